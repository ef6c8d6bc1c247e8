"""D3S: D1S prunes completions, D2S also tokens, D3S by scheduled fractions."""

import jax
import jax.numpy as jnp

from dppo_jax.algo.segments import segment_sum
from dppo_jax.algo.validation import FRACTION, SCHEDULE, check
from dppo_jax.methods import method
from dppo_jax.methods.grpo import grpo
from dppo_jax.methods.pods import max_variance
from dppo_jax.methods.ranking import round_count
from dppo_jax.records import Selection


def d1s(keep: method.Rate = 0.25, scope: str = "group") -> method.Method:
  """GRPO on the subset of largest advantage variance.

  In a group it is the subset of PODS. Advantages come from the full group.

  Args:
    keep, scope: as in `max_variance`; the scope "batch" is D1S-Cross.
  Source: D3S, arXiv:2509.22115.
  Deviates:
    1. As `pods`.
  """
  return grpo()._replace(
    completions=method.unweighted(max_variance(keep, scope)),
    prune_less="raise keep",
  )


def d2s(
  keep: float = 0.25, keep_tokens: float = 0.2, scope: str = "batch"
) -> method.Method:
  """D1S on only the tokens of largest |advantage| x entropy.

  Args:
    keep, scope: as in `max_variance`.
    keep_tokens: fraction of the tokens, as in `top_entropy`.
  Source: D3S, arXiv:2509.22115.
  Deviates:
    1. The batch's subset is taken from all completions, not from the groups'.
    2. A completion's loss is the mean over its kept tokens; under dapo times
      its length over the mean length.
  """
  check(FRACTION, keep_tokens=keep_tokens)
  return d1s(keep, scope)._replace(
    tokens=top_entropy(keep_tokens), prune_less="raise keep or keep_tokens"
  )


def d3s(
  keep: float = 0.25,
  keep_tokens: float = 0.2,
  final_keep: float = 1.0,
  final_keep_tokens: float = 1.0,
  scope: str = "batch",
  *,
  total_steps: int | None = None,
) -> method.Method:
  """D2S with fractions that change linearly over the run.

  Args:
    keep, keep_tokens, scope: as in `d2s`, at the start.
    final_keep, final_keep_tokens: fractions at the end.
    total_steps: config.steps in a run; None keeps the first fractions.
  Source: D3S, arXiv:2509.22115.
  Deviates:
    1. The fractions are ours; the paper's were not found.
    2. As `d2s`.
  """
  check(FRACTION, keep=keep, keep_tokens=keep_tokens)
  check(FRACTION, final_keep=final_keep, final_keep_tokens=final_keep_tokens)
  rate = _linear(keep, final_keep, total_steps)
  return d1s(rate, scope)._replace(
    tokens=top_entropy(_linear(keep_tokens, final_keep_tokens, total_steps)),
    has_schedule=keep != final_keep or keep_tokens != final_keep_tokens,
    prune_less="raise keep, keep_tokens, final_keep or final_keep_tokens",
  )


def top_entropy(keep: method.Rate) -> method.TokenRule:
  """Keeps the tokens of largest |advantage| x entropy; biased.

  The probability it reports is the fraction of the token's completion that is
  kept, which makes a mean over a completion's tokens one over those kept. Ties
  are broken at random.

  Args:
    keep: fraction of the trainable tokens, in (0, 1], or a function from the
      step to it; rounded to a number of tokens, at least one.
  Source: D3S, arXiv:2509.22115, token level.
  Deviates:
    1. Ranks over all tokens of the kept samples, as the formula reads; the
       text can be read as a fraction of each response.
    2. Divides by a completion's kept tokens; the paper gives no divisor.
    3. Takes the entropy of the policy that sampled.
  """
  check(SCHEDULE, keep=keep)

  def select(rng, batch, stats):
    can_train = method.trainable(batch)
    num_trainable = can_train.sum(dtype=jnp.int32)
    num = round_count(method.at_step(keep, rng.step), num_trainable)
    score = jnp.abs(batch.advantages) * stats.entropy
    # NaN and infinite values are kept, so that the update is skipped.
    is_finite = jnp.isfinite(batch.advantages * batch.weights)
    score = jnp.where(is_finite, score, jnp.inf)
    score = jnp.where(can_train, score, -jnp.inf).reshape(-1)
    tie_break = jax.random.bits(rng.key, score.shape)
    rank = jnp.argsort(jnp.lexsort((tie_break, -score)))
    kept = can_train & (rank < num).reshape(can_train.shape)
    count = lambda x: segment_sum(x.astype(jnp.float32), batch.segment_ids)
    prob = count(kept) / jnp.maximum(count(can_train), 1.0)
    return Selection(kept, jnp.where(can_train, prob, 0.0))

  return method.TokenRule(needs_stats=True, select=select)


def _linear(first: float, last: float, total_steps: int | None) -> method.Rate:
  """Interpolates from `first`, at step 0, to `last`, at the last step."""
  if first == last or total_steps is None:
    return first

  def rate(step):
    progress = step.astype(jnp.float32) / max(total_steps - 1, 1)
    return first + (last - first) * jnp.minimum(progress, 1.0)

  return rate
