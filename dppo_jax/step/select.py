"""From rewards to weighted rows: advantages, completions, weights, packing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.algo import diagnostics
from dppo_jax.algo.policy_loss import Objective
from dppo_jax.algo.weights import horvitz_thompson, invalid_probs
from dppo_jax.records import (
  CompletionSummary,
  Groups,
  IntScalar,
  PackedBatch,
  PromptBatch,
  Rollout,
  Scalar,
)
from dppo_jax.rng import StepRng
from dppo_jax.step.pack import count_rows, pack
from dppo_jax.step.spec import StepSpec


class Part(NamedTuple):
  """A mini-batch of a rollout, before completions are chosen.

  Attributes:
    rollout: completions that are not trained on have length 0.
    groups: with advantages of the rollout's rewards.
    scale: `[Q, G]`, the objective's token share.
  """

  prompts: PromptBatch
  rollout: Rollout
  groups: Groups
  scale: Float[Array, "Q G"]


class Forecast(NamedTuple):
  """Predictions for one part of a rollout.

  Attributes:
    added_variance: `[K]`, as in `methods.Budget`.
    rows: `[K]`, packed rows that a draw of each fraction takes.
    sum_squares: sum of the squared norms of all completions' gradients, if
      token gradients are independent and of norm 1 - p.
  """

  added_variance: Float[Array, "K"]
  rows: Int[Array, "K"]
  sum_squares: Scalar


def select(
  rng: StepRng,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  budget: Scalar | None = None,
  part: IntScalar | int = 0,
  *,
  spec: StepSpec,
) -> tuple[PackedBatch, IntScalar, dict[str, Scalar], CompletionSummary]:
  """Chooses, weights and packs the completions of one update.

  Advantages come from all completions to train on. One of zero advantage has
  no gradient without a KL penalty. It gets no row unless the method trains on
  it.
  Shares and the denominator count all completions of the rollout.

  Args:
    budget: third argument of the method's rule; None is 1.
    part: as in `take_part`.
  Returns:
    Micro-batches `[M, R, L]`, how many are in use, metrics, and a summary of
    the part's completions.
  """
  method, objective = spec.method, spec.objective
  prompts, rollout, groups, scale = take_part(
    prompts, rollout, rewards, part, spec=spec
  )
  advantages, is_drawn = groups.advantages, rollout.lengths > 0
  budget = jnp.float32(1) if budget is None else budget
  chosen = method.completions(rng, groups, budget)  # drops completions
  drawn = chosen.replace(keep=chosen.keep & is_drawn)
  if method.has_statistics_after:
    advantages = objective.advantage(groups.rewards, drawn.keep)

  kept = rollout.kept
  weights = horvitz_thompson(kept, drawn)  # 1 / probability
  is_needed = adds_gradient(rollout, advantages, objective)
  is_trained = (weights > 0) & (is_needed | method.trains_zero_advantage)
  trained_lengths = jnp.where(is_trained, rollout.lengths, 0)
  batch, num_micro, metrics = pack(
    prompts,
    rollout.replace(lengths=trained_lengths),
    advantages,
    weights * scale,
    spec.packing,
  )

  # Gradient norm of a completion whose tokens' gradients are independent.
  size = jnp.abs(advantages) * scale * jnp.sqrt(groups.sum_sq_residual)
  metrics |= diagnostics.diagnose(chosen, weights, advantages, size, is_needed)
  metrics |= {
    "prompts/prob_min": jnp.where(kept.keep, kept.prob, 1.0).min(),
    "completions/kept": _count(weights > 0),
    "completions/trained": _count(is_trained),
    "tokens/trained": _count(trained_lengths),
    "weights/invalid_probs": invalid_probs(kept) + invalid_probs(drawn),
  }
  if method.budget:
    added = method.budget.added_variance(groups, budget[None])
    metrics["budget/added_variance"] = added[0]
  summary = CompletionSummary(advantages, weights, trained_lengths)
  return batch, num_micro, metrics, summary


def forecast(
  rng: StepRng,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  part: IntScalar | int = 0,
  *,
  spec: StepSpec,
) -> Forecast:
  """Predicts what each fraction of `method.budget` would add and cost.

  Rows are counted in a draw and a plan for each fraction: prompts are shared by
  the completions that are kept, and gaps remain, so that rows are proportional
  neither to completions nor to tokens.

  Args: as in `select`.
  """
  method = spec.method
  prompts, rollout, groups, _ = take_part(
    prompts, rollout, rewards, part, spec=spec
  )
  fractions = jnp.asarray(method.budget.fractions)

  def rows(fraction):
    chosen = method.completions(rng, groups, fraction)
    lengths = jnp.where(chosen.keep & groups.is_needed, rollout.lengths, 0)
    return count_rows(prompts, rollout.replace(lengths=lengths), spec.packing)

  squares = jnp.square(groups.advantages * groups.scale)
  return Forecast(
    added_variance=method.budget.added_variance(groups, fractions),
    rows=jax.lax.map(rows, fractions),
    sum_squares=(squares * groups.sum_sq_residual).sum(),
  )


def take_part(
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  part: IntScalar | int,
  *,
  spec: StepSpec,
) -> Part:
  """Returns one mini-batch of a rollout, with advantages.

  Args:
    part: mini-batch, from 0: prompt `q` belongs to part
      `q % spec.mini_batches`, since the last prompts may be blank after dynamic
      sampling.
  """
  objective, num_parts = spec.objective, spec.mini_batches
  scale = objective.token_share(rollout)
  if spec.mask_truncated:
    lengths = jnp.where(rollout.is_stopped, rollout.lengths, 0)
    rollout = rollout.replace(lengths=lengths)
  advantages = objective.advantage(rewards, rollout.lengths > 0)
  # A prompt that was not kept may have any probability, 0 too.
  prob = jnp.where(rollout.kept.keep, rollout.kept.prob, 1.0)
  groups = Groups(
    rewards,
    advantages,
    rollout.lengths,
    is_needed=adds_gradient(rollout, advantages, objective),
    scale=scale / prob[:, None],
    sum_sq_residual=_sum_sq_residual(rollout),
  )
  return jax.tree.map(
    lambda x: x.reshape(-1, num_parts, *x.shape[1:])[:, part] if x.ndim else x,
    Part(prompts, rollout, groups, scale),
  )


def _sum_sq_residual(rollout: Rollout) -> Float[Array, "Q G"]:
  """Returns the sum of `(1 - probability)^2` over a completion's tokens."""
  t = jnp.arange(rollout.tokens.shape[2], dtype=jnp.int32)
  squared = jnp.square(1 - jnp.exp(rollout.logprobs))
  return jnp.where(t < rollout.lengths[..., None], squared, 0.0).sum(axis=2)


def _count(x: Array) -> Scalar:
  return x.sum(dtype=jnp.float32)


def adds_gradient(
  rollout: Rollout, advantages: Float[Array, "Q G"], objective: Objective
) -> Array:
  """Returns True for completions that contribute to the gradient, `[Q, G]`."""
  return (rollout.lengths > 0) & ((advantages != 0) | objective.has_kl)
