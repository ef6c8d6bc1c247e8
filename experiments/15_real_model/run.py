r"""Trains SmolLM2-135M-Instruct by several methods, and compares their seconds.

  python -m experiments.15_real_model.run --stage=tune --core=0
  python -m experiments.15_real_model.run --stage=methods --core=0
  python -m experiments.15_real_model.run --stage=few --core=0
  python -m experiments.15_real_model.run --stage=unclipped --core=0
  python -m experiments.15_real_model.run --stage=epochs --core=0
  python -m experiments.15_real_model.run --stage=rows --core=0
  python -m experiments.15_real_model.run --stage=trl --python=VENV/bin/python
  python -m experiments.15_real_model.run --stage=tunix --python=VENV/bin/python
  python -m experiments.15_real_model.run --stage=report

Every run is one process on one core, starts from the same pretrained weights
and draws the same prompts. `tune` runs grpo with several shapes of batches and
learning rates, `methods` every method with the best of them, `few` those that
train on the fewest completions with three seeds, `unclipped` four methods
without a limit on the gradient's norm, `epochs` three methods for three
epochs, `rows` three methods after the automatic budget counts rows with their
prompts, `trl` and `tunix` grpo in these systems, installed in environments of
their own. A run that ended is not repeated, and results.jsonl
gets a line when one ends.
"""

import argparse
import json
import pathlib
import shutil
from typing import NamedTuple

from dppo_jax import config as configs
from dppo_jax import data
from dppo_jax.analysis import runs
from dppo_jax.files import user_code
from dppo_jax.run.setup import setup_run

from ..common import processes, results
from . import fetch

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"
CONFIG = "configs/smollm2.py"
EVAL_PROBLEMS, EVAL_SAMPLES = 32, 2


class Cell(NamedTuple):
  """A run: method, prompts a step, group size, learning rate, seed, steps."""

  method: str
  prompts: int
  group: int
  rate: str
  seed: int
  steps: int

  @property
  def name(self) -> str:
    shape = f"{self.prompts}x{self.group}"
    return f"{self.method}-{shape}-{self.rate}-{self.seed}-{self.steps}"


TUNE = (
  Cell("grpo", 8, 8, "1e-5", 0, 22),
  Cell("grpo", 8, 8, "2e-5", 0, 22),
  Cell("grpo", 16, 4, "2e-5", 0, 22),
  Cell("grpo", 8, 4, "2e-5", 0, 22),
  Cell("grpo", 8, 8, "4e-5", 0, 22),
  Cell("grpo", 16, 4, "4e-5", 0, 26),
)
BEST = Cell("grpo", 16, 4, "2e-5", 0, 26)
METHODS = (
  *(
    BEST._replace(method=method, seed=seed)
    for seed in range(6)
    for method in ("grpo", "dppo", "neyman")
  ),
  *(
    BEST._replace(method=method) for method in ("cppo", "greso", "pods", "d3s")
  ),
)
QUARTER = "neyman, quarter"  # a fixed budget of a quarter of the completions
UNCLIPPED = "{}, unclipped"  # no limit on the gradient's norm
FEW = (
  BEST._replace(method="cppo", seed=1),
  *(BEST._replace(method=QUARTER, seed=seed) for seed in (0, 1, 2)),
  BEST._replace(method="cppo", seed=2),
)
NO_LIMIT = (
  *(
    BEST._replace(method=UNCLIPPED.format(method), seed=seed)
    for seed in range(6)
    for method in ("grpo", "dppo", "neyman")
  ),
  *(
    BEST._replace(method=UNCLIPPED.format(QUARTER), seed=seed)
    for seed in (0, 1, 2)
  ),
)
EPOCH = 23  # steps
EPOCHS = tuple(
  BEST._replace(method=method, seed=seed, steps=3 * EPOCH)
  for seed in (0, 1, 2)
  for method in ("grpo", "dppo", "neyman")
)
ROWS = tuple(  # with the budget that counts rows
  BEST._replace(method=f"{method}, rows", seed=seed)
  for seed in (0, 1, 2)
  for method in ("grpo", "neyman", "dppo")
)
PEERS = {
  name: BEST._replace(method=name, steps=16) for name in ("trl", "tunix")
}
PEER_MICRO = 16  # completions of a micro-batch
STAGES = {
  "tune": TUNE,
  "methods": METHODS,
  "few": FEW,
  "unclipped": NO_LIMIT,
  "epochs": EPOCHS,
  "rows": ROWS,
  **{name: (cell,) for name, cell in PEERS.items()},
  "report": (),
}


def flags(cell: Cell, model: pathlib.Path) -> list[str]:
  """Returns the options of a run."""
  options = {
    "quarter": "--config.method.args.completion_budget=0.25",
    "unclipped": "--config.optimizer.clip_norm=1e9",
  }
  return [
    *(options[x] for x in cell.method.split(", ")[1:] if x in options),
    "--config.model.hub_id=",
    f"--config.model.path={model}",
    f"--config.seed={cell.seed}",
    f"--config.steps={cell.steps}",
    f"--config.data.prompts_per_step={cell.prompts}",
    f"--config.rollout.group_size={cell.group}",
    f"--config.optimizer.learning_rate={cell.rate}",
    "--config.optimizer.schedule=constant",
    "--config.eval.every=0",
    f"--config.eval.samples={EVAL_SAMPLES}",
    f"--config.data.eval_limit={EVAL_PROBLEMS}",
  ]


def summary(workdir: pathlib.Path) -> dict:
  """Returns the measurements of a run, step by step where they vary."""
  run = runs.load(workdir)
  column = lambda name: [round(x.get(name, 0.0), 4) for x in run.steps]
  predicted = "budget/predicted_speedup"  # where the budget was chosen
  return {
    "seconds": column("step/seconds"),
    "cpu_seconds": column("step/cpu_seconds"),
    "accuracy": column("reward/accuracy"),
    "rollout": column("rollout/seconds"),
    "update": column("update/seconds"),
    "score": column("score/seconds"),
    "micro_batches": column("update/micro_batches"),
    "generated": column("tokens/generated"),
    "trained": column("tokens/trained"),
    "length": column("tokens/completion_mean"),
    "predicted": [round(x[predicted], 4) for x in run.steps if predicted in x],
    "kept": column("budget/completions"),
    "noise_fraction": column("noise/fraction"),
    "held_out": [x["eval/accuracy"] for x in run.evals],
  }


def read() -> list[dict]:
  """Returns the results so far."""
  lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
  return [json.loads(line) for line in lines]


def train(cell: Cell, root: pathlib.Path, core: int) -> None:
  """Trains, and adds a line to results.jsonl; removes the checkpoints."""
  workdir = root / cell.name
  if not (workdir / "report.md").exists():
    shutil.rmtree(workdir, ignore_errors=True)
    method = cell.method.partition(",")[0]
    command = processes.train_command(f"{CONFIG}:{method}", workdir)
    model = fetch.fetch("smollm2")
    log = root / f"{cell.name}.log"
    processes.execute([*command, *flags(cell, model)], {core}, log)
    shutil.rmtree(workdir / "checkpoints")
  row = {**cell._asdict(), **summary(workdir), **results.facts()}
  with RESULTS.open("a") as file:
    file.write(json.dumps(row) + "\n")


def peer_config(cell: Cell) -> configs.Config:
  """Returns the config of our run that a peer repeats."""
  config = user_code.load(f"{CONFIG}:get_config")("grpo")
  config.seed, config.steps = cell.seed, cell.steps
  config.model.hub_id, config.model.path = "", str(fetch.fetch("smollm2"))
  config.data.prompts_per_step = cell.prompts
  config.rollout.group_size = cell.group
  return config


def write_work(config: configs.Config, path: pathlib.Path) -> None:
  """Writes the prompts of a run, step by step, and its options."""
  run = setup_run(config)
  problems, key = run.train_set, run.spec.root_key
  prompts, group_size = run.spec.num_prompts, run.spec.group_size
  draws = [
    data.draw(problems, key, step, prompts).ids for step in range(config.steps)
  ]
  row = lambda i: {
    "problem": problems.problems[i],
    "answer": problems.answers[i],
  }
  work = {
    "steps": [[row(i) for i in ids] for ids in draws],
    "batch": prompts * group_size,
    "group_size": group_size,
    "max_tokens": config.rollout.max_tokens,
    "clip_norm": config.optimizer.clip_norm,
    "beta": config.objective.args.get("beta", 0.0),
  }
  path.write_text(json.dumps(work))


def train_with_peer(
  cell: Cell, root: pathlib.Path, core: int, python: str
) -> None:
  """Trains by another system, and adds a line to results.jsonl."""
  work, out = root / f"{cell.name}.work.json", root / f"{cell.name}.json"
  if not out.exists():
    write_work(peer_config(cell), work)
    command = [python, "-m", f"experiments.15_real_model.with_{cell.method}"]
    command += [f"--model={fetch.fetch('smollm2')}", f"--prompts={work}"]
    command += [f"--out={out}", f"--rate={cell.rate}", f"--seed={cell.seed}"]
    log = root / f"{cell.name}.log"
    processes.execute([*command, f"--micro={PEER_MICRO}"], {core}, log)
  row = {**cell._asdict(), **json.loads(out.read_text()), **results.facts()}
  with RESULTS.open("a") as file:
    file.write(json.dumps(row) + "\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--stage", choices=STAGES)
  parser.add_argument("--core", type=int, default=0)
  parser.add_argument("--python", help="of the environment of TRL or tunix")
  parser.add_argument(
    "--workdir", type=pathlib.Path, default=pathlib.Path("runs/real_model")
  )
  args = parser.parse_args()
  if args.stage == "report":
    from . import report

    report.write(read())
    return
  root = args.workdir.resolve()
  root.mkdir(parents=True, exist_ok=True)
  done = {Cell(*(row[x] for x in Cell._fields)) for row in read()}
  for cell in STAGES[args.stage]:
    if cell in done:
      continue
    print(cell.name, flush=True)
    if cell.method in PEERS:
      train_with_peer(cell, root, args.core, args.python)
    else:
      train(cell, root, args.core)


if __name__ == "__main__":
  main()
