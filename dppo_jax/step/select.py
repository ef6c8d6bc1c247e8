"""From rewards to packed rows: advantages, completions, weights, packing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import shapes, sharding
from dppo_jax.algo import diagnostics, packing, policy_loss
from dppo_jax.algo.advantages import overlong_penalty
from dppo_jax.algo.weights import horvitz_thompson, invalid_probs
from dppo_jax.methods import Method
from dppo_jax.records import (
  Groups,
  Outcome,
  PackedBatch,
  PromptBatch,
  Rollout,
  TokenStats,
)
from dppo_jax.rng import StepRng
from dppo_jax.step import sharded_fill

Metrics = dict[str, Float[Array, ""]]


class PackingSpec(NamedTuple):
  """The shape of packed rows.

  Attributes:
    row_length: positions in a row.
    rows_per_micro: rows in a micro-batch, over all devices.
    window: sequences among which the packer chooses.
    share_prefix: neighbours of one prompt share its positions.
    spread_rows: rows go to the devices in turn, so that a last micro-batch of
      few is not the first devices' alone; else as many to each as it takes.
  """

  row_length: int
  rows_per_micro: int
  window: int = 256
  share_prefix: bool = True
  spread_rows: bool = False

  def num_rows(self, num_sequences: int, max_length: int) -> int:
    """Rows that always suffice, in whole micro-batches."""
    bound = packing.row_bound(num_sequences, max_length, self.row_length)
    return shapes.round_up(bound, self.rows_per_micro)


def select(
  rng: StepRng,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  *,
  method: Method,
  objective: policy_loss.Objective,
  spec: PackingSpec,
  train_zero_advantage: bool,
  overlong_tokens: int = 0,
  mini_batches: int = 1,
) -> tuple[PackedBatch, Int[Array, "*P"], Metrics, Outcome]:
  """The completions to train on, weighted and packed.

  Advantages come from all completions of a group before any is dropped. One
  whose advantage is zero adds nothing to the gradient where beta is 0: it is
  left out of the rows, and the loss denominator still counts it.

  Args:
    rng: consumed by the method's completion rule.
    train_zero_advantage: packs such completions all the same.
    overlong_tokens: length of the soft overlong ramp, in tokens.
    mini_batches: parts of the prompts that are packed by themselves. What is
      chosen, and how it is weighted, does not depend on them.
  Returns:
    Micro-batches `[M, R, L]`, how many of them are in use as of `pack`,
    metrics, and what became of each completion.
  """
  is_drawn = rollout.lengths > 0
  adds_gradient = lambda advantages: (
    is_drawn & ((advantages != 0) | bool(objective.beta))
  )

  # Advantages, of all G completions.
  if overlong_tokens:
    limit = rollout.tokens.shape[2]
    rewards += overlong_penalty(rollout.lengths, limit, overlong_tokens)
  advantages = objective.advantage(rewards)

  # Completions.
  token_share = objective.token_share(rollout)
  groups = Groups(
    rewards,
    advantages,
    rollout.lengths,
    is_needed=adds_gradient(advantages),
    scale=token_share / rollout.kept.prob[:, None],
    sum_sq_residual=sum_sq_residual(rollout),
  )
  chosen = method.completions(rng, groups)
  if method.has_statistics_after:
    advantages = objective.advantage(rewards, chosen.keep & is_drawn)

  # Weights.
  weights = horvitz_thompson(rollout.kept, chosen)
  weights = jnp.where(is_drawn, weights, 0.0)

  # Packing.
  is_needed = adds_gradient(advantages)
  is_trained = weights > 0
  if not train_zero_advantage:
    is_trained &= is_needed
  trained_lengths = jnp.where(is_trained, rollout.lengths, 0)
  batch, num_micro, pack_metrics = pack(
    prompts,
    rollout.replace(lengths=trained_lengths),
    advantages,
    weights * token_share,
    spec,
    mini_batches,
  )

  # A token's share of the loss times the root of their squared residuals: what
  # a completion adds where its tokens' gradients point nowhere in particular.
  size = jnp.abs(advantages) * token_share * jnp.sqrt(groups.sum_sq_residual)
  count = lambda x: x.sum(dtype=jnp.float32)
  metrics = {
    **pack_metrics,
    **diagnostics.diagnose(chosen, weights, advantages, size, is_needed),
    "weights/invalid_probs": invalid_probs(rollout.kept)
    + invalid_probs(chosen.replace(keep=chosen.keep & is_drawn)),
    "prompts/prob_min": jnp.where(
      rollout.kept.keep, rollout.kept.prob, 1.0
    ).min(),
    "completions/kept": count(weights > 0),
    "completions/trained": count(is_trained),
    "tokens/trained": count(trained_lengths),
    **(chosen.told or {}),
  }
  return (
    batch,
    num_micro,
    metrics,
    Outcome(advantages, weights, rollout.lengths),
  )


def sum_sq_residual(rollout: Rollout) -> Float[Array, "Q G"]:
  """Sum over tokens of (1 - p)^2, p being what each was sampled with."""
  t = jnp.arange(rollout.tokens.shape[2], dtype=jnp.int32)
  squared = jnp.square(1 - jnp.exp(rollout.logprobs))
  return jnp.where(t < rollout.lengths[..., None], squared, 0.0).sum(axis=2)


def choose_tokens(
  rng: StepRng,
  batch: PackedBatch,
  stats: TokenStats | None,
  *,
  method: Method,
  objective: policy_loss.Objective,
  is_on_policy: bool,
) -> tuple[PackedBatch, Metrics]:
  """The batch with the weights of the tokens that the method chooses.

  A token that is not chosen has weight 0, and the update does not compute its
  log-probability.

  Args:
    rng: consumed by the method's token rule.
    stats: of the batch under the policy to train, where they were computed.
    is_on_policy: False makes their log-probabilities the batch's old ones; how
      far the sampler's differed is corrected for here, if the objective asks.
  """
  weights, num_invalid = batch.weights, jnp.float32(0)
  if method.tokens:
    chosen = method.tokens.select(rng, batch, stats)
    keep = chosen.keep & batch.is_trained
    num_invalid = invalid_probs(chosen.replace(keep=keep))
    weights = jnp.where(keep, weights / jnp.where(keep, chosen.prob, 1.0), 0.0)
  if stats is not None and not is_on_policy:
    if objective.sampler_cap:
      weights *= policy_loss.sampler_correction(
        stats.logprobs, batch.old_logprobs, objective.sampler_cap
      )
    batch = batch.replace(old_logprobs=stats.logprobs)
  is_kept = weights != 0
  metrics = {
    "tokens/invalid_probs": num_invalid,
    "tokens/trained": is_kept.sum(dtype=jnp.float32),
    "tokens/weight_max": jnp.where(
      is_kept, weights / jnp.where(is_kept, batch.weights, 1.0), 0.0
    ).max(),
  }
  return batch.replace(weights=weights), metrics


def pack(
  prompts: PromptBatch,
  rollout: Rollout,
  advantages: Float[Array, "Q G"],
  token_weights: Float[Array, "Q G"],
  spec: PackingSpec,
  mini_batches: int = 1,
) -> tuple[PackedBatch, Int[Array, "*P"], Metrics]:
  """Micro-batches `[M, R, L]` of the sequences whose length is not 0.

  Returns:
    The micro-batches, how many are in use, and metrics. Of several
    mini-batches the number is `[P]`: those in use up to the end of each. Where
    `pack/unplaced` is above 0, sequences had no place in the rows, and their
    loss is NaN: such a batch must not be trained on.
  """
  # All devices plan alike, from lengths; tokens stay where they are.
  replicated = lambda x: sharding.constrain(x, *(None,) * x.ndim)
  prompts = prompts.replace(lengths=replicated(prompts.lengths))
  rollout = rollout.replace(lengths=replicated(rollout.lengths))
  counts = packing.count_tokens(
    prompts.lengths, rollout.lengths, spec.share_prefix
  )
  max_length = prompts.tokens.shape[1] + rollout.tokens.shape[2] - 1
  # Each mini-batch has rows enough for its sequences, however long.
  size = spec.num_rows(rollout.lengths.size // mini_batches, max_length)
  plan, num_micro = _plan(counts, spec, size, mini_batches)
  batch = sharded_fill.fill(
    plan,
    counts,
    prompts,
    rollout,
    replicated(advantages),
    replicated(token_weights),
    num_rows=mini_batches * size,
    row_length=spec.row_length,
    rows_per_micro=spec.rows_per_micro,
    spread_rows=spec.spread_rows,
  )
  num_used = plan.num_used
  total = lambda x: x.sum(dtype=jnp.float32)
  capacity = jnp.maximum(num_used, 1).astype(jnp.float32) * spec.row_length
  in_use = total(batch.segment_ids > 0)
  # What the completions would take, each with a prompt of its own.
  unshared = total(
    packing.count_tokens(prompts.lengths, rollout.lengths, False).own
  )
  metrics = {
    "pack/rows": num_used.astype(jnp.float32),
    "pack/fill": in_use / capacity,
    "pack/shared": 1 - in_use / jnp.maximum(unshared, 1.0),
    "pack/unplaced": plan.num_unplaced.astype(jnp.float32),
  }
  return batch, num_micro, metrics


def _plan(
  counts: packing.TokenCounts, spec: PackingSpec, size: int, mini_batches: int
) -> tuple[packing.Plan, Int[Array, "*P"]]:
  """Where sequences go, and the micro-batches in use at each part's end.

  Prompt `q` is of part `q % P`, so that what dynamic sampling left blank, the
  last prompts, is missing from all parts alike. Parts lie one after another.

  Args:
    size: rows that suffice for a part.
  """
  num_micro = lambda rows: -(-rows // spec.rows_per_micro)
  plan = lambda counts: packing.plan(counts, spec.row_length, size, spec.window)
  if mini_batches == 1:
    whole = plan(counts)
    return whole, num_micro(whole.num_used)
  split = lambda x: x.reshape(-1, mini_batches, *x.shape[1:]).swapaxes(0, 1)
  join = lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
  parts = jax.lax.map(plan, jax.tree.map(split, counts))
  used = num_micro(parts.num_used)
  ends = jnp.cumsum(used, dtype=jnp.int32)
  first = (ends - used)[:, None, None] * spec.rows_per_micro
  return packing.Plan(
    row=join(jnp.where(parts.row >= 0, first + parts.row, -1)),
    offset=join(parts.offset),
    prefix_offset=join(parts.prefix_offset),
    num_used=parts.num_used.sum(dtype=jnp.int32),
    num_unplaced=parts.num_unplaced.sum(dtype=jnp.int32),
  ), ends
