"""Metrics and measurements of a step; no log changes training."""

import collections
import dataclasses

import chex
import jax
import numpy as np
import pytest

from dppo_jax import rewards
from dppo_jax.methods.neyman.step_costs import StepSample
from dppo_jax.rng import rng_at
from dppo_jax.run.setup import setup_run
from dppo_jax.step import abstract_values, train_step
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
  "pack__rows_per_micro": 8,
  "optimizer__learning_rate": 1e-2,
  "sft__steps": 0,
}


class _Grader:
  specs = rewards.parse("exact")

  def grade(self, prompts, completions, *unused, **options):
    right = np.array([len(text) % 3 > 0 for text in completions], np.float32)
    return rewards.Graded(right, right, collections.Counter(), {})


def _train(steps=3, args=None, **hidden):
  """Trains; the rule's selections have other values of some fields."""
  c = commands.config("arithmetic:neyman", **SETTINGS)
  # Measured times would differ.
  c.method.args.update(args or {"update_cost": 4.0})
  run = setup_run(c)
  rule = run.spec.method.completions
  method = run.spec.method._replace(
    completions=lambda *args: rule(*args).replace(**hidden), noise_every=1
  )
  spec = dataclasses.replace(run.spec, method=method)
  with jax.set_mesh(spec.mesh):
    step = TrainStep(spec, run.train_set, run.tokenizer, _Grader())
    state = abstract_values.new_train_state(spec, run.initial_params())
    for i in range(steps):
      rng = rng_at(spec.root_key, i)
      state, experience = step.collect(state)
      batches = step.select(rng, experience, state)
      batches = step.score(rng, state.params, batches)
      state, updates = step.update(state, None, batches)
      info = step.info(state, experience, batches, updates)
  return jax.device_get(state), info.metrics(_Grader.specs)


def test_a_step_without_the_metrics_of_its_rule_trains_as_with_them():
  """The variance that the rule adds is a field: without it noise differs."""
  state, metrics = _train()
  blind, fewer = _train(metrics={})
  budget = {name for name in metrics if name.startswith("budget/")}
  assert budget == metrics.keys() - fewer.keys() != set()
  assert metrics["budget/completions"] < 1
  chex.assert_trees_all_equal(blind, state)
  other, _ = _train(added_variance=None)
  assert other.noise != state.noise


def test_choosing_tokens_does_not_change_what_rows_are_said_to_hold(
  monkeypatch,
):
  """The automatic budget predicts rows, which a choice of tokens leaves."""
  samples = []

  def record(*args, **fields):
    samples.append(StepSample(*args, **fields))
    return samples[-1]

  monkeypatch.setattr(train_step, "StepSample", record)
  for budget in (1.0, 0.2):
    _train(steps=1, args={"token_budget": budget})
  every, _, few, _ = samples  # each is repeated as the first process's
  assert every.tokens == few.tokens > 0
  assert every.rows == few.rows
