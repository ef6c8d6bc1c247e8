"""Neyman allocation: unbiased pruning with minimum-variance probabilities."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dppo_jax.algo import designs
from dppo_jax.algo.validation import (
  FINITE,
  FRACTION,
  UNIT,
  Limit,
  check,
  one_of,
)
from dppo_jax.methods import method
from dppo_jax.methods.grpo import grpo
from dppo_jax.methods.neyman import pass_rates
from dppo_jax.methods.neyman.budget import AutoBudget
from dppo_jax.methods.ranking import fixed_size, round_count
from dppo_jax.records import Groups, Selection
from dppo_jax.rng import StepRng, as_step_rng

# Least size of a needed completion, relative to the largest.
LEAST_SIZE = 1e-6
NOISE_EVERY = 128  # steps between measurements, for automatic budgets
# (batch, stats) -> a token's size, apart from |advantage| x weight.
TOKEN_SIZES = {
  "residual": lambda batch, stats: -jnp.expm1(batch.old_logprobs),
  "logit_grad": lambda batch, stats: jnp.sqrt(
    jnp.maximum(stats.logit_grad_sq, 0.0)
  ),
  "entropy": lambda batch, stats: stats.entropy,
}


def neyman(
  prompt_budget: float = 1.0,
  completion_budget: float | str = "auto",
  token_budget: float = 1.0,
  min_prob: float = 0.05,
  min_keep: float = 0.03,
  update_cost: float = 0.0,
) -> method.Method:
  """GRPO on fewer completions, at the least variance for their number.

  Probabilities are proportional to the expected contribution to the gradient,
  the draw is systematic, and every weight is 1 / probability: the expected
  gradient is that of the full batch. The functions below have more arguments;
  combine them with `Method._replace`.

  Args:
    prompt_budget: fraction of the prompts rolled out, as in `neyman_prompts`.
    completion_budget: fraction of the completions trained on, as in
      `neyman_completions`. "auto" minimises the predicted time to a target each
      step, from measured step times and gradient noise.
    token_budget: fraction of their tokens trained on, as in `neyman_tokens`.
    min_prob: least probability of a completion or token, in [0, 1].
    min_keep, update_cost: of the automatic budget, as in `AutoBudget`. With
      measured times no two runs are bit-identical.
  Source: ours, after Neyman 1934 and Deville and Tille 1998; the automatic
    budget after McCandlish et al. 2018, arXiv:1812.06162.
  Deviates:
    1. A prompt's size is that of advantages divided by their standard
       deviation, under any objective.
  """
  is_auto = completion_budget == "auto"
  budget = AutoBudget(min_keep, update_cost) if is_auto else completion_budget
  if not is_auto:
    limit = Limit(lambda x: 0 < float(x) <= 1, 'in (0, 1], or "auto"')
    check(limit, completion_budget=budget)
    budget = float(budget)  # text, if it is from the command line
  check(FRACTION, prompt_budget=prompt_budget, token_budget=token_budget)
  is_full = prompt_budget == 1
  tokens = neyman_tokens(token_budget, min_prob)
  rules = grpo()._replace(
    prompts=method.every_prompt() if is_full else neyman_prompts(prompt_budget),
    completions=neyman_completions(budget, min_prob, proxy="residual"),
    tokens=None if token_budget == 1 else tokens,
  )
  if not is_auto:
    return rules

  def describe(groups: Groups, chosen: Selection) -> dict[str, jax.Array]:
    return budget.size(groups, gradient_size(groups, proxy="residual"))[1]

  return rules._replace(
    describe=describe, reads_costs=True, noise_every=NOISE_EVERY
  )


def neyman_prompts(
  budget: float,
  min_prob: float = 0.1,
  kappa: float = 0.25,
  forgetting: float = 0.5,
  prior: tuple[float, float] = (0.2, 0.2),
  is_cost_aware: bool = True,
) -> method.PromptRule:
  """Keeps a fixed number of prompts, by their expected gradient per token.

  A Beta posterior of each problem's pass rate gives the second moment of the
  gradient of its group. Probabilities are proportional to the root of that
  moment per expected token, which minimises the variance of the weighted sum
  for its cost. The draw is systematic along the expected pass rate. Before
  anything is observed it is uniform.

  Args:
    budget: fraction of the candidates to keep, in (0, 1], rounded to a number,
      at least one.
    min_prob: least probability, in (0, 1]; the budget's if that is lower.
    kappa: `G |d|^2 / (4 s^2)`, at least 0, as in `pass_rates.second_moment`.
    forgetting: factor on the counts, per epoch, in (0, 1].
    prior: right and wrong completions of the Beta prior; below 1 it expects
      most groups to be all right or all wrong.
    is_cost_aware: uses the expected number of tokens of each problem;
      otherwise all are assumed to cost the same.
  Source: Neyman 1934, optimal allocation; the rest is ours.
  Deviates:
    1. The default of `kappa` is a guess, neither fitted nor published. Those
       of `prior` and `forgetting` predict of a group of 16 that was all
       wrong, or all right, an epoch ago that it is so again with a
       probability of 0.8: GRESO, arXiv:2506.02177, reports 0.79.
    2. Probabilities are rounded to `designs.GRID`; among tied prompts a random
       order decides which is rounded up.
  """
  check(FRACTION, budget=budget, min_prob=min_prob, forgetting=forgetting)
  check(FINITE, kappa=kappa)
  is_valid = lambda x: len(x) == 2 and 0 < min(x) <= max(x) < float("inf")
  check(Limit(is_valid, "two finite numbers above 0"), prior=prior)

  def select(rng, history, ids):
    counts = pass_rates.decayed(history, rng.step, ids, forgetting)
    right, wrong = counts.right + prior[0], counts.wrong + prior[1]
    moment = pass_rates.second_moment(right, wrong, counts.group_size, kappa)
    moment = jnp.maximum(moment, method.ROUNDING)
    tokens = pass_rates.expected_tokens(history, ids)
    size = jnp.sqrt(moment / tokens if is_cost_aware else moment)
    # Ties are ordered at random, so that nothing depends on the caller's order.
    order_key, draw_key = jax.random.split(rng.key)
    tie_break = method.uniform_for_ids(order_key, ids)
    order = jnp.lexsort((tie_break, right / (right + wrong)))
    number = max(round(budget * len(ids)), 1)
    prob = designs.water_filling(size[order], number, min_prob)
    keep = designs.systematic(draw_key, prob, number)
    back = jnp.argsort(order)
    return Selection(keep[back], prob[back])

  def observe(history, step, ids, rewards, correct, lengths):
    del rewards
    return pass_rates.update(history, step, ids, correct, lengths, forgetting)

  return method.PromptRule(pass_rates.init, select, observe)


def gradient_size(
  groups: Groups, proxy: str = "residual", coherence: float = 0.0
) -> Float[Array, "Q G"]:
  """Estimates the gradient norm of each completion, up to a common factor.

  Args:
    proxy, coherence: as in `neyman_completions`.
  Returns:
    At most 1; 0 for completions that are not needed.
  """
  length = groups.lengths.astype(jnp.float32)
  norm = length
  if proxy != "none":
    has_residual = proxy == "residual" and groups.sum_sq_residual is not None
    squares = groups.sum_sq_residual if has_residual else length
    norm = jnp.sqrt(jnp.float32(coherence) * length * length + squares)
  size = jnp.abs(groups.advantages) * norm
  if groups.scale is not None:
    size = size * groups.scale
  is_needed = groups.is_needed
  if is_needed is None:
    is_needed = groups.advantages != 0
  is_needed = is_needed & (groups.lengths > 0)
  size = jnp.where(is_needed, size, 0.0)
  # Under a KL penalty zero advantages are needed too, with some probability.
  size = size / jnp.where(size.max() > 0, size.max(), 1.0)
  return jnp.where(is_needed, jnp.maximum(size, LEAST_SIZE), 0.0)


def neyman_completions(
  budget: float | AutoBudget,
  min_prob: float = 0.05,
  coherence: float = 0.0,
  proxy: str = "length",
) -> method.CompletionRule:
  """Keeps a fixed number of completions, in proportion to gradient size.

  Keeps exactly `round(budget * drawn)` completions, or every needed one with
  probability 1 if these are fewer. If `groups.is_needed` is None, those of
  nonzero advantage are needed. The draw is systematic along (prompt, sign of
  the advantage, size), so that similar completions exclude one another.

  >>> import jax
  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo, methods, records
  >>> rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
  >>> advantages = algo.group_normalized(rewards)
  >>> groups = records.Groups(rewards, advantages, jnp.full((2, 4), 9))
  >>> chosen = methods.neyman_completions(0.25)(jax.random.key(0), groups)
  >>> print(chosen.keep.sum(), (100 * chosen.prob).astype(int))
  2 [[100  33  33  33]
   [  0   0   0   0]]

  Args:
    budget: fraction of the completions drawn, in (0, 1]; at least one is kept.
      An `AutoBudget` chooses a fraction of the needed ones.
    min_prob: least probability of a needed completion, in [0, 1]; their even
      share of the budget where that is lower.
    coherence: squared norm of the mean of a completion's token gradients over
      the mean square of the remainder of each, at least 0.
    proxy: factor on |advantage| times a token's scale. "length" is
      `sqrt(coherence * L^2 + L)`, the norm of a sum of `L` such tokens;
      "residual" replaces the second term by the sum of (1 - p)^2; "none" is L,
      so that only |advantage| counts if a token's scale is 1/L.
  Source: ours. Neyman 1934 for the probabilities, Madow 1949 for the draw.
  """
  if isinstance(budget, AutoBudget):
    budget.check()
  else:
    check(FRACTION, budget=budget)
  check(UNIT, min_prob=min_prob)
  check(FINITE, coherence=coherence)
  check(one_of("residual", "length", "none"), proxy=proxy)

  def rule(rng: StepRng | jax.Array, groups: Groups) -> Selection:
    rng = as_step_rng(rng)
    size = gradient_size(groups, proxy, coherence)
    prompt = jnp.arange(size.shape[0], dtype=jnp.int32)[:, None]
    prompt = jnp.broadcast_to(prompt, size.shape)
    strata = (size, jnp.sign(groups.advantages), prompt)
    if isinstance(budget, AutoBudget):
      num, _ = budget.size(groups, size)
    else:
      num = round_count(budget, (groups.lengths > 0).sum(dtype=jnp.int32))
    return fixed_size(rng.key, size, num, min_prob, strata)

  return rule


def neyman_tokens(
  budget: float, min_prob: float = 0.05, size: str = "residual"
) -> method.TokenRule:
  """Keeps a fixed number of tokens, in proportion to their possible gradient.

  The draw is systematic along the rows, so that neighbours exclude each other.

  Args:
    budget: fraction of the trainable tokens to keep, in (0, 1]; rounded to a
      number of tokens, at least one.
    min_prob: least probability of a trainable token, in [0, 1], which bounds
      its weight; `budget` if that is lower.
    size: factor on |advantage| x weight: `logit_grad`, the norm of the gradient
      of the token's log-probability with respect to the logits; `residual`,
      1 - p, a lower bound of it; `entropy`. All but "residual", which is known
      from the rollout, take another forward pass.
  Source: Neyman 1934, optimal allocation; D3S, arXiv:2509.22115, for
    choosing tokens after completions.
  """
  check(FRACTION, budget=budget)
  check(UNIT, min_prob=min_prob)
  check(one_of(*TOKEN_SIZES), size=size)

  def select(rng, batch, stats):
    rng = as_step_rng(rng)
    can_train = method.trainable(batch)
    measure = jnp.maximum(TOKEN_SIZES[size](batch, stats), 0.0)
    measure *= jnp.abs(batch.advantages * batch.weights)
    measure = jnp.where(can_train, measure, 0.0)
    # A size of 0 may have a gradient, from a KL penalty or after an update of
    # the policy: a probability of 0 would be a bias.
    largest = measure.max()
    least = jnp.where(largest > 0, largest / designs.GRID, 1.0)
    measure = jnp.where(can_train, jnp.maximum(measure, least), 0.0)
    n = round_count(budget, can_train.sum(dtype=jnp.int32))
    prob = designs.water_filling(measure.reshape(-1), n, min_prob)
    keep = designs.systematic(rng.key, prob, n)
    return Selection(
      keep.reshape(can_train.shape), prob.reshape(can_train.shape)
    )

  return method.TokenRule(size != "residual", select)
