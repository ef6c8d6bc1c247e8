"""What is optimised, as a weighted sum over tokens that is never divided.

An objective is a value; its normaliser is folded into one weight per token
before the backward pass, so that the sum does not depend on packing,
micro-batches or devices. One division, by the number of completions in the
unpruned batch, happens in `update.apply_gradient`.

| objective | a token counts  | ratio of   | advantage  | clip       |
|-----------|-----------------|------------|------------|------------|
| grpo      | 1 / length      | a token    | normalised | 0.2, 0.2   |
| dapo      | 1 / mean length | a token    | normalised | 0.2, 0.28  |
| dr_grpo   | 1 / limit       | a token    | centred    | 0.2, 0.2   |
| gspo      | 1 / length      | a sequence | normalised | 3e-4, 4e-4 |
"""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax.algo import checks
from dppo_jax.algo.advantages import group_centred, group_normalized
from dppo_jax.algo.segments import segment_sum
from dppo_jax.records import Rollout

check = functools.partial(checks.check, where="config.objective.args")


class Objective(NamedTuple):
  """A clipped surrogate with a KL penalty.

  Attributes:
    advantage: `(rewards [Q, G], is_counted [Q, G] or None) -> [Q, G]`, the
      statistics being those of the rewards that are counted.
    clip_low: a ratio below `1 - clip_low` stops counting.
    clip_high: a ratio above `1 + clip_high` stops counting.
    beta: coefficient of the KL penalty against the reference policy.
    token_share: a rollout to what a token of each completion, `[Q, G]`,
      counts for in the sum that is divided by the number of completions.
    is_sequence_ratio: one ratio for each sequence, not for each token.
    dual_clip: a ratio above it stops counting where the advantage is negative;
      above 1, or 0 for no such limit.
    sampler_cap: the largest factor by which a token's weight may correct for a
      sampler whose probabilities differ from the trainer's; 0 for none.
  """

  advantage: Callable[..., Float[Array, "Q G"]]
  clip_low: float
  clip_high: float
  beta: float
  token_share: Callable[[Rollout], Float[Array, "Q G"]]
  is_sequence_ratio: bool = False
  dual_clip: float = 0.0
  sampler_cap: float = 0.0


def grpo(
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  beta: float = 0.0,
  dual_clip: float = 0.0,
  sampler_cap: float = 0.0,
) -> Objective:
  """Mean over completions of the mean over each one's tokens.

  Raises:
    ValueError: for a coefficient that makes no sense.
  Source: Shao et al. 2024, arXiv:2402.03300, equation 3; Ye et al. 2020,
    arXiv:1912.09729, equation 5, for the dual clip.
  Deviates:
    1. beta is 0 unless asked for (0.04 there).
  """
  check("clip_low", clip_low, lambda x: x > 0, "above 0")
  check("clip_high", clip_high, lambda x: x > 0, "above 0")
  check("beta", beta, lambda x: 0 <= x < math.inf, "at least 0 and finite")
  check("dual_clip", dual_clip, lambda x: x == 0 or x > 1, "0 or above 1")
  is_valid = lambda x: x == 0 or x >= 1
  check("sampler_cap", sampler_cap, is_valid, "0 or at least 1")
  return Objective(
    group_normalized,
    clip_low,
    clip_high,
    beta,
    _one_over_length,
    dual_clip=dual_clip,
    sampler_cap=sampler_cap,
  )


def dapo(
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  beta: float = 0.0,
  dual_clip: float = 0.0,
  sampler_cap: float = 0.0,
  tokens_per_completion: float = 0.0,
) -> Objective:
  """Mean over all tokens of the batch, whichever completion they are of.

  Args:
    tokens_per_completion: the loss is divided by so many tokens for each
      completion of the unpruned batch. As a constant it leaves pruning exact.
      0 takes the mean length of the completions at hand.
  Raises:
    ValueError: for a coefficient that makes no sense.
  Source: Yu et al. 2025, arXiv:2503.14476, sections 3.1 and 3.3.
  Deviates:
    1. The mean is over the tokens of the whole batch, as codes have it; the
       paper's formula is over those of each group.
    2. The mean length at hand is the unpruned batch's, and pruning completions
       exact, as long as every prompt is kept. Where prompts were pruned it is
       estimated by the weighted mean of those kept, which makes the gradient a
       ratio estimate, with a bias of order 1 / their number.
    3. Drawing again for groups without variance is left to the method, the
       penalty on length to the reward.
  """
  check(
    "tokens_per_completion",
    tokens_per_completion,
    lambda x: 0 <= x < math.inf,
    "at least 0 and finite",
  )

  def one_over_constant(rollout):
    return jnp.full(
      rollout.lengths.shape, 1.0 / tokens_per_completion, jnp.float32
    )

  share = one_over_constant if tokens_per_completion else _one_over_mean_length
  plain = grpo(clip_low, clip_high, beta, dual_clip, sampler_cap)
  return plain._replace(token_share=share)


def dr_grpo(
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  beta: float = 0.0,
  dual_clip: float = 0.0,
  sampler_cap: float = 0.0,
) -> Objective:
  """GRPO divided by constants only: by no deviation, and by no length.

  Source: Liu et al. 2025, arXiv:2503.20783, section 3.2. The constant is the
    generation limit, as in the authors' code.
  """
  plain = grpo(clip_low, clip_high, beta, dual_clip, sampler_cap)
  return plain._replace(advantage=group_centred, token_share=_one_over_longest)


def gspo(
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  beta: float = 0.0,
  dual_clip: float = 0.0,
  sampler_cap: float = 0.0,
) -> Objective:
  """GRPO with one ratio per sequence, the geometric mean of its tokens'.

  Source: Zheng et al. 2025, arXiv:2507.18071, in the token form of section
    4.3, whose gradient is that of the sequence form; the clips are of 5.1.
  Deviates:
    1. A token's log ratio is held within 20 nats before the mean is taken.
  """
  plain = grpo(clip_low, clip_high, beta, dual_clip, sampler_cap)
  return plain._replace(is_sequence_ratio=True)


OBJECTIVES = {"grpo": grpo, "dapo": dapo, "dr_grpo": dr_grpo, "gspo": gspo}


def _one_over_length(rollout: Rollout) -> Float[Array, "Q G"]:
  return 1.0 / jnp.maximum(rollout.lengths, 1).astype(jnp.float32)


def _one_over_mean_length(rollout: Rollout) -> Float[Array, "Q G"]:
  """Estimated where prompts were pruned: each kept one stands for 1 / prob."""
  keep, prob = rollout.kept.keep, rollout.kept.prob
  weight = jnp.where(keep, 1.0 / jnp.where(keep, prob, 1.0), 0.0)
  lengths = rollout.lengths.astype(jnp.float32)
  completions = weight.sum() * lengths.shape[1]
  tokens = (weight[:, None] * lengths).sum()
  share = completions / jnp.where(tokens > 0, tokens, 1.0)
  return jnp.broadcast_to(share, lengths.shape)


def _one_over_longest(rollout: Rollout) -> Float[Array, "Q G"]:
  limit = rollout.tokens.shape[2]
  return jnp.full(rollout.lengths.shape, 1.0 / limit, jnp.float32)


def surrogate(
  objective: Objective,
  logprobs: Float[Array, "*rows L"],
  old_logprobs: Float[Array, "*rows L"],
  advantages: Float[Array, "*rows L"],
  weights: Float[Array, "*rows L"],
  is_trained: Bool[Array, "*rows L"],
  segment_ids: Int[Array, "*rows L"],
  ref_logprobs: Float[Array, "*rows L"] | None = None,
  sampler_logprobs: Float[Array, "*rows L"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
  """The loss summed over trained tokens, and sums that describe it.

  A token is clipped where moving further in the direction of its advantage
  would gain nothing; exactly at a bound it is not, and has its whole gradient.
  A positive weight commutes with the clipping, so weighting the term equals
  weighting the advantage.

  A token of weight 0 counts in no sum. Where each sequence has one ratio it is
  still part of that ratio; elsewhere its log-probabilities may be any finite
  numbers. Positions that are not trained may hold anything.

  Args:
    logprobs: nats, of the policy that is trained.
    old_logprobs: nats, of the policy before the step; a constant.
    weights: design weight times the objective's normaliser.
    segment_ids: positions of one sequence share one, for a ratio per sequence.
    ref_logprobs: nats, of the reference policy; needed where beta is not 0.
    sampler_logprobs: nats, of the distribution the tokens were drawn from;
      None where the weights correct for it already, or nothing should.
  Returns:
    `loss_sum` and `info` with the numbers `tokens`, `clipped`, `kl`: sums
    over trained tokens of a weight that is not 0.
  """
  rows = (logprobs, old_logprobs, advantages, weights, is_trained, segment_ids)
  chex.assert_equal_shape(rows)  # else they would broadcast in silence
  is_counted = is_trained & (weights != 0)
  logprobs = jnp.where(is_trained, logprobs, 0.0)
  old_logprobs = jnp.where(is_trained, old_logprobs, 0.0)
  log_ratio = _bounded(logprobs - old_logprobs)
  if objective.is_sequence_ratio:
    length = segment_sum(is_trained.astype(jnp.float32), segment_ids)
    mean = segment_sum(log_ratio, segment_ids) / jnp.maximum(length, 1.0)
    # The sequence's value with the token's own gradient.
    log_ratio = jax.lax.stop_gradient(mean)
    log_ratio = log_ratio + (logprobs - jax.lax.stop_gradient(logprobs))
  ratio, is_clipped = _clip(objective, jnp.exp(log_ratio), advantages)
  loss = -ratio * advantages
  info = {
    "tokens": is_counted.sum(dtype=jnp.float32),
    "clipped": (is_clipped & is_counted).sum(dtype=jnp.float32),
    "kl": jnp.float32(0.0),
  }
  if objective.beta:
    if ref_logprobs is None:
      raise ValueError(
        f"ref_logprobs is None but the objective's beta is {objective.beta}: "
        "its KL penalty needs the reference policy's log-probabilities"
      )
    kl = kl_k3(logprobs, ref_logprobs)
    loss = loss + objective.beta * kl
    info["kl"] = jnp.where(is_counted, kl, 0.0).sum()
  if objective.sampler_cap and sampler_logprobs is not None:
    weights = weights * sampler_correction(
      old_logprobs, sampler_logprobs, objective.sampler_cap
    )
  return jnp.where(is_counted, loss * weights, 0.0).sum(), info


def _clip(objective, ratio, advantages):
  """Ratios held within the bounds of their side, and which were beyond.

  By comparison: `jnp.clip` would halve the gradient at a bound.
  """
  is_bad = advantages < 0
  low = jnp.where(is_bad, 1 - objective.clip_low, 0.0)
  high = jnp.where(
    is_bad, objective.dual_clip or jnp.inf, 1 + objective.clip_high
  )
  is_clipped = ((ratio < low) | (ratio > high)) & (advantages != 0)
  bound = jnp.where(ratio < low, low, high)
  return jnp.where(is_clipped, bound, ratio), is_clipped


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


def sampler_correction(
  old_logprobs: Float[Array, "*shape"],
  sampler_logprobs: Float[Array, "*shape"],
  cap: float,
) -> Float[Array, "*shape"]:
  """Corrects for a sampler whose probabilities differ from the trainer's.

  The importance ratio, but at most `cap`: a constant factor of each token.

  Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", fengyao.notion.site/off-policy-rl.
  Deviates:
    1. It multiplies the KL penalty too, whose tokens are drawn alike.
  """
  log_ratio = _bounded(old_logprobs - sampler_logprobs)
  return jnp.minimum(jnp.exp(jax.lax.stop_gradient(log_ratio)), cap)


def _bounded(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Within 20 nats: an infinite ratio would make a clipped gradient NaN."""
  return jnp.clip(log_ratio, -20.0, 20.0)
