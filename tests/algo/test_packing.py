"""Packing: nothing lost, nothing overlaps, rows bounded, data where planned."""

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.algo import filling, objectives, packing, policy_loss
from dppo_jax.records import PromptBatch, Rollout, Selection

ROW = 32
PROMPTS, GROUP = 10, 4
plan = jax.jit(packing.plan, static_argnums=(1, 2, 3))
fill = jax.jit(filling.fill, static_argnums=(6, 7))


def _plan(counts, window, num_rows=PROMPTS * GROUP):
  return plan(jax.tree.map(jnp.asarray, counts), ROW, num_rows, window)


@st.composite
def _counts(draw):
  """Tokens of completions, some of them absent, that all fit a row."""
  prefix = draw(
    st.lists(st.integers(0, 12), min_size=PROMPTS, max_size=PROMPTS)
  )
  lengths = st.lists(st.integers(0, ROW - 12), min_size=GROUP, max_size=GROUP)
  completions = draw(st.lists(lengths, min_size=PROMPTS, max_size=PROMPTS))
  return packing.TokenCounts(
    np.array(prefix, np.int32), np.array(completions, np.int32)
  )


WINDOWS = st.sampled_from([1, 4, 64])


@hypothesis.given(_counts(), WINDOWS)
def test_nothing_is_lost_and_nothing_overlaps(counts, window):
  placed = jax.tree.map(np.asarray, _plan(counts, window))
  assert ((placed.row >= 0) == (counts.completion > 0)).all()
  owner = {}

  def take(row, start, length, name):
    assert start + length <= ROW
    for i in range(length):
      assert owner.setdefault((row, start + i), name) == name

  for q, g in zip(*np.nonzero(counts.completion), strict=True):
    row, prefix = placed.row[q, g], counts.prefix[q]
    at, prefix_at = placed.offset[q, g], placed.prefix_offset[q, g]
    take(row, at, counts.completion[q, g], (q, g))
    if prefix:
      assert prefix_at + prefix <= at
      take(row, prefix_at, prefix, (q, "prompt", prefix_at))
    else:
      assert prefix_at == at
  rows = set(placed.row[placed.row >= 0].tolist())
  assert rows == set(range(int(placed.num_used)))


@hypothesis.given(_counts(), WINDOWS)
def test_a_prompt_and_its_completions_are_neighbours(counts, window):
  """Nothing of another prompt lies between a prefix and who sees it."""
  placed = jax.tree.map(np.asarray, _plan(counts, window))
  starts = {
    (placed.row[q, g], placed.offset[q, g]): q
    for q, g in zip(*np.nonzero(counts.completion), strict=True)
  }
  for q, g in zip(*np.nonzero(counts.completion), strict=True):
    row, at = placed.row[q, g], placed.offset[q, g]
    between = range(placed.prefix_offset[q, g], at)
    assert {starts.get((row, cell), q) for cell in between} <= {q}


@hypothesis.given(_counts(), WINDOWS)
def test_rows_stay_below_the_bound(counts, window):
  placed = _plan(counts, window)
  together = np.where(
    counts.completion > 0, counts.prefix[:, None] + counts.completion, 0
  )
  assert placed.num_used <= 2 * -(-together.sum() // ROW) + 1
  assert placed.num_used <= packing.row_bound(PROMPTS * GROUP, ROW, ROW)


@hypothesis.given(_counts())
def test_sharing_takes_no_more_tokens_than_repeating(counts):
  placed = jax.tree.map(np.asarray, _plan(counts, 64))
  is_placed = counts.completion > 0
  prefixes = {
    (row, at): counts.prefix[q]
    for q in range(PROMPTS)
    for row, at in zip(
      placed.row[q][is_placed[q]],
      placed.prefix_offset[q][is_placed[q]],
      strict=True,
    )
  }
  shared = sum(prefixes.values())
  assert shared >= counts.prefix[is_placed.any(1)].sum()
  assert shared <= (counts.prefix[:, None] * is_placed).sum()


def test_a_group_that_fits_a_row_shares_one_prompt():
  counts = packing.TokenCounts(
    np.full(PROMPTS, 8, np.int32), np.full((PROMPTS, GROUP), 6, np.int32)
  )
  placed = jax.tree.map(np.asarray, _plan(counts, 64))
  assert placed.num_used == PROMPTS
  for q in range(PROMPTS):
    assert len(set(placed.row[q])) == len(set(placed.prefix_offset[q])) == 1


@pytest.mark.parametrize(
  ("prefix", "completions", "num_rows", "num_used", "places"),
  [
    (0, (20, 20, 20), 2, 2, 2),  # too few rows
    (0, (20, 20, 20), 3, 3, 3),
    (0, (ROW + 1, 3), 40, 1, 1),  # too long by itself
    (1, (ROW, 3), 40, 1, 1),  # too long with its prompt
    (1, (ROW, ROW), 40, 1, 0),
  ],
)
def test_unplaced_completions_are_counted(
  prefix, completions, num_rows, num_used, places
):
  counts = packing.TokenCounts(
    np.array([prefix], np.int32), np.array([completions], np.int32)
  )
  placed = _plan(counts, 4, num_rows)
  assert placed.num_used == num_used
  assert (placed.row >= 0).sum() == places
  assert placed.num_unplaced == len(completions) - places


@pytest.mark.parametrize("num_rows, row_length", [(1, ROW), (12, 5), (2, 2)])
def test_rows_that_lack_a_sequence_cannot_be_trained_on(num_rows, row_length):
  """Too few rows, some that are too short, and none that is long enough."""
  prompts, rollout = _batch(tokens=12)
  counts = packing.count_tokens(prompts.lengths, rollout.lengths, True)
  placed = plan(counts, row_length, num_rows, 4)
  assert 1 <= placed.num_used <= num_rows and placed.num_unplaced > 0
  ones = jnp.ones((3, 4))
  rows = fill(
    placed, counts, prompts, rollout, ones, ones, num_rows, row_length
  )
  used = jax.tree.map(lambda x: x[: int(placed.num_used)], rows)
  loss, _ = policy_loss.surrogate(
    objectives.grpo(),
    used.old_logprobs,
    used.old_logprobs,
    used.advantages,
    used.weights,
    used.is_trained,
    used.segment_ids,
  )
  assert np.isnan(loss)


def _batch(seed=0, prompts=3, group=4, width=6, tokens=9):
  """Random prompts and completions, one completion of length 0 among them."""
  rng = np.random.default_rng(seed)
  integers = lambda low, high, shape: jnp.array(
    rng.integers(low, high, shape), jnp.int32
  )
  lengths = integers(1, tokens + 1, (prompts, group)).at[1, 2].set(0)
  batch = PromptBatch(
    jnp.arange(prompts, dtype=jnp.int32),
    integers(1, 99, (prompts, width)),
    # One of a single token, which leaves nothing to share.
    integers(1, width + 1, (prompts,)).at[0].set(1),
  )
  return batch, Rollout(
    prompt_ids=batch.ids,
    tokens=integers(100, 199, (prompts, group, tokens)),
    logprobs=jnp.array(rng.normal(size=(prompts, group, tokens)), jnp.float32),
    lengths=lengths,
    is_stopped=lengths > 0,
    kept=Selection(jnp.ones(prompts, bool), jnp.ones(prompts)),
    slot_steps=jnp.int32(0),
  )


@pytest.mark.parametrize("share_prefix", [False, True])
def test_every_sequence_can_be_read_back(share_prefix):
  """A position sees, in order, its prompt and its completion so far."""
  prompts, rollout = _batch()
  advantages = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
  counts = packing.count_tokens(prompts.lengths, rollout.lengths, share_prefix)
  placed = plan(counts, ROW, 12, 4)
  rows = fill(
    placed, counts, prompts, rollout, advantages, advantages + 50, 12, ROW
  )
  rows = jax.tree.map(np.asarray, rows)
  used = 0
  for q, g in np.ndindex(3, 4):
    n_prompt, n = int(prompts.lengths[q]), int(rollout.lengths[q, g])
    if n == 0:
      assert placed.row[q, g] == -1
      continue
    text = np.concatenate(
      [prompts.tokens[q, :n_prompt], rollout.tokens[q, g, :n]]
    )
    r, start = int(placed.row[q, g]), int(placed.offset[q, g])
    segment = rows.segment_ids[r, start]
    is_inside = rows.segment_ids[r] == segment
    columns = np.arange(rows.end.shape[1])
    last = columns[is_inside].max()
    is_seen = (columns <= last) & (last < rows.end[r])
    np.testing.assert_array_equal(rows.tokens[r][is_seen], text[:-1])
    np.testing.assert_array_equal(rows.targets[r][is_seen], text[1:])
    np.testing.assert_array_equal(
      rows.positions[r][is_seen], np.arange(len(text) - 1)
    )
    assert (rows.end[r][is_inside] == last + 1).all()
    is_trained = is_inside & (rows.positions[r] >= n_prompt - 1)
    np.testing.assert_array_equal(rows.is_trained[r] & is_inside, is_trained)
    s = 4 * q + g
    np.testing.assert_array_equal(
      rows.advantages[r][is_inside], s * is_trained[is_inside]
    )
    np.testing.assert_array_equal(
      rows.weights[r][is_inside], (s + 50) * is_trained[is_inside]
    )
    np.testing.assert_array_equal(
      rows.old_logprobs[r][is_trained], rollout.logprobs[q, g, :n]
    )
    used += is_inside.sum()
    if not share_prefix:
      assert (is_seen == is_inside).all()
  assert int(rows.is_trained.sum()) == int(rollout.lengths.sum())
  empty = rows.segment_ids == 0
  assert not rows.weights[empty].any() and not rows.is_trained[empty].any()
  is_prefix = ~empty & ~rows.is_trained
  if share_prefix:  # untrained: a prefix, which sees itself
    assert used + is_prefix.sum() == (~empty).sum()
    assert (~empty).sum() < int(
      packing.count_tokens(
        prompts.lengths, rollout.lengths, False
      ).completion.sum()
    )
  else:
    assert used == (~empty).sum()


@pytest.mark.parametrize("share_prefix", [False, True])
def test_neighbours_have_different_segment_ids(share_prefix):
  prompts, rollout = _batch(1)
  counts = packing.count_tokens(prompts.lengths, rollout.lengths, share_prefix)
  placed = plan(counts, ROW, 12, 4)
  ones = jnp.ones((3, 4))
  rows = fill(placed, counts, prompts, rollout, ones, ones, 12, ROW)
  ids = np.asarray(rows.segment_ids)
  for row in ids:
    real = row[row > 0]
    assert (np.diff(real) >= 0).all()
    assert sorted(set(real.tolist())) == list(range(1, real.max(initial=0) + 1))
  # A position that does not follow the one before begins a segment.
  positions = np.asarray(rows.positions)
  jumps = (np.diff(positions) != 1) & (ids[:, 1:] > 0)
  assert (np.diff(ids)[jumps] == 1).all()


def test_one_compilation_serves_every_set_of_lengths():
  traces = []

  @jax.jit
  def count(lengths):
    traces.append(1)
    counts = packing.TokenCounts(jnp.zeros((10,), jnp.int32), lengths)
    return packing.plan(counts, ROW, 40, 8)

  for seed in range(4):
    count(jax.random.randint(jax.random.key(seed), (10, 4), 0, ROW))
  assert len(traces) == 1
