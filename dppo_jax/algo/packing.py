"""Plans of packed rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dppo_jax.algo.validation import COUNT, check
from dppo_jax.records import IntScalar


class PackingSpec(NamedTuple):
  """The shape of packed rows.

  Attributes:
    row_length: positions in a row.
    rows_per_micro: rows in a micro-batch, over all devices.
    window: sequences among which the packer chooses.
    share_prefix: neighbours of one prompt share its positions.
    spread_rows: assigns rows to devices in turn, so that the devices share a
      last micro-batch of few rows; otherwise devices are filled in order.
  """

  row_length: int
  rows_per_micro: int
  window: int = 256
  share_prefix: bool = True
  spread_rows: bool = False

  def num_rows(self, num_sequences: int, max_length: int) -> int:
    """Returns a number of rows that always suffices, in full micro-batches."""
    bound = row_bound(num_sequences, max_length, self.row_length)
    return -(-bound // self.rows_per_micro) * self.rows_per_micro


class Plan(NamedTuple):
  """Place of each completion.

  Attributes:
    row: `[Q, G]`, -1 for a completion of length 0 or without a place.
    offset: `[Q, G]`, position in the row at which its own tokens start.
    prefix_offset: `[Q, G]`, position at which its shared prompt starts;
      `offset` if it shares none.
    num_used: rows in use, at least 1 if a completion has no place.
    num_unplaced: completions that are longer than a row or found no row. The
      caller must reject such a plan; the loss of its rows is NaN.
  """

  row: Int[Array, "Q G"]
  offset: Int[Array, "Q G"]
  prefix_offset: Int[Array, "Q G"]
  num_used: IntScalar
  num_unplaced: IntScalar


class TokenCounts(NamedTuple):
  """Number of row positions of prompts and completions.

  Attributes:
    prefix: `[Q]`, positions that neighbours of one prompt share.
    completion: `[Q, G]`, positions of each completion; its last token is only a
      target.
  """

  prefix: Int[Array, "Q"]
  completion: Int[Array, "Q G"]


def count_tokens(
  prompt_lengths: Int[Array, "Q"],
  completion_lengths: Int[Array, "Q G"],
  share_prefix: bool,
) -> TokenCounts:
  """Counts the positions of each completion, its prompt included or shared.

  A shared prompt leaves out its last token, which every completion reads
  itself to predict its first token.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> prompts, lengths = jnp.array([3, 4]), jnp.array([[4, 2], [4, 0]])
  >>> print(algo.count_tokens(prompts, lengths, share_prefix=True).completion)
  [[4 2]
   [4 0]]
  >>> print(algo.count_tokens(prompts, lengths, share_prefix=False).completion)
  [[6 4]
   [7 0]]
  """
  prefix = prompt_lengths - 1
  completion = completion_lengths
  if not share_prefix:
    completion = prefix[:, None] + completion
    prefix = jnp.zeros_like(prefix)
  return TokenCounts(prefix, jnp.where(completion_lengths > 0, completion, 0))


def row_bound(num_sequences: int, max_length: int, row_length: int) -> int:
  """Returns a number of rows that always suffices for `plan`.

  A row is closed if no sequence in the window fits. Such a sequence opens the
  next row, so two neighbouring rows hold more than one row's tokens.

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

  Completions of the prompt placed last go first, as the row already has their
  prefix; without any, the candidates are the full window. The packer looks one
  completion ahead: it takes the candidate that, with the best second one, fills
  the row furthest. Ties go to the longest, then to the oldest. If none fits,
  the next row is opened. In rows of 9, completions of 4 and 2 tokens that share
  2 (`p`), and one of 4 with a prefix of 3 (`q`):

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
    1. DPPO states a window and a greedy fill. Looking one sequence ahead is
       ours: it leaves half the gaps.
    2. Prefix Grouper packs a group as one sequence; here it may be divided
       among rows, each with a copy of the prompt.
  """
  check(COUNT, "algo.plan", row_length=row_length, window=window)
  size = counts.completion
  group_size = size.shape[1]
  is_long = counts.prefix[:, None] + size > row_length
  sizes = jnp.where(is_long, 0, size).reshape(-1)
  num = sizes.size
  order = jnp.argsort(sizes == 0, stable=True).astype(jnp.int32)
  # Rank `num` stands for an empty place of the window; it never fits.
  queue = _Queue(
    item=jnp.append(order, num),
    size=jnp.append(sizes[order], row_length + 1),
    prompt=jnp.append(order // group_size, -1),
    prefix=jnp.append(counts.prefix[order // group_size], 0),
    num_real=(sizes > 0).sum(dtype=jnp.int32),
  )
  state = jax.lax.while_loop(
    lambda state: (state.waiting < num).any(),
    lambda state: _place_next(state, queue, row_length),
    _empty_plan(queue, min(window, num)),
  )
  shaped = lambda x: x.reshape(size.shape)
  row = shaped(jnp.where(state.row < num_rows, state.row, -1))
  num_unplaced = ((size > 0) & (row < 0)).sum(dtype=jnp.int32)
  return Plan(
    row=row,
    offset=shaped(state.offset),
    prefix_offset=shaped(state.prefix_offset),
    num_used=jnp.maximum(row.max() + 1, jnp.minimum(num_unplaced, 1)),
    num_unplaced=num_unplaced,
  )


class _Queue(NamedTuple):
  """Completions by rank, in the order in which they enter the window."""

  item: Int[Array, "n"]
  size: Int[Array, "n"]
  prompt: Int[Array, "n"]
  prefix: Int[Array, "n"]
  num_real: IntScalar


class _PlanState(NamedTuple):
  """State of the greedy packer.

  Attributes:
    waiting: `[W]`, ranks in the window; the last rank is an empty place.
    upcoming: next rank to enter the window.
    row, offset, prefix_offset: `[Q * G]`, of the plan so far.
    current, used: row that is being filled, and its positions in use.
    last_prompt: prompt of the completion placed last; -2 in an empty row.
    prefix_at: position at which that prompt starts.
  """

  waiting: Int[Array, "W"]
  upcoming: IntScalar
  row: Int[Array, "n"]
  offset: Int[Array, "n"]
  prefix_offset: Int[Array, "n"]
  current: IntScalar
  used: IntScalar
  last_prompt: IntScalar
  prefix_at: IntScalar


def _empty_plan(queue: _Queue, window: int) -> _PlanState:
  num = len(queue.item) - 1
  ranks = jnp.arange(window, dtype=jnp.int32)
  waiting = jnp.where(ranks < queue.num_real, ranks, num)
  zeros, zero = jnp.zeros((num,), jnp.int32), jnp.int32(0)
  return _PlanState(
    waiting=waiting,
    upcoming=jnp.int32(window),
    row=zeros - 1,
    offset=zeros,
    prefix_offset=zeros,
    current=zero,
    used=zero,
    last_prompt=jnp.int32(-2),
    prefix_at=zero,
  )


def _choose(
  state: _PlanState, queue: _Queue, row_length: int
) -> tuple[IntScalar, Int[Array, "W"], Bool[Array, ""]]:
  """Returns the place to pack, the positions needed by each, if none fits."""
  num = len(queue.item) - 1
  size, prompt = queue.size[state.waiting], queue.prompt[state.waiting]
  prefix = queue.prefix[state.waiting]
  space = row_length - state.used
  is_last = prompt == state.last_prompt
  need = size + jnp.where(is_last, 0, prefix)
  fits = need <= space  # each alone fits an empty row
  fits &= is_last | ~(fits & is_last).any()
  # Positions that a sequence fills together with the best second one.
  second = size + jnp.where(prompt[:, None] == prompt, 0, prefix)
  both = need[:, None] + second
  is_pair = (both <= space) & ~jnp.eye(len(size), dtype=bool)
  filled = jnp.where(is_pair, both, need[:, None]).max(axis=1)
  is_best = fits & (filled == jnp.where(fits, filled, -1).max())
  is_best &= size == jnp.where(is_best, size, -1).max()
  oldest = jnp.argmin(jnp.where(is_best, state.waiting, num + 1))
  return oldest, need, ~fits.any()


def _place_next(
  state: _PlanState, queue: _Queue, row_length: int
) -> _PlanState:
  """Packs one completion, or closes the row if none fits."""
  num = len(queue.item) - 1
  pick, need, closes = _choose(state, queue, row_length)
  rank = state.waiting[pick]
  prompt, size = queue.prompt[rank], queue.size[rank]
  item = jnp.where(closes, num, queue.item[rank])
  shares = (prompt == state.last_prompt) & (queue.prefix[rank] > 0)
  prefix_at = jnp.where(shares, state.prefix_at, state.used)
  put = lambda x, value: x.at[item].set(value, mode="drop")
  next_rank = jnp.where(state.upcoming < queue.num_real, state.upcoming, num)
  end = state.used + need[pick]
  return _PlanState(
    waiting=jnp.where(
      closes, state.waiting, state.waiting.at[pick].set(next_rank)
    ),
    upcoming=jnp.where(closes, state.upcoming, state.upcoming + 1),
    row=put(state.row, state.current),
    offset=put(state.offset, end - size),
    prefix_offset=put(state.prefix_offset, prefix_at),
    current=jnp.where(closes, state.current + 1, state.current),
    used=jnp.where(closes, 0, end),
    last_prompt=jnp.where(closes, -2, prompt),
    prefix_at=prefix_at,
  )
