"""A rollout in parts, each an update: what is split, and in which order."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from dppo_jax import config as configs
from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.records import TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step import choose_tokens, select, update
from dppo_jax.step.optimizer import make_optimizer

pytestmark = pytest.mark.slow

RNG = rng_at(jax.random.key(0), 0, Stage.COMPLETIONS)
SPEC = PackingSpec(row_length=24, rows_per_micro=2, window=4)
REWARDS = jnp.array(
  [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
)
PLAIN = objectives.grpo(0.001, 0.001)
MODEL = dataclasses.replace(small.MODEL, layers=1)
OPTIMIZER = make_optimizer(1e-2, 10)


@functools.partial(jax.jit, static_argnames=("mini_batches", "objective"))
def _select(prompts, rollout, rewards, mini_batches=1, objective=PLAIN):
  return select.select(
    RNG,
    prompts,
    rollout,
    rewards,
    method=methods.grpo(),
    objective=objective,
    spec=SPEC,
    mini_batches=mini_batches,
  )


def _sampled():
  """Four prompts and their completions."""
  prompts = small.prompts(num=4)
  return prompts, small.rollout(prompts)


def _part(tree, k, num_parts):
  """Every `num_parts`-th prompt from the `k`-th on."""
  return jax.tree.map(lambda x: x[k::num_parts] if x.ndim else x, tree)


def _alone(k, num_parts, sampled, rewards, objective=PLAIN):
  """A part of the prompts, packed as if there were no others."""
  part = _part((*sampled, rewards), k, num_parts)
  batch, num_micro, *_ = _select(*part, objective=objective)
  return jax.tree.map(lambda x: x[: int(num_micro)], batch)


def test_a_mini_batch_is_packed_as_if_alone(num_parts=2):
  """The first part has no variance, and no rows."""
  rewards = REWARDS.at[::num_parts].set(1.0)
  prompts, rollout = _sampled()
  batch, ends, info, _ = _select(prompts, rollout, rewards, num_parts)
  alone = [
    _alone(k, num_parts, (prompts, rollout), rewards) for k in range(num_parts)
  ]
  assert ends.tolist() == np.cumsum([len(x.tokens) for x in alone]).tolist()
  assert ends[0] == 0 < ends[1]
  want = jax.tree.map(lambda *xs: np.concatenate(xs), *alone)
  actual = jax.tree.map(lambda x: x[: int(ends[-1])], batch)
  chex.assert_trees_all_equal(jax.device_get(actual), want)
  assert not (batch.segment_ids[int(ends[-1]) :] > 0).any()
  rows = sum((x.segment_ids > 0).any(2).sum() for x in alone)
  assert info.pack.rows == rows and info.pack.unplaced == 0


def _config(objective, inner_updates, mini_batches):
  return update.UpdateConfig(
    MODEL,
    objective,
    logit_chunk=16,
    inner_updates=inner_updates,
    mini_batches=mini_batches,
  )


def _state():
  zero, params = jnp.int32(0), small.params(0, MODEL)
  return TrainState(zero, zero, params, jax.jit(OPTIMIZER.init)(params), ())


@functools.partial(jax.jit, static_argnames="config")
def _score(params, batch, num_used, config):
  stats = update.score(params, config, batch, num_used)
  batch, _ = choose_tokens(
    RNG,
    batch,
    stats,
    method=methods.grpo(),
    objective=config.objective,
    samples_policy=False,
  )
  return batch


@functools.partial(jax.jit, static_argnames="config")
def _one_step(state, batch, config):
  """A step on all of `batch`, which is half of the prompts."""
  num = jnp.int32(len(batch.tokens))
  sums = update.sum_gradients(batch, num, state.params, None, config)
  state, info = update.apply_gradient(state, sums, jnp.float32(6), OPTIMIZER)
  return state, info, sums.sums


@pytest.mark.parametrize(
  ("objective", "inner_updates"), [(PLAIN, 2), (objectives.gspo(), 1)]
)
def test_mini_batches_are_consecutive_updates(objective, inner_updates):
  """With the log-probabilities from before the first; then clips count."""
  config = _config(objective, inner_updates, 2)
  sampled = _sampled()
  batch, ends, *_ = _select(*sampled, REWARDS, 2, objective)
  batch = _score(small.params(0, MODEL), batch, ends, config)
  step = functools.partial(update.update, config=config, optimizer=OPTIMIZER)
  actual, info = jax.jit(step)(_state(), None, batch, ends, jnp.float32(12))

  state, steps = _state(), []
  halves = [_alone(k, 2, sampled, REWARDS, objective) for k in range(2)]
  halves = [
    _score(small.params(0, MODEL), x, jnp.int32(len(x.tokens)), config)
    for x in halves
  ]
  for half in halves * inner_updates:
    state, last, sums = _one_step(state, half, config)
    steps.append((last, sums))
  chex.assert_trees_all_close(actual.params, state.params, rtol=1e-5, atol=1e-6)
  clipped = [float(sums["clipped"]) for _, sums in steps]
  assert clipped[0] == 0 < clipped[1]

  # Of the last pass: its tokens, and its last step.
  tokens = sum(sums["tokens"] for _, sums in steps[-2:])
  for name, want in {
    "clip_share": sum(clipped[-2:]) / tokens,
    "loss": sum(info.loss for info, _ in steps[-2:]) / 2,
    "policy_ratio_max": max(x.policy_ratio_max for x, _ in steps[-2:]),
    "grad_norm": last.grad_norm,
  }.items():
    np.testing.assert_allclose(
      getattr(info, name), want, rtol=1e-4, atol=1e-6, err_msg=name
    )


def test_prompts_not_divisible_into_mini_batches_are_rejected():
  c = configs.Config()
  c.data.prompts_per_step, c.objective.mini_batches = 32, 5
  with pytest.raises(ValueError, match=r"mini_batches=5\) is 32 .*multiple"):
    configs.validate(c)
