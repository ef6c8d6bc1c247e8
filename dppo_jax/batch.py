"""From rewards to rows: advantages, choice, weights, packing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import buckets, sharding
from dppo_jax.algo import diagnostics, objectives, packing, weights
from dppo_jax.algo.advantages import overlong_penalty
from dppo_jax.keys import Draw
from dppo_jax.methods import Method
from dppo_jax.records import (
  Groups,
  PackedBatch,
  PromptBatch,
  Rollout,
  Scores,
)


class Rows(NamedTuple):
  """The shape of packed rows.

  Attributes:
    length: cells in a row.
    per_micro: rows in a micro-batch.
    window: sequences among which the packer chooses.
    shares_prompts: neighbours of one prompt share its cells.
  """

  length: int
  per_micro: int
  window: int
  shares_prompts: bool = True

  def count(self, num_sequences: int, max_length: int) -> int:
    """Rows that always suffice, in whole micro-batches."""
    bound = packing.row_bound(num_sequences, max_length, self.length)
    return buckets.round_up(bound, self.per_micro)


def select(
  draw: Draw,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  *,
  method: Method,
  objective: objectives.Objective,
  rows: Rows,
  train_zero_advantage: bool,
  overlong_tokens: int = 0,
) -> tuple[PackedBatch, Int[Array, ""], dict[str, Float[Array, ""]]]:
  """The completions to train on, weighted and packed.

  Advantages come from all completions of a group before any is dropped. One
  whose advantage is zero adds nothing to the gradient where beta is 0: it is
  left out of the rows, and the denominator still counts it.

  Args:
    draw: consumed by the method's completion rule.
    train_zero_advantage: packs such completions all the same.
    overlong_tokens: the last tokens before the limit, which cost up to 1.
  Returns:
    Micro-batches `[M, R, L]`, how many of them are in use, and metrics.
  """
  is_drawn = rollout.lengths > 0
  needs = lambda advantages: (
    is_drawn & ((advantages != 0) | bool(objective.beta))
  )
  if overlong_tokens:
    limit = rollout.tokens.shape[2]
    rewards += overlong_penalty(rollout.lengths, limit, overlong_tokens)
  advantages = objective.advantage(rewards)
  token_share = objective.token_share(rollout)
  scale = token_share / rollout.kept.prob[:, None]
  groups = Groups(
    rewards,
    advantages,
    rollout.lengths,
    needs(advantages),
    scale,
    surprise(rollout),
  )
  chosen = method.completions(draw, groups)
  if method.has_statistics_after:
    advantages = objective.advantage(rewards, chosen.keep & is_drawn)
  weight = weights.horvitz_thompson(rollout.kept, chosen)
  weight = jnp.where(is_drawn, weight, 0.0)
  is_needed = needs(advantages)
  is_trained = weight > 0
  if not train_zero_advantage:
    is_trained &= is_needed
  trained = jnp.where(is_trained, rollout.lengths, 0)
  batch, num_micro, info = pack(
    prompts,
    rollout.replace(lengths=trained),
    advantages,
    weight * token_share,
    rows,
  )
  # A token's share of the loss times the root of their number: what a
  # completion adds where its tokens' gradients point nowhere in particular.
  size = jnp.abs(advantages) * token_share
  size *= jnp.sqrt(rollout.lengths.astype(jnp.float32))
  total = lambda x: x.sum(dtype=jnp.float32)
  info |= diagnostics.diagnose(chosen, weight, advantages, size, is_needed)
  return (
    batch,
    num_micro,
    info
    | {
      "prompts/prob_min": jnp.where(
        rollout.kept.keep, rollout.kept.prob, 1.0
      ).min(),
      "completions/kept": total(weight > 0),
      "completions/trained": total(is_trained),
      "tokens/trained": total(trained),
    },
  )


def surprise(rollout: Rollout) -> Float[Array, "Q G"]:
  """Sum over tokens of (1 - p)^2, p being what each was sampled with."""
  t = jnp.arange(rollout.tokens.shape[2], dtype=jnp.int32)
  missed = jnp.square(1 - jnp.exp(rollout.logprobs))
  return jnp.where(t < rollout.lengths[..., None], missed, 0.0).sum(axis=2)


def choose_tokens(
  draw: Draw,
  batch: PackedBatch,
  scores: Scores | None,
  *,
  method: Method,
  objective: objectives.Objective,
  is_on_policy: bool,
) -> tuple[PackedBatch, dict[str, Float[Array, ""]]]:
  """The batch with the weights of the tokens that the method chooses.

  A token that is not chosen has weight 0, and the update does not score it.

  Args:
    draw: consumed by the method's token rule.
    scores: of the batch under the policy to train, where they were made.
    is_on_policy: False makes those the batch's old log-probabilities; how far
      the sampler's differed is corrected for here, if the objective asks.
  """
  weight = batch.weights
  if method.tokens:
    chosen = method.tokens.select(draw, batch, scores)
    keep = chosen.keep & batch.is_trained
    weight = jnp.where(keep, weight / jnp.where(keep, chosen.prob, 1.0), 0.0)
  if scores is not None and not is_on_policy:
    if objective.sampler_cap:
      weight *= objectives.sampler_correction(
        scores.logprobs, batch.old_logprobs, objective.sampler_cap
      )
    batch = batch.replace(old_logprobs=scores.logprobs)
  return (
    batch.replace(weights=weight),
    {
      "tokens/trained": (weight != 0).sum(dtype=jnp.float32),
      "tokens/weight_max": jnp.where(
        weight != 0, weight / jnp.where(weight != 0, batch.weights, 1.0), 0.0
      ).max(),
    },
  )


def pack(
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  token_weights: Float[Array, "Q G"],
  rows: Rows,
) -> tuple[PackedBatch, Int[Array, ""], dict[str, Float[Array, ""]]]:
  """Micro-batches `[M, R, L]` of the sequences whose length is not 0.

  Returns:
    The micro-batches, how many are in use, and metrics; `pack/missing_rows`
    above 0 means that the rows did not suffice.
  """
  everywhere = lambda x: sharding.constrain(x, *(None,) * x.ndim)
  prompts, rollout, advantages, token_weights = jax.tree.map(
    everywhere, (prompts, rollout, advantages, token_weights)
  )
  cells = packing.count_cells(
    prompts.lengths, rollout.lengths, rows.shares_prompts
  )
  longest = prompts.tokens.shape[1] + rollout.tokens.shape[2] - 1
  num_rows = rows.count(rollout.lengths.size, longest)
  plan = packing.plan(cells, rows.length, num_rows, rows.window)
  batch = packing.fill(
    plan,
    cells,
    prompts,
    rollout,
    advantages,
    token_weights,
    num_rows,
    rows.length,
  )
  micro = lambda x: sharding.constrain(
    x.reshape(-1, rows.per_micro, rows.length), None, "batch", None
  )
  num_used = plan.num_used
  total = lambda x: x.sum(dtype=jnp.float32)
  in_rows = jnp.maximum(num_used, 1).astype(jnp.float32) * rows.length
  in_use = total(batch.segment_ids > 0)
  # What the completions would take, each with a prompt of its own.
  apart = total(
    packing.count_cells(prompts.lengths, rollout.lengths, False).own
  )
  info = {
    "pack/rows": num_used.astype(jnp.float32),
    "pack/fill": in_use / in_rows,
    "pack/shared": 1 - in_use / jnp.maximum(apart, 1.0),
    "pack/missing_rows": jnp.maximum(num_used - num_rows, 0).astype(
      jnp.float32
    ),
  }
  num_micro = (num_used + rows.per_micro - 1) // rows.per_micro
  return jax.tree.map(micro, batch), num_micro, info
