r"""Times rollouts with and without drafts, side by side.

  python -m experiments.12_drafts.run
  python -m experiments.12_drafts.run --stage=whole

The first command compares numbers of drafts, the second whole runs of grpo with
the automatic setting and without drafts.

Policies are those of configs/arithmetic.py and of experiment 03 before and
after training, and a random model that repeats itself at a low temperature.
Every number of drafts samples the same completions; repetitions take turns.
Results go to results.jsonl, whole.jsonl and table.md in this directory.
"""

import argparse
import functools
import pathlib
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import rollout
from dppo_jax.analysis import runs, tables
from dppo_jax.models import parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import PromptBatch
from dppo_jax.run.setup import setup_run

from ..common import machine, policy, processes, results, tasks

HERE = pathlib.Path(__file__).parent
DRAFTS = (0, 1, 3, 7)
STEPS = {"arithmetic": 300, "rings": 72}


class Workload(NamedTuple):
  """Prompts and a policy; `options` are those of `rollout.sample`."""

  name: str
  params: parameters.Params
  prompts: PromptBatch
  options: dict


def trained(task: str, root: pathlib.Path, cores: list[int]) -> list[Workload]:
  """Trains grpo on a task; returns its first and last policies."""
  config = tasks.grpo_config(task)
  config.steps = STEPS[task]
  pool = processes.Runs(root, cores)
  flags = (f"--config.steps={config.steps}", "--config.log.writers=")
  pool.start(task, f"{tasks.CONFIGS[task]}:grpo", *flags).result()
  run, workloads = setup_run(config), []
  for step, when in ((0, "before"), (config.steps, "after")):
    params, prompts = policy.restore(
      run, root / task, step, config.data.prompts_per_step
    )
    for slots in (config.rollout.num_slots, 8):
      options = {
        "model_config": run.model,
        "group_size": config.rollout.group_size,
        "max_tokens": config.rollout.max_tokens,
        "temperature": config.rollout.temperature,
        "num_slots": slots,
        "stop_ids": run.stop_ids,
      }
      name = f"{task}, {when} training"
      workloads.append(Workload(name, params, prompts, options))
  return workloads


def repetitive() -> list[Workload]:
  """Returns a random model whose samples fall into loops."""
  model = ModelConfig(
    vocab=512,
    embed=512,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=64,
    mlp=1536,
    has_qk_norm=True,
  )
  params = jax.jit(parameters.init, static_argnums=0)(model, jax.random.key(0))
  tokens = np.random.default_rng(0).integers(2, 512, (4, 16))
  prompts = PromptBatch(
    ids=jnp.arange(4, dtype=jnp.int32),
    tokens=jnp.array(tokens, jnp.int32),
    lengths=jnp.full(4, 16, jnp.int32),
  )
  options = {
    "model_config": model,
    "group_size": 4,
    "max_tokens": 256,
    "temperature": 0.1,
    "stop_ids": (1,),
  }
  return [
    Workload(
      "long repetitive text", params, prompts, options | {"num_slots": x}
    )
    for x in (16, 4)
  ]


def measure(work: Workload, repeats: int) -> dict:
  """Returns medians and ranges over repetitions that take turns."""
  programs = {
    k: jax.jit(
      functools.partial(rollout.sample, draft_tokens=k, **work.options)
    )
    for k in DRAFTS
  }
  rates = {k: [] for k in DRAFTS}
  per_step, reference = {}, None
  for repeat in range(-1, repeats):  # the first compiles
    for k, program in programs.items():
      start = time.perf_counter()
      out = program(work.params, prompts=work.prompts, rng=jax.random.key(7))
      jax.block_until_ready(out)
      seconds = time.perf_counter() - start
      reference = out if reference is None else reference
      if not (out.tokens == reference.tokens).all():
        raise RuntimeError(f"{work.name}: other tokens with {k} drafts")
      if repeat >= 0:
        rates[k].append(float(out.lengths.sum()) / seconds)
        per_step[k] = float(out.lengths.sum() / out.busy_steps)
  ratios = {
    k: [x / y for x, y in zip(rates[k], rates[0], strict=True)] for k in DRAFTS
  }
  return {
    "workload": work.name,
    "slots": work.options["num_slots"],
    "length": float(reference.lengths.mean()),
    "tokens_per_second": statistics.median(rates[0]),
    "tokens_per_step": per_step,
    "ratio": {
      k: [statistics.median(x), min(x), max(x)] for k, x in ratios.items()
    },
  }


def table(rows: list[dict]) -> str:
  """Returns, for each number of drafts, tokens per step and relative speed."""
  head = ["", "slots", "mean length", "tokens/s"]
  head += [f"{k} drafts: tokens a step | speed" for k in DRAFTS[1:]]
  head = " | ".join(head).split(" | ")
  lines = [
    [
      row["workload"],
      str(row["slots"]),
      f"{row['length']:.0f}",
      f"{row['tokens_per_second']:,.0f}",
      *(
        cell
        for k in DRAFTS[1:]
        for cell in (
          f"{row['tokens_per_step'][k]:.2f}",
          "{:.2f} ({:.2f}..{:.2f})".format(*row["ratio"][k]),
        )
      ),
    ]
    for row in rows
  ]
  return tables.markdown(head, lines)


def whole(root: pathlib.Path, cores: list[int], pairs: int) -> list[dict]:
  """Returns, for each pair of simultaneous runs, the times of its rollouts.

  The two runs of a pair sample the same completions, each on one of two cores,
  which they exchange from pair to pair.
  """
  rows = []
  for task, steps in STEPS.items():
    tasks.grpo_config(task)  # writes its problems
    command = lambda *flags, task=task, steps=steps: (
      f"{tasks.CONFIGS[task]}:grpo",
      f"--config.steps={steps}",
      "--config.eval.every=0",
      "--config.log.writers=",
      *flags,
    )
    warm = processes.Runs(root, cores[:1])
    warm.start(f"{task}-warm", *command("--config.steps=0")).result()
    for pair in range(pairs):
      started = {}
      for i, drafts in enumerate((0, -1)):
        pool = processes.Runs(root, [cores[(i + pair) % 2]])
        name = f"{task}{drafts}-{pair}"
        started[name] = pool.start(
          name,
          *command(
            f"--config.rollout.draft_tokens={drafts}",
            f"--config.sft.from_run={root / f'{task}-warm'}",
          ),
        )
      for run in started.values():
        run.result()
      steps_of = [runs.load(root / name).steps for name in started]
      seconds = [[x["rollout/seconds"] for x in run] for run in steps_of]
      rows.append(
        {
          "task": task,
          "pair": pair,
          "seconds": [round(sum(x), 3) for x in seconds],
          "medians": [round(statistics.median(x), 5) for x in seconds],
          **machine.description(),
        }
      )
      print(rows[-1], flush=True)
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--stage", choices=("drafts", "whole"), default="drafts")
  parser.add_argument("--pairs", type=int, default=4)
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--cores", default="0,1")
  parser.add_argument(
    "--workdir", type=pathlib.Path, default=pathlib.Path("runs/drafts")
  )
  args = parser.parse_args()
  cores = [int(core) for core in args.cores.split(",")]
  root = args.workdir.resolve()
  if args.stage == "whole":
    results.write(HERE / "whole.jsonl", whole(root, cores, args.pairs))
    return
  workloads = [x for task in STEPS for x in trained(task, root, cores)]
  rows = []
  for work in (*workloads, *repetitive()):
    rows.append({**measure(work, args.repeats), **machine.description()})
    print(rows[-1], flush=True)
  results.write(HERE / "results.jsonl", rows)
  (HERE / "table.md").write_text(table(rows))


if __name__ == "__main__":
  main()
