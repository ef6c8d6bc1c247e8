"""The loss of an objective: a weighted sum that is never divided.

An objective's normaliser is folded into one weight per token before the
backward pass, so that the sum does not depend on packing, micro-batches or
devices. One division, by the number of completions in the unpruned batch,
happens in `update.apply_gradient`.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax.algo.segments import segment_sum
from dppo_jax.records import Rollout, Scalar

Tokens = Float[Array, "*rows L"]
IsClipped = Bool[Array, "*rows L"]
TokenLoss = Callable[[Tokens, Tokens, Tokens], tuple[Tokens, IsClipped]]
Divergence = Callable[[Tokens, Tokens], Tokens]
PerCompletion = Float[Array, "Q G"]
Advantage = Callable[[PerCompletion, Bool[Array, "Q G"] | None], PerCompletion]
TokenShare = Callable[[Rollout], PerCompletion]


def _bounded(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Within 20 nats: an infinite ratio would make a clipped gradient NaN."""
  return jnp.clip(log_ratio, -20.0, 20.0)


def kl_k3(
  logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Non-negative, unbiased estimate of KL(policy || reference), nats.

  Args:
    logprobs: log-probabilities of tokens that the policy sampled; other tokens
      bias the estimate.
  Source: Schulman 2020, joschu.net/blog/kl-approx.html, estimator k3.
  """
  difference = _bounded(ref_logprobs - logprobs)
  return jnp.expm1(difference) - difference


class Objective(NamedTuple):
  """A loss of tokens with a KL penalty.

  `grpo()._replace(token_loss=mine)` is an objective with your own loss.

  Attributes:
    advantage: `(rewards [Q, G], is_counted [Q, G] or None) -> [Q, G]`, with
      statistics of the counted rewards.
    token_loss: `(ratio, advantages, logprobs) -> (loss, is_clipped)`, arrays of
      one shape. The ratio is the policy's probability over that before the
      step, of the token or its sequence; `logprobs` are in nats; `is_clipped`
      is only logged. For exact pruning, tokens must not affect each other's
      loss.
    token_share: `rollout -> [Q, G]`, factor on the tokens of each completion in
      the sum; the sum is divided by the number of completions.
    beta: coefficient of the KL penalty against the reference policy, or 0.
    kl: `(logprobs, ref_logprobs) -> kl`, the penalty of each token.
    is_sequence_ratio: takes the geometric mean of the ratios of a sequence.
    sampler_cap: largest factor of `sampler_correction`, which multiplies the
      weights; 0 for no correction.
  """

  advantage: Advantage
  token_loss: TokenLoss
  token_share: TokenShare
  beta: float = 0.0
  is_sequence_ratio: bool = False
  sampler_cap: float = 0.0
  kl: Divergence = kl_k3

  @property
  def has_kl(self) -> bool:
    """True if every token needs the reference policy's log-probability."""
    return self.beta != 0


def surrogate(
  objective: Objective,
  logprobs: Float[Array, "*rows L"],
  old_logprobs: Float[Array, "*rows L"],
  advantages: Float[Array, "*rows L"] | Float[Array, "*rows"],
  weights: Float[Array, "*rows L"] | Float[Array, "*rows"],
  is_trained: Bool[Array, "*rows L"],
  segment_ids: Int[Array, "*rows L"] | None = None,
  ref_logprobs: Float[Array, "*rows L"] | None = None,
) -> tuple[Scalar, dict[str, Scalar]]:
  """Computes the loss summed over trained tokens, and sums that describe it.

  A positive weight multiplies a token's loss, clipped or not, which equals
  weighting the advantage. A token of weight 0 counts in no sum, but is part of
  its sequence's ratio. Positions that are not trained may hold any number.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> logprobs = jnp.array([[-1.0, -2.0], [-0.5, 0.0]])
  >>> is_trained = jnp.array([[True, True], [True, False]])
  >>> advantages, weights = jnp.array([1.0, -1.0]), jnp.array([0.5, 2.0])
  >>> loss, info = algo.surrogate(
  ...   algo.grpo(), logprobs, logprobs - 0.1, advantages, weights, is_trained
  ... )
  >>> print(f"{loss:.4f}", f"{info['tokens']:.0f} tokens")
  1.1052 3 tokens

  Args:
    logprobs: log-probabilities under the trained policy, in nats.
    old_logprobs: the same under the policy before the step; a constant.
    advantages, weights: per token or, without segment ids, per row. A weight is
      the design's times the objective's normaliser.
    segment_ids: id of each sequence; None if every row is one sequence.
    ref_logprobs: the same under the reference policy, if `has_kl`.
  Returns:
    The loss; `tokens`, `clipped`, `kl` of trained tokens of nonzero weight.
  """
  if segment_ids is None:
    segment_ids = jnp.ones(logprobs.shape, jnp.int32)
    per_token = lambda x: x if x.ndim == logprobs.ndim else x[..., None]
    advantages = jnp.broadcast_to(per_token(advantages), logprobs.shape)
    weights = jnp.broadcast_to(per_token(weights), logprobs.shape)
  rows = (logprobs, old_logprobs, advantages, weights, is_trained, segment_ids)
  chex.assert_equal_shape(rows)  # else they would broadcast silently
  is_counted = is_trained & (weights != 0)
  logprobs = jnp.where(is_trained, logprobs, 0.0)
  old_logprobs = jnp.where(is_trained, old_logprobs, 0.0)
  ratio = _ratio(objective, logprobs, old_logprobs, is_trained, segment_ids)
  loss, is_clipped = _token_loss(objective, ratio, advantages, logprobs)
  info = {
    "tokens": is_counted.sum(dtype=jnp.float32),
    "clipped": (is_clipped & is_counted).sum(dtype=jnp.float32),
    "kl": jnp.float32(0.0),
  }
  if objective.has_kl:
    if ref_logprobs is None:
      raise ValueError(
        f"ref_logprobs is None but the objective's beta is {objective.beta}: "
        "its KL penalty needs the reference policy's log-probabilities"
      )
    kl = objective.kl(logprobs, ref_logprobs)
    loss = loss + objective.beta * kl
    info["kl"] = jnp.where(is_counted, kl, 0.0).sum()
  return jnp.where(is_counted, loss * weights, 0.0).sum(), info


def _ratio(objective, logprobs, old_logprobs, is_trained, segment_ids):
  """Ratio of the policy to that before the step, of tokens or sequences."""
  log_ratio = _bounded(logprobs - old_logprobs)
  if objective.is_sequence_ratio:
    length = segment_sum(is_trained.astype(jnp.float32), segment_ids)
    mean = segment_sum(log_ratio, segment_ids) / jnp.maximum(length, 1.0)
    # The sequence's value with the token's own gradient.
    zero_with_gradient = logprobs - jax.lax.stop_gradient(logprobs)
    log_ratio = jax.lax.stop_gradient(mean) + zero_with_gradient
  return jnp.exp(log_ratio)


def _token_loss(objective, ratio, advantages, logprobs):
  """Calls `objective.token_loss`, which may be a user's function."""
  result = objective.token_loss(ratio, advantages, logprobs)
  shapes = [getattr(x, "shape", None) for x in result]
  if shapes != [ratio.shape, ratio.shape]:
    raise ValueError(
      "an objective's token_loss must return (loss, is_clipped), both "
      f"{ratio.shape}, but it returned {shapes}"
    )
  return result


def sampler_correction(
  old_logprobs: Float[Array, "*shape"],
  sampler_logprobs: Float[Array, "*shape"],
  cap: float,
) -> Float[Array, "*shape"]:
  """Importance ratio of trainer to sampler, at most `cap`; a constant.

  Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", fengyao.notion.site/off-policy-rl.
  Deviates:
    1. It multiplies the KL penalty too, as its tokens have the same sampler.
  """
  log_ratio = _bounded(old_logprobs - sampler_logprobs)
  return jnp.minimum(jnp.exp(jax.lax.stop_gradient(log_ratio)), cap)
