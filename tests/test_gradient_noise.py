"""Gradient noise: measured with random signs, against per-prompt gradients."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import small

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.methods.neyman.step_costs import CostTracker, StepSample
from dppo_jax.records import Selection
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step import select, update
from dppo_jax.step.measure_noise import measure_noise

NUM = 4
REWARDS = jnp.array([[1.0, 0, 0], [0, 1, 1], [1, 0, 1], [0, 0, 1]])
RNG = rng_at(jax.random.key(0), 0, Stage.COMPLETIONS)
# Rows so short that micro-batches cut through groups.
SPEC = PackingSpec(12, rows_per_micro=2, window=4, share_prefix=False)
GRPO = objectives.grpo()
PARAMS = small.params()  # made outside of any tracing
EVERY = np.ones(NUM, bool)
SOME = np.array([True, False, True, True])
KEPT = {
  "every prompt": (EVERY, np.ones(NUM, np.float32)),
  "some, weighted": (SOME, np.array([0.5, 1, 0.8, 0.4], np.float32)),
}


def _rollout(is_kept, prob, is_present):
  """Completions of the kept prompts that are present."""
  full = small.rollout(small.prompts(NUM))
  is_present = is_present & is_kept
  return full.replace(
    lengths=jnp.where(is_present[:, None], full.lengths, 0),
    kept=Selection(jnp.asarray(is_present), jnp.asarray(prob)),
  )


def _select(rollout, parts=1):
  return select.select(
    RNG,
    small.prompts(NUM),
    rollout,
    jnp.where(rollout.kept.keep[:, None], REWARDS, 0.0),
    method=methods.grpo(),
    objective=GRPO,
    spec=SPEC,
    mini_batches=parts,
  )


def _config(parts=1):
  return update.UpdateConfig(
    small.MODEL, GRPO, logit_chunk=16, mini_batches=parts
  )


@functools.partial(jax.jit, static_argnames="parts")
def _gradient(rollout, parts):
  batch, num_used, *_ = _select(rollout)
  config = _config(parts)  # with parts, ratios are not 1
  sums = update.sum_gradients(batch, num_used, PARAMS, None, config)
  return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(sums.grad)])


@functools.partial(jax.jit, static_argnames="parts")
def _measure(rollout, signs, parts=1, apart=None):
  """One measurement with given signs of prompts and of completions."""
  if apart is None:
    apart = jnp.ones(REWARDS.shape)
  batch, num_micro, info, summary = _select(rollout, parts)
  with mock.patch.object(
    gradient_noise,
    "random_signs",
    lambda key, shape: signs if isinstance(shape, int) else apart,
  ):
    return measure_noise(
      RNG,
      gradient_noise.init(),
      PARAMS,
      None,
      batch,
      num_micro,
      small.prompts(NUM),
      rollout,
      summary,
      info,
      config=_config(parts),
      spec=SPEC,
    )


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("parts", [1, 2])
def test_all_signs_average_to_the_noise_of_all_pairs_of_prompts(name, parts):
  """With mini-batches, the first is measured: that of every other prompt."""
  measured = np.arange(NUM) % parts == 0
  num = (measured & KEPT[name][0]).sum()
  alone = np.array(
    [
      _gradient(_rollout(*KEPT[name], np.arange(NUM) == q), parts)
      for q in np.flatnonzero(measured)
    ],
    np.float64,
  )
  products = alone @ alone.T
  total = products.sum()
  pairs = (total - np.trace(products)) / (num * (num - 1))
  rollout = _rollout(*KEPT[name], EVERY)
  signs = np.array(list(np.ndindex(*(2,) * NUM)), np.float32) * 2 - 1
  noise = [_measure(rollout, x, parts) for x in signs]
  # |E g|^2 of a sum of prompts, from all pairs of different ones.
  signal = np.mean([x.signal for x in noise])
  np.testing.assert_allclose(signal, num**2 * pairs, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(
    np.mean([x.noise for x in noise]), total - num**2 * pairs, rtol=1e-4
  )


@pytest.mark.parametrize("name", KEPT)
def test_signs_of_completions_average_to_the_sum_of_their_squares(name):
  """Over rows of a Hadamard matrix, whose columns are orthogonal.

  Weighted terms count by the root of their weights: on average over draws that
  is the sum of the full batch.
  """
  rollout, weights = _rollout(*KEPT[name], EVERY), 1 / KEPT[name][1]
  matrix = scipy.linalg.hadamard(16)[:, : REWARDS.size].astype(np.float32)
  noise = [
    _measure(rollout, np.ones(NUM, np.float32), apart=x.reshape(REWARDS.shape))
    for x in matrix
  ]
  total = 0.0
  for q, i in np.argwhere(np.asarray(rollout.lengths) > 0):
    one = np.zeros(REWARDS.shape, np.float32)
    one[q, i] = 1
    alone = _measure(rollout, np.ones(NUM, np.float32), apart=one).apart
    total += alone
  np.testing.assert_allclose(
    np.mean([x.apart for x in noise]), total, rtol=1e-4
  )
  only = _rollout(*KEPT[name], np.arange(NUM) == 0)
  first = _measure(only, np.ones(NUM, np.float32))
  full = np.square(_gradient(only, 1)).sum()
  np.testing.assert_allclose(first.apart, full / weights[0], rtol=1e-4)


def test_the_signal_is_unbiased_over_draws_of_prompts():
  """Two of four prompts, equally likely and weighted: every draw, all signs."""
  half, signals = np.full(NUM, 0.5, np.float32), []
  signs = np.array(list(np.ndindex(*(2,) * NUM)), np.float32) * 2 - 1
  for pair in itertools.combinations(range(NUM), 2):
    is_kept = np.isin(np.arange(NUM), pair)
    rollout = _rollout(is_kept, half, EVERY)
    signals += [_measure(rollout, x).signal for x in signs]
  want = [_measure(_rollout(*KEPT["every prompt"], EVERY), x) for x in signs]
  want = np.mean([x.signal for x in want])
  np.testing.assert_allclose(np.mean(signals), want, rtol=1e-4)


def test_signs_depend_on_the_seed():
  keys = jax.random.split(jax.random.key(0), 2)
  one, two = (gradient_noise.random_signs(key, 64) for key in keys)
  assert (one != two).any()


def test_measurements_are_smoothed_and_non_finite_ones_left_out():
  add = gradient_noise.add_measurement
  one = add(gradient_noise.init(), jnp.float32(3), jnp.float32(2), 2)
  assert (one.signal, one.noise) == (2, 1)
  two = add(one, jnp.float32(1), jnp.float32(1), 2)
  np.testing.assert_allclose((two.signal, two.noise), (1.4, 1.7), rtol=1e-6)
  pruned = add(gradient_noise.init(), jnp.float32(3), jnp.float32(2), 2, 0.25)
  assert (pruned.signal, pruned.noise) == (2, 0.8)
  assert add(one, jnp.float32(np.nan), jnp.float32(1), 2) == one
  metrics = gradient_noise.describe(one, 8)
  assert metrics["noise/scale"] == pytest.approx(4)  # half as much as signal
  assert metrics["noise/fraction"] == pytest.approx(1 / 3)
  # With one prompt there is nothing to compare: all is noise.
  assert gradient_noise.noise_fraction(add(one, *jnp.ones(2), 1)) > 1 / 3
  assert gradient_noise.noise_fraction(gradient_noise.init()) == 1


@pytest.mark.parametrize("update_cost", [10.0, 30.0, 100.0])
@pytest.mark.parametrize("within", [3.0, 100.0])
def test_group_size_and_budget_in_turn_reach_the_best_pair(update_cost, within):
  """Against all pairs; a draw adds 0.6 (1 / keep - 1) of the noise within.

  The signal is 1, and the noise between prompts 2.
  """
  added = lambda keep: 0.6 * (1 / keep - 1)
  cost = lambda size, keep: (
    size
    * (1 + update_cost * keep)
    * (3 + within / (size - 1) * (1 + added(keep)))
  )
  keeps, sizes = np.geomspace(0.01, 1.0, 300), np.linspace(2.0, 64.0, 600)
  size = 4.0
  for _ in range(20):
    keep = keeps[np.argmin(cost(size, keeps))]
    apart = within / (size - 1)
    drawn = 2 + apart * (1 + added(keep))
    noise = gradient_noise.add_measurement(
      gradient_noise.init(),
      total=jnp.float32(1 + drawn),
      signed=jnp.float32(drawn),
      num_prompts=10**6,
      added=float(added(keep)) * apart / (2 + apart),
      apart=apart,
      group_size=size,
    )
    size = gradient_noise.best_group_size(noise, 64)
  assert cost(size, keep) < 1.01 * cost(sizes[:, None], keeps).min()


def test_costs_are_ratios_of_smoothed_seconds():
  tracker = CostTracker(rows_per_micro=4)
  noise = gradient_noise.Noise(*(jnp.float32(x) for x in (3, 3, 6, 12, 3)))
  first = tracker.costs(noise, 8)
  assert first.other_seconds == first.micro_seconds == 0
  sample = StepSample(update=6.0, other=2.0, micros=3, rows=10, tokens=50)
  for _ in range(3):
    tracker.add(sample)
  costs = tracker.costs(noise, 8)
  assert (costs.apart_fraction, costs.group_size) == (2, 3)
  assert tracker.costs(noise, 2).group_size == 2
  assert tracker.costs(gradient_noise.init(), 8).group_size == 4
  np.testing.assert_allclose(
    [costs.noise_fraction, costs.micro_seconds, costs.micro_tokens],
    [0.5, 2.0, 20.0],
    rtol=1e-6,
  )
  np.testing.assert_allclose(costs.other_seconds, 2.0, rtol=1e-6)
