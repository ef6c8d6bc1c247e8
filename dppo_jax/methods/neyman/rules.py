"""Neyman allocation: unbiased pruning with minimum-variance probabilities."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dppo_jax.algo import designs
from dppo_jax.algo.validation import (
  FINITE,
  FRACTION,
  POSITIVE,
  UNIT,
  Limit,
  check,
)
from dppo_jax.errors import UserError
from dppo_jax.methods import method
from dppo_jax.methods.grpo import grpo
from dppo_jax.methods.neyman import budget as budgets
from dppo_jax.methods.neyman import pass_rates
from dppo_jax.methods.ranking import fixed_size, round_count
from dppo_jax.records import Groups, Scalar, Selection
from dppo_jax.rng import StepRng, as_step_rng

# Least size of a needed completion, relative to the largest.
LEAST_SIZE = 1e-6
_FIXED_BUDGET = Limit(  # text, if it is from the command line
  lambda x: 0 < float(x) <= 1,
  'in (0, 1], "auto", or the metrics.jsonl of a run',
)


def neyman(
  prompt_budget: float = 1.0,
  completion_budget: float | str = "auto",
  token_budget: float = 1.0,
  min_prob: float = 0.05,
  update_cost: float = 0.0,
) -> method.Method:
  """GRPO on fewer completions, at the least variance for their number.

  Probabilities are proportional to the expected contribution to the gradient,
  the draw is systematic, and every weight is 1 / probability: the expected
  gradient is the full batch's.

  Args:
    prompt_budget: fraction of the prompts rolled out, as in `neyman_prompts`.
    completion_budget: fraction of the completions trained on, as in
      `neyman_completions`; "auto" for a `BudgetPolicy`; the metrics.jsonl of
      a run to repeat its choices.
    token_budget: fraction of their tokens trained on, as in `neyman_tokens`.
    min_prob: least probability of a completion or token, in [0, 1].
    update_cost: as in `BudgetPolicy`. With measured times no two runs are
      bit-identical.
  Source: ours, after Neyman 1934 and Madow 1949; the automatic budget after
    McCandlish et al. 2018, arXiv:1812.06162. Cost-Aware Learning,
    arXiv:2604.28020, is similar; experiments/PAPERS.md has the differences.
  Deviates:
    1. A prompt's size assumes advantages divided by their standard deviation,
       under any objective.
  """
  check(FRACTION, prompt_budget=prompt_budget, token_budget=token_budget)
  check(FINITE, update_cost=update_cost)
  budget: float | None = None
  policy: Callable[[], method.Policy] = functools.partial(
    budgets.BudgetPolicy, update_cost
  )
  if completion_budget != "auto":
    unused = Limit(lambda x: x == 0, 'left out unless completion_budget="auto"')
    check(unused, update_cost=update_cost)
    if str(completion_budget).endswith(".jsonl"):
      path = str(completion_budget)
      policy = functools.partial(budgets.recorded_policy, path)
    else:
      check(_FIXED_BUDGET, completion_budget=completion_budget)
      budget = float(completion_budget)
  rules = grpo()._replace(
    completions=neyman_completions(budget, min_prob),
    prune_less="raise completion_budget, prompt_budget, token_budget or "
    "min_prob",
  )
  if prompt_budget < 1:
    rules = rules._replace(prompts=neyman_prompts(prompt_budget))
  if token_budget < 1:
    rules = rules._replace(tokens=neyman_tokens(token_budget, min_prob))
  if budget is None:
    rules = rules._replace(budget=automatic(policy, min_prob))
  return rules


def automatic(
  policy: Callable[[], method.Policy], min_prob: float = 0.05
) -> method.Budget:
  """Returns the budget of `neyman_completions` that `policy` chooses."""

  def added_variance(groups, fractions):
    size = gradient_size(groups)
    return budgets.added_variance(groups, size, fractions, min_prob)

  return method.Budget(policy, added_variance, budgets.FRACTIONS)


def neyman_prompts(
  budget: float,
  min_prob: float = 0.1,
  kappa: float = 0.25,
  forgetting: float = 0.5,
  prior: float = 0.2,
) -> method.PromptRule:
  """Keeps a fixed number of prompts, by their expected gradient per token.

  A Beta posterior of each problem's pass rate gives the second moment of the
  gradient of its group. Probabilities are proportional to the root of that
  moment per expected token, which minimises the variance of the weighted sum
  for its cost. The draw is systematic along the expected pass rate. Before
  anything is observed it is uniform.

  Args:
    budget: fraction of the candidates to keep, in (0, 1], rounded to a number
      of them. A budget below 1 that is rounded to none or all is an error.
    min_prob: least probability, in (0, 1]; the budget's if that is lower.
    kappa: `G |d|^2 / (4 s^2)`, at least 0, as in `pass_rates.second_moment`.
    forgetting: factor on the counts, per epoch, in (0, 1].
    prior: number of right completions in the Beta prior, and of wrong ones;
      below 1 it expects most groups to be all right or all wrong.
  Source: Neyman 1934, optimal allocation; the rest is ours.
  Deviates:
    1. The default of `kappa` is a guess, neither fitted nor published. With
       the defaults of `prior` and `forgetting`, a group of 16 that was all
       wrong, or all right, an epoch ago is predicted to be so again with
       probability 0.8: GRESO, arXiv:2506.02177, reports 0.79.
    2. Probabilities are rounded to `designs.GRID`; among tied prompts a random
       order decides which is rounded up.
  """
  check(FRACTION, budget=budget, min_prob=min_prob, forgetting=forgetting)
  check(FINITE, kappa=kappa)
  check(POSITIVE, prior=prior)

  def select(rng, history, ids):
    counts = pass_rates.decayed(history, rng.step, ids, forgetting)
    right, wrong = counts.right + prior, counts.wrong + prior
    moment = pass_rates.second_moment(right, wrong, counts.group_size, kappa)
    moment = jnp.maximum(moment, method.ROUNDING)
    size = jnp.sqrt(moment / pass_rates.expected_tokens(history, ids))
    # Ties are ordered at random, so that nothing depends on the caller's order.
    order_key, draw_key = jax.random.split(rng.key)
    tie_break = method.uniform_for_ids(order_key, ids)
    order = jnp.lexsort((tie_break, right / (right + wrong)))
    number = round(budget * len(ids))
    if not number or number == len(ids) > budget * len(ids):
      raise UserError(
        f"prompt_budget is {budget:g} but of {len(ids)} prompts at a time, "
        f"those of a mini-batch, it keeps {number or 'none'}: raise "
        "config.data.prompts_per_step, or lower config.objective.mini_batches"
      )
    prob = designs.water_filling(size[order], number, min_prob)
    keep = designs.systematic(draw_key, prob)
    back = jnp.argsort(order)
    return Selection(keep[back], prob[back])

  def observe(history, step, ids, rewards, correct, lengths):
    del rewards
    return pass_rates.update(history, step, ids, correct, lengths, forgetting)

  return method.PromptRule(pass_rates.init, select, observe)


def gradient_size(groups: Groups) -> Float[Array, "Q G"]:
  """Estimates the gradient norm of each completion, up to a common factor.

  That is |advantage| x scale x the root of `sum_sq_residual`, the norm of a sum
  over tokens whose gradients are independent. It is at most 1, and 0 for
  completions that are not needed.
  """
  squares = groups.sum_sq_residual
  if squares is None:
    squares = groups.lengths.astype(jnp.float32)
  size = jnp.abs(groups.advantages) * jnp.sqrt(squares)
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
  budget: float | None = None, min_prob: float = 0.05
) -> method.CompletionRule:
  """Keeps a fixed number of completions, in proportion to `gradient_size`.

  Keeps exactly `round(budget * drawn)` completions, or every needed one with
  probability 1 if fewer are needed. If `groups.is_needed` is None, completions
  of nonzero advantage are needed. The draw is systematic along (prompt, sign
  of the advantage, size), so that similar completions exclude one another.

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
      None takes the rule's third argument, a fraction of the needed ones.
    min_prob: least probability of a needed completion, in [0, 1]; an even split
      of the budget if that is lower.
  Source: ours. Neyman 1934 for the probabilities, Madow 1949 for the draw.
  """
  if budget is not None:
    check(FRACTION, budget=budget)
  check(UNIT, min_prob=min_prob)

  def rule(
    rng: StepRng | jax.Array, groups: Groups, fraction: Scalar | float = 1.0
  ) -> Selection:
    rng = as_step_rng(rng)
    size = gradient_size(groups)
    prompt = jax.lax.broadcasted_iota(jnp.int32, size.shape, 0)
    strata = (size, jnp.sign(groups.advantages), prompt)
    if budget is None:
      fractions = jnp.reshape(jnp.float32(fraction), (1,))
      finite = jnp.where(jnp.isfinite(size), size, 0.0).reshape(-1)
      prob = budgets.probabilities(finite, fractions, min_prob)
      expected = prob.sum(axis=1)[0]
      num = jnp.maximum(jnp.round(expected).astype(jnp.int32), 1)
    else:
      num = round_count(budget, (groups.lengths > 0).sum(dtype=jnp.int32))
    return fixed_size(rng.key, size, num, min_prob, strata)

  return rule


def neyman_tokens(budget: float, min_prob: float = 0.05) -> method.TokenRule:
  """Keeps a fixed number of tokens, in proportion to their possible gradient.

  A token's size is |advantage| x weight x (1 - p), with p its probability in
  the rollout; 1 - p is a lower bound of the norm of its gradient with respect
  to the logits. The draw is systematic along the rows, so that neighbours
  exclude each other.

  Args:
    budget: fraction of the trainable tokens to keep, in (0, 1]; rounded to a
      number of tokens, at least one.
    min_prob: least probability of a trainable token, in [0, 1], which bounds
      its weight; `budget` if that is lower.
  Source: Neyman 1934, optimal allocation; D3S, arXiv:2509.22115, for
    choosing tokens after completions.
  """
  check(FRACTION, budget=budget)
  check(UNIT, min_prob=min_prob)

  def select(rng, batch, stats):
    del stats
    can_train = method.trainable(batch)
    size = jnp.maximum(-jnp.expm1(batch.old_logprobs), 0.0)
    size *= jnp.abs(batch.advantages * batch.weights)
    size = jnp.where(can_train, size, 0.0)
    # A size of 0 may have a gradient, from a KL penalty or after an update of
    # the policy: a probability of 0 would be a bias.
    largest = size.max()
    least = jnp.where(largest > 0, largest / designs.GRID, 1.0)
    size = jnp.where(can_train, jnp.maximum(size, least), 0.0)
    n = round_count(budget, can_train.sum(dtype=jnp.int32))
    prob = designs.water_filling(size.reshape(-1), n, min_prob)
    keep = designs.systematic(rng.key, prob)
    return Selection(keep.reshape(size.shape), prob.reshape(size.shape))

  return method.TokenRule(needs_stats=False, select=select)
