"""Automatic budgets: the fraction they keep, by noise and by seconds."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.methods.neyman import budget, rules
from dppo_jax.records import Groups
from dppo_jax.step import next_budget, select
from tests.helpers.completions import groups_of

RNG = np.random.default_rng(0)
# 24 groups of 8, a third of them without variance.
REWARDS = jnp.array(
  RNG.random((24, 8)) < np.repeat([[0.0], [0.3], [0.8]], 8, axis=0), jnp.float32
)
LENGTHS = jnp.array(RNG.integers(5, 50, (24, 8)), jnp.int32)
ADVANTAGES = REWARDS - REWARDS.mean(axis=1, keepdims=True)
GROUPS = Groups(REWARDS, ADVANTAGES, LENGTHS)
RULE = jax.jit(methods.neyman_completions())
added_variance = jax.jit(budget.added_variance, static_argnums=3)
FRACTIONS = jnp.asarray(budget.FRACTIONS)
ADDED = 0.5 * np.asarray(
  rules.automatic(budget.BudgetPolicy).added_variance(GROUPS, FRACTIONS)
)
MICROS = 40 * budget.FRACTIONS


def _step(update=1.0, other=1.0, micros=40.0, noise=1.0, fraction=1.0):
  return {
    "budget/completions": fraction,
    "update/micro_batches": micros,
    "update/seconds": update,
    "step/seconds": update + other,
    "noise/fraction": noise,
  }


def _choose(added=ADDED, micros=MICROS, cost=0.0, steps=2, **step):
  """The choice after some equal steps, the first of which is left out."""
  policy = budget.BudgetPolicy(cost)
  for _ in range(steps - 1):
    policy(_step(**step))
  fraction, metrics = policy(_step(**step), added, micros)
  return {"completions": fraction} | {
    name.split("/")[1]: x for name, x in metrics.items()
  }


def test_budget_falls_with_the_cost_of_an_update():
  chosen = [_choose(update=x) for x in (0.01, 0.3, 1.0, 3.0, 30.0)]
  fractions = [x["completions"] for x in chosen]
  assert fractions == sorted(fractions, reverse=True)
  assert fractions[0] > 0.7 and fractions[-1] < 0.4
  gains = [x["predicted_speedup"] for x in chosen]
  assert gains == sorted(gains) and gains[0] >= 1


def test_budget_rises_with_gradient_noise():
  fractions = [_choose(noise=x)["completions"] for x in (0.1, 0.4, 1.0)]
  assert fractions == sorted(fractions) and fractions[-1] > 2 * fractions[0]


def test_more_are_kept_if_completions_vary_more_than_groups():
  chosen = [_choose(x * ADDED, update=3.0)["completions"] for x in (1, 4)]
  assert chosen[1] > 1.2 * chosen[0]


def test_a_given_cost_replaces_measured_seconds_but_not_the_noise():
  chosen = _choose(update=9.0, noise=0.3, cost=2.0, steps=1)
  assert chosen == pytest.approx(_choose(update=2.0, noise=0.3), rel=1e-3)
  assert chosen["update_cost"] == pytest.approx(2.0, rel=1e-5)
  other = _choose(update=9.0, noise=1.0, cost=2.0)
  assert other["completions"] > chosen["completions"]
  seconds = 1 + 2 * chosen["completions"]
  added = ADDED[np.argmin(abs(budget.FRACTIONS - chosen["completions"]))]
  speedup = 3 / (seconds * (1 + 0.3 * added))
  assert chosen["predicted_speedup"] == pytest.approx(speedup, rel=1e-3)


@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_the_fraction_stays_until_noise_and_seconds_are_known(fraction):
  policy = budget.BudgetPolicy()
  assert policy(_step(fraction=fraction), ADDED, MICROS) == (fraction, {})
  assert policy(_step(fraction=fraction)) == (fraction, {})
  unknown = np.where(ADDED > 0, np.inf, 0.0)
  assert policy(_step(9.0, fraction=fraction), unknown, MICROS)[0] == 1
  assert policy(_step(9.0, fraction=fraction), ADDED, MICROS)[0] < 0.9


def test_an_update_of_one_micro_batch_cannot_be_made_smaller():
  assert _choose(micros=np.ones(10), update=9.0)["completions"] == 1


def test_a_part_of_the_update_that_does_not_shrink_is_not_saved():
  """Steps with other numbers of micro-batches show it; else it is 0."""
  policy = budget.BudgetPolicy()
  for micros in (40, 40, 20, 30):
    policy(_step(update=2 + 0.05 * micros, micros=micros))
  metrics = _step(update=3, micros=20)
  policy(metrics, ADDED, MICROS)
  update, other = policy._seconds(MICROS)
  np.testing.assert_allclose(update, 2 + 0.05 * MICROS, rtol=0.1)
  assert other == pytest.approx(1)
  for _ in range(9):
    policy(_step(update=1, micros=20))
  alike = _choose(update=4.0, steps=9)["update_cost"]
  assert alike == pytest.approx(4.0, rel=1e-3)


def test_the_first_step_with_its_one_time_costs_is_left_out():
  policy = budget.BudgetPolicy()
  policy(_step(update=1e4))
  for _ in range(2):
    _, metrics = policy(_step(update=0.01), ADDED, MICROS)
  assert metrics["budget/update_cost"] == pytest.approx(0.01, rel=0.01)


def test_micro_batches_are_rounded_up_in_every_part():
  rows = np.array([[1.0, 8.0], [0.0, 9.6]])
  expected = budget.expected_micro_batches(rows, rows_per_micro=8)
  np.testing.assert_allclose(expected, [1, 1.4 + 1.8])


@pytest.mark.parametrize("min_prob", [0.0, 0.05, 0.2])
def test_the_variance_predicted_is_that_of_the_draw(min_prob):
  """Under a KL penalty, where zero advantages have the least probability."""
  groups = GROUPS.replace(is_needed=jnp.ones(REWARDS.shape, bool))
  rule = jax.jit(methods.neyman_completions(min_prob=min_prob))
  chosen = rule(jax.random.key(0), groups, 0.4)
  assert chosen.prob.min() == pytest.approx(min_prob, abs=1e-3)
  size = rules.gradient_size(groups)
  added = budget.systematic_variance(
    chosen.prob.reshape(1, -1),
    size.reshape(-1) ** 2,
    ADVANTAGES.reshape(-1) > 0,
    REWARDS.shape,
  )
  (predicted,) = added_variance(groups, size, jnp.float32([0.4]), min_prob)
  assert predicted == pytest.approx(float(added[0]), rel=0.03)


@pytest.mark.parametrize("fraction", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("num", [0, 1])
def test_one_needed_completion_is_kept(num, fraction):
  values = np.zeros((2, 3))
  values.flat[:num] = 1
  groups = groups_of(values)
  chosen = RULE(jax.random.key(0), groups, fraction)
  assert chosen.keep.sum() == num and (chosen.prob[chosen.keep] == 1).all()
  size = rules.gradient_size(groups)
  added = added_variance(groups, size, FRACTIONS, 0.05)
  assert (np.asarray(added) == 0).all()


def test_the_number_kept_is_a_fraction_of_the_needed_ones():
  needed = int((ADVANTAGES != 0).sum())
  for fraction in (0.1, 0.35, 1.0):
    chosen = RULE(jax.random.key(0), GROUPS, fraction)
    assert int(chosen.keep.sum()) == round(fraction * needed)


def test_predictions_are_finite_with_a_nan_reward():
  advantages = ADVANTAGES.at[1].set(jnp.nan)
  groups = Groups(REWARDS.at[1, 0].set(jnp.nan), advantages, LENGTHS)
  size = rules.gradient_size(groups)
  added = added_variance(groups, size, FRACTIONS)
  assert np.isfinite(added).all()
  chosen = RULE(jax.random.key(0), groups, 0.5)
  assert chosen.keep[1].any()  # so that the update is skipped, and counted


def test_a_step_without_a_completion_predicts_nothing():
  """Else it would set the update's cost to 0, and the budget to 1."""
  none = select.Forecast(np.zeros(3), np.zeros(3, int), np.float32(0.0))
  batches = [mock.Mock(forecast=x) for x in (None, none, none)]
  assert not next_budget.NextBudget._predict(mock.Mock(), None, batches)


def test_only_an_automatic_budget_has_a_policy():
  assert methods.neyman().budget
  assert not methods.neyman(completion_budget="0.5").budget  # a command's text
  rule = methods.neyman(completion_budget=0.5).completions
  one, two = (rule(jax.random.key(0), GROUPS, x) for x in (0.1, 1.0))
  np.testing.assert_array_equal(one.keep, two.keep)


@pytest.mark.parametrize("noise", [0.2, 1.0])
@pytest.mark.parametrize("cost", [0.5, 3.0])
def test_the_budget_is_near_the_best_of_a_dense_grid(noise, cost):
  dense = np.geomspace(0.05, 1.0, 400).astype(np.float32)
  size = rules.gradient_size(GROUPS)
  some = added_variance(GROUPS, size, jnp.asarray(dense), 0.05)
  added = 0.5 * np.asarray(some)
  times = (1 + cost * dense) * (1 + added * noise)
  best = _choose(noise=noise, cost=cost)["completions"]
  at_best = np.argmin(abs(dense - best))
  assert times[at_best] / times.min() <= 1 + budget.SLACK + 0.01
