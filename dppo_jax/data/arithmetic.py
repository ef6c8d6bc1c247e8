r"""The default task: short sums and differences, read from left to right.

  problem    3+9-5=
  solution   3+9=12;12-5=7;\boxed{7}
  direct     \boxed{7}

Operands and partial results lie in 0..15, so every value has exactly 17
continuations: 16 - value sums and value + 1 differences. There are 16 * 17**k
problems of k operations, and each is decoded from its own number.
"""

import random
import re
from typing import TypeGuard

from dppo_jax.data.sources import Row
from dppo_jax.errors import UserError

LARGEST = 15  # operand or partial result
NUM_PROBLEMS, NUM_OPERATIONS = 4096, 6  # defaults
MAX_OPERATIONS = 12  # from 15 on, problem numbers overflow random.sample
HELD_OUT_FRACTION = 1 / 8
# Of the solutions that are imitated, so that the initial policy mostly guesses.
DIRECT_SHARE = 0.55

_VALUES = LARGEST + 1
_CONTINUATIONS = LARGEST + 2
_SOURCE = re.compile(r"arithmetic(?::\d+){0,2}")


def boxed(answer: str) -> str:
  r"""Returns `\boxed{answer}`, the form in which graders expect an answer."""
  return rf"\boxed{{{answer}}}"


def is_source(source: object) -> TypeGuard[str]:
  """Returns True for `arithmetic[:NUM[:MAX_OPS]]`."""
  return isinstance(source, str) and bool(_SOURCE.fullmatch(source))


def read(source: str, seed: int, held_out: bool) -> list[Row]:
  """Generates the rows to train on or, one in eight, those held out."""
  _, num, operations = [*source.split(":"), "", ""][:3]
  rows = make(seed, int(num or NUM_PROBLEMS), int(operations or NUM_OPERATIONS))
  num_held_out = max(1, int(len(rows) * HELD_OUT_FRACTION))
  return rows[:num_held_out] if held_out else rows[num_held_out:]


def make(seed: int, count: int, max_operations: int) -> list[Row]:
  """Generates `count` distinct problems of 1 to `max_operations` operations.

  All numbers of operations are equally frequent, except that small classes are
  used up (272 problems of one operation, 4624 of two) and longer problems make
  up for them. Consecutive problems have about the same mix, so the first n are
  a fair sample of difficulty.
  """
  sizes = [_VALUES * _CONTINUATIONS ** (i + 1) for i in range(max_operations)]
  source = f"config.data: arithmetic:{count}:{max_operations} must have"
  if not 1 <= max_operations <= MAX_OPERATIONS:
    raise UserError(f"{source} 1 to {MAX_OPERATIONS} operations")
  if not 2 <= count <= sum(sizes):
    raise UserError(
      f"{source} 2 to {sum(sizes):,} problems, the number of distinct ones"
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
  columns = [_decode(*coordinates) for _, *coordinates in sorted(ranked)]
  return [Row(f"arithmetic/{i}", **x, columns=x) for i, x in enumerate(columns)]


def _decode(operations: int, number: int) -> dict[str, str]:
  """Returns the columns of problem `number`, below 16 * 17**operations."""
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
  answer = str(value)
  solution += boxed(answer)
  return dict(problem=problem + "=", answer=answer, solution=solution)
