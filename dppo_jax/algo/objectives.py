"""What is optimised, as a weighted sum over tokens that is never divided.

An objective is a value; its normaliser is folded into one weight per token
before the backward pass, so that the sum does not depend on packing,
micro-batches or devices. One division, by a count of the unpruned batch,
happens in `update.apply_gradient`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Objective(NamedTuple):
  """A clipped surrogate with a KL penalty.

  Attributes:
    clip_low: a token's ratio below `1 - clip_low` stops counting.
    clip_high: a token's ratio above `1 + clip_high` stops counting.
    beta: coefficient of the KL penalty against the reference policy.
    token_share: completion lengths `[Q, G]` to the share of its completion
      that each token stands for.
  """

  clip_low: float
  clip_high: float
  beta: float
  token_share: Callable[[Int[Array, "Q G"]], Float[Array, "Q G"]]


def grpo(
  clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0
) -> Objective:
  """Mean over completions of the mean over each one's tokens.

  Source: Shao et al. 2024, arXiv:2402.03300, equation 3.
  Deviates:
    1. beta is 0 unless asked for (0.04 there).
  """
  for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
    if not value > 0:
      raise ValueError(
        f"{name} is {value} but must be above 0; see config.objective.args"
      )
  if beta < 0:
    raise ValueError(
      f"beta is {beta} but must be at least 0; see config.objective.args"
    )
  return Objective(clip_low, clip_high, beta, _one_over_length)


OBJECTIVES = {"grpo": grpo}


def _one_over_length(lengths: Int[Array, "Q G"]) -> Float[Array, "Q G"]:
  return 1.0 / jnp.maximum(lengths, 1).astype(jnp.float32)


def surrogate(
  objective: Objective,
  logprobs: Float[Array, "*rows L"],
  old_logprobs: Float[Array, "*rows L"],
  advantages: Float[Array, "*rows L"],
  weights: Float[Array, "*rows L"],
  is_trained: Bool[Array, "*rows L"],
  segment_ids: Int[Array, "*rows L"],
  ref_logprobs: Float[Array, "*rows L"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
  """The loss summed over trained tokens, and sums that describe it.

  A token is clipped where moving on in the direction of its advantage would
  pay nothing; exactly at a bound it is not. A positive weight commutes with
  the clipping, so weighting the term equals weighting the advantage.

  Args:
    logprobs: nats, of the policy that is trained.
    old_logprobs: nats, of the policy that sampled; a constant.
    weights: design weight times the objective's normaliser.
    segment_ids: which cells belong together, for objectives with a ratio per
      sequence.
    ref_logprobs: nats, of the reference policy; needed where beta is not 0.
  Returns:
    `loss_sum` and `info` with the numbers `tokens`, `clipped`, `kl`: sums
    over trained tokens.
  """
  logprobs = jnp.where(is_trained, logprobs, 0.0)
  old_logprobs = jnp.where(is_trained, old_logprobs, 0.0)
  ratio = jnp.exp(_bounded(logprobs - old_logprobs))
  upper, lower = 1 + objective.clip_high, 1 - objective.clip_low
  is_clipped = jnp.where(advantages > 0, ratio > upper, ratio < lower)
  is_clipped &= advantages != 0
  bound = jnp.where(advantages > 0, upper, lower)
  loss = -jnp.where(is_clipped, bound, ratio) * advantages
  info = {
    "tokens": is_trained.sum(dtype=jnp.float32),
    "clipped": (is_clipped & is_trained).sum(dtype=jnp.float32),
    "kl": jnp.float32(0.0),
  }
  if objective.beta:
    ref_logprobs = jnp.where(is_trained, ref_logprobs, 0.0)
    kl = kl_k3(logprobs, ref_logprobs)
    loss = loss + objective.beta * kl
    info["kl"] = kl.sum()
  return jnp.where(is_trained, loss * weights, 0.0).sum(), info


def kl_k3(
  logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Non-negative, unbiased estimate of KL(policy || reference), nats.

  Args:
    logprobs: of tokens that the policy sampled; others bias the estimate.
  Source: Schulman 2020, joschu.net/blog/kl-approx.html, estimator k3.
  """
  difference = _bounded(ref_logprobs - logprobs)
  return jnp.expm1(difference) - difference


def _bounded(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Within 20 nats of 0: an infinite ratio would make a clipped slope NaN."""
  return jnp.clip(log_ratio, -20.0, 20.0)
