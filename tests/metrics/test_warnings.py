"""Warnings appear if their check fails, with advice and not too often."""

import collections
import json
import re

import pytest

from dppo_jax.config import Config, flatten
from dppo_jax.metrics import health, progress, writer
from dppo_jax.step import grade

HEALTHY = {
  "step/seconds": 0.2,
  "groups/zero_std": 10,
  "prompts/kept": 32,
  "completions/drawn": 256,
  "completions/stopped": 0.95,
  "completions/trained": 120,
  "reward/accuracy": 0.4,
  "reward/mean": -0.1,
  "noise/scale": 20.0,
  "prompts/drawn": 32,
  "update/policy_ratio_max": 1.1,
  "update/sampler_ratio_max": 1.1,
  "update/skipped_in_a_row": 0,
  "weights/max": 4,
}
# Changes of a healthy line that one check finds.
CASES = {
  "cut_off": {"completions/stopped": 0.3},
  "large_weights": {"weights/max": 4.5e30},
  "no_reward": {"reward/accuracy": 0},
  "nothing_trained": {"completions/trained": 0},
  "reward_failures": {"reward/timeouts": 4, "reward/errors": 1},
  "reuse": {"noise/scale": 40.0},
  "sampler_mismatch": {"update/sampler_ratio_max": 3},
  "skipped_update": {"update/skipped_in_a_row": 1},
  "zero_variance": {"groups/zero_std": 30},
}


def _messages(watch, line, steps, first=1):
  """Steps with a message."""
  last = first + steps
  return [step for step in range(first, last) if watch.check(step, line)[1]]


@pytest.mark.parametrize("check", health.CHECKS, ids=lambda x: x.name)
def test_check_finds_its_problem_and_nothing_else(check):
  line = HEALTHY | CASES[check.name]
  watch = health.Health(2)
  assert not _messages(watch, HEALTHY, 60)
  assert not watch.check(60, {"eval/accuracy": 0.0})[1]
  assert _messages(watch, line, check.steps, first=61)
  assert watch.check(200, line)[0] == {f"warnings/{check.name}": 1.0}
  first = check.steps
  assert _messages(health.Health(2), line, 250) == [
    *range(first, 251, 100)  # not repeated for 100 steps
  ]


def test_ratio_to_the_sampler_may_grow_over_several_updates():
  line = HEALTHY | {"update/policy_ratio_max": 4689.0}
  assert not _messages(health.Health(4), line, 60)


def test_reuse_is_judged_only_where_updates_share_a_measured_rollout():
  assert not _messages(health.Health(1), HEALTHY | CASES["reuse"], 60)
  unknown = HEALTHY | {"noise/scale": 1e6}
  assert not _messages(health.Health(4), unknown, 60)


def test_advice_names_options_that_exist():
  options = {*flatten(Config()), "objective.args.sampler_cap"}
  for check in health.CHECKS:
    names = re.findall(r"config\.([a-z_.]*[a-z_])", check.message)
    assert names and {*names} <= options


def test_resumed_run_warns_as_if_it_had_not_stopped(tmp_path):
  line, lines = HEALTHY | {"weights/max": 1e6}, []
  for name, parts in (("full", [14]), ("parts", [3, 12, 14])):
    folder, done = tmp_path / name, None
    folder.mkdir()
    for end in parts:
      watch, bar = health.Health(1), progress.Progress()
      with writer.Writer(folder, done, bar, watch, "", {}) as out:
        for step in range((done or 0) + 1, end + 1):
          out.write(step, line)
      done = end
    lines.append((folder / "metrics.jsonl").read_text())
    log = (folder / "log.txt").read_text()
    assert log.count("warning, step 10") == log.count("warning") == 1
  assert lines[0] == lines[1]
  metrics = map(json.loads, lines[0].splitlines())
  warned = [x["step"] for x in metrics if "warnings/large_weights" in x]
  assert warned == [*range(10, 15)]


def test_steps_without_a_prompt_have_no_means():
  """Every prompt of a small step may be pruned."""
  line = grade.to_metrics(collections.Counter(prompts=4), [], 8, ())
  assert line["completions/drawn"] == 0 and "reward/mean" not in line
  watch = health.Health(1)
  lines = [watch.check(x, line | {"step/seconds": 1.0}) for x in range(20)]
  text = " ".join(x for _, messages in lines for x in messages)
  assert "max_tokens" not in text and "reward.functions" not in text
