r"""The first steps of GRPO as published by TRL, for its seconds.

  python -m experiments.17_papers_protocol.with_trl --python=VENV/bin/python

Needs an environment with torch, trl, accelerate and datasets, and the run of
GRPO as published, whose prompts and options it repeats. Adds a line to
trl.jsonl, and prints the seconds of both.
"""

import argparse
import importlib
import json
import pathlib

from dppo_jax.config import choose

from ..common import processes, results
from . import run

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "trl.jsonl"
MICRO = 16  # completions of a micro-batch
TRAINER = "experiments.15_real_model.with_trl"


def train(args: argparse.Namespace, seed: int) -> dict:
  """Trains by TRL, and returns its columns, each with a value per step."""
  root = args.workdir.resolve()
  workdir = run.workdir_of(root, run.PUBLISHED, seed)
  config = choose.read(workdir / "config.json")
  config.steps = args.steps
  work, out = root / "trl.work.json", root / "trl.json"
  peers = importlib.import_module("experiments.15_real_model.run")
  peers.write_work(config, work)
  command = [args.python, "-m", TRAINER, f"--model={config.model.path}"]
  command += [f"--prompts={work}", f"--out={out}", f"--rate={run.RATE}"]
  command += [f"--seed={seed}", f"--micro={MICRO}"]
  processes.execute(command, {args.core}, root / "trl.log")
  return json.loads(out.read_text())


def compared(line: dict, epoch: dict) -> str:
  """Returns TRL's seconds and those of our run, as text.

  Args:
    line: of trl.jsonl.
    epoch: measurements of the first epoch of GRPO as published.
  """
  num = len(line["cpu_seconds"])
  theirs = sum(line["cpu_seconds"]) / num
  ours = sum(epoch["step_cpu_seconds"][:num]) / num
  return (
    f"seed {line['seed']}, {num} steps: TRL {theirs:.0f} CPU s a step, ours "
    f"{ours:.0f}, ratio {theirs / ours:.1f}"
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--python", required=True, help="of TRL's environment")
  parser.add_argument("--steps", type=int, default=8)
  parser.add_argument("--core", type=int, default=0)
  parser.add_argument(
    "--workdir", type=pathlib.Path, default=pathlib.Path("runs/papers_protocol")
  )
  args = parser.parse_args()
  lines = run.read()
  seed = run.longest(lines)
  line = {"seed": seed, **train(args, seed), **results.facts()}
  with RESULTS.open("a") as file:
    file.write(json.dumps(line) + "\n")
  key = run.PUBLISHED, seed, 1
  (epoch,) = (x for x in run.read() if (x["row"], x["seed"], x["epoch"]) == key)
  print(compared(line, epoch))


if __name__ == "__main__":
  main()
