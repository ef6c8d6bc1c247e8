"""Experiment 10: the formulas of its bounds, and that its estimates are exact.

Nothing is sampled here: subsets, stops and cuts are enumerated.
"""

import importlib
import itertools
import statistics

import numpy as np
import pytest

from dppo_jax.algo import advantages

_load = lambda name: importlib.import_module(
  f"experiments.10_rollout_bound.{name}"
)
bounds, cuts, logged = map(_load, ("bounds", "cuts", "logged"))
moments, slots, stop_rules = map(_load, ("moments", "slots", "stop_rules"))
stopping, two_phase = map(_load, ("stopping", "two_phase"))


def _lognormal(num: int) -> np.ndarray:
  normal = statistics.NormalDist()
  return np.exp([normal.inv_cdf((i + 0.5) / num) for i in range(num)])


def test_gains_match_closed_forms():
  equal = np.full(64, 1 / 64)
  assert bounds.cauchy_schwarz(equal, equal) == pytest.approx(1)
  assert bounds.gains(bounds.Cells(equal, equal))["r=inf"] == pytest.approx(1)
  lengths = _lognormal(50_000)
  cost, value = lengths / lengths.sum(), np.full(len(lengths), 1 / len(lengths))
  gain = np.exp(1 / 4)
  assert bounds.cauchy_schwarz(value, cost) == pytest.approx(gain, rel=1e-3)
  gains = bounds.gains(bounds.Cells(cost, value))
  assert gains["r=inf"] == pytest.approx(gain, rel=1e-3)
  # Where nothing is fixed, a finite r adds what a smaller batch gains anyway.
  for r in (1.0, 3.0):
    also = bounds.smaller_batch(0.0, r)
    assert also == pytest.approx((1 + r) / r, rel=1e-3)
    assert gains[bounds.name(r)] == pytest.approx(gain * also, rel=2e-3)


def test_no_probabilities_take_fewer_seconds_than_the_optimum():
  generator = np.random.default_rng(0)
  cells = bounds.Cells(*generator.dirichlet(np.ones(5), 2), fixed=0.1)
  cells = cells._replace(cost=0.9 * cells.cost)
  least = {r: 1 / bounds.gains(cells)[bounds.name(r)] for r in bounds.RATIOS}
  for prob in generator.uniform(0.02, 1, (3000, 5)):
    cost, added = bounds.outcome(cells, prob)
    for r in bounds.RATIOS:
      assert bounds.seconds(cost, added, r) > least[r] * 0.999
  assert bounds.outcome(cells, np.ones(5)) == pytest.approx((1, 0))


def test_the_pooled_optimum_never_rises_and_no_falling_law_beats_it():
  cells = bounds.Cells(np.full(4, 0.25), np.array([0.3, 0.5, 0.2, 0.0]))
  pooled = bounds.pool(cells)
  assert pooled.cost.tolist() == [0.5, 0.25, 0.25]
  assert pooled.value.tolist() == pytest.approx([0.8, 0.2, 0.0])
  least = 1 / bounds.gains(pooled)["r=inf"]
  grid = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
  for prob in itertools.combinations_with_replacement(grid, 4):
    if prob[2]:  # else what is worth something has no weight
      took = bounds.seconds(*bounds.outcome(cells, np.array(prob)), np.inf)
      assert took > least * 0.999


def test_advantages_are_those_of_the_package():
  rewards = np.random.default_rng(0).integers(0, 2, (9, 5)).astype(float)
  for name in ("group_normalized", "leave_one_out"):
    ours = getattr(moments, name)(rewards)
    theirs = np.asarray(getattr(advantages, name)(rewards))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("multiple", [0.0, 0.4, 1.0])
def test_two_phases_are_unbiased_with_normalised_advantages(size, multiple):
  """All pilots of a group, both outcomes of each, probabilities of its own."""
  generator = np.random.default_rng(1)
  rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
  scores = generator.normal(size=(5, 3))
  gradient = lambda who: (
    moments.group_normalized(rewards[who]) @ scores[who] / len(who)
  )
  full, mean, num = gradient(np.arange(5)), np.zeros(3), 0
  for pilot in itertools.combinations(range(5), size):
    who = np.array(pilot)
    prob, num = (0.3, 0.9, 0.5, 0.7)[int(rewards[who].sum())], num + 1
    for goes_on, chance in ((1, prob), (0, 1 - prob)):
      mean += chance * two_phase.estimate(
        full, gradient(who), goes_on, prob, multiple
      )
  np.testing.assert_allclose(mean / num, full, atol=1e-12)
  always = two_phase.estimate(full, gradient(who), 1, 1.0, multiple)
  np.testing.assert_allclose(always, full, atol=1e-12)


def test_two_phases_that_always_continue_cost_and_add_nothing():
  log = _log()
  objective = moments.OBJECTIVES["grpo"]
  pilots = two_phase.draw(log, objective, moments.moments(log, objective), 2)
  value = pilots.full - 2 * pilots.cross + pilots.pilot
  cells = bounds.Cells(pilots.cost.ravel(), value.ravel(), pilots.fixed)
  ones = np.ones(value.size)
  assert bounds.outcome(cells, ones) == pytest.approx((1, 0), abs=1e-9)


def test_a_choice_at_the_update_adds_nothing_where_updates_cost_nothing():
  cost, value = np.random.default_rng(4).dirichlet(np.ones(6), 2)
  cell, free = np.arange(6) // 2, np.zeros(6)
  add = lambda x: np.bincount(cell, x)
  known = bounds.gains(bounds.Cells(add(cost), add(value)))
  gains = stopping._chosen_after(
    cell, cost, free, value, 0.0, np.geomspace(1, 0.01, 400)
  )
  assert gains["r=inf"] == pytest.approx(known["r=inf"], rel=0.01)
  # Nor does it where nothing may stop and everything is worth its cost.
  equal = np.full(6, 1 / 6)
  gains = stopping._chosen_after(cell, free, equal, equal, 0.0, np.ones(1))
  assert gains["r=inf"] == pytest.approx(1)


def test_stopping_is_unbiased_with_leave_one_out_baselines():
  """All ways in which completions may stop, each with its probability."""
  rewards, prob = np.array([1.0, 0.0, 0.5, 1.0]), np.array([0.2, 0.9, 0.5, 1.0])
  mean = np.zeros(4)
  for lived in _zeros_and_ones(4):
    chance = np.where(lived == 1, prob, 1 - prob).prod()
    mean += chance * stop_rules.baselined(rewards, lived / prob, 0.3, True)
  expected = np.asarray(advantages.leave_one_out(rewards[None]))[0]
  np.testing.assert_allclose(mean, expected, atol=1e-6)


def test_stopping_with_a_weighted_baseline_is_unbiased_over_completions():
  """Enumerates every group and stop of a policy with two choices."""
  p, stays = 0.3, np.array([0.5, 0.8])  # probability of 1; of living, by choice
  reward, score = np.array([0.2, 1.0]), np.array([-p, 1 - p])
  mean = 0.0
  for picks in _zeros_and_ones(3):
    prob = stays[picks]
    likely = np.where(picks == 1, p, 1 - p).prod()
    for lived in _zeros_and_ones(3):
      chance = likely * np.where(lived == 1, prob, 1 - prob).prod()
      factors = stop_rules.baselined(reward[picks], lived / prob, 0.4, False)
      mean += chance * factors @ score[picks] / 3
  assert mean == pytest.approx(p * (1 - p) * (reward[1] - reward[0]), abs=1e-12)


def test_variance_of_a_random_cut_is_that_of_its_formula():
  """All cuts of one completion in four parts."""
  generator = np.random.default_rng(2)
  parts, lasts = generator.normal(size=(4, 3)), np.array([1.0, 0.7, 0.7, 0.2])
  chance = lasts - np.append(lasts[1:], 0.0)  # of a cut after each part
  drawn = np.cumsum(parts / lasts[:, None], axis=0)
  whole = parts.sum(axis=0)
  assert chance @ drawn == pytest.approx(whole)
  variance = chance @ (np.square(drawn - whole).sum(axis=1))
  values = cuts.tail_values((parts @ parts.T)[None])[0]
  formula = (1 / lasts - 1) @ values
  assert variance == pytest.approx(formula)


def test_slots_are_simulated_as_the_schedule_says():
  simulate = slots.simulate
  lengths = np.array([3, 1, 2, 5])
  assert simulate(lengths, 4, "tpu") == (5, 20)
  assert simulate(lengths, 2, "tpu") == (8, 16)
  # Five slots until three are left, then those three.
  steps, slot_steps = simulate(np.array([2, 2, 7, 7, 7]), 5, "cpu")
  assert (steps, slot_steps) == (7, 2 * 5 + 5 * 3)


def _zeros_and_ones(num: int) -> np.ndarray:
  return np.array(list(itertools.product((0, 1), repeat=num)))


def _log():
  """Four groups of two prompts, of made gradients."""
  generator = np.random.default_rng(3)
  num, group = 4, logged.GROUP
  scores = generator.normal(size=(num, group, 6))
  lengths = generator.integers(3, 9, (num, group))
  return logged.Logged(
    name="made",
    shares=logged.Shares(0.5, 0.4),
    prompt=np.array([0, 0, 1, 1]),
    prompt_lengths=np.full(num, 4),
    rewards=generator.integers(0, 2, (num, group)).astype(float),
    lengths=lengths,
    logprobs=-generator.random((num, group, 9)),
    products=scores @ scores.swapaxes(1, 2),
    prompt_scores=generator.normal(size=(2, logged.PER_PROMPT, 6)),
    parts=np.zeros((0, logged.PARTS, logged.PARTS)),
    parts_of=np.zeros(0, int),
    slots=8,
    slot_steps=0,
  )
