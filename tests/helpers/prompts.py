"""All prompt rules in one table, compiled, and visits for them to remember."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import numpy as np

from dppo_jax import methods
from dppo_jax.algo import designs
from dppo_jax.methods import METHODS
from dppo_jax.rng import StepRng

NUM_PROMPTS, GRID_ERROR = 12, 2 / designs.GRID
drop, streaks, neyman = (
  methods.drop_by_history,
  methods.drop_zero_variance_streaks,
  methods.neyman_prompts,
)
PROMPT_RULES = {
  "every": methods.every_prompt(),
  "history": drop(0.6),
  "streaks": streaks(),
  "streaks_unweighted": methods.unweighted_prompts(streaks()),
  "neyman_half": neyman(0.5, prior=1.0),
  "neyman_other": neyman(0.7, 0.3, 0.0, 0.9),
}
# Costs for methods with an automatic budget, in place of measured seconds.
WITHOUT_CLOCK = {"neyman": {"update_cost": 0.5}}
EVERY = {
  name: make(**WITHOUT_CLOCK.get(name, {})) for name, make in METHODS.items()
}
for _name, _method in EVERY.items():  # every method obeys the laws too
  PROMPT_RULES[_name] = _method.prompts
# These say that they do not report the probability of their draw.
DISHONEST = {"streaks_unweighted", "greso"}

REWARDS = np.array(
  [[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0] * 6, [1] * 5 + [0], [1] * 6],
  np.float32,
)
VISITED = np.array([7, 2, 9, 4, 0], np.int32)
EASY, HARD, MIXED = [1.0] * 6, [0.0] * 6, [1.0] * 3 + [0.0] * 3
CANDIDATES = np.array([2, 11, 9, 0, 7, 4, 1, 5], np.int32)  # three are new


class Jitted(NamedTuple):
  """A rule's functions as compiled, on NumPy arrays, and what was traced."""

  init: Callable
  draws: Callable  # (history, ids, seed, step) -> Selection [NUM_DRAWS, N]
  observe: Callable
  traces: list

  def select(self, history, ids, seed=0, step=1):
    return jax.tree.map(lambda x: x[0], self.draws(history, ids, seed, step))


@functools.cache
def _keys(seed, num):
  return jax.random.split(jax.random.key(seed), num)


def jitted(rule, num_draws=20):
  traces = []

  @jax.jit
  def draws(history, ids, seeds, step):
    traces.append("select")
    select = lambda key: rule.select(StepRng(key, step), history, ids)
    return jax.lax.map(select, seeds)  # compiles faster than vmap

  @jax.jit
  def observe(history, step, ids, rewards, correct, lengths):
    traces.append("observe")
    return rule.observe(history, step, ids, rewards, correct, lengths)

  def observe_some(history, step, ids, rewards, lengths=None, correct=None):
    """Calls `observe` on eight prompts, padded with pruned ones.

    By default, lengths are 1 and rewards of 1 and more are for what is
    correct.
    """
    fill = lambda x, value: np.pad(
      x, ((0, 8 - len(ids)),) + ((0, 0),) * (x.ndim - 1), constant_values=value
    )
    rewards = np.asarray(rewards, np.float32)
    correct = np.clip(rewards, 0, 1) if correct is None else correct
    lengths = np.ones(rewards.shape, np.int32) if lengths is None else lengths
    correct = np.asarray(correct, np.float32)
    table = [fill(x, 0) for x in (rewards, correct, lengths)]
    ids = fill(np.asarray(ids, np.int32), NUM_PROMPTS)
    return jax.device_get(observe(history, step, ids, *table))

  return Jitted(
    init=lambda: jax.device_get(rule.init(NUM_PROMPTS)),
    draws=lambda history, ids, seed, step: jax.device_get(
      draws(history, ids, _keys(seed, num_draws), step)
    ),
    observe=observe_some,
    traces=traces,
  )


@functools.cache
def compiled(name):
  return jitted(PROMPT_RULES[name], num_draws=4000)


def lengths_of_visits():
  return np.arange(REWARDS.size, dtype=np.int32).reshape(REWARDS.shape) + 3


def seen(rule, steps=3):
  """Returns a rule's history after the same visits at each of some steps."""
  history = rule.init()
  for step in range(steps):
    history = rule.observe(history, step, VISITED, REWARDS, lengths_of_visits())
  return history


def prob_of(rule, history, ids, step=1):
  """Probabilities of `ids` among eight, the others of which are new."""
  new = np.full((8,), 10, np.int32)
  new[: len(ids)] = ids
  return rule.select(history, new, 0, step).prob[: len(ids)]
