"""From graded completions to what an evaluation says: numbers only.

Names of estimates: `greedy`, the accuracy of the likeliest completion; of n
samples `avg@n`, their mean accuracy; `pass@k`, whether one of k is right;
`maj@k`, whether the answer that most of k give is right.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dppo_jax.eval import estimators

MAX_GROUPS = 24  # a column of more values is no level or subject


class Scored(NamedTuple):
  """Graded completions of `M` problems, `k` of each.

  Attributes:
    correct: `[M, k]`, from 0 to 1.
    votes: `[M, k]`, the number of the answer, negative for none.
    lengths: `[M, k]`, tokens.
    is_stopped: `[M, k]`, False where the token limit cut it off.
    seconds: to sample and to grade them.
  """

  correct: np.ndarray
  votes: np.ndarray
  lengths: np.ndarray
  is_stopped: np.ndarray
  seconds: float


def summarize(
  greedy: Scored,
  sampled: Scored | None,
  columns: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
  """What the completions of a set say, as results.json has it.

  Args:
    sampled: completions at a temperature, if there are any.
    columns: by whose values the results are broken down.
  """
  per_problem = _per_problem(greedy, sampled)
  everything = np.ones(len(greedy.correct), bool)
  decodings = {"greedy": greedy, "sampled": sampled}
  return {
    "problems": len(greedy.correct),
    "samples": sampled.correct.shape[1] if sampled else 0,
    "estimates": _estimates(per_problem, everything),
    "by": {
      name: groups
      for name, values in columns.items()
      if (groups := _broken_down(per_problem, values))
    },
    "completions": {name: _describe(x) for name, x in decodings.items() if x},
  }


def headlines(estimates: Mapping[str, Any]) -> list[str]:
  """The estimates that say most: of each kind that of the largest k."""
  largest = {}
  for name in estimates:
    kind, _, size = name.partition("@")
    if int(size or 0) >= int(largest.get(kind, "0")):
      largest[kind] = size or "0"
  return [f"{kind}@{k}" if k != "0" else kind for kind, k in largest.items()]


def _per_problem(
  greedy: Scored, sampled: Scored | None
) -> dict[str, tuple[np.ndarray, int]]:
  """By estimate its value for each problem, and how many samples it is of."""
  found = {"greedy": (greedy.correct.mean(axis=1, dtype=np.float64), 1)}
  if sampled is None:
    return found
  correct, votes = sampled.correct, sampled.votes
  num = correct.shape[1]
  found[f"avg@{num}"] = correct.mean(axis=1, dtype=np.float64), num
  several = estimators.sizes(num)[1:]
  if (votes >= 0).any():  # a verifier may look elsewhere than in boxes
    for size in several:
      found[f"maj@{size}"] = estimators.majority(correct, votes, size), num
  for size in several:
    found[f"pass@{size}"] = estimators.best_of(correct, size), num
  return found


def _estimates(
  per_problem: Mapping[str, tuple[np.ndarray, int]], chosen: np.ndarray
) -> dict[str, dict[str, float]]:
  """Means with intervals over the chosen problems."""
  return {
    name: estimators.interval(values[chosen], num)._asdict()
    for name, (values, num) in per_problem.items()
  }


def _broken_down(
  per_problem: Mapping[str, tuple[np.ndarray, int]], values: Sequence[Any]
) -> dict[str, dict]:
  """By value of a column the estimates; empty where it has too many or one."""
  texts = np.array(["" if x is None else str(x) for x in values])
  groups = sorted({*texts} - {""}, key=_in_order)
  if not 2 <= len(groups) <= MAX_GROUPS:
    return {}
  heads = {name: per_problem[name] for name in headlines(per_problem)}
  return {
    str(group): {
      "problems": int((texts == group).sum()),
      "estimates": _estimates(heads, texts == group),
    }
    for group in groups
  }


def _in_order(text: str) -> tuple:
  """Numbers by their value, then texts."""
  is_number = text.replace(".", "", 1).isdecimal()  # not such as ²
  return (0, float(text), "") if is_number else (1, 0.0, text)


def _describe(scored: Scored) -> dict[str, float]:
  num_tokens = int(scored.lengths.sum())
  return {
    "completions": scored.correct.size,
    "tokens_mean": float(scored.lengths.mean()),
    "truncated": float(1 - scored.is_stopped.mean()),
    "unboxed": float((scored.votes < 0).mean()),
    "seconds": scored.seconds,
    "tokens_per_second": num_tokens / max(scored.seconds, 1e-9),
  }
