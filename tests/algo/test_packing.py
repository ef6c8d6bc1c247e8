"""Packing: nothing lost, nothing overlaps, rows bounded, data where planned."""

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax.algo import packing
from dppo_jax.records import PromptBatch, Rollout, Selection

ROW = 32
plan = jax.jit(packing.plan, static_argnums=(1, 2, 3))
fill = jax.jit(packing.fill, static_argnums=(5, 6))


def _plan(lengths, window, num_rows=40):
  # A few fixed sizes, so that hypothesis does not compile for each example.
  padded = np.zeros(40, np.int32)
  padded[: len(lengths)] = lengths
  return padded, plan(jnp.array(padded), ROW, num_rows, window)


LENGTHS = st.lists(st.integers(0, ROW), max_size=40)
WINDOWS = st.sampled_from([1, 4, 64])


@hypothesis.given(LENGTHS, WINDOWS)
def test_nothing_is_lost_and_nothing_overlaps(lengths, window):
  lengths, placed = _plan(lengths, window)
  row, offset = np.asarray(placed.row), np.asarray(placed.offset)
  assert ((row >= 0) == (lengths > 0)).all()
  slots = [
    (r, o + i)
    for n, r, o in zip(lengths, row, offset, strict=True)
    for i in range(n)
  ]
  assert len(set(slots)) == lengths.sum()
  assert all(o + n <= ROW for n, o in zip(lengths, offset, strict=True) if n)
  assert set(row[row >= 0]) == set(range(int(placed.num_used)))


@hypothesis.given(LENGTHS, WINDOWS)
def test_rows_stay_below_the_bound(lengths, window):
  lengths, placed = _plan(lengths, window)
  assert placed.num_used <= 2 * -(-lengths.sum() // ROW) + 1
  assert placed.num_used <= packing.row_bound(40, ROW, ROW)


def test_too_few_rows_or_too_long_a_sequence_show():
  _, placed = _plan([20, 20, 20], 4, num_rows=2)
  assert placed.num_used == 3 and (np.asarray(placed.row)[:3] == -1).sum() == 1
  _, placed = _plan([ROW + 1, 3], 4)
  assert placed.num_used > 40


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
    integers(1, width + 1, (prompts,)),
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


def test_every_sequence_can_be_read_back():
  prompts, rollout = _batch()
  advantages = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
  lengths = packing.sequence_lengths(prompts.lengths, rollout.lengths)
  placed = plan(lengths.reshape(-1), ROW, 12, 4)
  rows = fill(placed, prompts, rollout, advantages, advantages + 50, 12, ROW)
  used = 0
  for s in range(12):
    q, g = divmod(s, 4)
    n_prompt, n = int(prompts.lengths[q]), int(rollout.lengths[q, g])
    if n == 0:
      assert placed.row[s] == -1
      continue
    text = np.concatenate(
      [prompts.tokens[q, :n_prompt], rollout.tokens[q, g, :n]]
    )
    at = np.s_[
      int(placed.row[s]),
      int(placed.offset[s]) : int(placed.offset[s]) + len(text) - 1,
    ]
    is_trained = np.arange(1, len(text)) >= n_prompt
    np.testing.assert_array_equal(rows.tokens[at], text[:-1])
    np.testing.assert_array_equal(rows.targets[at], text[1:])
    np.testing.assert_array_equal(rows.positions[at], np.arange(len(text) - 1))
    np.testing.assert_array_equal(rows.is_trained[at], is_trained)
    assert len(set(np.asarray(rows.segment_ids[at]).tolist())) == 1
    np.testing.assert_array_equal(rows.advantages[at], s * is_trained)
    np.testing.assert_array_equal(rows.weights[at], (s + 50) * is_trained)
    np.testing.assert_array_equal(
      np.asarray(rows.old_logprobs[at])[is_trained], rollout.logprobs[q, g, :n]
    )
    used += len(text) - 1
  assert int((rows.segment_ids > 0).sum()) == used
  assert int(rows.is_trained.sum()) == int(rollout.lengths.sum())
  empty = rows.segment_ids == 0
  assert not rows.weights[empty].any() and not rows.is_trained[empty].any()


def test_neighbours_have_different_segment_ids():
  prompts, rollout = _batch(1)
  lengths = packing.sequence_lengths(prompts.lengths, rollout.lengths)
  placed = plan(lengths.reshape(-1), ROW, 12, 4)
  ones = jnp.ones((3, 4))
  rows = fill(placed, prompts, rollout, ones, ones, 12, ROW)
  starts = (rows.positions == 0) & (rows.segment_ids > 0)
  for row, start in zip(rows.segment_ids, starts, strict=True):
    assert sorted(set(row[row > 0].tolist())) == list(range(1, start.sum() + 1))


def test_one_compilation_serves_every_set_of_lengths():
  traces = []

  @jax.jit
  def count(lengths):
    traces.append(1)
    return packing.plan(lengths, ROW, 40, 8)

  for seed in range(4):
    count(jax.random.randint(jax.random.key(seed), (40,), 0, ROW))
  assert len(traces) == 1
