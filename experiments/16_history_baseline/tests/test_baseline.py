"""Laws of the baseline from history."""

import importlib

import numpy as np
import pytest

from dppo_jax import algo

History = importlib.import_module(
  "experiments.16_history_baseline.baseline"
).History
run = importlib.import_module("experiments.16_history_baseline.run")

REWARDS = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
IDS = np.array([4, 0, 2])


def _seen(snaps):
  past = History(num_prompts=5, decay=0.75, prior=1.0, snaps=snaps)
  past.add(IDS, REWARDS[::-1])
  return past


def test_without_history_and_prior_it_is_leave_one_out():
  past = History(num_prompts=5, decay=0.75, prior=0.0, snaps=False)
  np.testing.assert_allclose(
    REWARDS - past.baselines(IDS, REWARDS), algo.leave_one_out(REWARDS)
  )


@pytest.mark.parametrize("snaps", [False, True])
def test_a_baseline_does_not_see_its_own_reward(snaps):
  past = _seen(snaps)
  before = past.baselines(IDS, REWARDS)
  for place in np.ndindex(REWARDS.shape):
    changed = REWARDS.copy()
    changed[place] = 1 - changed[place]
    after = past.baselines(IDS, changed)
    np.testing.assert_allclose(after[place], before[place], atol=1e-12)
    assert (after != before).any() or snaps


def test_older_visits_count_less_and_other_prompts_keep_theirs():
  past = History(num_prompts=2, decay=0.75, prior=0.0, snaps=False)
  past.add(np.array([0]), np.array([[1.0]]))
  past.add(np.array([0]), np.array([[0.0]]))
  past.add(np.array([1]), np.array([[1.0]]))
  baseline = past.baselines(np.array([0, 1]), np.array([[1.0], [0.0]]))
  np.testing.assert_allclose(baseline, [[0.75 / 1.75], [1.0]])


def test_leave_one_out_has_no_history():
  cell = run.Cell("rings", 32, 4, "leave-one-out", 1.0, 0)
  assert run.history(cell, num_problems=5) is None
  assert run.history(cell._replace(baseline="snapped"), num_problems=5)
