"""Pruned prompts and several updates on a rollout: what is exact, and what not.

All draws of the prompts of four problems in two mini-batches are listed.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.algo import designs, objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.rng import Stage, keys_for_ids, rng_at
from dppo_jax.step import collect, select, update
from tests.helpers import small
from tests.helpers.enumeration import Draws

pytestmark = pytest.mark.slow

REWARDS = jnp.array([[1.0, 0, 0], [0, 1, 1], [0, 1, 0], [1, 0, 1]])
IDS = jnp.arange(4, dtype=jnp.int32)
RNG = rng_at(jax.random.key(0), 1, Stage.PROMPTS)
OBJECTIVE = objectives.dr_grpo(0.5, 0.5)
SPEC = PackingSpec(row_length=24, rows_per_micro=4, window=4)
STEP = small.spec(objective=OBJECTIVE, packing=SPEC, inner_updates=2)
PARAMS = small.params(0)
FLAT, UNFLATTEN = jax.flatten_util.ravel_pytree(PARAMS)
RATE = 0.3  # of SGD


def _history(method):
  """After a visit whose groups differ, so that no two prompts are alike."""
  before = jnp.array([[1.0, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0]])
  lengths = jnp.array([[4, 5, 3], [2, 2, 2], [5, 5, 5], [1, 2, 1]], jnp.int32)
  history = method.prompts.init(4)
  zero = jnp.int32(0)
  return method.prompts.observe(history, zero, IDS, before, before, lengths)


def _offsets(prob):
  """An offset of every different systematic draw in any order, with chances."""
  units = np.floor(np.asarray(prob) * designs.GRID).astype(np.int64)
  sums = [np.dot(bits, units) for bits in np.ndindex(*(2,) * len(units))]
  marks = np.unique(np.mod(sums, designs.GRID))
  chances = np.diff(np.append(marks, designs.GRID)) / designs.GRID
  return [(c, np.uint32(m)) for c, m in zip(chances, marks, strict=True)]


def _fixed_size_draws(method, num_parts):
  """Every draw of a fixed number of prompts, with its chance."""
  parts = jnp.arange(num_parts, dtype=jnp.int32)
  keys = [RNG.key] if num_parts == 1 else keys_for_ids(RNG.key, parts)
  keys = [jax.random.key_data(jax.random.split(x)[1]) for x in keys]
  assert len({tuple(x.tolist()) for x in keys}) == num_parts

  @jax.jit
  def choose(offsets):
    def systematic(key, prob):
      is_mine = (jax.random.key_data(key) == jnp.stack(keys)).all(axis=1)
      offset = jnp.where(is_mine, offsets, jnp.uint32(0)).sum(dtype=jnp.uint32)
      return designs.systematic_at(offset, prob)

    with mock.patch.object(designs, "systematic", systematic):
      return collect.choose_prompts(
        RNG,
        _history(method),
        IDS,
        jnp.int32(4),
        spec=small.spec(method=method, mini_batches=num_parts),
      )

  prob = choose(jnp.zeros(num_parts, jnp.uint32)).prob
  marks = [_offsets(prob[part::num_parts]) for part in range(num_parts)]
  for choices in np.ndindex(*map(len, marks)):
    chances, offsets = zip(
      *(marks[part][i] for part, i in enumerate(choices)), strict=True
    )
    yield np.prod(chances), choose(jnp.array(offsets, jnp.uint32))


@functools.partial(jax.jit, static_argnames="num_parts")
def _gradient(flat, kept, part, num_parts):
  prompts = small.prompts(4)
  rollout = small.rollout(prompts)
  keep = kept.keep[:, None]
  batch, num_micro, *_ = select.select(
    RNG,
    prompts,
    rollout.replace(lengths=jnp.where(keep, rollout.lengths, 0), kept=kept),
    jnp.where(keep, REWARDS, 0.0),
    part=part,
    spec=dataclasses.replace(STEP, mini_batches=num_parts),
  )
  sums = update.sum_gradients(
    batch, num_micro, UNFLATTEN(flat), None, spec=STEP
  )
  return jax.flatten_util.ravel_pytree(sums.grad)[0] / (12 / num_parts)


def _bias_of_later_update(draws, part, num_parts):
  """The largest, given the parameters that the first update leads to.

  Relative to the size of the gradient.
  """
  all_kept = small.everything(4)
  results = {}
  for chance, kept in draws:
    first = _gradient(FLAT, kept, 0, num_parts)
    key = np.asarray(first).tobytes()
    flat = FLAT - RATE * first
    later = np.asarray(_gradient(flat, kept, part, num_parts), np.float64)
    total, mean, _ = results.get(key, (0.0, 0.0, None))
    full = np.asarray(_gradient(flat, all_kept, part, num_parts), np.float64)
    results[key] = total + chance, mean + chance * later, full
  assert len(results) > 1
  np.testing.assert_allclose(sum(x for x, *_ in results.values()), 1, rtol=1e-6)
  return max(
    np.linalg.norm(mean / total - full) / np.linalg.norm(full)
    for total, mean, full in results.values()
  )


def test_prompts_of_a_fixed_number_are_drawn_within_each_mini_batch():
  """With one draw for both parts, the second update is biased."""
  method = methods.neyman(0.5, 1.0)
  within = list(_fixed_size_draws(method, num_parts=2))
  assert all(
    kept.keep[part::2].sum() == 1 for _, kept in within for part in (0, 1)
  )
  assert _bias_of_later_update(within, 1, 2) < 2e-5
  tied = list(_fixed_size_draws(method, num_parts=1))
  assert _bias_of_later_update(tied, 1, 2) > 0.3


def test_a_second_pass_is_unbiased_given_the_prompts_alone():
  """Its parameters depend on which prompts the first pass had."""
  method = methods.dppo(0.6, 0.7)
  choose = lambda: (
    collect.choose_prompts(
      RNG, _history(method), IDS, jnp.int32(4), spec=small.spec(method=method)
    ),
  )
  prompts = list(Draws(choose, IDS.shape)())
  assert len(prompts) > 1
  assert _bias_of_later_update(prompts, 0, 1) > 0.1

  # Given the prompts, the mean over completions is the gradient of all of them.
  def kept_completions(kept):
    rollout = small.rollout(small.prompts(4)).replace(kept=kept)
    rollout = rollout.replace(
      lengths=jnp.where(kept.keep[:, None], rollout.lengths, 0)
    )
    chosen = []

    def spy(*args):
      chosen.append(method.completions(*args))
      return chosen[0]

    batch, num_micro, *_ = select.select(
      RNG,
      small.prompts(4),
      rollout,
      jnp.where(kept.keep[:, None], REWARDS, 0.0),
      spec=dataclasses.replace(STEP, method=method._replace(completions=spy)),
    )
    return chosen[0], batch, num_micro

  sum_up = jax.jit(
    lambda flat, *batch: jax.flatten_util.ravel_pytree(
      update.sum_gradients(*batch, UNFLATTEN(flat), None, spec=STEP).grad
    )[0]
  )
  draws = Draws(kept_completions, (4, 3))
  _, kept = prompts[-1]
  flat = FLAT - RATE * _gradient(FLAT, kept, 0, 1)
  mean = sum(
    chance * np.asarray(sum_up(flat, *batch), np.float64) / 12
    for chance, _, *batch in draws(kept)
  )
  np.testing.assert_allclose(mean, _gradient(flat, kept, 0, 1), atol=2e-6)
