"""The laws of every prompt rule, and what histories and streaks do."""

import functools

import jax
import numpy as np
import pytest

from tests.helpers.prompts import (
  CANDIDATES,
  DISHONEST,
  EASY,
  GRID_ERROR,
  HARD,
  MIXED,
  NUM_PROMPTS,
  PROMPT_RULES,
  REWARDS,
  VISITED,
  compiled,
  drop,
  jitted,
  lengths_of_visits,
  neyman,
  prob_of,
  seen,
  streaks,
)


@pytest.mark.parametrize("name", PROMPT_RULES)
def test_prompt_rule_laws(name):
  rule = compiled(name)
  history = seen(rule)
  first = rule.draws(history, CANDIDATES, 1, 4)
  traces = list(rule.traces)
  assert first.keep.shape == first.prob.shape == (4000, 8)
  assert first.keep.dtype == bool and first.prob.dtype == np.float32
  assert (first.prob > 0).all()
  assert (first.prob <= 1).all()
  # Known before the draw; which of a tie is rounded up may depend on it.
  assert np.ptp(first.prob, axis=0).max() <= GRID_ERROR
  # The caller's order does not matter: a prompt's random number is its own.
  order = np.array([2, 0, 3, 1, 7, 6, 5, 4])
  permuted = rule.draws(history, CANDIDATES[order], 1, 4)
  np.testing.assert_array_equal(permuted.keep, first.keep[:, order])
  np.testing.assert_allclose(permuted.prob, first.prob[:, order], rtol=1e-6)
  # Prompts that were not rolled out change nothing.
  outside = np.full(VISITED.shape, NUM_PROMPTS)
  for step in (2, 3):
    after = rule.observe(history, step, outside, REWARDS, lengths_of_visits())
    after = rule.draws(after, CANDIDATES, 1, 4)
    jax.tree.map(np.testing.assert_array_equal, after, first)
  # A memory keeps its shapes and dtypes, so that nothing compiles again.
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(history) == shapes(rule.init())
  assert rule.traces == traces


@pytest.mark.parametrize(
  "name", [x for x in PROMPT_RULES if x not in DISHONEST]
)
def test_prompts_are_kept_with_reported_probabilities(name):
  """Tolerance: 5 standard errors of 8 shares; false alarm below 5e-6."""
  rule = compiled(name)
  drawn = rule.draws(seen(rule), CANDIDATES, 1, 4)
  prob = drawn.prob.mean(axis=0)
  error = 5 * np.sqrt(prob * (1 - prob) / len(drawn.prob))
  assert (np.abs(drawn.keep.mean(axis=0) - prob) <= error + 1e-6).all()


@pytest.mark.parametrize("name", PROMPT_RULES)
def test_a_prompt_never_visited_is_kept(name):
  rule = compiled(name)
  chosen = rule.draws(rule.init(), CANDIDATES, 0, 0)
  if "neyman" not in name:
    assert chosen.keep.all() and (chosen.prob == 1).all()
    assert rule.draws(seen(rule), CANDIDATES, 0, 4).keep[:, [1, 6, 7]].all()
  else:  # unless only some can be: then all have the same chance
    number = chosen.keep[0].sum()
    assert (chosen.keep.sum(axis=1) == number).all()
    np.testing.assert_allclose(chosen.prob, number / 8, atol=GRID_ERROR)


@pytest.mark.parametrize(
  "rule", [drop(0.0), streaks(base=1.0, tuning=0.0), neyman(1.0)]
)
def test_disabled_pruning_drops_nothing(rule):
  rule = jitted(rule)
  chosen = rule.draws(seen(rule), CANDIDATES, 0, 4)
  assert chosen.keep.all() and (chosen.prob == 1).all()


@pytest.mark.parametrize("name", PROMPT_RULES)
@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_nan_reward_does_not_spoil_the_history(name, reward):
  """It affects one update but not the history: every prompt may be drawn."""
  rule = compiled(name)
  rewards = REWARDS.copy()
  rewards[1, 2] = reward
  history = rule.observe(seen(rule), 3, VISITED, rewards, lengths_of_visits())
  chosen = rule.draws(history, CANDIDATES, 1, 4)
  assert ((chosen.prob > 0) & (chosen.prob <= 1)).all()
  assert chosen.keep.any(axis=0).all()


# History ---------------------------------------------------------------------


def test_prompts_with_low_scores_are_pruned():
  rule = compiled("history")
  history = rule.observe(rule.init(), 0, VISITED, REWARDS, lengths_of_visits())
  # Mean |advantage|: 0.68, 0.91, 0, 0.68, 0 and one never visited.
  prob = prob_of(rule, history, [7, 2, 9, 4, 0, 11, 1])
  np.testing.assert_allclose(prob, [1, 1, 0.4, 1, 0.4, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("scale", [1, 10])
def test_score_is_the_mean_of_normalised_advantages(scale):
  rule = compiled("history")
  history = rule.observe(rule.init(), 0, VISITED, scale * REWARDS)
  expected = np.abs(REWARDS - REWARDS.mean(1, keepdims=True)).mean(1)
  expected /= np.maximum(REWARDS.std(1, ddof=1), 1e-6)
  np.testing.assert_allclose(history[VISITED], expected, rtol=1e-4)


def test_threshold_is_the_mean_of_the_candidates():
  rule = compiled("history")
  history = rule.observe(rule.init(), 0, VISITED, REWARDS)
  # 0.68 is below the mean of itself and 0.91, but not that of all.
  chosen = prob_of(rule, history, [7, 2])
  np.testing.assert_allclose(chosen, [0.4, 1], rtol=1e-6)


def test_unweighted_keeps_the_choice_with_probability_1():
  honest, biased = compiled("streaks"), compiled("streaks_unweighted")
  history = seen(honest)
  one = honest.draws(history, CANDIDATES, 3, 4)
  other = biased.draws(history, CANDIDATES, 3, 4)
  np.testing.assert_array_equal(one.keep, other.keep)
  assert (other.prob == 1).all() and not (one.prob == 1).all()


def test_score_uses_rewards_not_correctness():
  rule = compiled("history")
  rewards = [[0.5, 1.5, 0.5, 1.5, 0.5, 1.5]]
  histories = [
    rule.observe(rule.init(), 0, [3], rewards, correct=[correct])
    for correct in ([0, 1] * 3, [0] * 6, [1] * 6)
  ]
  assert len({float(history[3]) for history in histories}) == 1
  assert histories[0][3] > 0


# Streaks ---------------------------------------------------------------------


def _visits(rule, groups, history=None, first=0):
  """Visits of problem 3, one group at each step."""
  history = rule.init() if history is None else history
  ids = np.array([3], np.int32)
  for step, group in enumerate(groups, first):
    history = rule.observe(history, step, ids, np.array([group], np.float32))
  return history


@functools.cache
def _untuned(**options):
  return jitted(streaks(tuning=0.0, **options))


def test_streaks_keep_probability():
  rule = _untuned()
  for length in range(9):
    history = _visits(rule, [MIXED] + [HARD] * length)
    expected = np.ceil(max(0.5**length, 0.01) * 2**23) / 2**23
    np.testing.assert_allclose(prob_of(rule, history, [3, 4]), [expected, 1])
  np.testing.assert_allclose(
    prob_of(rule, _visits(rule, [EASY, HARD, EASY]), [3]), 0.125
  )
  # One group with variance ends the streak; time alone does nothing.
  assert prob_of(rule, _visits(rule, [HARD, HARD, MIXED]), [3]) == 1
  assert prob_of(rule, _visits(rule, [HARD]), [3], step=90) == 0.5


def test_streaks_tune_easy_and_hard_apart():
  rule = jitted(streaks(target=0.3, tuning=0.1, base=0.5))
  tune = lambda group, times: _visits(rule, [MIXED] + [group] * times)
  easy, hard = tune(EASY, 1), tune(HARD, 1)
  # Every group was easy: easy ones are kept less often, hard ones more.
  np.testing.assert_allclose(prob_of(rule, easy, [3], step=2), 0.4, rtol=1e-6)
  np.testing.assert_allclose(easy.keep_base, 0.5)  # until the step is over
  np.testing.assert_allclose(tune(EASY, 2).keep_base, [0.4, 0.6], rtol=1e-6)
  np.testing.assert_allclose(tune(HARD, 2).keep_base, [0.6, 0.4], rtol=1e-6)
  # Within a step, no prompt is affected by the others.
  np.testing.assert_allclose(prob_of(rule, hard, [3], step=1), 0.5)


def test_keep_base_is_bounded():
  rule = jitted(streaks(tuning=0.1))
  least = _visits(rule, [HARD] * 30).keep_base
  np.testing.assert_allclose(least, [0.95, 0.05], rtol=1e-6)
  most = _visits(rule, [MIXED] * 30).keep_base
  np.testing.assert_allclose(most, [0.95, 0.95], rtol=1e-6)


@pytest.mark.parametrize("num_hard, base", [(1, 0.6), (2, 0.4)])
def test_keep_base_falls_if_the_target_is_reached(num_hard, base):
  """2 of 8 are a quarter, which is two thirds of the target."""
  rule = jitted(streaks(target=0.375, tuning=0.1))
  ids, rewards = np.arange(8), np.array([MIXED] * 8)
  history = rule.observe(rule.init(), 0, ids, rewards)
  rewards[:num_hard] = HARD
  # In two parts, as a step that draws again observes.
  for part in (slice(0, 5), slice(5, 8)):
    history = rule.observe(history, 1, ids[part], rewards[part])
  history = rule.observe(history, 2, [8], [MIXED])
  np.testing.assert_allclose(history.keep_base[1], base, rtol=1e-6)


@pytest.mark.parametrize("rewards, is_correct", [(0.9, 0), (0.1, 1)])
def test_variance_uses_rewards_and_difficulty_correctness(rewards, is_correct):
  """Covers shaped rewards, such as for a format or a length."""
  rule = jitted(streaks())
  observe = lambda rewards, correct: rule.observe(
    rule.init(), 0, [3], np.array([rewards]), correct=np.array([correct])
  )
  history = observe([rewards] * 6, [is_correct] * 6)
  assert history.run[3] == 1 and history.is_easy[3] == is_correct
  # Rewards that differ among the right ones are a signal all the same.
  history = observe([rewards] * 5 + [0.5], [is_correct] * 6)
  assert history.run[3] == 0


def test_first_visits_tune_nothing():
  rule = compiled("streaks")
  history = rule.observe(rule.init(), 0, VISITED, np.zeros_like(REWARDS))
  later = rule.observe(history, 1, VISITED, np.zeros_like(REWARDS))
  np.testing.assert_array_equal(later.keep_base, [0.5, 0.5])
  even_later = rule.observe(later, 2, VISITED, REWARDS)
  np.testing.assert_allclose(even_later.keep_base, [0.51, 0.49], rtol=1e-6)
