"""Exact bias and variance of the choice of groups to train.

Every token is corrected by the exact ratio of its completion, so any bias left
is that of the choice. A completion of at most L tokens lives through `lag`
updates: `L / lag` tokens are sampled between two, by the policy of that time.
"""

import math
from typing import NamedTuple

import numpy as np

from . import corrections, ledger, policies

GROUP = 4  # completions of a prompt
BUDGET = 0.75  # of the token limit, after which a group is dropped
STARTED, TRAINED = 8, 4  # groups, where the first to finish are trained
EXACT = corrections.Rule("sequence ratio", corrections.sequence)


class Group(NamedTuple):
  """Sums over a prompt's completions, by length, when a group was started."""

  cdf: np.ndarray  # [Q, L + 1], P(length <= l)
  mean: np.ndarray  # [Q, L + 1, P], E[term, length is l]
  second: np.ndarray  # [Q, L + 1], E[|term|^2, length is l]


class Choice(NamedTuple):
  """Probability that a group is trained, and its weight, by longest length."""

  prob: np.ndarray  # [L + 1]
  weight: np.ndarray  # [L + 1]


class Sums(NamedTuple):
  """Moments of the estimate of one group, which is 0 if it is not trained."""

  mass: float  # probability that it is trained
  mean: np.ndarray  # [P]
  second: float


def window_logprobs(task, path: list, lag: int, age: int) -> np.ndarray:
  """Returns log-probabilities of tokens in a group that started `age` ago.

  Args:
    path: parameters after each update; the last are those to be trained.
  """
  size = math.ceil(task.tokens.shape[1] / lag)
  parts = [
    policies.logprobs(task, path[-1 - age + i])[..., i * size : (i + 1) * size]
    for i in range(age)
  ]
  drawn = np.concatenate(parts, axis=-1)
  left = task.tokens.shape[1] - drawn.shape[-1]
  if left:  # tokens that a group of this age never has
    late = policies.logprobs(task, path[-2])[..., -left:]
    drawn = np.concatenate([drawn, late], axis=-1)
  return drawn


def group(here: ledger.Setting) -> Group:
  """Sums a setting's completions by their length."""
  terms = ledger.terms(here, EXACT)
  at = here.task.lengths == np.arange(here.task.tokens.shape[1] + 1)[:, None]
  square = np.square(terms).sum(axis=-1)
  return Group(
    np.cumsum(here.probs @ at.T, axis=-1),
    np.einsum("qs,qsp,ls->qlp", here.probs, terms, at),
    (here.probs * square) @ at.T,
  )


def longest(cdf: np.ndarray, others: int) -> np.ndarray:
  """Returns P(the longest of a group has l | one has k), `[Q, k, l]`."""
  num = cdf.shape[-1]
  power = cdf**others
  step = np.diff(power, axis=-1, prepend=0.0)
  k, l = np.arange(num)[:, None], np.arange(num)
  same = np.where(k == l, power[:, None, :], 0.0)
  return np.where(l > k, step[:, None, :], same)


def sums(x: Group, choice: Choice, size: int = GROUP) -> Sums:
  """Returns the moments of a group's mean term, of a random prompt."""
  num = len(x.cdf)
  law = np.diff(x.cdf**size, axis=-1, prepend=0.0)
  once = longest(x.cdf, size - 1)
  first = choice.prob * choice.weight
  square = first * choice.weight
  mean = np.einsum("qkp,qkl,l->p", x.mean, once, first) / num
  alone = np.einsum("qk,qkl,l->", x.second, once, square) / size
  products = np.einsum("qkp,qjp->qkj", x.mean, x.mean)
  k = np.arange(x.cdf.shape[-1])
  twice = longest(x.cdf, size - 2) @ square
  both = (products * twice[:, np.maximum(k[:, None], k)]).sum()
  second = (alone + both * (size - 1) / size) / num
  return Sums((law @ choice.prob).sum() / num, mean, second)


def always(limit: int) -> Choice:
  """Trains every group."""
  return Choice(np.ones(limit + 1), np.ones(limit + 1))


def within(limit: int, longest_length: float) -> Choice:
  """Drops groups with a longer completion."""
  is_within = np.arange(limit + 1) <= longest_length
  return Choice(is_within.astype(float), np.ones(limit + 1))


def first_to_finish(x: Group, is_weighted: bool = False) -> Choice:
  """Trains the `TRAINED` of `STARTED` groups that finish first.

  Groups that finish together are chosen uniformly at random.

  Args:
    is_weighted: weighs by 1 / probability, which a real system does not know.
  """
  law = np.diff(x.cdf**GROUP, axis=-1, prepend=0.0).mean(axis=0)
  prob = np.array([_first(law, l) for l in range(len(law))])
  weight = 1 / prob if is_weighted else np.ones(len(law))
  return Choice(prob, weight)


def _first(law: np.ndarray, length: int) -> float:
  """Returns P(trained) of a group of this longest length, among the others."""
  earlier, tied = law[:length].sum(), law[length]
  later, others, prob = max(1 - earlier - tied, 0.0), STARTED - 1, 0.0
  for a in range(min(TRAINED, others + 1)):
    for b in range(others - a + 1):
      ways = math.comb(others, a) * math.comb(others - a, b)
      chance = ways * earlier**a * tied**b * later ** (others - a - b)
      prob += chance * min(1.0, (TRAINED - a) / (b + 1))
  return prob


def finished_at(limit: int, lag: int, age: int) -> Choice:
  """Trains the groups that finish in the window number `age` after theirs."""
  size = math.ceil(limit / lag)
  windows = np.maximum(np.ceil(np.arange(limit + 1) / size), 1)
  return Choice((windows == age).astype(float), np.ones(limit + 1))


def rows(task: policies.Task, path: list, lag: int) -> list[dict]:
  """Returns the rows of all schedules for the update of `path[-1]`."""
  limit = task.tokens.shape[1]
  sampled = {
    age: window_logprobs(task, path, lag, age) for age in range(1, lag + 1)
  }
  sampled[0] = policies.logprobs(task, path[-1])
  here = {a: ledger.setting(task, path[-1], y) for a, y in sampled.items()}
  x = {age: group(y) for age, y in here.items()}
  fresh, true = x.pop(0), ledger.target(here[0])
  queue = [sums(x[a], finished_at(limit, lag, a)) for a in x]
  chosen = lambda choice: [sums(x[lag], choice)]
  known = first_to_finish(x[lag], is_weighted=True)
  results = {
    "no lag, each group once": errors(true, [sums(fresh, always(limit))]),
    "FIFO, each group once": errors(true, chosen(always(limit))),
    "drop late groups": errors(true, chosen(within(limit, BUDGET * limit))),
    "first 4 of 8, abandon the others": errors(
      true, chosen(first_to_finish(x[lag]))
    ),
    "same, weights 1/pi": errors(true, chosen(known), TRAINED / STARTED),
    "queue, first to finish: start": errors(true, queue[:1]),
    "queue, first to finish: later": errors(true, queue, 1.0),
  }
  return [{"rule": name} | result for name, result in results.items()]


def errors(true: np.ndarray, parts: list[Sums], started: float = 0.0) -> dict:
  """Compares groups of independent starts with the true gradient.

  Groups count as independent, although those of the same eight are not quite.

  Args:
    parts: moments of a group started at each time, as many at each.
    started: divides the sum by the number of groups that started, of which
      this fraction is trained; 0 divides by the number that is trained.
  """
  mass = sum(x.mass for x in parts)
  mean = sum(x.mean for x in parts)
  if started:
    # Variance of a sum over starts, at an equal number of trained groups.
    noise = sum(x.second - x.mean @ x.mean for x in parts) * started
  else:
    mean = mean / mass
    noise = sum(x.second for x in parts) / mass - mean @ mean
  second = noise * GROUP + mean @ mean  # per completion, as in `ledger.row`
  return {"trained": mass} | ledger.errors(true, mean, second)
