"""Measures the bias and variance of the gradient under each pruning rule.

  python -m experiments.02_design_variance.run

For the default task and that of experiment 03: warms up the model, samples one
large batch from it, takes the gradient of every completion, and draws each
rule's choice thousands of times at equal tokens: choices of completions, of
prompts, of tokens, and of how many completions to sample at all. Then it times
the updates. Every stage leaves a file in --workdir, and a stage that has one is
not measured again; results.jsonl, table.csv and figure.png here are made of
them.
"""

import argparse
import pathlib

import jax

from ..common import results, tasks
from . import (
  baselines,
  batch,
  completions,
  group_sizes,
  law,
  ledger,
  picture,
  prefixes,
  prompts,
  rollouts,
  seconds,
  tokens,
)

HERE = pathlib.Path(__file__).parent
STAGES = {
  "batch": lambda sampled: [batch.describe(sampled)],
  "law": law.measure,
  "design effects": law.design_effects,
  "completions": completions.measure,
  "prompts": prompts.measure,
  "tokens": tokens.measure,
  "prefixes": prefixes.measure,
  "rollouts": rollouts.measure,
  "group sizes": group_sizes.measure,
  "baselines": baselines.measure,
  "seconds": seconds.measure,
}


def measure(name: str, workdir: pathlib.Path, num_prompts: int) -> None:
  """Runs the stages that have no file in `workdir` yet."""
  files = {level: workdir / f"{level}.jsonl" for level in STAGES}
  if all(file.exists() for file in files.values()):
    return
  config = tasks.grpo_config(name)
  sampled = batch.prepare(config, workdir / "model", num_prompts)
  facts = {"batch": name, **results.facts()}
  for level, stage in STAGES.items():
    if files[level].exists():
      continue
    print(f"{name}: {level}", flush=True)
    rows = [{"level": level, **row, **facts} for row in stage(sampled)]
    results.write(files[level], rows)
    jax.clear_caches()  # or the programs of all stages pile up


def collect(workdir: pathlib.Path, names: list[str]) -> list[dict]:
  """Returns the rows of all stages that are done."""
  files = [workdir / n / f"{level}.jsonl" for n in names for level in STAGES]
  return [row for file in files if file.exists() for row in results.read(file)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--prompts", type=int, default=128)
  parser.add_argument("--batches", default="arithmetic,rings")
  parser.add_argument("--workdir", default="runs/02_design_variance")
  args = parser.parse_args()
  workdir = pathlib.Path(args.workdir).absolute()
  names = args.batches.split(",")
  for name in names:
    measure(name, workdir / name, args.prompts)
  rows = collect(workdir, names)
  results.write(HERE / "results.jsonl", rows)
  (HERE / "table.csv").write_text(results.to_csv(ledger.pages(rows)))
  picture.draw(rows, HERE / "figure.png")


if __name__ == "__main__":
  main()
