r"""The default task: short sums and differences, read from left to right.

  problem    3+9-5=
  solution   3+9=12;12-5=7;\boxed{7}
  direct     \boxed{7}

Operands and partial results lie in 0..15, so any value has exactly 17
continuations: 16 - value sums and value + 1 differences. There are then
16 * 17**k problems of k operations, each with a number of its own, and distinct
problems are distinct numbers.
"""

import random
from typing import NamedTuple

LARGEST = 15  # operand or partial result
MAX_OPERATIONS = 12  # beyond these, problem numbers outgrow random.sample
HELD_OUT_SHARE = 1 / 8

_VALUES = LARGEST + 1
_CONTINUATIONS = LARGEST + 2


class Problem(NamedTuple):
  """A problem, its answer, and a solution that writes out each step."""

  problem: str
  answer: str
  solution: str


def boxed(answer: str) -> str:
  r"""`\boxed{answer}`, the form in which graders look for an answer."""
  return rf"\boxed{{{answer}}}"


def make(seed: int, count: int, max_operations: int) -> list[Problem]:
  """`count` distinct problems of 1 to `max_operations` operations.

  Every number of operations has the same share, save those with too few
  problems: they give all they have (272 of one operation, 4624 of two) and the
  longer ones make up for it. Any run of consecutive problems has about the same
  mix, so the first n are a fair sample of difficulty.

  Raises:
    ValueError: if there are not as many distinct problems.
  """
  if not 1 <= max_operations <= MAX_OPERATIONS:
    raise ValueError(
      f"config.data.max_operations is {max_operations}, not in "
      f"1..{MAX_OPERATIONS}"
    )
  sizes = [
    _VALUES * _CONTINUATIONS**operations
    for operations in range(1, max_operations + 1)
  ]
  if not 2 <= count <= sum(sizes):
    raise ValueError(
      f"config.data.num_arithmetic is {count}, not in 2..{sum(sizes)}, the "
      f"distinct problems of at most {max_operations} operations: change it "
      "or config.data.max_operations"
    )
  generator = random.Random(seed)
  ranked, missing = [], count
  for operations, size in enumerate(sizes, 1):  # the smallest class first
    num = min(size, missing // (max_operations - operations + 1))
    missing -= num
    numbers = generator.sample(range(size), num)
    # Ordering by rank within the class interleaves the classes evenly.
    ranked += [
      ((rank + 0.5) / num, operations, number)
      for rank, number in enumerate(numbers)
    ]
  return [
    _decode(operations, number) for _, operations, number in sorted(ranked)
  ]


def split(problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
  """Train and held-out problems, one in eight held out, at least one."""
  num_held_out = max(1, int(len(problems) * HELD_OUT_SHARE))
  return problems[num_held_out:], problems[:num_held_out]


def _decode(operations: int, number: int) -> Problem:
  """The problem with this number, below 16 * 17**operations."""
  number, value = divmod(number, _VALUES)
  problem, solution = str(value), ""
  for _ in range(operations):
    number, choice = divmod(number, _CONTINUATIONS)
    num_sums = _VALUES - value
    step = f"+{choice}" if choice < num_sums else f"-{choice - num_sums}"
    result = value + int(step)
    problem += step
    solution += f"{value}{step}={result};"
    value = result
  return Problem(problem + "=", str(value), solution + boxed(str(value)))
