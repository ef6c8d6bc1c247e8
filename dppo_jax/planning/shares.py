"""How much a method leaves of a step, tried on groups that are made up."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dppo_jax.algo import policy_loss
from dppo_jax.methods import Method
from dppo_jax.records import Groups, Measured
from dppo_jax.rng import Stage, rng_at

_PROMPTS = 256
_VISITS = 4  # to each prompt, before the share of prompts is taken


class Shares(NamedTuple):
  """What is left of the prompts drawn and of their completions.

  Attributes:
    prompts: rolled out.
    completions: trained on, of those that were rolled out; none of zero
      advantage, unless there is a KL penalty.
    mixed: groups that have one trained completion or more.
    draws: times that prompts are drawn, for dynamic sampling.
  """

  prompts: float
  completions: float
  mixed: float
  draws: float = 1.0


def try_out(
  method: Method,
  objective: policy_loss.Objective,
  group_size: int,
  zero_variance: float,
  step: int = 0,
  update_cost: float = 1.0,
) -> Shares:
  """The shares that a method keeps of groups of a stated kind.

  All completions of a group have the same reward with probability
  `zero_variance`, as many right as wrong; in the others each is right with a
  chance that is uniform between 0 and 1. Lengths are equal. A prompt keeps its
  kind from visit to visit.

  Args:
    step: of the run, for methods that prune more as it goes on.
    update_cost: seconds of an update on all that is needed over the others of
      a step, for methods whose shares set themselves; gradients are all noise.
  """
  root, ids = jax.random.key(0), jnp.arange(_PROMPTS, dtype=jnp.int32)
  key_rate, key_kind, key_reward = jax.random.split(root, 3)
  rate = jax.random.uniform(key_rate, (_PROMPTS,))
  is_flat = jnp.arange(_PROMPTS) < round(zero_variance * _PROMPTS)
  rate = jnp.where(is_flat, jnp.float32(rate < 0.5), rate)
  rate = jax.random.permutation(key_kind, rate)
  shape = (_PROMPTS, group_size)

  @jax.jit
  def visit(history, number):
    def at(stage, num_needed=1e3):
      """Where an update on `num_needed` tokens costs what was said."""
      # In so many micro-batches that it does not matter how full the last is.
      tokens = num_needed / 1e3
      numbers = (1.0, update_cost / 1e3, tokens, 1.0, 1.0, 0.0)
      measured = Measured(*(jnp.float32(x) for x in numbers))
      return rng_at(root, step + number, stage)._replace(measured=measured)

    kept = method.prompts.select(at(Stage.PROMPTS), history, ids)
    key = jax.random.fold_in(key_reward, number)
    correct = jax.random.uniform(key, shape) < rate[:, None]
    rewards = jnp.where(kept.keep[:, None], correct.astype(jnp.float32), 0.0)
    lengths = jnp.where(kept.keep[:, None], jnp.full(shape, 100), 0)
    advantages = objective.advantage(rewards)
    is_needed = lengths > 0
    if not objective.beta:
      is_needed &= advantages != 0
    groups = Groups(rewards, advantages, lengths, is_needed=is_needed)
    num_needed = jnp.maximum(jnp.where(is_needed, lengths, 0).sum(), 1)
    chosen = method.completions(at(Stage.COMPLETIONS, num_needed), groups)
    is_trained = chosen.keep & is_needed
    told = jnp.where(kept.keep, ids, _PROMPTS)
    history = method.prompts.observe(
      history, jnp.int32(step + number), told, rewards, rewards, lengths
    )
    shares = (
      kept.keep.mean(),
      is_trained.sum() / jnp.maximum((lengths > 0).sum(), 1),
      is_trained.any(1).sum() / jnp.maximum(kept.keep.sum(), 1),
    )
    return history, shares

  history = method.prompts.init(_PROMPTS)
  for number in range(_VISITS + 1):
    history, shares = visit(history, number)
  prompts, completions, mixed = map(float, shares)
  draws = 1.0
  if method.dynamic_sampling:  # goes on until all groups are mixed
    draws = min(1 / max(mixed, 0.01), method.dynamic_sampling.max_draws)
    completions, mixed = completions * draws, min(mixed * draws, 1.0)
  return Shares(prompts, min(completions, 1.0), mixed, draws)
