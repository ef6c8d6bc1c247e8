"""Logs, measurements and state of a step."""

import collections
import json
from unittest import mock

import chex
import jax
import numpy as np
import pytest

from dppo_jax import config as configs
from dppo_jax import methods, rewards
from dppo_jax.errors import UserError
from dppo_jax.rng import rng_at
from dppo_jax.run.setup import setup_run
from dppo_jax.step import abstract_values
from dppo_jax.step.clock import StageClock
from dppo_jax.step.train_step import TrainStep
from tests.helpers import commands

pytestmark = pytest.mark.slow

SETTINGS = {
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__eval": "",
  "data__train": "arithmetic:20:1",
  "data__prompts_per_step": 8,
  "rollout__group_size": 4,
  "rollout__max_tokens": 8,
  "rollout__num_slots": 32,
  "pack__row_length": 24,
  "pack__rows_per_micro": 1,
  "optimizer__learning_rate": 1e-2,
  "sft__steps": 0,
}


class _Grader:
  specs = rewards.parse("exact")

  def grade(self, prompts, completions, *unused, **options):
    right = np.array([len(text) % 3 > 0 for text in completions], np.float32)
    return rewards.Graded(right, right, collections.Counter(), {})


class _Loop:
  """A training loop that may be stopped and started again."""

  def __init__(self, method="neyman", args=None, **settings):
    c = commands.config(f"arithmetic:{method}", **SETTINGS | settings)
    c.method.args.update(args or {})
    self.run = setup_run(c)
    self.spec = self.run.spec
    self.lines = []

  def start(self):
    self.step = TrainStep(
      self.spec, self.run.train_set, self.run.tokenizer, _Grader()
    )

  def train(self, steps, state=None):
    """Returns the state after more steps, as a checkpoint would hold it."""
    with jax.set_mesh(self.spec.mesh):
      self.start()
      params = self.run.initial_params()
      state = state or abstract_values.new_train_state(self.spec, params)
      for i in range(int(state.step), int(state.step) + steps):
        rng = rng_at(self.spec.root_key, i)
        state, self.experience = self.step.collect(state)
        batches = self.step.select(rng, self.experience, state)
        batches = self.step.score(rng, state.params, batches)
        state, updates = self.step.update(state, None, batches)
        info = self.step.info(state, self.experience, batches, updates)
        line = info.metrics(_Grader.specs)
        self.lines.append({"step": i + 1} | jax.tree.map(float, line))
    return jax.device_get(state)


def _without_seconds(lines):
  return [
    {k: x for k, x in line.items() if "seconds" not in k} for line in lines
  ]


def _budgets(lines):
  return [line["budget/completions"] for line in lines]


@pytest.fixture(scope="module")
def costly():
  """A run whose updates are given a cost, in place of measured seconds."""
  loop = _Loop(args={"update_cost": 4.0}, objective__mini_batches=2)
  return loop, loop.train(7)


def test_a_run_with_a_given_cost_resumes_to_the_bit(costly):
  """Budget and noise are part of the state; a choice is made after step 2."""
  loop, state = costly
  fractions = _budgets(loop.lines)
  assert fractions[:2] == [1.0, 1.0] and fractions[2] < 1
  assert state.budget.dtype == state.noise.noise.dtype == np.float32
  assert state.noise.noise > 0 and state.noise.within > 0
  other = _Loop(args={"update_cost": 4.0}, objective__mini_batches=2)
  half = other.train(4)
  chex.assert_trees_all_equal(other.train(3, half), state)
  assert _without_seconds(other.lines) == _without_seconds(loop.lines)


def test_recorded_budgets_repeat_a_run_to_the_bit(costly, tmp_path):
  """Without its costs, and through a restart."""
  loop, state = costly
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(json.dumps(x) + "\n" for x in loop.lines))
  args = {"completion_budget": str(path)}
  other = _Loop(args=args, objective__mini_batches=2)
  half = other.train(3)
  again = other.train(4, half)
  assert _budgets(other.lines) == _budgets(loop.lines)
  # The choice after the last step is in no line.
  chex.assert_trees_all_equal(again.replace(budget=state.budget), state)


def test_recorded_budgets_need_a_run_that_has_them(tmp_path, monkeypatch):
  """In training alone; a relative path is that of the command's directory."""
  path = tmp_path / "metrics.jsonl"
  args = {"completion_budget": path.name}
  config = commands.config("arithmetic:neyman", steps=1)
  config.method.args |= args
  setup_run(config, trains=False)
  with pytest.raises(UserError, match=r"metrics.jsonl', no file with budget"):
    setup_run(config)
  path.write_text('{"step": 1, "budget/completions": 0.5}\n')
  monkeypatch.chdir(tmp_path)
  there = configs.absolute_paths(config)
  monkeypatch.chdir("/")
  run = setup_run(there)
  line = {"step": 0, "budget/completions": 1.0}
  assert run.spec.method.budget.policy()(line) == (0.5, {})
  with pytest.raises(UserError, match=r"the metrics\.jsonl of a run"):
    methods.neyman(completion_budget="half")


def test_measured_seconds_change_the_budget_alone(monkeypatch):
  """Nothing compiled reads a clock."""
  loop = _Loop()
  seconds = {"update/seconds": 9.0, "step/seconds": 10.0}
  clock = mock.Mock(return_value=seconds)
  monkeypatch.setattr(StageClock, "metrics", clock)
  slow = loop.train(3).budget
  loop.lines.clear()
  clock.return_value = seconds | {"step/seconds": 1e5}
  assert slow < loop.train(3).budget == 1


def test_the_overlong_penalty_is_part_of_the_reward():
  """History, samples, metrics and variance include it."""
  loop = _Loop("dppo", reward__overlong_tokens=6)
  plain = _Loop("dppo")
  state, other = loop.train(1), plain.train(1)
  experience, (line,) = loop.experience, loop.lines
  lengths = np.asarray(experience.rollout.lengths)
  penalty = np.clip((8 - 6 - lengths) / 6, -1, 0).astype(np.float32)
  assert penalty.min() == -1 and len(np.unique(penalty)) > 2
  right = np.asarray(plain.experience.rewards)
  np.testing.assert_allclose(experience.rewards, right + penalty, rtol=1e-6)
  for sample in experience.samples:
    at = sample["row"], sample["member"]
    assert sample["reward"] == experience.rewards[at]
    assert sample["rewards"]["overlong"] == penalty[at]
  assert line["reward/overlong"] == pytest.approx(penalty.mean())
  assert line["reward/mean"] == pytest.approx(experience.rewards.mean())
  assert line["reward/accuracy"] == pytest.approx(right.mean())
  equal = np.ptp(experience.rewards, axis=1) == 0
  assert line["groups/zero_std"] == equal.sum()
  assert (state.history != other.history).any()
  assert "reward/overlong" not in plain.lines[0]
