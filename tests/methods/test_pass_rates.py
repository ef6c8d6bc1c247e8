"""Pass counts against exact integrals, and the prompt rule on them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.errors import UserError
from dppo_jax.methods.neyman import pass_rates
from dppo_jax.rng import Stage, rng_at
from tests.helpers.prompts import (
  CANDIDATES,
  EASY,
  GRID_ERROR,
  HARD,
  REWARDS,
  VISITED,
  compiled,
  jitted,
  lengths_of_visits,
  neyman,
  prob_of,
  seen,
)

NODE, WEIGHT = np.polynomial.legendre.leggauss(200)
PASS_RATE, WEIGHT = (NODE + 1) / 2, WEIGHT / 2  # exact for these polynomials


def _posterior(right, wrong):
  """Weights of the pass rates, `[..., 200]`, under Beta(right, wrong)."""
  right, wrong = np.float64(right)[..., None], np.float64(wrong)[..., None]
  log = (right - 1) * np.log(PASS_RATE) + (wrong - 1) * np.log1p(-PASS_RATE)
  density = WEIGHT * np.exp(log - log.max(axis=-1, keepdims=True))
  return density / density.sum(axis=-1, keepdims=True)


def test_chance_of_a_mixed_group_is_the_integral():
  right = np.array([1, 1, 2, 5, 90, 1, 30], np.float32)
  wrong = np.array([1, 9, 2, 3, 1, 200, 30], np.float32)
  compute = jax.jit(pass_rates.prob_mixed)
  for size in (1, 2, 8, 64):
    mixed = 1 - PASS_RATE**size - (1 - PASS_RATE) ** size
    np.testing.assert_allclose(
      compute(right, wrong, np.int32(size)),
      _posterior(right, wrong) @ mixed,
      rtol=2e-5,
      atol=1e-6,
    )
  assert compute._cache_size() == 1


def _moment(right, wrong, size, kappa):
  """Sums the documented model over the number of right completions."""
  posterior, total = _posterior(right, wrong), 0.0
  for count in range(1, size):
    rate = PASS_RATE**count * (1 - PASS_RATE) ** (size - count)
    chance = posterior @ (math.comb(size, count) * rate)
    total += chance * (1 + 4 * kappa * count * (size - count) / size**2)
  return total


def test_neyman_follows_the_second_moment_per_token():
  """None is at a bound: probabilities are proportional to size."""
  rule = compiled("neyman_half")
  tokens = np.array([5, 4, 6, 4, 6], np.int32)
  history = rule.observe(
    rule.init(), 0, VISITED, REWARDS, np.repeat(tokens, 6).reshape(5, 6)
  )
  right = np.append(REWARDS.sum(axis=1), [0] * 3)
  wrong = np.append(6 - REWARDS.sum(axis=1), [0] * 3)
  moment = _moment(1 + right, 1 + wrong, 6, kappa=0.25)
  # Those never visited are expected to cost the mean, which is 5.
  size = np.sqrt(moment / np.append(tokens, [5] * 3))
  actual = prob_of(rule, history, np.append(VISITED, [1, 5, 11]), step=0)
  np.testing.assert_allclose(actual, 4 * size / size.sum(), rtol=2e-5)


def test_only_how_lengths_differ_counts():
  rule = compiled("neyman_half")
  visit = lambda lengths: rule.observe(
    rule.init(), 0, VISITED, REWARDS, lengths
  )
  prob = lambda lengths: prob_of(rule, visit(lengths), CANDIDATES)
  one, nine = (np.full(REWARDS.shape, n, np.int32) for n in (1, 9))
  np.testing.assert_allclose(prob(one), prob(nine), atol=GRID_ERROR)
  assert np.ptp(prob(one) - prob(lengths_of_visits())) > 0.01


def test_pass_counts_use_correctness_not_rewards():
  rule = compiled("neyman_half")
  visit = lambda rewards: rule.observe(
    rule.init(), 0, VISITED, rewards, correct=REWARDS
  )
  for shaped in (REWARDS, 0.1 + 0.5 * REWARDS, REWARDS - 1):
    history = visit(shaped)
    np.testing.assert_array_equal(history.right[VISITED], REWARDS.sum(axis=1))
    np.testing.assert_array_equal(
      history.wrong[VISITED], 6 - REWARDS.sum(axis=1)
    )


def test_pass_counts_decay():
  rule = compiled("neyman_half")
  rewards = [[1.0, 0.25, 0.0, 7.0]]  # clipped to [0, 1]
  counts = lambda x: [x.right[5], x.wrong[5], x.tokens[5]]
  tokens = np.full((1, 4), 8, np.int32)
  history = rule.observe(rule.init(), 0, [5], rewards, tokens)
  np.testing.assert_allclose(counts(history), [2.25, 1.75, 32])
  # With eight candidates of twelve a step, two epochs later.
  history = rule.observe(history, 3, [5], rewards, tokens // 4)
  np.testing.assert_allclose(counts(history), [2.8125, 2.1875, 16])
  # In time, what is believed is what was at first.
  rule = compiled("neyman_other")
  history = rule.observe(rule.init(), 0, VISITED, REWARDS)
  assert np.ptp(prob_of(rule, history, CANDIDATES, step=3)) > 0.01
  late = prob_of(rule, history, CANDIDATES, step=999)
  np.testing.assert_allclose(late, late.mean(), atol=GRID_ERROR)


def test_nan_correctness_is_not_counted():
  rule = jitted(neyman(0.5))
  correct = [[1.0, np.nan, 0.0, np.inf]]
  lengths = np.array([[3, 40, 5, 60]], np.int32)
  history = rule.observe(rule.init(), 0, [5], correct, lengths, correct)
  counts = [history.right[5], history.wrong[5], history.tokens[5]]
  np.testing.assert_array_equal(counts, [1, 1, 8])


@pytest.mark.parametrize("budget", [0.1, 0.9])
def test_a_budget_of_no_prompt_or_of_all_is_rejected(budget):
  """Mini-batches choose four prompts at a time."""
  rule = methods.neyman_prompts(budget)
  rng = rng_at(jax.random.key(0), 0, Stage.PROMPTS)
  choose = jax.jit(lambda ids: rule.select(rng, rule.init(20), ids))
  with pytest.raises(UserError, match=f"prompt_budget is {budget} but of 4"):
    choose(jnp.arange(4))
  assert int(choose(jnp.arange(10)).keep.sum()) == 10 * budget


def test_neyman_prompts_are_stratified_by_pass_rate():
  """Four right and four wrong, equally good: always two of each."""
  rule = compiled("neyman_half")
  ids = np.array([1, 8, 3, 6, 0, 11, 9, 4], np.int32)
  history = rule.observe(rule.init(), 0, ids, [EASY, HARD] * 4)
  kept = rule.draws(history, ids, 0, 1).keep
  assert (kept[:, ::2].sum(axis=1) == 2).all()
  assert (kept[:, 1::2].sum(axis=1) == 2).all()
  assert len(np.unique(kept, axis=0)) > 10


@pytest.mark.parametrize(
  "rule, number, least",
  [
    (compiled("neyman_half"), 4, 0.1),
    (compiled("neyman_other"), 6, 0.3),
    (jitted(neyman(0.1)), 1, 0.1),
  ],
)
def test_neyman_keeps_the_budget(rule, number, least):
  chosen = rule.draws(seen(rule), CANDIDATES, 0, 4)
  assert (chosen.keep.sum(axis=1) == number).all()
  assert chosen.prob.min() >= min(least, number / 8) - GRID_ERROR
