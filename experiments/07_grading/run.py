"""Measures grading speed on honest answers and the cost of hostile ones.

  python -m experiments.07_grading.run [--answers=FILE.jsonl] [--workers=1,2,4]

Honest answers are those of a data file (of its column `answer`), or made by
rules: a quarter stands in the box as in the data, half of them in another
notation, a quarter are those of another problem. Hostile ones are those of
tests/helpers/hostile.py. Rows are appended to results.jsonl.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import tempfile
import time

from dppo_jax.rewards import Grader
from tests.helpers import hostile

HERE = pathlib.Path(__file__).parent


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--answers", default="", help="a .jsonl file")
  parser.add_argument("--number", type=int, default=10_000, help="honest ones")
  parser.add_argument("--workers", default="1,2,4")
  parser.add_argument("--deadline", type=float, default=1.0, help="seconds")
  parser.add_argument("--parts", default="honest,hostile")
  return parser.parse_args()


def main() -> None:
  args = arguments()
  here = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}
  with (HERE / "results.jsonl").open("a", encoding="utf-8") as file:

    def keep(row: dict) -> None:
      file.write(json.dumps(row | here) + "\n")
      file.flush()
      print(json.dumps(row | here), flush=True)

    if "honest" in args.parts:
      pairs = honest(args.answers, args.number)
      for workers in map(int, args.workers.split(",")):
        keep(rate(pairs, workers) | {"answers": bool(args.answers)})
    if "hostile" in args.parts:
      keep(sweep(args.deadline))


def honest(path: str, number: int) -> list[tuple[str, str]]:
  """Returns pairs (gold answer, boxed answer) in a fixed order."""
  rng = random.Random(0)
  golds = _read(path) if path else _make(rng, number)
  pairs = []
  for i in range(number):
    gold, other = golds[i % len(golds)], golds[(i + 1) % len(golds)]
    box = (gold, _rewritten(gold), _rewritten(gold), other)[i % 4]
    pairs.append((gold, box))
  rng.shuffle(pairs)
  return pairs


def _read(path: str) -> list[str]:
  lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  return [json.loads(line)["answer"] for line in lines]


def _make(rng: random.Random, number: int) -> list[str]:
  forms = (
    "{a}",
    r"\frac{{{a}}}{{{b}}}",
    r"{a}\sqrt{{{b}}}",
    "{a}.{b}",
    "({a}, {b})",
    r"\{{{a}, {b}, {c}\}}",
    "{a}x^2+{b}x-{c}",
    r"[{a}, \infty)",
    r"{a}\pi",
    "x = {a}",
  )
  draw = lambda: rng.randint(2, 999)
  return [
    forms[i % len(forms)].format(a=draw(), b=draw(), c=draw())
    for i in range(number)
  ]


def _rewritten(gold: str) -> str:
  """Returns an equal answer in another notation."""
  return f"{gold}+0" if gold.isdigit() else gold.replace("frac", "dfrac") + " "


def rate(pairs: list[tuple[str, str]], workers: int) -> dict:
  """Returns the seconds to grade `pairs`, once every worker is ready."""
  completions = [rf"Thus it is \boxed{{{box}}}." for _, box in pairs]
  golds = [gold for gold, _ in pairs]
  with Grader("math", workers, timeout_seconds=30.0) as grader:
    warm = [f"{i}" for i in range(8 * workers)]
    grader.grade(warm, [rf"\boxed{{{x}+0}}" for x in warm], warm)
    start = time.perf_counter()
    graded = grader.grade(golds, completions, golds)
    seconds = time.perf_counter() - start
  return {
    "part": "honest",
    "workers": workers,
    "number": len(pairs),
    "seconds": round(seconds, 1),
    "a_second": round(len(pairs) / seconds),
    "counts": {name: n for name, n in sorted(graded.counts.items()) if n},
  }


def sweep(deadline: float) -> dict:
  """Grades every hostile completion with each built-in function."""
  with tempfile.TemporaryDirectory() as folder:
    mark = pathlib.Path(folder, "injected")
    texts = hostile.completions(str(mark))
    longest, counts = 0.0, {}
    with Grader("math,exact,boxed", 1, deadline, on_error="stop") as grader:
      grader.self_check()
      for text in texts.values():
        start = time.perf_counter()
        graded = grader.grade([""], [text], ["7"])
        longest = max(longest, time.perf_counter() - start)
        for name, n in graded.counts.items():
          counts[name] = counts.get(name, 0) + n
    was_written = mark.exists()
  return {
    "part": "hostile",
    "number": len(texts),
    "deadline": deadline,
    "longest_seconds": round(longest, 2),
    "counts": {name: n for name, n in sorted(counts.items()) if n},
    "code_ran": was_written,
  }


if __name__ == "__main__":
  main()
