"""Where randomness comes from: a key is a coordinate, never a stream.

A draw is a function of (seed, step, room) and, inside a room, of the identity
of the item it is for. Any draw can be repeated after a restart, and what one
item draws does not depend on which other items there are.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Room(enum.IntEnum):
  """Who draws. Append only: a number, once used, keeps its meaning."""

  INIT = 0
  DATA = 1
  PROMPTS = 2
  ROLLOUT = 3
  COMPLETIONS = 4
  TOKENS = 5
  WARMUP = 6
  EVALUATE = 7


class Draw(NamedTuple):
  """Randomness of one room at one step; whoever receives it consumes it."""

  key: jax.Array
  step: jax.Array


@jax.jit
def draw_at(root_key: jax.Array, step: int | jax.Array, room: Room) -> Draw:
  """The randomness of `room` at `step` under `root_key`."""
  step = jnp.asarray(step, jnp.int32)
  key = jax.random.fold_in(jax.random.fold_in(root_key, step), room)
  return Draw(key, step)


def for_items(key: jax.Array, ids: jax.Array) -> jax.Array:
  """One key for each of `ids`, whatever the company and order they are in."""
  return jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
