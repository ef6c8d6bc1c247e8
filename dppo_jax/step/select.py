"""From rewards to weighted rows: advantages, completions, weights, packing."""

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from dppo_jax.algo import diagnostics
from dppo_jax.algo.advantages import overlong_penalty
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.algo.policy_loss import Objective
from dppo_jax.algo.weights import horvitz_thompson, invalid_probs
from dppo_jax.methods import Method
from dppo_jax.records import (
  CompletionSummary,
  Groups,
  IntScalar,
  NoiseTerms,
  PackedBatch,
  PromptBatch,
  Rollout,
  Scalar,
  Selection,
  StepCosts,
)
from dppo_jax.rng import StepRng
from dppo_jax.step.pack import PackInfo, pack


class SelectInfo(struct.PyTreeNode):
  """Result of choosing and packing completions.

  Attributes:
    num_invalid_probs: kept items whose probability is not in (0, 1].
    num_trained: completions packed.
    num_tokens: completion tokens packed.
    noise: properties that the gradient noise is measured with.
    diagnostics: scalars to log.
  """

  pack: PackInfo
  num_invalid_probs: Scalar
  num_trained: Scalar
  num_tokens: Scalar
  noise: NoiseTerms
  diagnostics: dict[str, Scalar]

  def metrics(self) -> dict[str, Scalar]:
    return {
      **self.pack.metrics(),
      **self.diagnostics,
      "weights/invalid_probs": self.num_invalid_probs,
      "completions/trained": self.num_trained,
      "tokens/trained": self.num_tokens,
    }


def select(
  rng: StepRng,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  costs: StepCosts | None = None,
  part: IntScalar | int = 0,
  *,
  method: Method,
  objective: Objective,
  spec: PackingSpec,
  overlong_tokens: int = 0,
  mask_truncated: bool = False,
  num_parts: int = 1,
) -> tuple[PackedBatch, IntScalar, SelectInfo, CompletionSummary]:
  """Chooses, weights and packs the completions of one update.

  Advantages come from all completions to train on. If beta is 0, one of zero
  advantage has no gradient and gets no row, unless the method trains on it.
  Shares and the denominator count all completions of the rollout.

  Args:
    costs: timings of earlier steps, for methods that read them.
    part: mini-batch, from 0: prompt `q` belongs to part `q % num_parts`, since
      the last prompts may be blank after dynamic sampling.
    overlong_tokens: length of the soft overlong ramp, in tokens.
    mask_truncated: True to train on completions with a stop only.
    num_parts: mini-batches of the rollout.
  Returns:
    Micro-batches `[M, R, L]`, how many are in use, information to log, and a
    summary of the part's completions.
  """
  if overlong_tokens:
    rewards = rewards + overlong_penalty(
      rollout.lengths, rollout.tokens.shape[2], overlong_tokens
    )
  scale, sampled = objective.token_share(rollout), rollout.lengths
  if mask_truncated:
    rollout = rollout.replace(lengths=jnp.where(rollout.is_stopped, sampled, 0))
  advantages = objective.advantage(rewards, rollout.lengths > 0)
  groups = make_groups(rollout, rewards, advantages, scale, objective, costs)
  prompts, rollout, groups, scale, sampled = _take_part(
    (prompts, rollout, groups, scale, sampled), part, num_parts
  )
  advantages, is_drawn = groups.advantages, rollout.lengths > 0
  chosen = method.completions(rng, groups)  # drops completions
  drawn = chosen.replace(keep=chosen.keep & is_drawn)
  if method.has_statistics_after:
    advantages = objective.advantage(groups.rewards, drawn.keep)

  weights = horvitz_thompson(rollout.kept, drawn)  # 1 / probability
  is_needed = adds_gradient(rollout, advantages, objective)
  is_trained = (weights > 0) & (is_needed | method.trains_zero_advantage)
  trained_lengths = jnp.where(is_trained, rollout.lengths, 0)
  batch, num_micro, pack_info = pack(
    prompts,
    rollout.replace(lengths=trained_lengths),
    advantages,
    weights * scale,
    spec,
  )

  # Gradient norm of a completion whose tokens' gradients are independent.
  size = jnp.abs(advantages) * scale * jnp.sqrt(groups.sum_sq_residual)
  scalars = diagnostics.diagnose(chosen, weights, advantages, size, is_needed)
  scalars |= chosen.metrics | {
    "prompts/prob_min": _least_prob(rollout.kept),
    "completions/kept": _count(weights > 0),
  }
  info = SelectInfo(
    pack=pack_info,
    num_invalid_probs=invalid_probs(rollout.kept) + invalid_probs(drawn),
    num_trained=_count(is_trained),
    num_tokens=_count(trained_lengths),
    noise=_noise_terms(groups, chosen.added_variance),
    diagnostics=scalars,
  )
  summary = CompletionSummary(advantages, weights, sampled, trained_lengths)
  return batch, num_micro, info, summary


def _take_part(tree: PyTree, part: IntScalar | int, num_parts: int) -> PyTree:
  """Returns the prompts of one mini-batch; scalars stay."""
  if num_parts == 1:
    return tree
  return jax.tree.map(
    lambda x: x.reshape(-1, num_parts, *x.shape[1:])[:, part] if x.ndim else x,
    tree,
  )


def make_groups(
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  advantages: Float[Array, "Q G"],
  scale: Float[Array, "Q G"],
  objective: Objective,
  costs: StepCosts | None = None,
) -> Groups:
  """Builds the input of a completion rule; `scale` is the token share."""
  # A prompt that was not kept may have any probability, 0 too.
  prob = jnp.where(rollout.kept.keep, rollout.kept.prob, 1.0)
  return Groups(
    rewards,
    advantages,
    rollout.lengths,
    is_needed=adds_gradient(rollout, advantages, objective),
    scale=scale / prob[:, None],
    sum_sq_residual=sum_sq_residual(rollout),
    costs=costs,
  )


def _least_prob(chosen: Selection) -> Scalar:
  return jnp.where(chosen.keep, chosen.prob, 1.0).min()


def _count(x: Array) -> Scalar:
  return x.sum(dtype=jnp.float32)


def _noise_terms(groups: Groups, added_variance: Scalar | None) -> NoiseTerms:
  """Returns the properties that the gradient noise is measured with."""
  squares = jnp.square(groups.advantages * groups.scale)
  added = jnp.float32(0) if added_variance is None else added_variance
  return NoiseTerms(
    added_variance=added, sum_squares=(squares * groups.sum_sq_residual).sum()
  )


def adds_gradient(
  rollout: Rollout, advantages: Float[Array, "Q G"], objective: Objective
) -> Array:
  """Returns True for completions that contribute to the gradient, `[Q, G]`."""
  return (rollout.lengths > 0) & ((advantages != 0) | bool(objective.beta))


def sum_sq_residual(rollout: Rollout) -> Float[Array, "Q G"]:
  """Sums (1 - p)^2 over tokens, with p the sampling probability of each."""
  t = jnp.arange(rollout.tokens.shape[2], dtype=jnp.int32)
  squared = jnp.square(1 - jnp.exp(rollout.logprobs))
  return jnp.where(t < rollout.lengths[..., None], squared, 0.0).sum(axis=2)
