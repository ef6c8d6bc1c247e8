"""Sequences laid side by side in rows: first a plan in integers, then data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.records import PackedBatch, PromptBatch, Rollout


class Plan(NamedTuple):
  """Where each sequence goes.

  Attributes:
    row: `[S]`, -1 for a sequence of length 0 or without a place.
    offset: `[S]`, the cell of its row at which the sequence starts.
    num_used: rows that the sequences need. More than there are means that
      some have no place, or that one is longer than a row: the caller must
      refuse such a plan.
  """

  row: Int[Array, "S"]
  offset: Int[Array, "S"]
  num_used: Int[Array, ""]


def row_bound(num_sequences: int, max_length: int, row_length: int) -> int:
  """Rows that always suffice for `plan`.

  A row is closed only when no sequence in the window fits, and one of those
  opens the next: two neighbours hold more than one row's cells.
  """
  cells = num_sequences * max_length
  return max(1, min(num_sequences, 2 * -(-cells // row_length) + 1))


def plan(
  lengths: Int[Array, "S"], row_length: int, num_rows: int, window: int
) -> Plan:
  """Places every sequence of positive length, greedily within a window.

  Of the `window` sequences that wait, the one is placed that fills the row
  furthest together with the best second one; of several, the longest, and of
  those the oldest. Where none fits, the next row is opened. Lengths 5, 3, 2 in
  rows of 8:

    row 0   1 1 1 1 1 2 2 2
    row 1   1 1 . . . . . .      (segment ids; . is padding, id 0)

  Args:
    lengths: cells that each sequence needs, 0 for one that is left out.
  Source: dense prompt packing, DPPO, arXiv:2603.04135, section 4.3.
  Deviates:
    1. A window and a greedy fill are all that is known of the paper's order.
       Looking one sequence ahead is ours: it leaves half the gaps.
  """
  num = lengths.shape[0]
  window = min(window, num)
  order = jnp.argsort(lengths == 0, stable=True).astype(jnp.int32)
  count = (lengths > 0).sum(dtype=jnp.int32)
  # Rank `num` stands for an empty place in the window; it never fits.
  ranked = jnp.append(lengths[order], row_length + 1)
  is_other = ~jnp.eye(window, dtype=bool)

  def place(state):
    waiting, upcoming, row, offset, current, used = state
    size = ranked[waiting]
    room = row_length - used
    fits = (waiting < num) & ((size <= room) | (used == 0))
    # Cells that a sequence fills together with the best second one.
    both = jnp.where(is_other, size[:, None] + size[None, :], size[:, None])
    filled = jnp.where(both <= room, both, size[:, None]).max(axis=1)
    is_best = fits & (filled == jnp.where(fits, filled, -1).max())
    is_best &= size == jnp.where(is_best, size, -1).max()
    seat = jnp.argmin(jnp.where(is_best, waiting, num + 1))  # the oldest
    rank = jnp.where(fits.any(), waiting[seat], num)
    item = jnp.where(rank < num, order[jnp.minimum(rank, num - 1)], num)
    row = row.at[item].set(current, mode="drop")
    offset = offset.at[item].set(used, mode="drop")
    entrant = jnp.where(upcoming < count, upcoming, num)
    closes = rank == num
    waiting = jnp.where(closes, waiting, waiting.at[seat].set(entrant))
    return (
      waiting,
      jnp.where(closes, upcoming, upcoming + 1),
      row,
      offset,
      jnp.where(closes, current + 1, current),
      jnp.where(closes, 0, used + ranked[rank]),
    )

  seats = jnp.arange(window, dtype=jnp.int32)
  state = (
    jnp.where(seats < count, seats, num),
    jnp.int32(window),
    jnp.full((num,), -1, jnp.int32),
    jnp.zeros((num,), jnp.int32),
    jnp.int32(0),
    jnp.int32(0),
  )
  has_waiting = lambda state: (state[0] < num).any()
  _, _, row, offset, current, used = jax.lax.while_loop(
    has_waiting, place, state
  )
  num_used = jnp.where(used > 0, current + 1, current)
  is_possible = (lengths <= row_length).all()
  return Plan(
    row=jnp.where(row < num_rows, row, -1),
    offset=offset,
    num_used=jnp.where(is_possible, num_used, jnp.iinfo(jnp.int32).max),
  )


def sequence_lengths(
  prompt_lengths: Int[Array, "Q"], completion_lengths: Int[Array, "Q G"]
) -> Int[Array, "Q G"]:
  """Cells that each sequence needs: the last token is a target only."""
  total = prompt_lengths[:, None] + completion_lengths - 1
  return jnp.where(completion_lengths > 0, total, 0)


def fill(
  plan: Plan,
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  weights: Float[Array, "Q G"],
  num_rows: int,
  row_length: int,
) -> PackedBatch:
  """The rows `[R, L]` of a plan; cells without a sequence carry no weight.

  Args:
    plan: of the `Q * G` sequences, in order.
    weights: of each token of a completion.
  """
  group_size = rollout.lengths.shape[1]
  num_sequences = rollout.lengths.size
  cells = jnp.arange(row_length, dtype=jnp.int32)
  # Sequence s + 1 marks the cell it starts at; each cell then finds the last
  # mark at or before it.
  row = jnp.where(plan.row >= 0, plan.row, num_rows)
  marks = jnp.zeros((num_rows, row_length), jnp.int32)
  marks = marks.at[row, plan.offset].set(
    jnp.arange(1, num_sequences + 1, dtype=jnp.int32), mode="drop"
  )
  start = jax.lax.cummax(jnp.where(marks > 0, cells, 0), axis=1)
  owner = jnp.take_along_axis(marks, start, axis=1) - 1
  s = jnp.maximum(owner, 0)
  q = s // group_size
  positions = cells - start
  lengths = sequence_lengths(prompts.lengths, rollout.lengths).reshape(-1)
  is_real = (owner >= 0) & (positions < lengths[s])

  completions = rollout.tokens.reshape(num_sequences, -1)
  logprobs = rollout.logprobs.reshape(num_sequences, -1)

  def token_at(position):
    t = position - prompts.lengths[q]
    of_prompt = prompts.tokens[
      q, jnp.minimum(position, prompts.tokens.shape[1] - 1)
    ]
    of_completion = completions[s, jnp.clip(t, 0, completions.shape[1] - 1)]
    return jnp.where(is_real, jnp.where(t < 0, of_prompt, of_completion), 0)

  t = positions + 1 - prompts.lengths[q]
  is_trained = is_real & (t >= 0)
  at_trained = lambda x: jnp.where(is_trained, x, 0.0)
  return PackedBatch(
    tokens=token_at(positions),
    targets=token_at(positions + 1),
    positions=jnp.where(is_real, positions, 0),
    segment_ids=jnp.where(is_real, jnp.cumsum(marks > 0, axis=1), 0),
    is_trained=is_trained,
    advantages=at_trained(advantages.reshape(-1)[s]),
    weights=at_trained(weights.reshape(-1)[s]),
    old_logprobs=at_trained(logprobs[s, jnp.clip(t, 0, logprobs.shape[1] - 1)]),
  )
