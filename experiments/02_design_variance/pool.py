"""Completions to sample rollouts from: a policy whose every mean is known.

A rule that decides how many completions to sample needs more of some prompts
than a batch holds. Here 32 completions of each prompt stand for the policy:
rollouts are drawn from them with replacement, so that a prompt's pass rate and
every expectation are known exactly.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dppo_jax.records import Rollout

from ..common.policy import sample
from .batch import Batch, score_gradients

GROUP = 16  # completions of a prompt in the full batch


class Pool(NamedTuple):
  """`K` completions of each of `Q` prompts.

  Attributes:
    rollout: the second half of them; the first is the batch's own.
    rewards, lengths: `[Q, K]`.
    seen: `[Q]`, share of an earlier visit's 16 that was right.
  """

  sampled: Batch
  rollout: Rollout
  rewards: np.ndarray
  lengths: np.ndarray
  seen: np.ndarray

  @property
  def rates(self) -> np.ndarray:
    """`[Q]`, the share that is right."""
    return self.rewards.mean(axis=1)

  def advantages(self, size: int) -> np.ndarray:
    """`[size + 1, 2]`, of a wrong and a right one, by how many are right."""
    return _advantages(self.sampled.run.spec.objective.advantage, size)


def prepare(sampled: Batch) -> Pool:
  """The batch's completions and as many again; draw 1 is the earlier visit.

  Raises:
    ValueError: for rewards that are not 0 or 1.
  """
  run, prompts = sampled.run, sampled.prompts
  _, before = sample(run, sampled.params, prompts, draw=1)
  more, rewards = sample(run, sampled.params, prompts, draw=2)
  both = lambda x, y: np.concatenate([x, y], axis=1)
  rewards = both(sampled.rewards, rewards)
  if not np.isin(rewards, (0, 1)).all():
    raise ValueError("a reward is neither 0 nor 1: means are not known exactly")
  lengths = both(sampled.rollout.lengths, more.lengths)
  return Pool(sampled, more, rewards, lengths, np.asarray(before).mean(axis=1))


def products(pool: Pool) -> np.ndarray:
  """`[Q * K, Q * K]`, of the gradients of all at advantage 1."""
  sampled = pool.sampled
  more = score_gradients(
    sampled.run, sampled.params, sampled.prompts, pool.rollout
  )
  by_prompt = lambda x: x.reshape(len(pool.rates), GROUP, -1)
  scores = np.concatenate([by_prompt(sampled.scores), by_prompt(more)], axis=1)
  scores = scores.reshape(pool.rewards.size, -1)
  return (scores @ scores.T).astype(np.float64)


def expected(pool: Pool) -> np.ndarray:
  """`[Q, K]`: the mean factor of each score in the full batch's gradient.

  The mean gradient of a prompt's group is one multiple of each of its right
  completions, and another of its wrong ones.
  """
  others = binomial(GROUP - 1, pool.rates)
  table = pool.advantages(GROUP)
  right, wrong = others @ table[1:, 1], others @ table[:-1, 0]
  mean = np.where(pool.rewards > 0, right[:, None], wrong[:, None])
  return mean * GROUP / pool.rewards.shape[1]


def binomial(size: int, rates: np.ndarray) -> np.ndarray:
  """`[Q, size + 1]`: probabilities of so many right ones among `size`."""
  probs = np.zeros((len(rates), size + 1))
  probs[:, 0] = 1.0
  for _ in range(size):
    more = probs[:, :-1] * rates[:, None]
    probs *= 1 - rates[:, None]
    probs[:, 1:] += more
  return probs


@functools.cache
def _advantages(advantage, size: int) -> np.ndarray:
  """Computes `Pool.advantages`."""
  count = np.arange(size + 1)[:, None]
  rewards = (np.arange(size)[None] < count).astype(np.float32)
  values = np.asarray(advantage(jnp.asarray(rewards)), np.float64)
  return np.stack([values[:, -1], values[:, 0]], axis=1)
