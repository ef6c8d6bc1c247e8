"""Trains every method on one task, seed by seed, and draws the comparison.

  python experiments/03_comparison/run.py [--seeds=5] [--cores=0,1]

Each run is a process of its own on a core of its own, as many at a time as
there are cores; all start from the same fine-tuned weights, as runs on a public
model would. A run that is done is not repeated. Results go to results.jsonl,
table.md and figure.png beside this file.
"""

import argparse
from concurrent import futures
import json
import os
import pathlib
import platform
import queue
import runpy
import shutil
import statistics
import subprocess
import sys

import jax
from matplotlib import figure as figures
import summary

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CONFIG = "experiments/03_comparison/config.py"
# Stated before any was run; see README.md.
VARIANTS = {
  "grpo, all tokens": ("grpo", "--config.objective.train_zero_advantage=True"),
  "grpo": ("grpo",),
  "grpo, half the prompts": ("grpo", "--config.data.prompts_per_step=16"),
  "grpo, groups of 4": ("grpo", "--config.rollout.group_size=4"),
  "dppo": ("dppo",),
  "pods": ("pods",),
  "neyman": ("neyman",),
  "neyman, an eighth": (
    "neyman",
    "--config.method.args.prompt_budget=1.0",
    "--config.method.args.completion_budget=0.125",
  ),
  "neyman, groups of 4": ("neyman", "--config.rollout.group_size=4"),
  "neyman, 2 mini-batches": ("neyman", "--config.objective.mini_batches=2"),
  "neyman, 4 mini-batches": ("neyman", "--config.objective.mini_batches=4"),
}
COLOURS = {
  "grpo, all tokens": "#9aa5b1",
  "grpo": "#343a40",
  "grpo, half the prompts": "#6c757d",
  "grpo, groups of 4": "#5f9e6e",
  "dppo": "#9e2a2b",
  "pods": "#b56576",
  "neyman": "#012a4a",
  "neyman, an eighth": "#2a6f97",
  "neyman, groups of 4": "#386641",
  "neyman, 2 mini-batches": "#e07a5f",
  "neyman, 4 mini-batches": "#d98e04",
}
# The first makes the same weights as grpo, up to rounding: only its time is of
# use.
ONLY_SEEDS = {
  "grpo, all tokens": (0, 1),
  "neyman, 2 mini-batches": (0, 1, 2),
  "neyman, 4 mini-batches": (0, 1, 2),
}
# Student's t, 97.5%, by degrees of freedom.
T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}


def command(workdir: pathlib.Path, method: str, seed: int, *flags) -> list:
  """One run of the main program."""
  return [
    sys.executable,
    "-m",
    "dppo_jax.main",
    f"--config={CONFIG}:{method}",
    f"--config.seed={seed}",
    f"--workdir={workdir}",
    *flags,
  ]


def execute(arguments: list, core: int, log: pathlib.Path) -> None:
  """Runs on one core, its output in a file."""
  with log.open("w") as file:
    subprocess.run(
      arguments,
      cwd=ROOT,
      check=True,
      stdout=file,
      stderr=subprocess.STDOUT,
      preexec_fn=lambda: os.sched_setaffinity(0, {core}),
      env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def train_all(root: pathlib.Path, seeds: int, cores: list[int]) -> list[dict]:
  """Every variant under every seed, a seed at a time so that drift hits all."""
  free = queue.Queue()
  for core in cores:
    free.put(core)

  def on_a_core(name: str, arguments: list) -> None:
    core = free.get()
    try:
      if not (root / name / "report.md").exists():
        shutil.rmtree(root / name, ignore_errors=True)
        execute(arguments, core, root / f"{name}.log")
      print(f"{name}: done", flush=True)
    finally:
      free.put(core)

  warm = root / "warm"
  on_a_core("warm", command(warm, "grpo", 0, "--config.steps=0"))
  with futures.ThreadPoolExecutor(len(cores)) as pool:
    runs = {
      (variant, seed): pool.submit(
        on_a_core,
        _name(variant, seed),
        command(
          root / _name(variant, seed),
          method,
          seed,
          f"--config.sft.from_run={warm}",
          *flags,
        ),
      )
      for seed in range(seeds)
      for variant, (method, *flags) in VARIANTS.items()
      if seed in ONLY_SEEDS.get(variant, range(seeds))
    }
  for run in runs.values():
    run.result()
  return [
    {
      "variant": variant,
      "seed": seed,
      **summary.summary(root / _name(variant, seed), "step/cpu_seconds"),
      "jax": jax.__version__,
      "machine": platform.processor() or platform.machine(),
    }
    for variant, seed in runs
  ]


def _name(variant: str, seed: int) -> str:
  return f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"


def interval(values: list[float]) -> tuple[float, float]:
  """Mean, and half the width of its 95% interval."""
  error = statistics.stdev(values) / len(values) ** 0.5
  return statistics.mean(values), T[len(values) - 1] * error


def paired(
  results: list[dict], variant: str, value, base: str = "grpo"
) -> list[float]:
  """Ratios of the base's value to the variant's, seed by seed."""
  of = lambda name: {
    r["seed"]: value(r)
    for r in results
    if r["variant"] == name and r["is_timed"]
  }
  whole, other = of(base), of(variant)
  return [
    whole[seed] / other[seed]
    for seed in whole
    if whole[seed] is not None and other.get(seed) is not None
  ]


def difference(results: list[dict], variant: str) -> str:
  """Final accuracy less that of grpo, seed by seed, with its 95% interval."""
  of = lambda name: {
    r["seed"]: r["accuracy"][-1] for r in results if r["variant"] == name
  }
  whole, other = of("grpo"), of(variant)
  mean, half = interval([other[seed] - whole[seed] for seed in other])
  return f"{mean:+.3f} ± {half:.3f}"


def whole_run(result: dict) -> float:
  """Seconds of all steps."""
  return result["seconds"][-1]


def to_last_mark(result: dict) -> float | None:
  """Seconds to the highest mark, if it was reached."""
  return result["seconds_to"][f"{summary.MARKS[-1]:.0%}"]


def mean_curve(runs: list[dict], name: str) -> list[float]:
  """Evaluation by evaluation, the mean over runs."""
  columns = zip(*(run[name] for run in runs), strict=True)
  return [statistics.mean(column) for column in columns]


def told_interval(values: list[float]) -> str:
  if len(values) < 2:
    return f"{values[0]:.3f}"
  mean, half = interval(values)
  return f"{mean:.3f} ± {half:.3f}"


def told_ratios(ratios: list[float]) -> str:
  if not ratios:
    return "–"
  median, least, most = statistics.median(ratios), min(ratios), max(ratios)
  return f"{median:.2f} ({least:.2f}..{most:.2f})"


def table(results: list[dict]) -> str:
  """Means with 95% intervals; of times medians and ranges, over those timed.

  A time to a mark is over the runs that reached it, and says how many did.
  """
  head = [
    "",
    "accuracy",
    "less grpo's",
    "step, s",
    "faster than grpo",
    "than on all tokens",
    *(f"to {mark:.0%}, s" for mark in summary.MARKS),
    f"faster to {summary.MARKS[-1]:.0%}",
    "prompts",
    "generated, M",
    "trained, M",
    "largest weight",
  ]
  lines = [head, ["---"] * len(head)]
  for variant in VARIANTS:
    runs = [r for r in results if r["variant"] == variant]
    timed = [r for r in runs if r["is_timed"]]
    cells = [
      variant,
      told_interval([r["accuracy"][-1] for r in runs]),
      difference(results, variant),
      f"{statistics.median(r['step_seconds'] for r in timed):.3f}",
      *(
        told_ratios(paired(results, variant, whole_run, base))
        for base in ("grpo", "grpo, all tokens")
      ),
    ]
    for mark in summary.MARKS:
      times = [r["seconds_to"][f"{mark:.0%}"] for r in timed]
      reached = [t for t in times if t is not None]
      cell = f"{statistics.median(reached):.1f}" if reached else "–"
      if len(reached) < len(times):
        cell += f" ({len(reached)} of {len(times)})"
      cells.append(cell)
    cells.append(told_ratios(paired(results, variant, to_last_mark)))
    drawn = statistics.mean(r["prompts_drawn"] for r in runs)
    cells.append(f"{drawn:.0f}")
    for name in ("tokens_generated", "tokens_trained"):
      cells.append(f"{statistics.mean(r[name] for r in runs) / 1e6:.2f}")
    cells.append(f"{max(r['weights_max'] for r in runs):.1f}")
    lines.append(cells)
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(results: list[dict]) -> None:
  """Accuracy against seconds, and final accuracy against the speed-up."""
  figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
  curves, plane = figure.subplots(1, 2)
  for variant, colour in COLOURS.items():
    runs = [r for r in results if r["variant"] == variant]
    timed = [r for r in runs if r["is_timed"]]
    curves.plot(
      mean_curve(timed, "seconds"),
      mean_curve(runs, "accuracy"),
      color=colour,
      label=variant,
    )
    ratios = paired(results, variant, whole_run)
    if len(runs) > 1 and ratios:
      mean, half = interval([r["accuracy"][-1] for r in runs])
      faster = statistics.median(ratios)
      plane.errorbar(faster, mean, half, color=colour, marker="o", capsize=3)
  curves.set(xlabel="training seconds", ylabel="held-out accuracy")
  plane.set(
    xlabel="times faster than grpo, same prompts",
    ylabel="final held-out accuracy, 95% interval",
  )
  plane.axvline(1, color="#9aa5b1", linewidth=1)
  for axis in (curves, plane):
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
  figure.legend(
    *curves.get_legend_handles_labels(),
    loc="outside lower center",
    ncols=6,
    frameon=False,
    fontsize="small",
  )
  figure.savefig(HERE / "figure.png", dpi=120)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--cores", default="0,1")
  parser.add_argument("--workdir", default="runs/03_comparison")
  parser.add_argument(
    "--disturbed",
    default="",
    help="seeds whose times do not count, as 0,1: other work went on",
  )
  args = parser.parse_args()
  root = pathlib.Path(args.workdir).absolute()
  root.mkdir(parents=True, exist_ok=True)
  runpy.run_path(str(HERE / "problems.py"))["write"](
    HERE / "data", 0, 1536, 512
  )
  cores = [int(core) for core in args.cores.split(",")]
  if not 2 <= args.seeds <= max(T) + 1:
    parser.error(f"--seeds is {args.seeds} but must be in 2..{max(T) + 1}")
  results = train_all(root, args.seeds, cores)
  for result in results:
    result["is_timed"] = str(result["seed"]) not in args.disturbed.split(",")
  (HERE / "results.jsonl").write_text(
    "".join(json.dumps(r) + "\n" for r in results)
  )
  draw(results)
  (HERE / "table.md").write_text(table(results) + "\n")
  print(table(results))


if __name__ == "__main__":
  main()
