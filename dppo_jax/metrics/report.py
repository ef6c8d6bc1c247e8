"""A run on a page: `report.md` with `report.png`, from its own logs."""

import pathlib
import re
import statistics

from dppo_jax.analysis import runs
from dppo_jax.metrics import jsonl, plots, samples, style, tables
from dppo_jax.metrics import warnings as health


def write(workdir: pathlib.Path) -> pathlib.Path:
  """Writes the report of the run in `workdir`; returns its path.

  The run may go on meanwhile, or may not have begun: both files are replaced
  whole, and say what there is.

  Raises:
    ValueError: where there is no run, or a damaged line.
  """
  run = runs.load(workdir)
  shown = jsonl.read_ends(workdir / "samples.jsonl")
  style.save(plots.draw(run), workdir / "report.png")
  parts = [
    f"# {plots.title(run)}",
    _summary(run),
    "Training time is that of the steps: evaluation, checkpoints, "
    "supervised fine-tuning and compilation are not in it.",
    "![accuracy, pruning and time](report.png)",
  ]
  if run.steps:
    parts += ["## What was pruned", _pruning(run)]
    parts += ["## Where the time went", _times(run)]
    parts += ["## What went wrong", _faults(run)]
  outcomes = samples.table(shown)
  if outcomes:
    parts += ["## What became of completions", OUTCOMES, outcomes]
  parts += ["## Sampled solutions", _solutions(shown)]
  path = workdir / "report.md"
  jsonl.replace(path, ["\n\n".join(parts), "\n"])
  return path


OUTCOMES = (
  "Completions of one group, some kept and some pruned. The advantage is "
  "relative to the group; the weight is 1 over the probability with which the "
  "completion was kept, and makes up for those that were pruned."
)


def _summary(run: runs.Run) -> str:
  rows = [
    ("model", _model(run.config)),
    ("method", runs.call(run.config, "method")),
    ("objective", runs.call(run.config, "objective")),
    *_accuracies(run.evals),
    ("steps", f"{run.done} of {run.config.get('steps', run.done)}"),
    ("training time", f"{run.total('step/seconds'):.1f} s"),
    ("prompts drawn", f"{run.total('prompts/drawn'):,.0f}"),
    ("tokens generated", f"{run.total('tokens/generated'):,.0f}"),
    ("tokens trained", f"{run.total('tokens/trained'):,.0f}"),
  ]
  if run.evals:
    # Where most of what there was to learn had been learnt.
    _, accuracy = run.curve()
    start, best = accuracy[0], accuracy.max()
    mark = start + 0.9 * (best - start)
    if best > start:
      spent = run.cost_to(mark)
      rows.append((f"training time to {mark:.0%}", f"{spent:.1f} s"))
  return tables.markdown(("", ""), rows)


def _accuracies(evals: list[dict]) -> list[tuple[str, str]]:
  """First and last accuracy on each evaluation set."""
  rows = []
  for name in dict.fromkeys(name for line in evals for name in line):
    stage, _, quantity = name.rpartition("/")
    if stage.partition("/")[0] != "eval" or quantity != "accuracy":
      continue
    lines = [line for line in evals if name in line]
    ends = [
      f"{line[name]:.3f} ± {line.get(f'{stage}/stderr', float('nan')):.3f}"
      for line in (lines[0], lines[-1])
    ]
    which = stage.partition("/")[2]
    what = f"held-out accuracy, {which}" if which else "held-out accuracy"
    rows.append((what, " → ".join(ends[: len(lines)])))
  return rows


def _model(config: dict) -> str:
  path = config.get("model.path") or config.get("model.hub_id")
  get = lambda name: config.get(f"model.{name}", "?")
  shape = f"{get('layers')} layers of width {get('embed')}"
  return f"{pathlib.Path(path).name if path else shape}, {get('dtype')}"


def _pruning(run: runs.Run) -> str:
  share = lambda a, b: f"{run.total(a) / max(run.total(b), 1):.1%}"
  mean = lambda name: f"{run.total(name) / len(run.steps):.1%}"
  sampled = "completions sampled"
  rows = [
    (
      "prompts kept",
      share("prompts/kept", "prompts/drawn"),
      "prompts drawn",
    ),
    (
      "completions kept",
      share("completions/kept", "completions/drawn"),
      sampled,
    ),
    (
      "completions trained",
      share("completions/trained", "completions/drawn"),
      f"{sampled} (the rest had weight or advantage 0)",
    ),
    (
      "tokens trained",
      share("tokens/trained", "tokens/generated"),
      "tokens generated",
    ),
    (
      "groups of zero variance",
      share("groups/zero_std", "prompts/kept"),
      "prompts rolled out",
    ),
    (
      "decode slots busy",
      mean("rollout/slot_utilisation"),
      "slots x decode steps",
    ),
    ("packed positions in use", mean("pack/fill"), "rows x row length"),
    *_self_set(run.steps, "prompts", "prompts drawn"),
    *_self_set(run.steps, "completions", "completions with an advantage"),
  ]
  noise = [x for x in run.steps if "noise/scale" in x]
  if noise:
    rows.append(
      (
        "gradient noise, at last",
        f"{noise[-1]['noise/share']:.1%}",
        "the gradient's squared length: a noise scale of "
        f"{noise[-1]['noise/scale']:.3g} prompts",
      )
    )
  return tables.markdown(("", "share", "of"), rows)


def _self_set(steps: list[dict], what: str, of: str) -> list[tuple]:
  """What a share set itself to, if it did: a row or none."""
  found = sorted(x[f"shares/{what}"] for x in steps if f"shares/{what}" in x)
  if not found:
    return []
  gains = [x.get(f"shares/{what}_speedup", 1.0) for x in steps]
  return [
    (
      f"share of {what} that set itself, median",
      f"{statistics.median(found):.1%}",
      f"{of}; from {found[0]:.1%} to {found[-1]:.1%}, predicted "
      f"{statistics.median(gains):.2f} times as fast as all of them",
    )
  ]


def _faults(run: runs.Run) -> str:
  """What went wrong without ending the run, counted."""
  count = lambda name: f"{run.total(name):.0f}"
  skipped = run.steps[-1].get("update/skipped", 0)  # counts from the start
  rows = [
    ("updates skipped, their gradient not finite", f"{skipped:.0f}"),
    ("gradings that ran out of time", count("reward/timeouts")),
    ("gradings that crashed a worker", count("reward/crashes")),
    ("gradings that raised an error", count("reward/errors")),
    ("rewards that were not finite", count("reward/nonfinite")),
    *_warnings(run),
  ]
  return tables.markdown(("", "count"), rows)


def _warnings(run: runs.Run) -> list[tuple[str, str]]:
  lines = [*run.steps, *run.evals]
  counts = {
    alarm.name: sum(line.get(f"warnings/{alarm.name}", 0) for line in lines)
    for alarm in health.ALARMS
  }
  return [
    (f"steps with the warning {name}", f"{count:.0f}")
    for name, count in counts.items()
    if count
  ]


def _times(run: runs.Run) -> str:
  total = max(run.total("step/seconds"), 1e-9)
  spent = plots.spent_in(run)
  spent["the rest"] = total - sum(spent.values())
  rows = [
    (stage, f"{seconds:.1f} s", f"{seconds / total:.1%}")
    for stage, seconds in spent.items()
  ]
  return tables.markdown(("stage", "seconds", "share"), rows)


def _solutions(lines: list[dict]) -> str:
  # Where nothing is held out, of what was sampled to train on.
  shown = [line for line in lines if line.get("split") == "eval"] or lines
  if not shown:
    return "None were kept."
  steps = sorted({line["step"] for line in shown})
  chosen = [
    line
    for step in dict.fromkeys((steps[0], steps[-1]))
    for line in [x for x in shown if x["step"] == step][:3]
  ]
  blocks = []
  for line in chosen:
    is_right = line.get("correct", line["reward"]) == 1  # as older runs say
    verdict = "right" if is_right else "wrong"
    text = f"{line['problem']}\n{line['completion']}"
    # Longer than any fence in the text: models like to write code.
    fence = "`" * (1 + max(2, *map(len, re.findall("`+", text)), 0))
    blocks.append(
      f"Step {line['step']}, {verdict} (answer: {line['answer']}):\n\n"
      f"{fence}\n{text}\n{fence}"
    )
  return "\n\n".join(blocks)
