r"""Writes rings of small operations: half the groups have zero variance.

  python -m experiments.common.rings DIR

A problem is a ring of `STEPS` operations, a mark for the number of rounds, and
the first digit. The solution walks the ring: it copies each operation and
writes the resulting digit in place of the semicolon. Each round ends with the
mark for one round less and the digit again, the last one with the box.

  problem    +3;*7;-2;,5
  solution   +38*70-24 4+37*79-23\boxed{3}

An operator with its operand is a skill. It adds a fixed amount to the digit
(modulo 10) that its name does not reveal. The solutions for fine-tuning add one
too much with the skill's error rate: never for the intact skills, from seldom
to nearly always for the faulty ones. The box holds the result of these
mistakes; the answer is the correct result. A model that imitates the solutions
starts with their error rates, and only the reward shows it the correct amounts.
"""

import argparse
import json
import pathlib
import random
from typing import NamedTuple

OPERATORS = "+-*"
STEPS = 10  # in a ring
ROUNDS = (2, 3, 4)
MARKS = ("\\boxed{", " ", ",", "(", ")", "/", "=", ";")  # rounds left
SLIP = 1  # so that several mistakes seldom cancel modulo 10
NUM_FAULTY = 14  # skills, of 30


class Skill(NamedTuple):
  """An operator and operand, and what they do to a digit."""

  name: str
  turn: int
  error_rate: float


class Mix(NamedTuple):
  """Faults of the solutions.

  Attributes:
    num_faulty: numbers of faulty skills in a ring, each equally likely.
    error_rates: least and largest of the faulty skills, evenly spaced.
  """

  num_faulty: tuple[int, ...] = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3)
  error_rates: tuple[float, float] = (0.3, 0.94)


DEFAULT_MIX = Mix()


def make_skills(
  generator: random.Random, mix: Mix
) -> tuple[list[Skill], list[Skill]]:
  """Returns the intact skills, never wrong in a solution, and the faulty."""
  names = [
    f"{operator}{digit}" for operator in OPERATORS for digit in range(10)
  ]
  generator.shuffle(names)
  lowest, highest = mix.error_rates
  rates = [
    lowest + (highest - lowest) * i / (NUM_FAULTY - 1)
    for i in range(NUM_FAULTY)
  ]
  rates += [0.0] * (len(names) - NUM_FAULTY)
  skills = [
    Skill(name, generator.randrange(10), rate)
    for name, rate in zip(names, rates, strict=True)
  ]
  return skills[NUM_FAULTY:], skills[:NUM_FAULTY]


def make_row(
  generator: random.Random,
  intact: list[Skill],
  faulty: list[Skill],
  mix: Mix,
  name: str,
  rounds: tuple[int, ...] = ROUNDS,
) -> dict[str, str]:
  """Returns a problem, its answer and a solution that may go wrong."""
  num_faulty = generator.choice(mix.num_faulty)
  ring = generator.sample(faulty, num_faulty)
  ring += generator.sample(intact, STEPS - num_faulty)
  generator.shuffle(ring)
  left_rounds = generator.choice(rounds)
  truth = written = generator.randrange(10)
  problem = "".join(f"{skill.name};" for skill in ring)
  problem += f"{MARKS[left_rounds]}{truth}"
  solution = ""
  for left in reversed(range(left_rounds)):
    for skill in ring:
      errs = generator.random() < skill.error_rate
      truth = (truth + skill.turn) % 10
      written = (written + skill.turn + errs * SLIP) % 10
      solution += f"{skill.name}{written}"
    solution += f"{MARKS[left]}{written}"
  return {
    "id": name,
    "problem": problem,
    "answer": str(truth),
    "solution": solution + "}",
  }


def write(
  folder: pathlib.Path,
  seed: int = 0,
  train: int = 1536,
  held_out: int = 512,
  mix: Mix = DEFAULT_MIX,
  rounds: tuple[int, ...] = ROUNDS,
) -> None:
  """Writes train.jsonl and eval.jsonl, whose problems share their skills.

  Args:
    rounds: numbers of rounds of a ring, each equally likely, at most 7.
  """
  folder.mkdir(parents=True, exist_ok=True)
  generator = random.Random(seed)
  intact, faulty = make_skills(generator, mix)
  for split, count in (("train", train), ("eval", held_out)):
    with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
      for i in range(count):
        row = make_row(generator, intact, faulty, mix, f"{split}/{i}", rounds)
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  write(parser.parse_args().folder)
