"""Randomness as a coordinate, never a stream.

A key is a function of (seed, step, stage) and, inside a stage, of the identity
of its item. Draws repeat after a restart, and the draw of one item does not
depend on the other items.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Stage(enum.IntEnum):
  """Consumers of randomness. Append only: reusing a value changes old runs.

  Randomness is indexed by the training step, except that DATA is indexed by
  the epoch, PROMPTS and ROLLOUT by the batch of prompts, as a step may draw
  several, SFT by the supervised step, and EVALUATE by the set of problems.
  """

  INIT = 0
  DATA = 1
  PROMPTS = 2
  ROLLOUT = 3
  COMPLETIONS = 4
  TOKENS = 5
  SFT = 6
  EVALUATE = 7
  NOISE = 8


class StepRng(NamedTuple):
  """A key and the training step it belongs to.

  Attributes:
    key: consumed by its receiver.
    step: None if a caller gave a key alone.
  """

  key: jax.Array
  step: jax.Array | None

  def at(self, stage: Stage) -> "StepRng":
    """Returns the randomness of one stage of this step."""
    return StepRng(_fold_in(self.key, stage), self.step)

  def draw(self, number: int) -> "StepRng":
    """Returns the randomness of one of several draws; draw 0 has this key."""
    key = _fold_in(self.key, number) if number else self.key
    return StepRng(key, self.step)


def as_step_rng(rng: StepRng | jax.Array) -> StepRng:
  """Returns `rng`; a bare key becomes the randomness of an unknown step."""
  return rng if isinstance(rng, StepRng) else StepRng(rng, None)


def rng_at(
  root_key: jax.Array, step: int | jax.Array, stage: Stage | None = None
) -> StepRng:
  """Returns the randomness of a step, or of one stage of it."""
  step = jnp.asarray(step, jnp.int32)
  rng = StepRng(_fold_in(root_key, step), step)
  return rng if stage is None else rng.at(stage)


@jax.jit
def _fold_in(key: jax.Array, data: int | jax.Array) -> jax.Array:
  return jax.random.fold_in(key, data)


def keys_for_ids(key: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns one key per id, independent of batch composition and order."""
  return jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
