"""Six kinds of problems that no method of the experiment trains on."""

import random

from dppo_jax.configs import smollm2

KINDS = ("sums", "differences", "products", "stories")
KINDS += ("long_calculations", "long_stories")  # of two steps
NUM_CALCULATIONS = 32
Rows = list[dict[str, str]]


def sums() -> Rows:
  return _calculations(" + ")


def differences() -> Rows:
  return _calculations(" - ")


def products() -> Rows:
  return _calculations(" x ")


def stories() -> Rows:
  """Returns word problems of one step."""
  return [x for x in smollm2.single_test() if not _is_calculation(x)]


def long_calculations() -> Rows:
  """Returns calculations of two operations; `words` trains on others."""
  known = {x["problem"] for x in smollm2.words()}
  generator, rows = random.Random(4), {}
  kinds = ("++", "+-", "-+", "*+", "*-")
  while len(rows) < NUM_CALCULATIONS:
    kind = kinds[len(rows) % len(kinds)]
    a, b, c = (generator.randint(2, 9) for _ in range(3))
    x, y = kind.replace("*", "x")
    problem = f"What is {a} {x} {b} {y} {c}? Answer with a number."
    first = {"+": a + b, "-": a - b, "*": a * b}[kind[0]]
    answer = first + {"+": c, "-": -c}[kind[1]]
    if min(first, answer) >= 0 and problem not in known:
      rows[problem] = dict(problem=problem, answer=str(answer))
  return list(rows.values())


def long_stories() -> Rows:
  """Returns word problems of two steps."""
  short = {x["problem"] for x in (*smollm2.single(), *smollm2.single_test())}
  return [x for x in smollm2.words_test() if x["problem"] not in short]


def _calculations(symbol: str) -> Rows:
  rows = filter(_is_calculation, smollm2.single_test())
  return [x for x in rows if symbol in x["problem"]]


def _is_calculation(row: dict[str, str]) -> bool:
  return row["problem"].startswith("What is ")
