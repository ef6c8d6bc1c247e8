"""The estimate of seconds against the stored measurements and publications."""

import importlib
import statistics

import pytest

from dppo_jax.planning import step_time

seconds = importlib.import_module("experiments.08_plan.step_seconds")


@pytest.mark.slow
def test_steps_are_within_a_factor_of_1_3_of_the_measured(monkeypatch):
  monkeypatch.setattr(step_time, "ceilings", lambda dtype: (1.0, 1.0))
  rows = seconds.results.read(seconds.RESULTS)
  for case in seconds.CASES:
    steps = [row for row in rows if row["case"] == case]
    steps = map(seconds.with_estimates, steps[:: len(steps) // 5])
    ratio = lambda x: x["estimated"]["step"] / x["measured"]["step"]
    assert 1 / 1.3 < statistics.median(map(ratio, steps)) < 1.3


def test_published_figures_have_a_ratio():
  lines = seconds.published_table().splitlines()[2:]
  assert len(lines) == len(seconds.PUBLISHED) + 3
  ratios = [float(line.split("|")[-2]) for line in lines]
  assert all(0.05 < x < 2 for x in ratios)
