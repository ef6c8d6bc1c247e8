"""The objectives of the papers, each a factory: see methods/README.md.

Equal arguments return equal objectives, so that an objective compiles once.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dppo_jax.algo import validation
from dppo_jax.algo.advantages import (
  group_centred,
  group_normalized,
  leave_one_out,
)
from dppo_jax.algo.policy_loss import (
  IsClipped,
  Objective,
  TokenLoss,
  Tokens,
  TokenShare,
)
from dppo_jax.algo.validation import FINITE, POSITIVE, Limit
from dppo_jax.algo.weights import horvitz_thompson
from dppo_jax.records import Rollout

check = functools.partial(validation.check, where="config.objective.args")


def grpo(
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  beta: float = 0.0,
  sampler_cap: float = 0.0,
) -> Objective:
  """Mean over completions of the mean over each one's tokens.

  Arguments that other factories share with this one are documented here.

  Args:
    clip_low, clip_high: a ratio below `1 - clip_low` has no gradient at a
      negative advantage, one above `1 + clip_high` none at a positive one.
    beta, sampler_cap: the fields of `Objective`.
  Raises:
    UserError: for a coefficient outside its range.
  Source: Shao et al. 2024, arXiv:2402.03300, equation 3.
  Deviates:
    1. beta is 0.04 in the paper.
  """
  check(POSITIVE, clip_low=clip_low, clip_high=clip_high)
  check(FINITE, beta=beta)
  at_least_1 = Limit(lambda x: x == 0 or x >= 1, "0 or at least 1")
  check(at_least_1, sampler_cap=sampler_cap)
  return Objective(
    group_normalized,
    _clipped_ratio_loss(clip_low, clip_high),
    _one_over_length,
    beta,
    sampler_cap=sampler_cap,
  )


def dapo(
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  beta: float = 0.0,
  sampler_cap: float = 0.0,
  tokens_per_completion: float = 0.0,
) -> Objective:
  """Mean over all tokens of the batch.

  Args:
    tokens_per_completion: constant number of tokens per completion of the
      unpruned batch by which the loss is divided, which leaves pruning exact;
      0 for the mean length of all completions that were sampled.
  Source: Yu et al. 2025, arXiv:2503.14476, sections 3.1 and 3.3.
  Deviates:
    1. The mean is over the tokens of the full batch, as in public code; the
       paper's formula is over the tokens of each group.
    2. The mean length is taken over the unpruned batch if every prompt is kept.
       If prompts were pruned it is estimated by the weighted mean over the kept
       ones: a ratio estimate, with a bias of order 1 / their number.
    3. Dynamic sampling is part of methods, the overlong penalty of rewards.
    4. One update on a rollout unless `objective.mini_batches` is set: 16 in
       the paper, each on 512 of 8,192 completions. The mean is over
       the rollout; in public code it is over each mini-batch.
  """
  check(FINITE, tokens_per_completion=tokens_per_completion)
  plain = grpo(clip_low, clip_high, beta, sampler_cap)
  if tokens_per_completion:
    return plain._replace(token_share=_constant(1.0 / tokens_per_completion))
  return plain._replace(token_share=_one_over_mean_length)


def dr_grpo(
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  beta: float = 0.0,
  sampler_cap: float = 0.0,
) -> Objective:
  """GRPO divided by constants only, not by deviation or length.

  Source: Liu et al. 2025, arXiv:2503.20783, section 3.2. The constant is the
    generation limit, as in the authors' code.
  """
  plain = grpo(clip_low, clip_high, beta, sampler_cap)
  return plain._replace(advantage=group_centred, token_share=_one_over_limit)


def gspo(
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  beta: float = 0.0,
  sampler_cap: float = 0.0,
) -> Objective:
  """GRPO with one ratio per sequence, the geometric mean of its tokens'.

  Source: Zheng et al. 2025, arXiv:2507.18071, in the token form of section
    4.3, which has the gradient of the sequence form; clips from section 5.1.
  Deviates:
    1. A token's log ratio is held within 20 nats before the mean is taken.
    2. One update on a rollout unless `objective.mini_batches` is set: 4 in the
       paper.
  """
  plain = grpo(clip_low, clip_high, beta, sampler_cap)
  return plain._replace(is_sequence_ratio=True)


def cispo(
  clip_low: float = 1.0,
  clip_high: float = 4.0,
  beta: float = 0.0,
  sampler_cap: float = 0.0,
  tokens_per_completion: float = 0.0,
) -> Objective:
  """Mean over all tokens of `-sg(clip(r)) A log p`: all keep their gradient.

  Args:
    clip_low, clip_high: bounds `1 - clip_low` and `1 + clip_high` of the ratio
      as a weight; a `clip_low` of 1 is no bound.
    tokens_per_completion: see `dapo`.
  Source: MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5; without a lower
    bound, as its experiments.
  Deviates:
    1. The paper tunes its upper bound and does not give it: a weight of at
       most 5 is what TRL recommends for ScaleRL, arXiv:2510.13786.
    2. The mean is over the batch, as in `dapo`; the paper's is over a group.
  """
  plain = dapo(clip_low, clip_high, beta, sampler_cap, tokens_per_completion)
  return plain._replace(token_loss=_clipped_weight_loss(clip_low, clip_high))


def rloo(beta: float = 0.0, sampler_cap: float = 0.0) -> Objective:
  """REINFORCE with the mean reward of the others as each baseline.

  A completion's loss, `-(R_i - mean of R_j, j != i) log p(completion)`, is
  divided by the number of completions alone, not by a length.

  Source: Ahmadian et al. 2024, arXiv:2402.14740, after Kool et al. 2019;
    Williams 1992 for REINFORCE.
  Deviates:
    1. The KL penalty, if any, is in the loss; the paper's is in the reward.
    2. There is no ratio: with more than one update on a rollout, the later ones
       are not corrected for the change of the policy.
  """
  return grpo(beta=beta, sampler_cap=sampler_cap)._replace(
    advantage=leave_one_out,
    token_loss=_log_likelihood,
    token_share=_constant(1.0),
  )


OBJECTIVES = {x.__name__: x for x in (grpo, dapo, dr_grpo, gspo, cispo, rloo)}


@functools.cache
def _clipped_ratio_loss(low: float, high: float) -> TokenLoss:
  """`-min(r A, clip(r, 1 - low, 1 + high) A)`, PPO's.

  Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
  """

  def loss(ratio: Tokens, advantages: Tokens, logprobs: Tokens):
    del logprobs
    # Exactly at a bound the gradient is full; `jnp.clip` would halve it.
    is_bad = advantages < 0
    bound = jnp.where(is_bad, 1 - low, 1 + high)
    is_beyond = jnp.where(is_bad, ratio < bound, ratio > bound)
    is_clipped = is_beyond & (advantages != 0)
    return -jnp.where(is_clipped, bound, ratio) * advantages, is_clipped

  return loss


@functools.cache
def _clipped_weight_loss(low: float, high: float) -> TokenLoss:
  """`-sg(clip(r, 1 - low, 1 + high)) A log p`."""

  def loss(ratio: Tokens, advantages: Tokens, logprobs: Tokens):
    ratio = jax.lax.stop_gradient(ratio)
    weight = jnp.clip(ratio, max(1 - low, 0.0), 1 + high)
    is_clipped = (weight != ratio) & (advantages != 0)
    return -weight * advantages * logprobs, is_clipped

  return loss


def _log_likelihood(
  ratio: Tokens, advantages: Tokens, logprobs: Tokens
) -> tuple[Tokens, IsClipped]:
  return -advantages * logprobs, jnp.zeros(ratio.shape, bool)


@functools.cache
def _constant(share: float) -> TokenShare:
  return lambda rollout: jnp.full(rollout.lengths.shape, share, jnp.float32)


def _one_over_length(rollout: Rollout) -> Float[Array, "Q G"]:
  return 1.0 / jnp.maximum(rollout.lengths, 1).astype(jnp.float32)


def _one_over_mean_length(rollout: Rollout) -> Float[Array, "Q G"]:
  """Estimates the mean if prompts were pruned, by weights 1 / prob."""
  lengths = rollout.lengths.astype(jnp.float32)
  weight = horvitz_thompson(rollout.selection)
  completions = weight.sum() * lengths.shape[1]
  tokens = (weight[:, None] * lengths).sum()
  share = completions / jnp.where(tokens > 0, tokens, 1.0)
  return jnp.broadcast_to(share, lengths.shape)


def _one_over_limit(rollout: Rollout) -> Float[Array, "Q G"]:
  limit = rollout.tokens.shape[2]
  return jnp.full(rollout.lengths.shape, 1.0 / limit, jnp.float32)
