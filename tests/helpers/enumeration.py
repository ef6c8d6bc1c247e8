"""Every draw that a rule may make, with its chance: none is sampled."""

import contextlib
import functools
import inspect
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax.algo import designs
from dppo_jax.methods import method


def _offsets(prob):
  """An offset of every different systematic draw, with its chance."""
  units = np.floor(np.asarray(prob) * designs.GRID).astype(np.int64)
  marks = np.unique(np.append(np.cumsum(units) % designs.GRID, 0))
  chances = np.diff(np.append(marks, designs.GRID)) / designs.GRID
  return [(c, np.uint32(m)) for c, m in zip(chances, marks, strict=True)]


def _outcomes(prob):
  """Every outcome of independent draws, with its chance."""
  prob = np.asarray(prob)
  for bits in itertools.product((False, True), repeat=prob.size):
    keep = np.array(bits).reshape(prob.shape)
    chance = np.where(keep, prob, 1 - prob).prod()
    if chance:
      yield chance, jnp.array(keep)


class Draws:
  """All that a function which draws may return, each with its chance.

  A systematic draw is made at each of its offsets. Independent draws compare a
  random number with each item's probability: they are made with each
  combination of numbers just below the probabilities, which must keep, and at
  them, which must drop. Any other draw is an error, as it would be left out.
  """

  def __init__(self, draws, shape):
    self._shape = shape

    def at(offset, noise, *args):
      probs = []

      def systematic(key, prob):
        probs.append(prob)
        return designs.systematic_at(offset, prob)

      def uniform(key, shape=(), *unused):
        if shape != self._shape:
          raise AssertionError(f"random numbers for {shape}, not {self._shape}")
        return noise

      with contextlib.ExitStack() as patches:
        patch = lambda *args: patches.enter_context(mock.patch.object(*args))
        for name in SAMPLERS:
          patch(jax.random, name, functools.partial(_refuse, name))
        patch(jax.random, "uniform", uniform)
        patch(designs, "systematic", systematic)
        of_ids = lambda key, ids: uniform(key, ids.shape)
        patch(method, "uniform_for_ids", of_ids)
        return *draws(*args), probs

    self._at = jax.jit(at)

  def __call__(self, *args):
    least = jnp.zeros(self._shape)
    chosen, *_, probs = self._at(np.uint32(0), least, *args)
    if not probs:
      for chance, keep in _outcomes(chosen.prob):
        below = jnp.nextafter(chosen.prob, jnp.zeros_like(chosen.prob))
        noise = jnp.where(keep, below, chosen.prob)
        yield chance, *self._at(np.uint32(0), noise, *args)[:-1]
      return
    # Random numbers may order ties, but not choose as well.
    other, *_ = self._at(np.uint32(0), least + (1 - 2.0**-24), *args)
    if len(probs) > 1 or (other.keep != chosen.keep).any():
      raise AssertionError("it draws more than once")
    for chance, offset in _offsets(probs[0]):
      yield chance, *self._at(offset, least, *args)[:-1]


# What draws random numbers, but for `uniform`.
SAMPLERS = {
  name
  for name, value in vars(jax.random).items()
  if inspect.isfunction(value)
  and "shape" in inspect.signature(value).parameters
} | {"permutation", "bits"}


def _refuse(name, *args, **kwargs):
  raise AssertionError(f"a draw by jax.random.{name} is left out")
