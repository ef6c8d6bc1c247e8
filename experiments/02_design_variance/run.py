"""How far from the full batch's gradient does each way of pruning land?

  python experiments/02_design_variance/run.py

For the default task and that of experiment 03: warms up the model, samples one
large batch from it, takes the gradient of every completion, and draws each
rule's choice thousands of times at equal tokens: choices of completions, of
prompts, of tokens, and of how many completions to sample at all. Then it times
the updates. Every stage leaves a file in --workdir, and a stage that has one is
not measured again; results.jsonl, table.md and figure.png beside this file are
made of them.
"""

import argparse
import json
import pathlib
import platform
import runpy

import batch
import completions
import jax
import law
import ledger
import picture
import prefixes
import prompts
import rollouts
import seconds
import tokens

from dppo_jax.analysis import jsonl

HERE = pathlib.Path(__file__).parent
RINGS = HERE.parent / "03_comparison"
CONFIGS = {
  "arithmetic": HERE.parents[1] / "configs" / "arithmetic.py",
  "rings": RINGS / "config.py",
}
STAGES = {
  "batch": lambda sampled: [batch.describe(sampled)],
  "law": law.measure,
  "completions": completions.measure,
  "prompts": prompts.measure,
  "tokens": tokens.measure,
  "prefixes": prefixes.measure,
  "rollouts": rollouts.measure,
  "seconds": seconds.measure,
}


def measure(name: str, workdir: pathlib.Path, num_prompts: int) -> None:
  """What no earlier run has left in `workdir`, a file for each stage."""
  files = {level: workdir / f"{level}.jsonl" for level in STAGES}
  if all(file.exists() for file in files.values()):
    return
  if name == "rings":
    write = runpy.run_path(str(RINGS / "problems.py"))["write"]
    write(RINGS / "data", 0, 1536, 512)
  config = runpy.run_path(str(CONFIGS[name]))["get_config"]("grpo")
  sampled = batch.prepare(config, workdir / "model", num_prompts)
  facts = {
    "batch": name,
    "jax": jax.__version__,
    "machine": platform.processor() or platform.machine(),
  }
  for level, stage in STAGES.items():
    if files[level].exists():
      continue
    print(f"{name}: {level}", flush=True)
    rows = [{"level": level, **row, **facts} for row in stage(sampled)]
    lines = [json.dumps(row, default=float) + "\n" for row in rows]
    files[level].write_text("".join(lines))
    jax.clear_caches()  # or the programs of all stages pile up


def collect(workdir: pathlib.Path, names: list[str]) -> list[dict]:
  """The rows of all stages that are done."""
  files = [workdir / n / f"{level}.jsonl" for n in names for level in STAGES]
  return [row for file in files if file.exists() for row in jsonl.read(file)]


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
  results = "".join(json.dumps(row) + "\n" for row in rows)
  (HERE / "results.jsonl").write_text(results)
  (HERE / "table.md").write_text(ledger.pages(rows))
  picture.draw(rows, HERE / "figure.png")


if __name__ == "__main__":
  main()
