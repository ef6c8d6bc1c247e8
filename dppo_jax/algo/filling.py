"""Rows of a packing plan, filled with tokens."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax.algo.packing import Plan, TokenCounts, count_tokens, plan
from dppo_jax.algo.policy_loss import Objective
from dppo_jax.records import IntScalar, PackedBatch, PromptBatch, Rollout


class RowLayout(NamedTuple):
  """Prompt and completion token that each position holds.

  Attributes:
    is_real: False for padding.
    prompt: index of the prompt, below `Q`.
    completion: index below `Q * G`; 0 in a prefix, any in padding.
    positions, segment_ids, end: the fields of `PackedBatch`.
  """

  is_real: Bool[Array, "R L"]
  prompt: Int[Array, "R L"]
  completion: Int[Array, "R L"]
  positions: Int[Array, "R L"]
  segment_ids: Int[Array, "R L"]
  end: Int[Array, "R L"]


class RowTokens(NamedTuple):
  """Tokens, targets and their sampled log-probabilities; 0 in padding."""

  tokens: Int[Array, "R L"]
  targets: Int[Array, "R L"]
  logprobs: Float[Array, "R L"]


def pack_chosen(
  objective: Objective,
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  weights: Float[Array, "Q G"],
  *,
  num_rows: int,
  row_length: int,
  window: int = 32,
) -> tuple[PackedBatch, Plan]:
  """Packs the completions of a choice, behind one copy of their prompt.

  Args:
    objective: loss whose share of each token multiplies the weights.
    weights: result of `horvitz_thompson`; completions of weight 0 are left out.
    num_rows: rows `R`; `row_bound` has the number that is always enough.
    window: completions among which the packer chooses, see `plan`.
  Returns:
    Rows `[R, L]`, and the plan with the number of rows in use. If sequences
    have no place in the rows, `num_unplaced` is above 0 and the loss is NaN.
  """
  lengths = jnp.where(weights > 0, rollout.lengths, 0)
  counts = count_tokens(prompts.lengths, lengths, share_prefix=True)
  rows = plan(counts, row_length, num_rows, window=window)
  batch = fill(
    rows,
    counts,
    prompts,
    rollout.replace(lengths=lengths),
    advantages,
    weights * objective.token_share(rollout),
    num_rows,
    row_length,
  )
  return batch, rows


def fill(
  plan: Plan,
  counts: TokenCounts,
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  weights: Float[Array, "Q G"],
  num_rows: int,
  row_length: int,
) -> PackedBatch:
  """Fills the rows `[R, L]` of a plan of `counts`; padding has weight 0."""
  chex.assert_equal_shape((rollout.lengths, advantages, weights, plan.row))
  layout = lay_out(plan, counts, num_rows, row_length)
  row_tokens = read_rows(
    layout, prompts.lengths, prompts.tokens, rollout.tokens, rollout.logprobs
  )
  return assemble(
    layout, row_tokens, prompts.lengths, advantages, weights, plan.num_unplaced
  )


def assemble(
  layout: RowLayout,
  row_tokens: RowTokens,
  prompt_lengths: Int[Array, "Q"],
  advantages: Float[Array, "Q G"],
  weights: Float[Array, "Q G"],
  num_unplaced: IntScalar,
) -> PackedBatch:
  """Joins layout and tokens; a NaN marks a batch with unplaced completions."""
  next_token = layout.positions + 1 - prompt_lengths[layout.prompt]
  is_trained = layout.is_real & (next_token >= 0)
  at_trained = lambda x: jnp.where(is_trained, x, 0.0)
  per_completion = lambda x: at_trained(x.reshape(-1)[layout.completion])
  is_spoiled = jnp.zeros_like(is_trained).at[0, 0].set(num_unplaced > 0)
  return PackedBatch(
    tokens=row_tokens.tokens,
    targets=row_tokens.targets,
    positions=layout.positions,
    segment_ids=layout.segment_ids,
    end=layout.end,
    is_trained=is_trained | is_spoiled,
    advantages=per_completion(advantages),
    weights=jnp.where(is_spoiled, jnp.nan, per_completion(weights)),
    old_logprobs=at_trained(row_tokens.logprobs),
  )


def read_rows(
  layout: RowLayout,
  prompt_lengths: Int[Array, "Q"],
  prompt_tokens: Int[Array, "q P"],
  completion_tokens: Int[Array, "q G T"],
  logprobs: Float[Array, "q G T"],
  first: IntScalar | int = 0,
) -> RowTokens:
  """Reads the tokens of `q` of `Q` prompts, from `first` on; 0 elsewhere."""
  num_here, group_size, longest = completion_tokens.shape
  lengths = prompt_lengths[layout.prompt]
  q, s = layout.prompt - first, layout.completion - first * group_size
  # What an index out of bounds reads is not used.
  is_here = layout.is_real & (q >= 0) & (q < num_here)
  at = lambda x, t: x.reshape(-1, longest)[s, t]

  def token_at(position):
    t = position - lengths
    prompt_token = prompt_tokens[q, position]
    token = jnp.where(t < 0, prompt_token, at(completion_tokens, t))
    return jnp.where(is_here, token, 0)

  after = layout.positions + 1
  return RowTokens(
    tokens=token_at(layout.positions),
    targets=token_at(after),
    logprobs=jnp.where(is_here, at(logprobs, after - lengths), 0.0),
  )


def lay_out(
  plan: Plan, counts: TokenCounts, num_rows: int, row_length: int
) -> RowLayout:
  """Finds the prompt and completion of every position of the rows."""
  num_prompts, group_size = plan.row.shape
  num_sequences = plan.row.size
  columns = jnp.arange(row_length, dtype=jnp.int32)
  prompt = jnp.repeat(jnp.arange(num_prompts, dtype=jnp.int32), group_size)
  completion = counts.completion.reshape(-1)
  # Segments are completions and then prefixes of prompts. Each marks the
  # position where it starts; a position belongs to the last mark before it.
  # Neighbours that share a prefix write the same mark at the same place; an
  # empty prefix has its completion's place, and is overwritten.
  row = jnp.where(plan.row >= 0, plan.row, num_rows).reshape(-1)
  offset = plan.offset.reshape(-1)
  prefix_offset = plan.prefix_offset.reshape(-1)
  marks = jnp.zeros((num_rows, row_length), jnp.int32)
  marks = marks.at[row, prefix_offset].set(
    num_sequences + 1 + prompt, mode="drop"
  )
  marks = marks.at[row, offset].set(
    jnp.arange(1, num_sequences + 1, dtype=jnp.int32), mode="drop"
  )
  # A prefix is seen until its last completion ends.
  ends = jnp.zeros_like(marks)
  for at in (prefix_offset, offset):
    ends = ends.at[row, at].max(offset + completion, mode="drop")
  start = jax.lax.cummax(jnp.where(marks > 0, columns, 0), axis=1)
  owner = jnp.take_along_axis(marks, start, axis=1) - 1
  is_prefix = owner >= num_sequences
  s = jnp.where(is_prefix, 0, jnp.maximum(owner, 0))
  q = jnp.where(is_prefix, owner - num_sequences, s // group_size)
  length = jnp.where(is_prefix, counts.prefix[q], completion[s])
  is_real = (owner >= 0) & (columns - start < length)
  positions = columns - start + jnp.where(is_prefix, 0, counts.prefix[q])
  segment_ids = jnp.where(is_real, jnp.cumsum(marks > 0, axis=1), 0)
  return RowLayout(
    is_real=is_real,
    prompt=q,
    completion=s,
    positions=jnp.where(is_real, positions, 0),
    segment_ids=segment_ids,
    end=jnp.where(is_real, jnp.take_along_axis(ends, start, axis=1), 0),
  )
