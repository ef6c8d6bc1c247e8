"""Sequences laid side by side in rows: first a plan in integers, then data."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax.records import PackedBatch, PromptBatch, Rollout


class Plan(NamedTuple):
  """Where each completion goes.

  Attributes:
    row: `[Q, G]`, -1 for a completion of length 0 or without a place.
    offset: `[Q, G]`, the position in its row at which its own tokens start.
    prefix_offset: `[Q, G]`, the position at which the prompt that it shares
      starts; its `offset` where it shares none.
    num_used: rows in use, at least 1 where some completion has no place.
    num_unplaced: completions without a place, as they are longer than a row or
      the rows did not suffice. The caller must refuse such a plan; the loss of
      its rows is NaN.
  """

  row: Int[Array, "Q G"]
  offset: Int[Array, "Q G"]
  prefix_offset: Int[Array, "Q G"]
  num_used: Int[Array, ""]
  num_unplaced: Int[Array, ""]


class TokenCounts(NamedTuple):
  """How many positions of a row completions take.

  Attributes:
    prefix: `[Q]`, those that neighbours of one prompt share.
    own: `[Q, G]`, those of each, 0 where there is no completion. The last token
      is a target only.
  """

  prefix: Int[Array, "Q"]
  own: Int[Array, "Q G"]


def count_tokens(
  prompt_lengths: Int[Array, "Q"],
  completion_lengths: Int[Array, "Q G"],
  share_prefix: bool,
) -> TokenCounts:
  """Positions of each completion, its prompt included or shared.

  A shared prompt leaves out its last token, which every completion reads
  itself: each predicts a first token of its own from it.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> prompts, completions = jnp.array([3, 4]), jnp.array([[4, 2], [4, 0]])
  >>> print(algo.count_tokens(prompts, completions, share_prefix=True).own)
  [[4 2]
   [4 0]]
  >>> print(algo.count_tokens(prompts, completions, share_prefix=False).own)
  [[6 4]
   [7 0]]
  """
  prefix = prompt_lengths - 1
  own = completion_lengths
  if not share_prefix:
    own = prefix[:, None] + own
    prefix = jnp.zeros_like(prefix)
  return TokenCounts(prefix, jnp.where(completion_lengths > 0, own, 0))


def row_bound(num_sequences: int, max_length: int, row_length: int) -> int:
  """Rows that always suffice for `plan`.

  A row is closed only when no sequence in the window fits, and one of those
  opens the next: two neighbouring rows hold more than one row's tokens.

  >>> from dppo_jax import algo
  >>> algo.row_bound(num_sequences=8, max_length=100, row_length=256)
  8

  Args:
    max_length: positions of a prompt and a completion.
  """
  total = num_sequences * max_length
  return max(1, min(num_sequences, 2 * -(-total // row_length) + 1))


def plan(
  counts: TokenCounts, row_length: int, num_rows: int, window: int
) -> Plan:
  """Places every completion that has tokens, greedily within a window.

  Of the `window` completions that wait, one of the prompt that was placed last
  goes first, since it finds its prefix there. Of these, or of all where there
  is none, the one goes first that fills the row furthest together with the
  best second one; of several, the longest, and of those the oldest. Where none
  fits, the next row is opened. Two completions of 4 and 2 tokens that share 2
  (`p`), one of 4 that shares 3 (`q`), in rows of 9:

    row 0   p p 1 1 1 1 2 2 .
    row 1   q q q 3 3 3 3 . .

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> prompts, completions = jnp.array([3, 4]), jnp.array([[4, 2], [4, 0]])
  >>> counts = algo.count_tokens(prompts, completions, share_prefix=True)
  >>> plan = algo.plan(counts, row_length=9, num_rows=3, window=4)
  >>> print(plan.row)
  [[ 0  0]
   [ 1 -1]]
  >>> print(plan.offset)
  [[2 6]
   [3 0]]

  Source: dense prompt packing, DPPO, arXiv:2603.04135, section 4.3; shared
  prompts, Prefix Grouper, arXiv:2506.05433.
  Deviates:
    1. A window and a greedy fill are all that is known of DPPO's order.
       Looking one sequence ahead is ours: it leaves half the gaps.
    2. Prefix Grouper lays a group out as one sequence; here a group may be
       divided among rows, each with a copy of the prompt.
  """
  together = jnp.where(counts.own > 0, counts.prefix[:, None] + counts.own, 0)
  own = jnp.where(together > row_length, 0, counts.own).reshape(-1)
  num, group_size = own.size, counts.own.shape[1]
  window = min(window, num)
  order = jnp.argsort(own == 0, stable=True).astype(jnp.int32)
  num_real = (own > 0).sum(dtype=jnp.int32)
  # Rank `num` stands for an empty place of the window; it never fits.
  ranked = jnp.append(own[order], row_length + 1)
  ranked_prompt = jnp.append(order // group_size, -1)
  ranked_prefix = jnp.append(counts.prefix[order // group_size], 0)
  is_other = ~jnp.eye(window, dtype=bool)

  def place(state):
    waiting, upcoming, plan, current, used, last_prompt, prefix_at = state
    size, prompt = ranked[waiting], ranked_prompt[waiting]
    prefix = ranked_prefix[waiting]
    space = row_length - used
    is_last = prompt == last_prompt
    need = size + jnp.where(is_last, 0, prefix)
    fits = (waiting < num) & ((need <= space) | (used == 0))
    fits &= is_last | ~(fits & is_last).any()
    # Positions that a sequence fills together with the best second one.
    second = size + jnp.where(prompt[:, None] == prompt, 0, prefix)
    both = jnp.where(is_other, need[:, None] + second, need[:, None])
    filled = jnp.where(both <= space, both, need[:, None]).max(axis=1)
    is_best = fits & (filled == jnp.where(fits, filled, -1).max())
    is_best &= size == jnp.where(is_best, size, -1).max()
    pick = jnp.argmin(jnp.where(is_best, waiting, num + 1))  # the oldest
    rank = jnp.where(fits.any(), waiting[pick], num)
    closes = rank == num
    item = jnp.where(closes, num, order[jnp.minimum(rank, num - 1)])
    shares = is_last[pick] & (prefix[pick] > 0)
    prefix_at = jnp.where(shares, prefix_at, used)
    put = lambda x, value: x.at[item].set(value, mode="drop")
    plan = plan._replace(
      row=put(plan.row, current),
      offset=put(plan.offset, used + need[pick] - size[pick]),
      prefix_offset=put(plan.prefix_offset, prefix_at),
    )
    next_item = jnp.where(upcoming < num_real, upcoming, num)
    return (
      jnp.where(closes, waiting, waiting.at[pick].set(next_item)),
      jnp.where(closes, upcoming, upcoming + 1),
      plan,
      jnp.where(closes, current + 1, current),
      jnp.where(closes, 0, used + need[pick]),
      jnp.where(closes, -2, prompt[pick]),
      prefix_at,
    )

  window_ids = jnp.arange(window, dtype=jnp.int32)
  zeros = jnp.zeros((num,), jnp.int32)
  zero = jnp.int32(0)
  state = (
    jnp.where(window_ids < num_real, window_ids, num),
    jnp.int32(window),
    Plan(zeros - 1, zeros, zeros, zero, zero),
    zero,
    zero,
    jnp.int32(-2),  # no prompt: the row is empty
    zero,
  )
  has_waiting = lambda state: (state[0] < num).any()
  _, _, placed, current, used, _, _ = jax.lax.while_loop(
    has_waiting, place, state
  )
  num_used = jnp.minimum(jnp.where(used > 0, current + 1, current), num_rows)
  shaped = lambda x: x.reshape(counts.own.shape)
  row = shaped(jnp.where(placed.row < num_rows, placed.row, -1))
  num_unplaced = ((counts.own > 0) & (row < 0)).sum(dtype=jnp.int32)
  return Plan(
    row=row,
    offset=shaped(placed.offset),
    prefix_offset=shaped(placed.prefix_offset),
    num_used=jnp.where(num_unplaced > 0, jnp.maximum(num_used, 1), num_used),
    num_unplaced=num_unplaced,
  )


class Layout(NamedTuple):
  """What is at each position of rows, before a token is read.

  Attributes:
    is_real: False for padding.
    is_prefix: the position is of a prompt that several completions share.
    prompt: whose position it is.
    completion: likewise, of `Q * G`; 0 where prefix or padding.
    positions, segment_ids, prefix_ids: as in `PackedBatch`.
  """

  is_real: Bool[Array, "R L"]
  is_prefix: Bool[Array, "R L"]
  prompt: Int[Array, "R L"]
  completion: Int[Array, "R L"]
  positions: Int[Array, "R L"]
  segment_ids: Int[Array, "R L"]
  prefix_ids: Int[Array, "R L"]


class Texts(NamedTuple):
  """What rows read: `[R, L]` each, 0 where there is nothing."""

  tokens: Int[Array, "R L"]
  targets: Int[Array, "R L"]
  logprobs: Float[Array, "R L"]


def fill(
  plan: Plan,
  counts: TokenCounts,
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  weights: Float[Array, "Q G"],
  num_rows: int,
  row_length: int,
  reader: Callable[[Layout, PromptBatch, Rollout], Texts] | None = None,
) -> PackedBatch:
  """The rows `[R, L]` of a plan; positions without a sequence have weight 0.

  Args:
    plan: of `counts`.
    advantages, weights: `[Q, G]`, the same for all tokens of a completion.
    reader: fetches what the rows read; None is `read`. Only it looks at the
      tokens and log-probabilities of `prompts` and `rollout`.
  """
  chex.assert_equal_shape((rollout.lengths, advantages, weights, plan.row))
  layout = _lay_out(plan, counts, num_rows, row_length)
  texts = (reader or read)(layout, prompts, rollout)
  next_token = layout.positions + 1 - prompts.lengths[layout.prompt]
  is_trained = layout.is_real & ~layout.is_prefix & (next_token >= 0)
  at_trained = lambda x: jnp.where(is_trained, x, 0.0)
  of_each = lambda x: at_trained(x.reshape(-1)[layout.completion])
  # Where a sequence has no place, one NaN spoils the sum over the others.
  is_first = jnp.zeros((num_rows, row_length), bool).at[0, 0].set(True)
  is_spoiled = is_first & (plan.num_unplaced > 0)
  return PackedBatch(
    tokens=texts.tokens,
    targets=texts.targets,
    positions=jnp.where(layout.is_real, layout.positions, 0),
    segment_ids=layout.segment_ids,
    prefix_ids=layout.prefix_ids,
    is_trained=is_trained | is_spoiled,
    advantages=of_each(advantages),
    weights=jnp.where(is_spoiled, jnp.nan, of_each(weights)),
    old_logprobs=at_trained(texts.logprobs),
    prompts=jnp.where(layout.is_real, layout.prompt, 0),
  )


def read(
  layout: Layout,
  prompts: PromptBatch,
  rollout: Rollout,
  first: Int[Array, ""] | int = 0,
) -> Texts:
  """What rows read from the prompts `first`, `first + 1`, ...; else 0.

  Args:
    prompts: lengths of all, tokens of these.
    rollout: tokens and log-probabilities of these.
    first: the first of them.
  """
  num_here, group_size, longest = rollout.tokens.shape
  lengths = prompts.lengths[layout.prompt]
  is_here = layout.is_real
  q, s = layout.prompt - first, layout.completion - first * group_size
  if num_here < prompts.lengths.shape[0]:
    is_here &= (q >= 0) & (q < num_here)
    q = jnp.clip(q, 0, num_here - 1)
    s = jnp.clip(s, 0, num_here * group_size - 1)
  in_rows = lambda x: x.reshape(-1, *x.shape[2:])
  of_completion = lambda x, t: in_rows(x)[s, jnp.clip(t, 0, longest - 1)]

  def token_at(position):
    t = position - lengths
    of_prompt = prompts.tokens[
      q, jnp.minimum(position, prompts.tokens.shape[1] - 1)
    ]
    token = jnp.where(t < 0, of_prompt, of_completion(rollout.tokens, t))
    return jnp.where(is_here, token, 0)

  after = layout.positions + 1
  logprobs = of_completion(rollout.logprobs, after - lengths)
  return Texts(
    tokens=token_at(layout.positions),
    targets=token_at(after),
    logprobs=jnp.where(is_here, logprobs, 0.0),
  )


def _lay_out(
  plan: Plan, counts: TokenCounts, num_rows: int, row_length: int
) -> Layout:
  num_prompts, group_size = plan.row.shape
  num_sequences = plan.row.size
  columns = jnp.arange(row_length, dtype=jnp.int32)
  prompt = jnp.repeat(jnp.arange(num_prompts, dtype=jnp.int32), group_size)
  own, prefix = counts.own.reshape(-1), counts.prefix[prompt]
  # Segments are completions and, after them, the prefixes of prompts. Each
  # marks the position it starts at; a position is of the last mark at or before
  # it. Neighbours that share a prefix write the same mark at the same place.
  row = jnp.where(plan.row >= 0, plan.row, num_rows).reshape(-1)
  prefix_row = jnp.where(prefix > 0, row, num_rows)
  prefix_offset = plan.prefix_offset.reshape(-1)
  marks = jnp.zeros((num_rows, row_length), jnp.int32)
  marks = marks.at[prefix_row, prefix_offset].set(
    num_sequences + 1 + prompt, mode="drop"
  )
  marks = marks.at[row, plan.offset.reshape(-1)].set(
    jnp.arange(1, num_sequences + 1, dtype=jnp.int32), mode="drop"
  )
  start = jax.lax.cummax(jnp.where(marks > 0, columns, 0), axis=1)
  owner = jnp.take_along_axis(marks, start, axis=1) - 1
  is_prefix = owner >= num_sequences
  s = jnp.where(is_prefix, 0, jnp.maximum(owner, 0))
  q = jnp.where(is_prefix, owner - num_sequences, s // group_size)
  length = jnp.where(is_prefix, counts.prefix[q], own[s])
  is_real = (owner >= 0) & (columns - start < length)
  positions = columns - start + jnp.where(is_prefix, 0, counts.prefix[q])
  segment_ids = jnp.where(is_real, jnp.cumsum(marks > 0, axis=1), 0)
  seen = jnp.take_along_axis(segment_ids, prefix_offset[s], axis=1)
  return Layout(
    is_real=is_real,
    is_prefix=is_prefix,
    prompt=q,
    completion=s,
    positions=positions,
    segment_ids=segment_ids,
    prefix_ids=jnp.where(is_real & ~is_prefix, seen, segment_ids),
  )
