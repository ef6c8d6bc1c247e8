"""Which prompts to roll out: `PromptRule` values, and what they remember.

A rule sees only what was observed before this step, so its choice is
independent of the rollouts to come and the weight 1 / prob leaves the expected
gradient that of the full batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from dppo_jax import keys
from dppo_jax.algo import advantages
from dppo_jax.algo.completion_rules import ROUNDING, check_rate
from dppo_jax.records import Selection

History = PyTree[jax.Array]


class PromptRule(NamedTuple):
  """A way to choose prompts, as pure functions.

  Attributes:
    init: `num_prompts -> history`, the memory of `M` problems.
    select: `(draw, history, ids [N]) -> Selection [N]`.
    observe: `(history, step, ids [Q], rewards [Q, G]) -> history`; an id
      outside `0..M-1` is a prompt that was not rolled out and changes nothing.
  """

  init: Callable[..., History]
  select: Callable[..., Selection]
  observe: Callable[..., History]


def every_prompt() -> PromptRule:
  """Keeps all, with probability 1, and remembers nothing."""

  def select(draw, history, ids):
    return Selection(jnp.ones(ids.shape, bool), jnp.ones(ids.shape))

  return PromptRule(
    init=lambda num_prompts: (),
    select=select,
    observe=lambda history, step, ids, rewards: history,
  )


def drop_by_history(
  rate: float,
  advantage: Callable[
    [Float[Array, "Q G"]], Float[Array, "Q G"]
  ] = advantages.group_normalized,
) -> PromptRule:
  """Drops with probability `rate` where the last visit taught less than usual.

  A prompt's score is the mean |advantage| of its group at its last visit; it
  is eligible where that is below the mean score of the candidates that were
  ever visited. A prompt never visited is always kept.

  Args:
    rate: share of the eligible prompts to drop, in [0, 1).
    advantage: rewards to advantages, as the method computes them.
  Source: DPPO, arXiv:2603.04135, section 4.2; InfoBatch, arXiv:2303.04947,
    for the soft threshold at the mean.
  """
  check_rate(rate, "prompt")

  def init(num_prompts: int) -> Float[Array, "M"]:
    return jnp.full((num_prompts,), jnp.inf, jnp.float32)

  def select(draw, history, ids):
    score = history[ids]
    is_visited = jnp.isfinite(score)
    total = jnp.where(is_visited, score, 0.0).sum()
    count = is_visited.sum(dtype=jnp.float32)
    mean = total / jnp.maximum(count, 1.0)
    is_eligible = is_visited & (score < mean * (1 - ROUNDING))
    prob = jnp.where(is_eligible, jnp.float32(1 - rate), 1.0)
    item_keys = keys.for_items(draw.key, ids)
    return Selection(jax.vmap(jax.random.uniform)(item_keys) < prob, prob)

  def observe(history, step, ids, rewards):
    score = jnp.abs(advantage(rewards)).mean(axis=1)
    return history.at[ids].set(score, mode="drop")

  return PromptRule(init, select, observe)
