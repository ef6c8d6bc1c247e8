r"""Compares methods after the same epochs, as the papers do, on a real model.

  python -m experiments.17_papers_protocol.run --core=0
  python -m experiments.17_papers_protocol.run --rows="dppo 0.7" --epochs=2
  python -m experiments.17_papers_protocol.run --task=words
  python -m experiments.17_papers_protocol.run --report

SmolLM2-135M-Instruct learns problems of one step (`single`) with groups of 5
and a KL penalty of 0.001; `words`, which starts after an epoch, has two. Rows
take turns: every run trains for an epoch on one core, is evaluated, saved, and
adds a line to the results of its task; the next round resumes it. All rows
therefore have about the same number of epochs at any moment, and a stopped
queue resumes where it was.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
import importlib
import json
import pathlib
from typing import NamedTuple

import numpy as np

from dppo_jax.analysis import runs
from dppo_jax.files import jsonl

from ..common import processes, results
from . import held_out

HERE = pathlib.Path(__file__).parent
PROMPTS, GROUP, BETA, RATE = 16, 5, "0.001", "2e-5"
EPOCHS = 6
EVAL_PROBLEMS, EVAL_SAMPLES = 16, 2  # of each kind
STAGES = ("rollout", "reward", "select", "score", "update", "update_history")


class Task(NamedTuple):
  """Problems to learn.

  Attributes:
    config: the configuration file.
    problems: the number of problems to train on.
    results: a file of this directory.
  """

  config: str
  problems: int
  results: str

  def steps(self, row: "Row") -> int:
    """Returns the steps of an epoch."""
    return self.problems // row.prompts


class Row(NamedTuple):
  """A row of the table.

  Attributes:
    method: the method, a name or FILE.py:FUNCTION.
    args: arguments of the method.
    beta: coefficient of the KL penalty.
    prompts: prompts of a step.
  """

  method: str
  args: Mapping[str, float | str]
  beta: str = BETA
  prompts: int = PROMPTS


def dppo(rate: float, scope: str = "batch") -> Row:
  rates = {"prompt_rate": rate, "completion_rate": rate}
  return Row("dppo", {**rates, "scope": scope})


PUBLISHED = "GRPO as published"
ROWS = {
  PUBLISHED: Row("grpo", {}),
  "dppo 0.7": dppo(0.7),
  "our grpo": Row("grpo", {}, beta="0.0"),
  "dppo 0.5": dppo(0.5),
  "cppo": Row("cppo", {"keep": 0.5}, prompts=2 * PROMPTS),
  "neyman": Row("neyman", {}),
  "neyman, prompts": Row("neyman", {"prompt_budget": 0.7}),
  "cppo, same prompts": Row("cppo", {"keep": 0.5}),
  "greso": Row("greso", {}),
  # With a KL penalty, groups of equal rewards count, which it skips.
  "greso, exact, no KL": Row(
    "greso", {"dynamic_sampling": "exact"}, beta="0.0"
  ),
  "d3s": Row("d3s", {}),
  "pods": Row("pods", {}),
  "GRPO as published, no KL": Row(
    "experiments/common/baselines.py:grpo_all_tokens", {}, beta="0.0"
  ),
  "dppo 0.9": dppo(0.9),
  **{f"dppo {x}, group": dppo(x, "group") for x in (0.5, 0.7, 0.9)},
}
TASKS = {
  "single": Task("configs/smollm2.py", 372, "single.jsonl"),
  "words": Task("configs/smollm2_words.py", 638, "words.jsonl"),
}
START = "our grpo"  # after an epoch of `single`; `words` starts from there
TURNS = (  # rows that take turns; the first are the most important
  (PUBLISHED, "dppo 0.7", "our grpo"),
  ("dppo 0.5", "cppo", "neyman"),
  tuple(ROWS)[6:],
)
# Its schedule depends on the last step, which a resumed run may not change.
IN_ONE_PART = ("d3s",)


def turns(
  names: Iterable[str], seeds: Iterable[int], epochs: int
) -> Iterator[tuple[str, int, int]]:
  """Yields row, seed and epoch of every part, in the order of the queue."""
  for seed in seeds:
    for some in TURNS:
      for epoch in range(1, epochs + 1):
        for name in some:
          if name in names and (name not in IN_ONE_PART or epoch == epochs):
            yield name, seed, epoch


def flags(task: str, name: str, seed: int, epoch: int) -> list[str]:
  """Returns the options of a run up to the end of an epoch."""
  fetch = importlib.import_module("experiments.15_real_model.fetch").fetch
  row = ROWS[name]
  sets = (f"{x}={HERE / 'held_out.py'}:{x}" for x in held_out.KINDS)
  return [
    *(f"--config.method.args.{x}={value}" for x, value in row.args.items()),
    f"--config.objective.args.beta={row.beta}",
    "--config.model.hub_id=",
    f"--config.model.path={fetch('smollm2')}",
    f"--config.seed={seed}",
    f"--config.steps={epoch * TASKS[task].steps(row)}",
    f"--config.data.prompts_per_step={row.prompts}",
    f"--config.rollout.group_size={GROUP}",
    f"--config.optimizer.learning_rate={RATE}",
    "--config.optimizer.schedule=constant",
    f"--config.data.eval={','.join(sets)}",
    f"--config.data.eval_limit={EVAL_PROBLEMS}",
    f"--config.eval.samples={EVAL_SAMPLES}",
    f"--config.eval.every={TASKS[task].steps(row)}",
    "--config.checkpoint.keep=1",
    "--config.log.writers=completions",
  ]


def accuracies(line: dict) -> dict[str, dict[str, list[float]]]:
  """Returns each set's accuracy, and its limits, by decoding."""
  table = {}
  for decoding, prefix in (("sampled", ""), ("greedy", "greedy_")):
    names = [f"{prefix}{x}" for x in ("accuracy", "accuracy_low")]
    names.append(f"{prefix}accuracy_high")
    stages = ["eval", *(f"eval/{x}" for x in held_out.KINDS[1:])]
    table[decoding] = {
      kind: [round(line[f"{stage}/{x}"], 4) for x in names]
      for kind, stage in zip(held_out.KINDS, stages, strict=True)
      if f"{stage}/{names[0]}" in line
    }
  return table


def groups(workdir: pathlib.Path, first: int, last: int) -> list[list[int]]:
  """Returns the problem and the number of right completions of each group.

  Args:
    first, last: steps whose groups are counted.
  """
  counts: dict[tuple[int, int], int] = {}
  for path in sorted((workdir / "completions").glob("*.jsonl")):
    for line in jsonl.read(path):
      if first <= line["step"] <= last:
        key = line["step"], int(line["id"].rpartition("/")[2])
        counts[key] = counts.get(key, 0) + int(line["correct"] > 0.5)
  return [[problem, right] for (_, problem), right in counts.items()]


def summary(workdir: pathlib.Path, size: int, epoch: int) -> dict:
  """Returns the measurements of an epoch; epoch 0 is the evaluation before.

  Args:
    size: steps of an epoch.
  """
  run = runs.load(workdir)
  first, last = (epoch - 1) * size + 1, epoch * size
  steps = [x for x in run.steps if first <= x["step"] <= last]
  column = lambda key: [round(x.get(key, 0.0), 4) for x in steps]
  total = lambda key: round(float(np.sum(column(key))), 3)
  evaluation = next(x for x in run.evals if x["step"] == last)
  return {
    "steps": len(steps),
    "cpu_seconds": total("step/cpu_seconds"),
    "seconds": total("step/seconds"),
    **{stage: total(f"{stage}/seconds") for stage in STAGES},
    "generated": total("tokens/generated"),
    "trained": total("tokens/trained"),
    "micro_batches": total("update/micro_batches"),
    "prompts": total("prompts/kept"),
    "max_weight": max(column("weights/max"), default=0.0),
    "step_cpu_seconds": column("step/cpu_seconds"),
    "step_accuracy": column("reward/accuracy"),
    "noise_fraction": column("noise/fraction"),
    "kept": column("budget/completions"),
    "groups": groups(workdir, first, last),
    **accuracies(evaluation),
  }


def workdir_of(root: pathlib.Path, name: str, seed: int) -> pathlib.Path:
  return root / f"{name.replace(' ', '-').replace(',', '')}-{seed}"


def start(root: pathlib.Path, seed: int, core: int) -> str:
  """Trains on `single` unless it was done, and returns the checkpoint."""
  workdir, size = root / f"start-{seed}", TASKS["single"].steps(ROWS[START])
  if not (workdir / "report.md").exists():
    _execute("single", START, seed, 1, workdir, core)
  return f"{workdir}@{size}"


def train(
  task: str, name: str, seed: int, epoch: int, root: pathlib.Path, core: int
) -> list[dict]:
  """Trains a run to the end of an epoch, and returns its measurements."""
  workdir, more = workdir_of(root, name, seed), []
  if task != "single":
    workdir = root / f"{task}-{workdir.name}"
    more = [f"--config.sft.from_run={start(root, seed, core)}"]
  _execute(task, name, seed, epoch, workdir, core, *more)
  labels, size = {"row": name, "seed": seed}, TASKS[task].steps(ROWS[name])
  is_first = epoch == 1 or name in IN_ONE_PART
  epochs = range(0 if is_first else epoch, epoch + 1)
  return [
    {**labels, "epoch": x, **summary(workdir, size, x), **results.facts()}
    for x in epochs
  ]


def _execute(
  task: str,
  name: str,
  seed: int,
  epoch: int,
  workdir: pathlib.Path,
  core: int,
  *more: str,
) -> None:
  config = f"{TASKS[task].config}:{ROWS[name].method}"
  command = processes.train_command(config, workdir, *more)
  command += flags(task, name, seed, epoch)
  log = workdir.with_name(f"{workdir.name}-{epoch}.log")
  processes.execute(command, {core}, log)


def read(task: str = "single") -> list[dict]:
  """Returns the results so far."""
  path = HERE / TASKS[task].results
  return results.read(path) if path.exists() else []


def longest(lines: Iterable[dict]) -> int:
  """Returns the seed of GRPO as published that has most epochs."""
  published = [x for x in lines if x["row"] == PUBLISHED]
  return max(published, key=lambda x: (x["epoch"], -x["seed"]))["seed"]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--task", choices=TASKS, default="single")
  parser.add_argument("--rows", help="names, separated by ';'; default: all")
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
  parser.add_argument("--epochs", type=int, default=EPOCHS)
  parser.add_argument("--core", type=int, default=0)
  parser.add_argument("--report", action="store_true")
  parser.add_argument(
    "--workdir", type=pathlib.Path, default=pathlib.Path("runs/papers_protocol")
  )
  args = parser.parse_args()
  if args.report:
    from . import report

    report.write({task: read(task) for task in TASKS})
    return
  root = args.workdir.resolve()
  root.mkdir(parents=True, exist_ok=True)
  names = args.rows.split(";") if args.rows else list(ROWS)
  done = {(x["row"], x["seed"], x["epoch"]) for x in read(args.task)}
  for part in turns(names, args.seeds, args.epochs):
    if part in done:
      continue
    print(*part, flush=True)
    lines = train(args.task, *part, root, args.core)
    with (HERE / TASKS[args.task].results).open("a") as file:
      file.writelines(json.dumps(x, default=float) + "\n" for x in lines)


if __name__ == "__main__":
  main()
