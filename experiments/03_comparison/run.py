"""Trains every method on one task, seed by seed, and draws the comparison.

  python -m experiments.03_comparison.run [--seeds=5] [--cores=0,1]

Each run is a process on its own core; all start from the same fine-tuned
weights, as runs on a public model would. A finished run is not repeated.
Results go to results.jsonl, table.csv and figure.png in this folder.
"""

import argparse
import pathlib
import statistics

from matplotlib import figure as figures

from dppo_jax.analysis import statistics as intervals
from dppo_jax.analysis import tables

from ..common import processes, results, rings
from . import summary

HERE = pathlib.Path(__file__).parent
CONFIG = "experiments/03_comparison/config.py"
# Stated before any was run; see README.md.
VARIANTS = {
  "grpo, all tokens": ("experiments/common/baselines.py:grpo_all_tokens",),
  "grpo": ("grpo",),
  "grpo, half the prompts": ("grpo", "--config.data.prompts_per_step=16"),
  "grpo, groups of 4": ("grpo", "--config.rollout.group_size=4"),
  "dppo": ("dppo",),
  "pods": ("pods",),
  "neyman": ("neyman",),
  "neyman, an eighth": (
    "neyman",
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
# The first has the weights of grpo, up to rounding: only its time counts.
ONLY_SEEDS = {
  "grpo, all tokens": (0, 1),
  "neyman, 2 mini-batches": (0, 1, 2),
  "neyman, 4 mini-batches": (0, 1, 2),
}


def train_all(root: pathlib.Path, seeds: int, cores: list[int]) -> list[dict]:
  """Trains every variant, a seed at a time so that drift affects all."""
  runs = processes.Runs(root, cores)
  runs.start("warm", f"{CONFIG}:grpo", "--config.steps=0").result()
  queued = {
    (variant, seed): runs.start(
      _name(variant, seed),
      f"{CONFIG}:{method}",
      f"--config.seed={seed}",
      f"--config.sft.from_run={root / 'warm'}",
      *flags,
    )
    for seed in range(seeds)
    for variant, (method, *flags) in VARIANTS.items()
    if seed in ONLY_SEEDS.get(variant, range(seeds))
  }
  for run in queued.values():
    run.result()
  return [
    {
      "variant": variant,
      "seed": seed,
      **summary.summary(root / _name(variant, seed), "step/cpu_seconds"),
      **results.facts(),
    }
    for variant, seed in queued
  ]


def _name(variant: str, seed: int) -> str:
  return f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"


def interval(values: list[float]) -> tuple[float, float]:
  """Returns the mean and half the width of its 95% interval."""
  mean = intervals.mean(values)
  return mean.value, mean.high - mean.value


def paired(
  rows: list[dict], variant: str, value, base: str = "grpo"
) -> list[float]:
  """Returns ratios of the base's value to the variant's, by seed."""
  of = lambda name: {
    r["seed"]: value(r) for r in rows if r["variant"] == name and r["is_timed"]
  }
  full, other = of(base), of(variant)
  return [
    full[seed] / other[seed]
    for seed in full
    if full[seed] is not None and other.get(seed) is not None
  ]


def difference(rows: list[dict], variant: str) -> str:
  """Formats final accuracy minus that of grpo, paired by seed."""
  of = lambda name: {
    r["seed"]: r["accuracy"][-1] for r in rows if r["variant"] == name
  }
  full, other = of("grpo"), of(variant)
  mean, half = interval([other[seed] - full[seed] for seed in other])
  return f"{mean:+.3f} ± {half:.3f}"


def full_run(result: dict) -> float:
  """Returns the seconds of all steps."""
  return result["seconds"][-1]


def to_last_mark(result: dict) -> float | None:
  """Returns the seconds to the highest mark, if it was reached."""
  return result["seconds_to"][f"{summary.MARKS[-1]:.0%}"]


def mean_curve(runs: list[dict], name: str) -> list[float]:
  """Returns the mean over runs at each evaluation."""
  columns = zip(*(run[name] for run in runs), strict=True)
  return [statistics.mean(column) for column in columns]


def format_interval(values: list[float]) -> str:
  if len(values) < 2:
    return f"{values[0]:.3f}"
  mean, half = interval(values)
  return f"{mean:.3f} ± {half:.3f}"


def format_ratios(ratios: list[float]) -> str:
  return results.median_range(ratios) if ratios else "–"


def table(rows: list[dict]) -> str:
  """Returns means with 95% intervals, and medians with ranges of times.

  A time to a mark is over the runs that reached it.
  """
  head = [
    "",
    "accuracy (greedy)",
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
  lines = []
  for variant in VARIANTS:
    runs = [r for r in rows if r["variant"] == variant]
    timed = [r for r in runs if r["is_timed"]]
    cells = [
      variant,
      format_interval([r["accuracy"][-1] for r in runs]),
      difference(rows, variant),
      f"{statistics.median(r['step_seconds'] for r in timed):.3f}",
      *(
        format_ratios(paired(rows, variant, full_run, base))
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
    cells.append(format_ratios(paired(rows, variant, to_last_mark)))
    drawn = statistics.mean(r["prompts_drawn"] for r in runs)
    cells.append(f"{drawn:.0f}")
    for name in ("tokens_generated", "tokens_trained"):
      cells.append(f"{statistics.mean(r[name] for r in runs) / 1e6:.2f}")
    cells.append(f"{max(r['weights_max'] for r in runs):.1f}")
    lines.append(cells)
  return tables.markdown(head, lines)


def draw(rows: list[dict]) -> None:
  """Draws accuracy against seconds, and final accuracy against speed-up."""
  figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
  curves, plane = figure.subplots(1, 2)
  for variant, colour in COLOURS.items():
    runs = [r for r in rows if r["variant"] == variant]
    timed = [r for r in runs if r["is_timed"]]
    curves.plot(
      mean_curve(timed, "seconds"),
      mean_curve(runs, "accuracy"),
      color=colour,
      label=variant,
    )
    ratios = paired(rows, variant, full_run)
    if len(runs) > 1 and ratios:
      mean, half = interval([r["accuracy"][-1] for r in runs])
      faster = statistics.median(ratios)
      plane.errorbar(faster, mean, half, color=colour, marker="o", capsize=3)
  curves.set(xlabel="training seconds", ylabel="held-out accuracy (greedy)")
  plane.set(
    xlabel="times faster than grpo, same prompts",
    ylabel="final held-out accuracy (greedy), 95% interval",
  )
  plane.axvline(1, color="#9aa5b1", linewidth=1)
  for axis in (curves, plane):
    results.tidy(axis)
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
    help="seeds whose times other work disturbed, as 0,1",
  )
  args = parser.parse_args()
  if args.seeds < 2:
    parser.error(f"--seeds is {args.seeds} but must be at least 2")
  rings.write(HERE / "data")
  cores = [int(core) for core in args.cores.split(",")]
  rows = train_all(pathlib.Path(args.workdir).absolute(), args.seeds, cores)
  for row in rows:
    row["is_timed"] = str(row["seed"]) not in args.disturbed.split(",")
  results.write(HERE / "results.jsonl", rows)
  draw(rows)
  (HERE / "table.csv").write_text(results.to_csv(table(rows)))
  print(table(rows))


if __name__ == "__main__":
  main()
