"""Gradients of groups: advantages, second moments, and the noise between them.

Inner products are of gradients of log-probabilities, sums over tokens; an
objective multiplies each completion's by its advantage and its token share.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .logged import PER_PROMPT, Logged


class Objective(NamedTuple):
  """Factors on a completion's gradient.

  Attributes:
    advantage: rewards `[..., g]` to `[..., g]`.
    is_mean: a completion counts as the mean over its tokens, not as the sum.
    is_linear: in the rewards, so that a reward that is never seen can be
      estimated.
  """

  advantage: Callable[[np.ndarray], np.ndarray]
  is_mean: bool
  is_linear: bool


# As in dppo_jax.algo, which would compile for every new shape.
def group_normalized(rewards: np.ndarray) -> np.ndarray:
  centred = rewards - rewards.mean(axis=-1, keepdims=True)
  return centred / (rewards.std(axis=-1, ddof=1, keepdims=True) + 1e-6)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
  num = rewards.shape[-1]
  return (rewards - rewards.mean(axis=-1, keepdims=True)) * num / (num - 1)


OBJECTIVES = {
  "grpo": Objective(group_normalized, True, False),
  "leave-one-out, mean of tokens": Objective(leave_one_out, True, True),
  "leave-one-out, sum of tokens": Objective(leave_one_out, False, True),
}


class Moments(NamedTuple):
  """Second moments of groups under an objective.

  Attributes:
    products: `[K, G, G]`, of completions' gradients at advantage 1, with their
      token shares.
    share: `[K, G]`, those.
    factors: `[K, G]`, advantage over G: the group's gradient is the sum of
      these times the completions'.
    variance: between the gradients of groups.
    noise_scale: in groups: the variance over the squared mean gradient.
  """

  products: np.ndarray
  share: np.ndarray
  factors: np.ndarray
  variance: float
  noise_scale: float

  @property
  def values(self) -> np.ndarray:
    """`[K, G]`: each completion's second moment over all variance."""
    squares = np.einsum("kgg->kg", self.products)
    return squares * self.factors**2 / (len(squares) * self.variance)


def moments(log: Logged, objective: Objective) -> Moments:
  share = 1.0 / log.lengths if objective.is_mean else np.ones(log.lengths.shape)
  products = log.products * share[:, :, None] * share[:, None, :]
  factors = objective.advantage(log.rewards) / log.rewards.shape[1]
  squares = np.einsum("kg,kgh,kh->k", factors, products, factors)
  signal = _squared_mean(log, factors * share)
  return Moments(
    products,
    share,
    factors,
    squares.mean() - signal,
    (squares.mean() - signal) / max(signal, 1e-30),
  )


def _squared_mean(log: Logged, factors: np.ndarray) -> float:
  """|E g|^2, without bias: from the products of different prompts."""
  num = len(log.prompt_scores)
  factors = factors.reshape(num, PER_PROMPT) / (PER_PROMPT / factors.shape[1])
  of_prompt = np.einsum("qh,qhd->qd", factors, log.prompt_scores)
  total = of_prompt.sum(axis=0)
  return (total @ total - (of_prompt**2).sum()) / (num * (num - 1))


def live_tokens(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Tokens an update trains on: those of groups whose rewards differ."""
  return np.where(np.ptp(rewards, axis=-1, keepdims=True) > 0, lengths, 0)


def regroup(log: Logged, group: int) -> Logged:
  """The same completions in groups of another size."""
  num, before = log.rewards.shape
  each = before // group
  cut = lambda x: x.reshape(num * each, group, *x.shape[2:])
  blocks = log.products.reshape(num, each, group, each, group)
  return log._replace(
    prompt=log.prompt.repeat(each),
    prompt_lengths=log.prompt_lengths.repeat(each),
    rewards=cut(log.rewards),
    lengths=cut(log.lengths),
    logprobs=cut(log.logprobs),
    products=np.concatenate(
      [blocks[:, i, None, :, i] for i in range(each)], axis=1
    ).reshape(-1, group, group),
  )


def last_visit(log: Logged) -> np.ndarray:
  """`[K]`: the share of the prompt's other completions that are correct.

  A visit to the prompt that is as fresh as can be.
  """
  right, group = log.rewards.sum(axis=1), log.rewards.shape[1]
  of_prompt = np.bincount(log.prompt, right)[log.prompt]
  return (of_prompt - right) / (PER_PROMPT - group)


def folds(log: Logged) -> tuple[list, list]:
  """Groups to fit a rule on and groups to use it on, as pairs of `[K]`.

  Returns:
    One half of the prompts for the other, both ways; all for all.
  """
  odd = log.prompt % 2 == 1
  every = np.ones(len(odd), bool)
  return [(odd, ~odd), (~odd, odd)], [(every, every)]
