"""Groups of completions, and what rules choose of them, as NumPy arrays."""

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax.algo import advantages
from dppo_jax.records import Groups
from dppo_jax.rng import StepRng

BINARY = np.array(
  [[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0] * 6, [1] * 5 + [0]], np.float32
)


def draw(seed, step=0):
  key = jax.random.key(seed)
  return StepRng(key, jnp.int32(step))


def groups_of(values, pruned=(), **others):
  """Groups of given advantages, of which some rows were not rolled out."""
  values = np.array(values, np.float32)
  lengths = np.full(values.shape, 5, np.int32)
  lengths[list(pruned)] = 0
  lengths = others.pop("lengths", lengths)
  others = {name: jnp.array(x) for name, x in others.items()}
  return Groups(
    jnp.array(values), jnp.array(values), jnp.array(lengths), **others
  )


def choose(rule, groups, seed=0, step=0):
  chosen = jax.jit(rule)(draw(seed, step), groups)
  return np.asarray(chosen.keep), np.asarray(chosen.prob)


def many(rule, num=500):
  """The function of groups that makes `num` draws, `[num, Q, G]`."""
  every = jax.random.split(jax.random.key(0), num)
  draws = jax.jit(
    jax.vmap(
      lambda key, groups: rule(StepRng(key, jnp.int32(0)), groups), (0, None)
    )
  )

  def choose(groups):
    chosen = draws(every, groups)
    return np.asarray(chosen.keep), np.asarray(chosen.prob)

  return choose


_group_normalized = jax.jit(advantages.group_normalized)


def normalized(rewards):
  return np.array(_group_normalized(np.float32(rewards)))


# Small whole numbers tie often; a third of one is not exact in float32.
VALUES = st.lists(
  st.integers(-4, 4).map(lambda x: x / 3), min_size=18, max_size=18
).map(lambda x: np.array(x, np.float32).reshape(3, 6))
