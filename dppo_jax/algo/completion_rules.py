"""Which completions to train on: factories of `rule(draw, groups)`.

A rule returns a `Selection[Q, G]`. It looks at the whole group before anything
is dropped, and the probability it reports is that of the draw it makes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dppo_jax.keys import Draw
from dppo_jax.records import Groups, Selection

CompletionRule = Callable[[Draw, Groups], Selection]

# Advantages that are equal on paper differ in the last bits of a float32.
ROUNDING = 1e-5


def every_completion() -> CompletionRule:
  """Keeps all, with probability 1."""

  def rule(draw: Draw, groups: Groups) -> Selection:
    shape = groups.advantages.shape
    return Selection(jnp.ones(shape, bool), jnp.ones(shape, jnp.float32))

  return rule


def drop_small_advantage(rate: float) -> CompletionRule:
  """Drops with probability `rate` where |advantage| is below its group's mean.

  Args:
    rate: share of the eligible completions to drop, in [0, 1).
  Source: DPPO, arXiv:2603.04135, section 4.2.
  """
  check_rate(rate, "completion")

  def rule(draw: Draw, groups: Groups) -> Selection:
    size = jnp.abs(groups.advantages)
    mean = size.mean(axis=1, keepdims=True)
    is_small = size < mean * (1 - ROUNDING)
    prob = jnp.where(is_small, jnp.float32(1 - rate), 1.0)
    return Selection(jax.random.uniform(draw.key, prob.shape) < prob, prob)

  return rule


def unweighted(rule: CompletionRule) -> CompletionRule:
  """`rule` without its correction: probabilities of 1, hence a biased mean."""

  def biased(draw: Draw, groups: Groups) -> Selection:
    chosen = rule(draw, groups)
    return chosen.replace(prob=jnp.ones_like(chosen.prob))

  return biased


def check_rate(rate: float, what: str) -> None:
  """Refuses a pruning rate that would make some weight infinite."""
  if not 0 <= rate < 1:
    raise ValueError(
      f"a {what} pruning rate of {rate} is outside [0, 1): at 1 nothing "
      "could stand for what is dropped; see config.method.args"
    )
