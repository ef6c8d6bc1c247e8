"""Gradient noise: from momentum and random signs, against exact gradients."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.records import Selection, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step import optimizer as optimizers
from dppo_jax.step import select, update
from dppo_jax.step.optimizer import make_optimizer
from dppo_jax.step.pack import pack
from tests.helpers import small

NUM = 4
REWARDS = jnp.array([[1.0, 0, 0], [0, 1, 1], [1, 0, 1], [0, 0, 1]])
RNG = rng_at(jax.random.key(0), 0, Stage.COMPLETIONS)
# Rows so short that micro-batches cut through groups.
SPEC = PackingSpec(12, rows_per_micro=2, window=4, share_prefix=False)
GRPO = objectives.grpo()
PARAMS = small.params()  # made outside of any tracing
EVERY = np.ones(NUM, bool)
SOME = np.array([True, False, True, True])
ONE = np.array([False, False, True, False])
KEPT = {
  "every prompt": (EVERY, np.ones(NUM, np.float32)),
  "some, weighted": (SOME, np.array([0.5, 1, 0.8, 0.4], np.float32)),
  "a quarter": (ONE, np.full(NUM, 0.25, np.float32)),
}


def _rollout(is_kept, prob, is_present):
  """Completions of the kept prompts that are present."""
  full = small.rollout(small.prompts(NUM))
  is_present = is_present & is_kept
  return full.replace(
    lengths=jnp.where(is_present[:, None], full.lengths, 0),
    kept=Selection(jnp.asarray(is_present), jnp.asarray(prob)),
  )


@functools.partial(jax.jit, static_argnames="spec")
def _select(rollout, spec=SPEC):
  return select.select(
    RNG,
    small.prompts(NUM),
    rollout,
    jnp.where(rollout.kept.keep[:, None], REWARDS, 0.0),
    spec=small.spec(packing=spec),
  )


def _sum_squares(rollout):
  """The sum of all completions' squares, as a forecast has it."""
  return select.forecast(
    RNG,
    small.prompts(NUM),
    rollout,
    jnp.where(rollout.kept.keep[:, None], REWARDS, 0.0),
    spec=small.spec(method=methods.neyman(), packing=SPEC),
  ).sum_squares


SGD = make_optimizer(0.0, 10, clip_norm=0.5)  # no step moves
STEP = small.spec(optimizer=SGD)


@jax.jit
def _sum_gradients(batch, num_used):
  return update.sum_gradients(batch, num_used, PARAMS, None, spec=STEP)


@jax.jit
def _sums(rollout):
  batch, num_used, *_ = _select(rollout)
  return _sum_gradients(batch, num_used).grad


@jax.jit
def _signed_square(batch, num_used, by_segment):
  """Measures completions with the signs of the segments of each row."""
  draw = lambda key, shape, dtype: by_segment
  with mock.patch.object(jax.random, "rademacher", draw):
    return update.signed_square(RNG, PARAMS, None, batch, num_used, spec=STEP)


def _gradient(rollout):
  return jnp.concatenate(
    [jnp.ravel(x) for x in jax.tree.leaves(_sums(rollout))]
  )


@jax.jit
def _squared_norm(rollout, advantages, weights, q, i):
  """Returns that of one completion's gradient; all others have length 0."""
  lengths = jnp.zeros_like(rollout.lengths).at[q, i].set(rollout.lengths[q, i])
  alone = rollout.replace(lengths=lengths)
  weights = weights[:, None] / jnp.maximum(rollout.lengths, 1)
  rows, end, *_ = pack(small.prompts(NUM), alone, advantages, weights, SPEC)
  return optax.tree.norm(_sum_gradients(rows, end).grad, squared=True)


@pytest.mark.parametrize("name", KEPT)
def test_signs_average_to_the_sum_of_the_completions_squared_norms(name):
  """Over rows of a Hadamard matrix; weights of prompts count in full."""
  rollout = _rollout(*KEPT[name], EVERY)
  # All completions in one micro-batch, each of them a segment of a row.
  spec = PackingSpec(24, rows_per_micro=8, window=4, share_prefix=False)
  batch, end, _, summary = _select(rollout, spec)
  assert end == 1
  segments = np.asarray(batch.segment_ids[0])
  numbers = np.cumsum(np.r_[0, segments.max(axis=1)])  # first of each row

  def measure(signs):
    by_segment = np.zeros((8, 25), np.float32)
    for row in range(8):
      count = numbers[row + 1] - numbers[row]
      values = signs[numbers[row] : numbers[row + 1]]
      by_segment[row, 1 : count + 1] = values
    return _signed_square(batch, end, by_segment)

  matrix = scipy.linalg.hadamard(16)[:, : numbers[-1]].astype(np.float32)
  ratios = [measure(x) for x in matrix]
  within = np.mean(ratios) * jax.jit(_sum_squares)(rollout)
  want, weights = 0.0, 1 / KEPT[name][1]
  full = summary.advantages
  for q, i in np.argwhere(np.asarray(summary.trained_lengths) > 0):
    # The advantage is the one of the full group.
    want += _squared_norm(rollout, full, weights, q, i)
  np.testing.assert_allclose(within, want, rtol=1e-4)


def _update(state, rollout):
  batch, num_used, *_ = _select(rollout)
  return update.update(
    state, None, batch, num_used, jnp.float32(REWARDS.size), spec=STEP
  )


def test_norms_of_the_momentum_give_its_product_with_the_gradient():
  """Clipping shortens the gradients in the momentum, but not the estimate."""
  zero, opt_state = jnp.int32(0), SGD.init(PARAMS)
  state = TrainState(zero, zero, PARAMS, opt_state, ())
  rollouts = [_rollout(EVERY, np.ones(NUM, np.float32), EVERY)]
  rollouts += [_rollout(SOME, KEPT["some, weighted"][1], EVERY)]
  one, two = (_gradient(x) / REWARDS.size for x in rollouts)
  state, first = jax.jit(_update)(state, rollouts[0])
  before = optimizers.momentum_square(state.opt_state)
  state, info = jax.jit(_update)(state, rollouts[1])
  after = optimizers.momentum_square(state.opt_state)
  kept = [float(min(0.5 / x["update/grad_norm"], 1.0)) for x in (first, info)]
  product = gradient_noise.product_with_momentum(
    float(before), float(after), kept[1] * float(info["update/grad_norm"]), 0.9
  )
  np.testing.assert_allclose(
    product / kept[1] / (0.1 * kept[0]), one @ two, rtol=1e-3
  )


OPTIMIZERS = {
  "adamw": (None, 0.9),
  "lion": (optax.lion, 0.99),
  "sgd": (optax.sgd, 0.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_decay_of_any_momentum_is_found(name):
  factory, decay = OPTIMIZERS[name]
  optimizer = make_optimizer(1e-3, 10, factory=factory)
  assert optimizers.momentum_decay(optimizer) == decay
  square = optimizers.momentum_square(optimizer.init(PARAMS))
  assert np.isnan(square) == (decay == 0)


def test_signal_and_noise_are_unbiased_over_all_draws():
  """Three gradients, each one of four vectors; the last is measured."""
  vectors = np.random.default_rng(0).normal(size=(4, 3)) + 0.5
  signals, noises, clip = [], [], 1.5
  for a, b, c in itertools.product(vectors, repeat=3):
    noise, momentum = gradient_noise.init(), np.zeros(3)
    for g in (a, b):
      kept = min(clip / np.linalg.norm(g), 1.0)
      momentum = 0.9 * momentum + 0.1 * kept * g
      noise = gradient_noise.add_momentum(noise, 0.9, float(kept))
    # The weights of clipped gradients depend on their lengths.
    weighted = noise.momentum
    moved = 0.9 * momentum + 0.1 * c
    product = gradient_noise.product_with_momentum(
      momentum @ momentum, moved @ moved, float(np.linalg.norm(c)), 0.9
    )
    noise = gradient_noise.add_gradient(
      noise, float(c @ c), float(product), 0.0
    )
    signals.append(float(noise.signal * weighted))
    noises.append(float(noise.noise + noise.signal))
  kept = np.minimum(clip / np.linalg.norm(vectors, axis=1), 1.0)
  mean = vectors.mean(axis=0)
  clipped = (vectors * kept[:, None]).mean(axis=0)
  scale = 1 - gradient_noise.DECAY
  want = mean @ clipped * (0.09 + 0.1)
  np.testing.assert_allclose(np.mean(signals) / scale, want, rtol=1e-4)
  square = (vectors**2).sum(axis=1).mean()
  np.testing.assert_allclose(np.mean(noises) / scale, square, rtol=1e-4)


def test_measurements_are_smoothed_and_non_finite_ones_left_out():
  f = float
  empty = gradient_noise.init()
  assert gradient_noise.noise_fraction(empty) == 1
  assert gradient_noise.within_fraction(empty) == np.inf
  add = gradient_noise.add_gradient
  assert add(empty, 3.0, 2.0, 0.0) == empty  # no momentum yet
  old = empty._replace(momentum=np.float32(0.5))
  one = add(old, f(3), f(1), f(0))
  np.testing.assert_allclose((one.signal, one.noise), (0.2, 0.1), rtol=1e-5)
  pruned = add(old, f(3), f(1), f(0.25))
  np.testing.assert_allclose(pruned.noise, 0.08, rtol=1e-5)
  assert add(one, f(np.nan), f(1), f(0)) == one
  assert gradient_noise.add_signs(one, f(3), f(np.nan), f(0)) == one
  metrics = gradient_noise.describe(one, 8)
  assert metrics["noise/scale"] == pytest.approx(4)  # half as much as signal
  assert metrics["noise/fraction"] == pytest.approx(1 / 3)
  # Two passes over the same prompts count their noise twice.
  assert gradient_noise.noise_fraction(one, 2) == pytest.approx(0.5)
