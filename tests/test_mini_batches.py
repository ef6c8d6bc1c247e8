"""Several updates on a rollout: its parts, their order, their metrics."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from dppo_jax.algo import objectives
from dppo_jax.records import TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.rollout import Sampling
from dppo_jax.step import choose_tokens, select, step_info, update
from dppo_jax.step.optimizer import make_optimizer
from tests.helpers import small

pytestmark = pytest.mark.slow

RNG = rng_at(jax.random.key(0), 0, Stage.COMPLETIONS)
REWARDS = jnp.array(
  [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
)
PLAIN = objectives.grpo(0.001, 0.001)
MODEL = dataclasses.replace(small.MODEL, layers=1)
OPTIMIZER = make_optimizer(1e-2, 10)


@functools.partial(jax.jit, static_argnames=("num_parts", "objective"))
def _select(prompts, rollout, rewards, part=0, num_parts=1, objective=PLAIN):
  return select.select(
    RNG,
    prompts,
    rollout,
    rewards,
    part=part,
    spec=small.spec(objective=objective, mini_batches=num_parts),
  )


def _sampled():
  """Four prompts and their completions."""
  prompts = small.prompts(num=4)
  return prompts, small.rollout(prompts)


def _in_use(batch, num_micro):
  return jax.tree.map(lambda x: x[: int(num_micro)], jax.device_get(batch))


def test_a_mini_batch_is_packed_as_if_alone(num_parts=2):
  """The first part has no variance, and no rows."""
  rewards = REWARDS.at[::num_parts].set(1.0)
  counts = []
  for k in range(num_parts):
    actual, num, info, summary = _select(*_sampled(), rewards, k, num_parts)
    alone = jax.tree.map(
      lambda x, k=k: x[k::num_parts] if x.ndim else x, (*_sampled(), rewards)
    )
    want, num_alone, info_alone, summary_alone = _select(*alone)
    chex.assert_trees_all_equal(_in_use(actual, num), _in_use(want, num_alone))
    chex.assert_trees_all_equal(info, info_alone)
    chex.assert_trees_all_equal(summary, summary_alone)
    counts.append(int(num))
  assert counts[0] == 0 < counts[1]


def _state():
  zero, params = jnp.int32(0), small.params(0, MODEL)
  return TrainState(zero, zero, params, jax.jit(OPTIMIZER.init)(params), ())


@functools.partial(jax.jit, static_argnames="spec")
def _score(params, batch, num_micro, spec):
  stats = update.score(params, batch, num_micro, spec=spec)
  return choose_tokens(RNG, batch, stats, spec=spec)[0]


@functools.partial(jax.jit, static_argnames="spec")
def _one_step(state, batch, num_micro, spec):
  sums = update.sum_gradients(batch, num_micro, state.params, None, spec=spec)
  state, info = update.apply_gradient(state, sums, jnp.float32(6), OPTIMIZER)
  return state, info, sums.sums


@pytest.mark.parametrize(
  ("objective", "inner_updates"), [(PLAIN, 2), (objectives.gspo(), 1)]
)
def test_updates_on_a_rollout_are_optimizer_steps_from_one_old_policy(
  objective, inner_updates
):
  """With log-probabilities from before the first; the last ends the step."""
  spec = small.spec(
    model=MODEL,
    objective=objective,
    # Not the sampler's distribution: old log-probabilities are computed.
    sampling=Sampling(5, (small.STOP,), top_p=0.9),
    optimizer=OPTIMIZER,
    num_prompts=4,
    inner_updates=inner_updates,
    mini_batches=2,
  )
  first = small.params(0, MODEL)
  batches = []
  for part in range(2):
    batch, num, *_ = _select(*_sampled(), REWARDS, part, 2, objective)
    batches.append((_score(first, batch, num, spec), num))
  step = jax.jit(functools.partial(update.update, spec=spec))
  state = want = _state()
  clipped = []
  for number, batch in enumerate(batches * inner_updates):
    state, info = step(state, None, *batch, jnp.float32(6), jnp.int32(number))
    want, info_alone, sums = _one_step(want, *batch, spec)
    chex.assert_trees_all_close(info, info_alone, rtol=1e-4, atol=1e-6)
    assert int(state.step) == (number == 2 * inner_updates - 1)
    clipped.append(float(sums["clipped"]))
  chex.assert_trees_all_close(state.params, want.params, rtol=1e-5, atol=1e-6)
  assert clipped[0] == 0 < clipped[1]
  assert info["update/policy_ratio_max"] > 1.01


def test_metrics_of_several_updates_are_sums_means_or_extremes():
  """Two passes over a rollout in two parts."""
  names = (
    "completions/trained",
    "pack/fill",
    "weights/max",
    "prompts/prob_min",
    "update/grad_norm",
    "update/sampler_ratio_max",
    "update/entropy",
    "tokens/trained",
    "update/skipped_in_a_row",
  )
  values = [dict.fromkeys(names, float(x)) for x in (1, 2, 3, 6)]
  values[1]["update/skipped_in_a_row"] = 15.0  # before a finite update
  assert step_info.combined(values, passes=2) == dict(
    zip(names, (6, 3, 6, 1, 6, 1, 50 / 12, 6, 15), strict=True)
  )
  assert step_info.combined(values[:1], passes=1) == values[0]
