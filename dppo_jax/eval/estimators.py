"""What k completions of each of M problems say of a model.

An estimate is the mean over problems of one number in [0, 1] for each: the
functions here give that number and, for the mean, a confidence interval.
Numpy in float64: nothing here is compiled.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from dppo_jax.analysis.statistics import t_quantile


class Estimate(NamedTuple):
  """A mean over problems with its 95% confidence interval."""

  value: float
  low: float
  high: float


def best_of(
  values: Float[np.ndarray, "M n"], size: int
) -> Float[np.ndarray, "M"]:
  """The expected best of `size` of a problem's n completions, without bias.

  That is the mean, over all subsets of `size`, of their largest value. Of
  values 0 and 1, c of them 1, it is pass@k, 1 - C(n-c,k)/C(n,k) (Chen et al.,
  2107.03374, equation 1).

  Args:
    values: from 0 to 1.
    size: k, in 1..n.
  Raises:
    ValueError: for a size that is not in 1..n.
  """
  num = values.shape[1]
  _check_size(size, num)
  # The i-th smallest is the largest of C(i-1, k-1) subsets.
  shares = [math.comb(i, size - 1) / math.comb(num, size) for i in range(num)]
  return np.sort(values.astype(np.float64), axis=1) @ np.array(shares)


def majority(
  values: Float[np.ndarray, "M n"], votes: Int[np.ndarray, "M n"], size: int
) -> Float[np.ndarray, "M"]:
  """maj@k: what the answer that most of `size` completions give is worth.

  The mean over all subsets of `size` of a problem's n completions, computed
  exactly. Of answers with equally many votes each is taken with the same
  probability; where nobody votes, the value is 0.

  Args:
    values: from 0 to 1; an answer's is the mean over those who give it.
    votes: which answer a completion gives, a number for each that differs;
      negative for none.
    size: k, in 1..n.
  Raises:
    ValueError: for a size that is not in 1..n.
  """
  _check_size(size, values.shape[1])
  rows = zip(values.astype(np.float64), votes, strict=True)
  return np.array([_majority(value, vote, size) for value, vote in rows])


def interval(values: Float[np.ndarray, "M"], num_samples: int = 1) -> Estimate:
  """The mean over problems, and where it is with a confidence of 95%.

  Wilson's interval with Student's quantile, of as many problems as would have
  the variance seen if each were simply right or wrong: the effective sample
  size of Korn and Graubard (Survey Methodology 24, 1998). So it stays inside
  [0, 1] and has a width where all values are 0 or all are 1, as the interval
  of the mean plus or minus its standard error has not: of 30 problems, none
  of them solved, it is [0, 0.12]. The variance counts as seen on M - 1 problems
  and on two more that have the largest possible, mean * (1 - mean): with 30 a
  few rare ones that the sample lacks may hold most of it. In simulation 30
  problems are covered with 0.94 or more, but with 0.90 where the mean is 0.05
  and few problems are ever solved; 500 problems with 0.94 to 0.96.

  Problems count as drawn from all that might have been asked.

  Args:
    values: from 0 to 1.
    num_samples: completions behind each, which bound how much less than one
      completion's the variance can be.
  """
  values = np.round(values.astype(np.float64), 9)  # what is 1 is exactly 1
  num, mean = len(values), float(values.mean())
  if num < 2:
    return Estimate(mean, 0.0, 1.0)
  largest = mean * (1 - mean)
  variance = (num * float(values.var()) + 2 * largest) / (num + 1)
  effective = float(num)
  if variance > 0:
    effective = min(num * largest / variance, float(num * num_samples))
  square = t_quantile(num - 1) ** 2 / effective
  centre = (mean + square / 2) / (1 + square)
  half = math.sqrt(square * (largest + square / 4)) / (1 + square)
  return Estimate(mean, max(centre - half, 0.0), min(centre + half, 1.0))


def sizes(num: int) -> list[int]:
  """The k for which pass@k and maj@k are reported: doublings up to n."""
  return [2**i for i in range(num.bit_length()) if 2**i < num] + [num]


def _check_size(size: int, num: int) -> None:
  if not 1 <= size <= num:
    raise ValueError(f"k is {size}, not in 1..{num}, the completions sampled")


def _majority(
  values: Float[np.ndarray, "n"], votes: Int[np.ndarray, "n"], size: int
) -> float:
  """`majority` of one problem."""
  answers, counts = np.unique(votes[votes >= 0], return_counts=True)
  silent = int((votes < 0).sum())
  total = 0.0
  for answer in answers:
    value = float(values[votes == answer].mean())
    if value > 0:
      own = int(counts[answers == answer][0])
      others = counts[answers != answer].tolist()
      total += value * _wins(own, others, silent, size)
  return total / math.comb(len(votes), size)


def _wins(own: int, others: Sequence[int], silent: int, size: int) -> float:
  """Of how many subsets an answer is the most frequent; a tie of t is 1/t.

  Args:
    own: completions that give it.
    others: how many give each other answer.
    silent: how many give none.
  """
  total = 0.0
  for most in range(1, min(own, size) + 1):
    # Ways to choose the others: by how many are chosen, and how many answers
    # are tied with this one.
    left = size - most
    ways = np.zeros((left + 1, left // most + 1))
    ways[0, 0] = 1.0
    for count in others:
      ways = _add_answer(ways, count, most)
    chosen = np.array([math.comb(silent, left - i) for i in range(left + 1)])
    tied = 1 / (1 + np.arange(ways.shape[1]))
    ways_in_all = chosen.astype(np.float64) @ ways @ tied
    total += math.comb(own, most) * float(ways_in_all)
  return total


def _add_answer(
  ways: Float[np.ndarray, "chosen tied"], count: int, most: int
) -> Float[np.ndarray, "chosen tied"]:
  """The ways with one more answer, chosen at most `most` times of `count`."""
  out = ways.copy()
  for number in range(1, min(count, most) + 1):
    if number >= len(ways):
      break
    more = math.comb(count, number) * ways[: len(ways) - number]
    if number < most:
      out[number:] += more
    else:
      out[number:, 1:] += more[:, :-1]
  return out
