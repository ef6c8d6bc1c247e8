"""What looks wrong is told, with what to try, and not too often."""

import dataclasses
import re

import pytest

from dppo_jax.config import Config
from dppo_jax.metrics import progress
from dppo_jax.metrics import warnings as health
from dppo_jax.metrics import writer as metrics

HEALTHY = {
  "step/seconds": 0.2,
  "groups/zero_std": 10,
  "prompts/kept": 32,
  "completions/drawn": 256,
  "completions/stopped": 0.95,
  "completions/trained": 120,
  "reward/mean": 0.4,
  "reward/std": 0.3,
  "reward/unboxed": 0.2,
  "reward/timeouts": 0,
  "reward/crashes": 0,
  "reward/errors": 0,
  "reward/nonfinite": 0,
  "update/clip_share": 0.01,
  "update/clipped_norm": 0,
  "update/policy_ratio_max": 1.1,
  "update/skipped_in_a_row": 0,
  "weights/max": 4,
}
BEST = {"eval/accuracy": 0.8, "eval/stderr": 0.02}
# What a run shows that is wrong in one way, as changes of a healthy line.
CASES = {
  "accuracy_fell": {"eval/accuracy": 0.5, "eval/stderr": 0.02},
  "clip_share": {"update/clip_share": 0.4},
  "clipped_norm": {"update/clipped_norm": 1},
  "cut_off": {"completions/stopped": 0.3},
  "far_from_sampler": {"update/policy_ratio_max": 30},
  "grading_lost": {"reward/timeouts": 4, "reward/crashes": 1},
  "large_weights": {"weights/max": 4.5e30},
  "no_box": {"reward/unboxed": 0.97},
  "no_reward": {"reward/mean": 0, "reward/std": 0},
  "nothing_trained": {"completions/trained": 0},
  "reward_errors": {"reward/errors": 10},
  "sampler_mismatch": {"update/policy_ratio_max": 3},
  "skipped_update": {"update/skipped_in_a_row": 1},
  "unused_experts": {"moe/unused": 0.8},
  "zero_variance": {"groups/zero_std": 30},
}


def _told(watch, line, steps, first=1):
  """`(step, what was said)` while the line repeats."""
  found = []
  for step in range(first, first + steps):
    found += [(step, text) for text in watch.check(step, line)[1]]
  return found


@pytest.mark.parametrize("alarm", health.ALARMS, ids=lambda x: x.name)
def test_every_alarm_is_raised_by_what_it_is_for_and_by_nothing_else(alarm):
  inner_updates = 4 if alarm.name == "far_from_sampler" else 1
  watch = health.Health(inner_updates)
  assert not _told(watch, HEALTHY, 60)
  assert not _told(watch, BEST, 3)
  line = CASES[alarm.name]
  if alarm.reads == "step/seconds":
    line = HEALTHY | line
  (first, text), *_ = _told(watch, line, alarm.steps, first=61)
  assert text.startswith(f"warning, step {first}: ") and "Try " in text
  metrics, _ = watch.check(200, line)
  assert metrics == {f"warnings/{alarm.name}": 1.0}
  fresh = health.Health(inner_updates)
  if alarm.steps > 1:  # too early to tell
    assert not _told(fresh, line, alarm.steps - 1)


def test_an_alarm_is_told_once_and_then_ever_more_rarely():
  watch = health.Health(1)
  line = HEALTHY | {"weights/max": 1e6}
  steps = [step for step, _ in _told(watch, line, 1000)]
  assert steps == [5, 55, 155, 355, 755]
  assert not _told(watch, HEALTHY, 20, first=1001)


def test_the_options_that_an_alarm_names_are_there():
  config = Config()
  for alarm in health.ALARMS:
    names = re.findall(r"config\.([a-z_.]*[a-z_])", alarm.means + alarm.advice)
    for name in names:
      section, _, field = name.partition(".")
      field, _, arg = field.partition(".")
      holder = getattr(config, section)
      assert field in {x.name for x in dataclasses.fields(holder)}, name
      if arg:
        assert arg in config.objective.args, name
    assert names, alarm.name


def test_a_run_that_goes_on_is_warned_as_if_it_had_not_stopped(tmp_path):
  line = HEALTHY | {"weights/max": 1e6}
  lines = {}
  for folder, parts in (("whole", [12]), ("parts", [3, 7, 12])):
    (tmp_path / folder).mkdir()
    done = None
    for end in parts:
      watch, bar = health.Health(1), progress.Progress()
      with metrics.Writer(tmp_path / folder, done, bar, watch) as writer:
        for step in range((done or 0) + 1, end + 1):
          writer.write(step, line)
      done = end
    lines[folder] = (tmp_path / folder / "metrics.jsonl").read_text()
    said = (tmp_path / folder / "log.txt").read_text()
    assert said.count("warning, step 5") == said.count("warning") == 1
  assert lines["whole"] == lines["parts"]
