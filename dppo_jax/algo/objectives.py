"""The objectives of the papers, each a factory: see methods/README.md.

With one update on a rollout every ratio is 1: the clips do nothing, and grpo,
gspo and gmpo have one gradient, as have dapo and cispo. More updates come of
`objective.mini_batches` and `objective.inner_updates`.
"""

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from dppo_jax.algo import token_losses, validation
from dppo_jax.algo.advantages import (
  group_centred,
  group_normalized,
  leave_one_out,
)
from dppo_jax.algo.policy_loss import Objective
from dppo_jax.algo.weights import horvitz_thompson
from dppo_jax.records import Rollout

check = functools.partial(validation.check, where="config.objective.args")


def grpo(
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  beta: float = 0.0,
  dual_clip: float = 0.0,
  sampler_cap: float = 0.0,
) -> Objective:
  """Mean over completions of the mean over each one's tokens.

  Args:
    clip_low, clip_high: a ratio below `1 - clip_low` stops counting where the
      advantage is negative, one above `1 + clip_high` where it is positive.
    beta: coefficient of the KL penalty.
    dual_clip: a ratio above it stops counting where the advantage is negative;
      0 for no such limit.
    sampler_cap: bound of the correction of a sampler that differs; 0 for none.
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
    token_losses.clipped_ratio(clip_low, clip_high),
    _one_over_length,
    beta,
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
    4. One update on a rollout unless `objective.mini_batches` asks for more:
       16 in the paper, each on 512 of 8,192 completions. The mean length stays
       the whole rollout's; codes take that of each mini-batch.
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
    2. One update on a rollout unless `objective.mini_batches` asks for more:
       4 in the paper. With one the clips do nothing.
  """
  plain = grpo(clip_low, clip_high, beta, dual_clip, sampler_cap)
  return plain._replace(is_sequence_ratio=True)


def gmpo(
  clip_low: float = 0.4,
  clip_high: float = 0.4,
  beta: float = 0.0,
  dual_clip: float = 0.0,
  sampler_cap: float = 0.0,
) -> Objective:
  """GRPO with the geometric mean of token ratios that are clipped before it.

  A completion's loss is `-A (prod_t r_t)^(1 / length)`, where the ratios `r_t`
  of its tokens are held below `e^clip_high` for a positive `A`, above
  `e^-clip_low` for a negative one. A token that is held has no gradient; the
  others' is scaled by the mean, as in gspo's token form.

  Args:
    clip_low, clip_high: of log ratios, in nats.
  Source: Zhao et al. 2025, arXiv:2507.20673, with the range (e^-0.4, e^0.4) of
    its section 4; the form is that of the authors' code in verl.
  Deviates:
    1. A token's log ratio is held within 20 nats, whatever the clips.
    2. `beta`, `dual_clip` and `sampler_cap` are additions, off by default.
  """
  plain = grpo(clip_low, clip_high, beta, dual_clip, sampler_cap)
  return plain._replace(
    token_loss=token_losses.ratio_alone,
    is_sequence_ratio=True,
    log_clip=(clip_low, clip_high),
  )


def cispo(
  clip_low: float = 1.0,
  clip_high: float = 4.0,
  beta: float = 0.0,
  dual_clip: float = 0.0,
  sampler_cap: float = 0.0,
  tokens_per_completion: float = 0.0,
) -> Objective:
  """A mean over all tokens of `-sg(clip(r)) A log p`: none loses its gradient.

  Args:
    clip_low: a ratio below `1 - clip_low` weighs as much as that; 1 or more
      is no bound, as a ratio is never negative.
    clip_high: a ratio above `1 + clip_high` weighs as much as that.
    tokens_per_completion: as of `dapo`.
  Source: MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5; without a lower
    bound, as its experiments.
  Deviates:
    1. The paper tunes its upper bound and does not say to what: 4, which lets
       a weight reach 5, is a guess of ours.
    2. The mean is that of `dapo`, over the batch; the paper's is over a group.
  """
  plain = dapo(
    clip_low, clip_high, beta, dual_clip, sampler_cap, tokens_per_completion
  )
  return plain._replace(
    token_loss=token_losses.clipped_weight(clip_low, clip_high)
  )


def rloo(beta: float = 0.0, sampler_cap: float = 0.0) -> Objective:
  """REINFORCE with the mean of the others as the baseline of each.

  A completion's loss is `-(R_i - mean of R_j, j != i) log p(completion)`, the
  sum over its tokens, divided by the number of completions alone: gradients
  are larger than those of grpo by about a completion's length.

  Source: Ahmadian et al. 2024, arXiv:2402.14740, whose estimator is Kool et
    al.'s of 2019.
  Deviates:
    1. The KL penalty, if any, is the loss's; the paper's is in the reward.
    2. There is no ratio: with more than one update on a rollout, the later ones
       are not corrected for the policy having moved.
  """
  plain = grpo(beta=beta, sampler_cap=sampler_cap)
  return plain._replace(
    advantage=leave_one_out,
    token_loss=token_losses.log_likelihood,
    token_share=_one,
  )


OBJECTIVES = {
  "grpo": grpo,
  "dapo": dapo,
  "dr_grpo": dr_grpo,
  "gspo": gspo,
  "gmpo": gmpo,
  "cispo": cispo,
  "rloo": rloo,
}


def _one(rollout: Rollout) -> Float[Array, "Q G"]:
  return jnp.ones(rollout.lengths.shape, jnp.float32)


def _one_over_length(rollout: Rollout) -> Float[Array, "Q G"]:
  return 1.0 / jnp.maximum(rollout.lengths, 1).astype(jnp.float32)


def _one_over_mean_length(rollout: Rollout) -> Float[Array, "Q G"]:
  """Estimated where prompts were pruned: each kept one stands for 1 / prob."""
  lengths = rollout.lengths.astype(jnp.float32)
  weight = jnp.ones(lengths.shape[:1], jnp.float32)
  if rollout.kept is not None:
    weight = horvitz_thompson(rollout.kept)
  completions = weight.sum() * lengths.shape[1]
  tokens = (weight[:, None] * lengths).sum()
  share = completions / jnp.where(tokens > 0, tokens, 1.0)
  return jnp.broadcast_to(share, lengths.shape)


def _one_over_longest(rollout: Rollout) -> Float[Array, "Q G"]:
  limit = rollout.tokens.shape[2]
  return jnp.full(rollout.lengths.shape, 1.0 / limit, jnp.float32)
