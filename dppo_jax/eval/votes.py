"""Which answer each completion votes for: answers that are equal are one."""

import collections
from collections.abc import Callable, Sequence
import re

from jaxtyping import Int
import numpy as np

from dppo_jax.rewards.math_answers import normalize

# Of aligned answers, whether they are equal: `rewards.Grader.same_answers`.
SameAnswers = Callable[[Sequence[str], Sequence[str]], list[bool]]

_INTEGER = re.compile(r"-?\d{1,30}")


def count(
  answers: Sequence[Sequence[str | None]],
  is_right: Sequence[Sequence[bool]],
  same_answers: SameAnswers,
) -> Int[np.ndarray, "M k"]:
  """For each completion the number of its answer, -1 where it has none.

  Equality is the grader's, which is not transitive: an answer joins the first
  of its problem's answers, in order of frequency and then of appearance, that
  it equals. What the verifier found right equals the gold answer, and so is
  one answer without asking; integers are compared here. All problems are
  compared together, so that the grader's processes have enough to do.

  Args:
    answers: of each problem those of its completions; None casts no vote.
    is_right: likewise, what the verifier said.
  """
  problems = [_Ballot(*rows) for rows in zip(answers, is_right, strict=True)]
  while any(ballot.waiting for ballot in problems):
    # The first that waits is the next answer; those that equal it join.
    asked = [(ballot, x) for ballot in problems for x in ballot.unclear()]
    firsts = [ballot.waiting[0] for ballot, _ in asked]
    is_same = same_answers(firsts, [text for _, text in asked])
    joining = collections.defaultdict(list)
    for (ballot, text), same in zip(asked, is_same, strict=True):
      if same:
        joining[id(ballot)].append(text)
    for ballot in problems:
      ballot.close(joining[id(ballot)])
  return np.array([ballot.votes() for ballot in problems], np.int32)


class _Ballot:
  """The answers of one problem, of which some have a number already.

  Attributes:
    waiting: texts that have none yet, the most frequent first.
  """

  def __init__(self, answers: Sequence[str | None], is_right: Sequence[bool]):
    self._texts = [None if x is None else _canonical(x) for x in answers]
    pairs = zip(self._texts, is_right, strict=True)
    right = {text for text, ok in pairs if ok and text is not None}
    self._number = dict.fromkeys(right, 0)
    self._next = 1
    counts = collections.Counter(self._texts)
    known = {None, *right}
    self.waiting = [x for x, _ in counts.most_common() if x not in known]

  def unclear(self) -> list[str]:
    """Those of whom it takes the grader to say if they equal the first."""
    if not self.waiting:
      return []
    first, *others = self.waiting
    if _INTEGER.fullmatch(first):
      return [x for x in others if not _INTEGER.fullmatch(x)]
    return others

  def close(self, equal: Sequence[str]) -> None:
    """Gives the first that waits, and those `equal` to it, a number."""
    chosen = {*self.waiting[:1], *equal}
    self._number |= dict.fromkeys(chosen, self._next)
    self._next += 1
    self.waiting = [x for x in self.waiting if x not in chosen]

  def votes(self) -> list[int]:
    return [-1 if x is None else self._number[x] for x in self._texts]


def _canonical(answer: str) -> str:
  """The text by which an answer goes: 7 for 007."""
  text = normalize(answer)
  return str(int(text)) if _INTEGER.fullmatch(text) else text
