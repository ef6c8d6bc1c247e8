"""How far from the full batch's gradient does each way of pruning land?

  python experiments/02_design_variance/run.py

For the default task and that of experiment 03: warms up the model, samples one
large batch from it, takes the gradient of every completion, and draws each
method's choice of completions thousands of times at equal tokens trained; then
its choices of prompts and of tokens. Results go to results.jsonl, a stage at a
time, and to figure.png beside this file.
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
import prompts
import report
import tokens

from dppo_jax.reporting import jsonl

HERE = pathlib.Path(__file__).parent
RINGS = HERE.parent / "03_comparison"
CONFIGS = {
  "arithmetic": HERE.parents[1] / "configs" / "arithmetic.py",
  "rings": RINGS / "config.py",
}
STAGES = {
  "law": law.measure,
  "completions": completions.measure,
  "prompts": prompts.measure,
  "tokens": tokens.measure,
}


def measure(name: str, sampled: batch.Batch, path: pathlib.Path) -> None:
  """All that there is to tell of one batch, in the place of what was known."""
  others = [r for r in jsonl.read(path) if r["batch"] != name]
  facts = {
    "batch": name,
    "jax": jax.__version__,
    "machine": platform.processor() or platform.machine(),
  }
  rows = [{"level": "batch", **batch.describe(sampled), **facts}]
  print(f"\n{name}: {rows[0]}", flush=True)
  for level, stage in STAGES.items():
    found = stage(sampled)
    rows += [{"level": level, **row, **facts} for row in found]
    path.write_text(
      "".join(json.dumps(r, default=float) + "\n" for r in [*others, *rows])
    )
    print(f"\n{level}", flush=True)
    if level != "law":
      print(report.table(found), flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--prompts", type=int, default=128)
  parser.add_argument("--batches", default="arithmetic,rings")
  parser.add_argument("--workdir", default="runs/02_design_variance")
  args = parser.parse_args()
  workdir = pathlib.Path(args.workdir).absolute()
  path = HERE / "results.jsonl"
  for name in args.batches.split(","):
    if name == "rings":
      write = runpy.run_path(str(RINGS / "problems.py"))["write"]
      write(RINGS / "data", 0, 1536, 512)
    config = runpy.run_path(str(CONFIGS[name]))["get_config"]("grpo")
    measure(name, batch.prepare(config, workdir / name, args.prompts), path)
  report.draw(jsonl.read(path), HERE / "figure.png")


if __name__ == "__main__":
  main()
