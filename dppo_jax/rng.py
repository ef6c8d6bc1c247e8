"""Where randomness comes from: a key is a coordinate, never a stream.

Randomness is a function of (seed, step, stage) and, inside a stage, of the
identity of the item it is for. It can be repeated after a restart, and what
one item samples does not depend on which other items there are.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dppo_jax.records import Measured


class Stage(enum.IntEnum):
  """Who samples. Append only: a number, once used, keeps its meaning.

  The step is that of the run; but DATA counts epochs, and PROMPTS and ROLLOUT
  count batches of prompts, of which one step may draw several.
  """

  INIT = 0
  DATA = 1
  PROMPTS = 2
  ROLLOUT = 3
  COMPLETIONS = 4
  TOKENS = 5
  SFT = 6
  EVALUATE = 7


class StepRng(NamedTuple):
  """Randomness of one stage at one step; whoever receives it consumes it.

  Attributes:
    step: None where a caller gave a key alone.
    measured: what earlier steps tell, for the rules of a method that reads it;
      nothing of this step, whose draws may then depend on it.
  """

  key: jax.Array
  step: jax.Array | None
  measured: Measured | None = None


def as_step_rng(rng: StepRng | jax.Array) -> StepRng:
  """`rng`; a key alone stands for the randomness of a step not known."""
  return rng if isinstance(rng, StepRng) else StepRng(rng, None)


@jax.jit
def rng_at(root_key: jax.Array, step: int | jax.Array, stage: Stage) -> StepRng:
  """The randomness of `stage` at `step` under `root_key`."""
  step = jnp.asarray(step, jnp.int32)
  key = jax.random.fold_in(jax.random.fold_in(root_key, step), stage)
  return StepRng(key, step)


def keys_for_ids(key: jax.Array, ids: jax.Array) -> jax.Array:
  """One key per id, independent of batch composition and order."""
  return jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
