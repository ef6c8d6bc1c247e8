"""Automatic budgets: the fraction they keep, by noise and by seconds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.methods.neyman import budget, rules
from dppo_jax.records import Groups, StepCosts
from tests.helpers.completions import groups_of

RNG = np.random.default_rng(0)
# 24 groups of 8, a third of them without variance.
REWARDS = jnp.array(
  RNG.random((24, 8)) < np.repeat([[0.0], [0.3], [0.8]], 8, axis=0), jnp.float32
)
LENGTHS = jnp.array(RNG.integers(5, 50, (24, 8)), jnp.int32)
ADVANTAGES = REWARDS - REWARDS.mean(axis=1, keepdims=True)
TOKENS = int(LENGTHS[ADVANTAGES != 0].sum())  # of all needed completions


def _costs(
  noise=1.0, micro=0.0, tokens=100.0, other=1.0, within=0.5, updates=1.0
):
  values = noise, micro, tokens, other, within, updates
  return StepCosts(*(jnp.float32(x) for x in values))


@functools.cache
def _draw(**options):
  method = methods.neyman(**options)

  def draw(costs):
    groups = Groups(REWARDS, ADVANTAGES, LENGTHS, costs=costs)
    return method.completions(jax.random.key(0), groups)

  return jax.jit(draw)


def _describe(costs=None, **options):
  chosen = _draw(**options)(costs)
  metrics = {name.split("/")[1]: float(x) for name, x in chosen.metrics.items()}
  needed = int((ADVANTAGES != 0).sum())
  assert int(chosen.keep.sum()) == round(metrics["completions"] * needed)
  return metrics


def _at_cost(cost, noise=1.0):
  """Measured seconds, with micro-batches of one token."""
  return _describe(_costs(noise, micro=cost / TOKENS, tokens=1.0))


def test_budget_falls_with_the_cost_of_an_update():
  chosen = [_at_cost(x) for x in (0.01, 0.3, 1.0, 3.0, 30.0)]
  fractions = [x["completions"] for x in chosen]
  assert fractions == sorted(fractions, reverse=True)
  assert fractions[0] > 0.8 and fractions[-1] < 0.4
  gains = [x["predicted_speedup"] for x in chosen]
  assert gains == sorted(gains) and gains[0] >= 1


def test_budget_rises_with_gradient_noise():
  fractions = [_at_cost(1.0, x)["completions"] for x in (0.1, 0.4, 1.0)]
  assert fractions == sorted(fractions) and fractions[-1] > 2 * fractions[0]


def test_noise_estimate_of_0_does_not_prune_to_the_minimum():
  assert _at_cost(1.0, 0.0) == _at_cost(1.0, 0.1)


def test_an_update_that_costs_nothing_is_not_pruned():
  chosen = _at_cost(1e-6)
  assert chosen["completions"] == chosen["predicted_speedup"] == 1
  assert chosen["added_variance"] == 0


def test_without_timings_an_update_costs_as_much_as_other_stages():
  chosen = _describe(_costs(micro=0.0, tokens=0.0, other=0.0))
  assert chosen == pytest.approx(_describe(update_cost=1.0))
  assert 0.2 < chosen["completions"] < 0.8


def test_a_given_cost_replaces_measured_seconds_but_not_the_noise():
  chosen = _describe(_costs(0.3, micro=9.0, tokens=1.0), update_cost=2.0)
  assert chosen == pytest.approx(_at_cost(2.0, 0.3), rel=1e-3)
  assert chosen["update_cost"] == pytest.approx(2.0, rel=1e-5)
  # Without costs, the gradient is assumed to be all noise.
  assert _describe(update_cost=2.0)["completions"] > chosen["completions"]
  # Tokens are proportional to neither number nor size, but nearly.
  seconds = 1 + 2 * chosen["completions"]
  slower = 1 + 0.3 * chosen["added_variance"]
  speedup = 3 / (seconds * slower)
  assert chosen["predicted_speedup"] == pytest.approx(speedup, rel=0.25)


def test_more_are_kept_if_completions_vary_more_than_groups():
  chosen = [_describe(_costs(0.5, within=x), update_cost=3.0) for x in (0.5, 2)]
  assert chosen[1]["completions"] > 1.2 * chosen[0]["completions"]


def test_one_micro_batch_is_not_pruned():
  one = _describe(_costs(0.1, micro=9.0, tokens=2.0 * TOKENS, other=0.1))
  assert one["completions"] == 1
  two = _describe(_costs(0.1, micro=9.0, tokens=TOKENS / 2, other=0.1))
  assert two["completions"] < 0.5


def test_no_fraction_falls_below_the_least():
  options = {"update_cost": 5000.0, "min_prob": 0.0}
  chosen = _describe(_costs(noise=0.1), **options)
  assert chosen["completions"] == pytest.approx(0.03, abs=0.01)


@pytest.mark.parametrize("min_prob", [0.0, 0.05, 0.2])
def test_the_variance_predicted_is_that_of_the_draw(min_prob):
  """Under a KL penalty, where zero advantages have the least probability."""
  groups = Groups(
    REWARDS,
    ADVANTAGES,
    LENGTHS,
    is_needed=jnp.ones(REWARDS.shape, bool),
    costs=_costs(noise=0.3),
  )
  method = methods.neyman(update_cost=3.0, min_prob=min_prob)
  chosen = method.completions(jax.random.key(0), groups)
  assert chosen.prob.min() == pytest.approx(min_prob, abs=1e-3)
  size = rules.gradient_size(groups)
  added = budget.systematic_variance(
    chosen.prob.reshape(1, -1),
    size.reshape(-1) ** 2,
    ADVANTAGES.reshape(-1) > 0,
    REWARDS.shape,
  )
  predicted = chosen.added_variance
  assert predicted == pytest.approx(0.5 * float(added[0]), rel=0.03)


@pytest.mark.parametrize("num", [0, 1])
def test_one_needed_completion_is_kept(num):
  values = np.zeros((2, 3))
  values.flat[:num] = 1
  groups, method = groups_of(values), methods.neyman(update_cost=9.0)
  chosen = jax.jit(method.completions)(jax.random.key(0), groups)
  assert chosen.keep.sum() == num and (chosen.prob[chosen.keep] == 1).all()
  metrics = chosen.metrics
  assert metrics["budget/completions"] == num
  assert all(np.isfinite(x) for x in metrics.values())


def test_metrics_are_finite_with_a_nan_reward():
  advantages = ADVANTAGES.at[1].set(jnp.nan)
  groups = Groups(REWARDS.at[1, 0].set(jnp.nan), advantages, LENGTHS)
  method = methods.neyman(update_cost=9.0)
  chosen = method.completions(jax.random.key(0), groups)
  metrics = chosen.metrics
  assert all(np.isfinite(x) for x in metrics.values())


def test_an_automatic_budget_needs_seconds_or_a_cost():
  method = methods.neyman()
  assert method.reads_costs and method.noise_every
  fixed = methods.neyman(completion_budget="0.5")  # as on the command line
  assert not fixed.reads_costs and not fixed.noise_every
  with pytest.raises(ValueError, match=r"costs is None.*update_cost"):
    method.completions(jax.random.key(0), Groups(REWARDS, ADVANTAGES, LENGTHS))


@pytest.mark.parametrize("updates", [1.0, 4.0])
@pytest.mark.parametrize("noise", [0.2, 1.0])
@pytest.mark.parametrize("tokens", [100.0, 700.0])
def test_the_budget_is_near_the_best_of_a_dense_grid(updates, noise, tokens):
  costs = _costs(noise, micro=0.4, tokens=tokens, updates=updates)
  groups = Groups(REWARDS, ADVANTAGES, LENGTHS, costs=costs)
  size = rules.gradient_size(groups)
  auto = budget.AutoBudget()
  dense = auto._predict(
    groups, size.reshape(-1), jnp.geomspace(0.03, 1.0, 400), 0.05
  )
  best = auto.choose(groups, size, 0.05)
  at_best = jnp.abs(dense.number - float(best.number)).argmin()
  loss = dense.seconds[at_best] / dense.seconds.min()
  assert loss <= 1 + budget.SLACK + 0.01


def test_an_update_of_one_micro_batch_cannot_be_made_smaller():
  many = _describe(_costs(0.3, micro=1.0, tokens=TOKENS / 4))
  one = _describe(_costs(0.3, micro=1.0, tokens=2.0 * TOKENS))
  assert many["completions"] < 0.7 and one["completions"] == 1


def test_updates_on_a_rollout_share_the_time_of_its_sampling():
  """The more of them, the larger their part of the time, and the gain."""
  costs = [_costs(micro=0.1, tokens=TOKENS / 32, updates=x) for x in (1.0, 8.0)]
  one, eight = (_describe(x)["completions"] for x in costs)
  assert eight < one


def test_nothing_is_pruned_before_the_noise_is_measured():
  assert _at_cost(3.0)["completions"] < 0.8
  costs = _costs(micro=3.0 / TOKENS, tokens=1.0, within=np.inf)
  assert _describe(costs)["completions"] == 1
