r"""Writes rings of small operations: half the groups have zero variance.

  python problems.py --out=DIR [--seed=0] [--train=1536] [--eval=512]

A problem is a ring of `STEPS` operations, a mark that says how many rounds to
walk, and the digit to start from. The solution walks the ring: it copies each
operation and puts the digit that it leads to in the semicolon's place; after a
round come the mark for one round less and the digit again, and after the last
round the box.

  problem    +3;*7;-2;,5
  solution   +38*70-24 4+37*79-23\boxed{3}

Each operator with its operand, a skill, turns the digit by an amount of its own
(modulo 10), which nothing but a table tells. A solution, from which fine-tuning
learns, turns one too far as often as the skill's error rate says: never for the
sound skills; for the faulty ones from seldom to nearly always. Its box holds
what its mistakes led to; the answer is the truth. A model that imitates the
solutions starts as right on each skill as they are, and only the reward can
tell it which turn is the right one.
"""

import argparse
import json
import pathlib
import random
from typing import NamedTuple

OPERATORS = "+-*"
STEPS = 10  # in a ring
ROUNDS = (2, 3, 4)
MARKS = ("\\boxed{", " ", ",", "(", ")")  # rounds left
SLIP = 1  # so that several mistakes seldom cancel modulo 10
NUM_FAULTY = 14  # skills, of 30
ERROR_RATES = (0.3, 0.94)  # of the faulty skills, evenly spaced
# How many faulty skills a ring has; each entry is as likely.
FAULTY_IN_RING = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3)


class Skill(NamedTuple):
  """An operator and operand, and what they do to a digit."""

  name: str
  turn: int
  error_rate: float


def make_skills(generator: random.Random) -> tuple[list[Skill], list[Skill]]:
  """The sound skills, never wrong in a solution, and the faulty ones."""
  names = [
    f"{operator}{digit}" for operator in OPERATORS for digit in range(10)
  ]
  generator.shuffle(names)
  lowest, highest = ERROR_RATES
  rates = [
    lowest + (highest - lowest) * i / (NUM_FAULTY - 1)
    for i in range(NUM_FAULTY)
  ]
  rates += [0.0] * (len(names) - NUM_FAULTY)
  skills = []
  for name, rate in zip(names, rates, strict=True):
    skills.append(Skill(name, generator.randrange(10), rate))
  return skills[NUM_FAULTY:], skills[:NUM_FAULTY]


def make_row(
  generator: random.Random, sound: list[Skill], faulty: list[Skill], name: str
) -> dict[str, str]:
  """A problem, its answer and a solution that may go wrong."""
  num_faulty = generator.choice(FAULTY_IN_RING)
  ring = generator.sample(faulty, num_faulty)
  ring += generator.sample(sound, STEPS - num_faulty)
  generator.shuffle(ring)
  rounds = generator.choice(ROUNDS)
  truth = written = generator.randrange(10)
  problem = "".join(f"{skill.name};" for skill in ring)
  problem += f"{MARKS[rounds]}{truth}"
  solution = ""
  for left in reversed(range(rounds)):
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


def write(folder: pathlib.Path, seed: int, train: int, held_out: int) -> None:
  """Writes train.jsonl and eval.jsonl, of problems that share their skills."""
  folder.mkdir(parents=True, exist_ok=True)
  generator = random.Random(seed)
  sound, faulty = make_skills(generator)
  for split, count in (("train", train), ("eval", held_out)):
    with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
      for i in range(count):
        row = make_row(generator, sound, faulty, f"{split}/{i}")
        file.write(json.dumps(row) + "\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--train", type=int, default=1536, help="problems")
  parser.add_argument("--eval", type=int, default=512, help="problems")
  args = parser.parse_args()
  write(args.out, args.seed, args.train, args.eval)


if __name__ == "__main__":
  main()
