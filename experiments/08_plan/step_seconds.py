"""Compares the seconds that plan mode estimates with measured and published.

  python -m experiments.08_plan.step_seconds --model=DIR [--core=0] [CASE ...]

DIR is printed by `python experiments/15_real_model/fetch.py smollm2`. Each case
trains a few steps on one core. After each step the ceilings of the core, the
rate of a product and the bandwidth, are measured again, and the step is
estimated from them twice: with the lengths and the fraction of tokens that it
had, and with those that plan mode assumes beforehand. All seconds are CPU
seconds, so that other programs on the core matter little. Lines go to
step_seconds.jsonl; without CASE the tables are printed.
"""

import argparse
import os
import pathlib
import statistics
import tempfile
import time
import types
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from dppo_jax import config as configs
from dppo_jax import train
from dppo_jax.analysis import tables
from dppo_jax.analysis.runs import load
from dppo_jax.config import cli
from dppo_jax.planning import assumed, memory, step_time, targets
from dppo_jax.run.setup import setup_run
from dppo_jax.step import clock

from ..common import machine, results

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "step_seconds.jsonl"
CASES = {  # config, and steps after two that are left out
  "arithmetic": ("arithmetic.py:grpo", 40),
  "arithmetic, neyman": ("arithmetic.py", 40),
  "smollm2": ("smollm2.py:grpo", 6),
  "smollm2, dppo": ("smollm2.py", 6),
}
STAGES = ("rollout", "update", "rest", "step")
SKIPPED = 2  # steps, while caches warm up


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("cases", nargs="*", metavar="CASE", choices=[*CASES, []])
  parser.add_argument("--model", default="")
  parser.add_argument("--core", type=int, default=0)
  flags = parser.parse_args()
  os.sched_setaffinity(0, {flags.core})
  # Stages are timed in CPU seconds.
  spent = {"monotonic": time.process_time, "process_time": time.process_time}
  clock.time = types.SimpleNamespace(**spent)
  rows = results.read(RESULTS) if RESULTS.exists() else []
  for name in flags.cases:
    rows = [row for row in rows if row["case"] != name]
    rows += measure(name, flags.model)
    results.write(RESULTS, rows)
  print(f"{measured_table(rows)}\n\n{published_table()}")


def measure(name: str, model: str) -> list[dict[str, Any]]:
  """Trains a few steps of a case, and measures the ceilings after each."""
  config, steps = load_config(name), CASES[name][1]
  config.steps = steps + SKIPPED
  config.eval.every, config.eval.samples = 0, 0
  config.data.eval_limit = 4
  if config.model.hub_id:
    config.model.path = model
  rates = []
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder)
    ceilings = lambda *_: rates.append(
      step_time.ceilings(config.model.dtype, time.process_time, 3)
    )
    train.run(config, workdir, [ceilings])
    lines = load(workdir).steps
  problems = setup_run(config).train_set
  facts = {"case": name, **machine.description()}
  facts["width"] = problems.tokens.shape[1]
  facts["prompt"] = float(problems.lengths.mean())
  rows = []
  for line, rate in [*zip(lines, rates, strict=True)][SKIPPED:]:
    took = {x: line[f"{x}/seconds"] for x in ("rollout", "update", "step")}
    took["rest"] = 2 * took["step"] - sum(took.values())
    trained = line["tokens/trained"] / line["tokens/generated"]
    rows.append(
      facts
      | {"flops": rate[0], "bandwidth": rate[1], "measured": took}
      | {"completion": line["tokens/completion_mean"], "trained": trained}
    )
  return rows


def load_config(name: str) -> configs.Config:
  path = HERE.parents[1] / "configs" / CASES[name][0]
  return cli.parse(["main", f"--config={path}"])[0]


def with_estimates(row: dict[str, Any]) -> dict[str, Any]:
  """Adds the estimates at the lengths of a step, and beforehand."""
  place, estimates = targets.parse("cpu"), {}
  names = ("prompt", "completion", "trained", "flops", "bandwidth")
  for kind, given in ("estimated", names), ("planned", names[3:]):
    config = load_config(row["case"])
    if kind == "estimated":
      config.data.max_prompt_tokens = row["width"]
    mesh = assumed.abstract_mesh(config.mesh, 1)
    run = assumed.assumed_run(config, mesh, "cpu")
    basis = step_time.assume(run, place)
    basis = basis._replace(**{x: row[x] for x in given})
    if kind == "estimated" and row["case"] in ("arithmetic", "smollm2"):
      basis = basis._replace(groups=row["trained"])  # grpo drops whole groups
    seconds = step_time.estimate(run, memory.estimate(run), basis)
    estimates[kind] = seconds | {"step": sum(seconds.values())}
  return row | estimates


def measured_table(rows: list[dict[str, Any]]) -> str:
  """Medians over the steps of each case."""
  step_time.ceilings = lambda dtype: (1.0, 1.0)  # each row has its own
  rows, lines = [*map(with_estimates, rows)], []
  for name in dict.fromkeys(row["case"] for row in rows):
    here = [row for row in rows if row["case"] == name]
    middle = lambda get, of=here: statistics.median(map(get, of))
    for stage in STAGES:
      took = middle(lambda row, x=stage: row["measured"][x])
      cells = [f"{took:.3g}"]
      for kind in ("estimated", "planned"):
        cells.append(f"{middle(lambda r, x=stage, k=kind: r[k][x]):.3g}")
        ratio = lambda r, x=stage, k=kind: r[k][x] / max(r["measured"][x], 1e-9)
        cells.append(f"{middle(ratio):.2f}")
      lines.append([name if stage == "rollout" else "", stage, *cells])
  head = ["case", "stage", "CPU s", "at its lengths", "ratio", "beforehand"]
  return tables.markdown([*head, "ratio"], lines)


class Published(NamedTuple):
  """A published figure, and the plan of the same work.

  Attributes:
    unit: "s", seconds of a step, or "tokens/s", of a device's rollout.
    lengths: mean tokens of prompts and completions.
  """

  what: str
  unit: str
  value: float
  hardware: str
  options: dict[str, Any]
  lengths: tuple[float, float]


def _serving(prompt: int, slots: int, shards: int) -> dict[str, Any]:
  return {
    "model.hub_id": "Qwen/Qwen3-8B",
    "mesh.model": shards,
    "data.max_prompt_tokens": prompt,
    "rollout.max_tokens": 1024,
    "rollout.num_slots": slots,
    "data.prompts_per_step": 4 * slots,
    "rollout.group_size": 2,
    "pack.row_length": prompt + 1024,
  }


def _step(hub_id: str, prompts: int, group: int, tokens: int, shards: int):
  return {
    "model.hub_id": hub_id,
    "mesh.model": shards,
    "data.prompts_per_step": prompts,
    "rollout.group_size": group,
    "rollout.max_tokens": tokens,
    "pack.row_length": 2 * tokens,
  }


PUBLISHED = [
  Published(
    "Qwen3-8B in FP8, 128 in, 1,024 out, 472 users (vLLM 0.30)",
    "tokens/s",
    15_103,
    "h100:1",
    _serving(128, 472, 1),
    (128, 1024),
  ),
  Published(
    "Qwen3-8B, 1,024 in and out, 64 requests, 4 chips (sglang-jax)",
    "tokens/s",
    1_324,
    "v6e:4",
    _serving(1024, 64, 4),
    (1024, 1024),
  ),
  Published(
    "the same, 256 requests",
    "tokens/s",
    1_893,
    "v6e:4",
    _serving(1024, 256, 4),
    (1024, 1024),
  ),
  Published(
    "GRPO, Qwen2.5-Math-1.5B, 32 x 16, 512 tokens (NeMo, bound)",
    "s",
    25,
    "h100:8",
    _step("Qwen/Qwen2.5-Math-1.5B", 32, 16, 512, 1),
    (128, 512),
  ),
  Published(
    "GRPO, Qwen2.5-7B, 64 x 32, 4,096 tokens (NeMo, bound)",
    "s",
    50,
    "h100:32",
    _step("Qwen/Qwen2.5-7B", 64, 32, 4096, 1),
    (128, 2048),
  ),
  Published(
    "GRPO, Qwen3-30B-A3B, 64 x 32, 3,200 tokens on average (NeMo)",
    "s",
    192,
    "h100:32",
    _step("Qwen/Qwen3-30B-A3B", 64, 32, 4096, 4),
    (128, 3072),
  ),
]


def published_table() -> str:
  """Published figures and what plan mode says."""
  lines = []
  for x in PUBLISHED:
    config = cli.parse(
      ["main", f"--config={HERE.parents[1] / 'configs/qwen_math.py'}:grpo"]
    )[0]
    for name, value in x.options.items():
      configs.assign(config, name, value)
    place = targets.parse(x.hardware)
    mesh = assumed.abstract_mesh(config.mesh, place.num)
    run = assumed.assumed_run(config, mesh, place.platform)
    run = memory.choose_slots(run, place.memory)
    held, spec = memory.estimate(run), run.spec
    prompt, completion = x.lengths
    basis = step_time.assume(run, place)
    basis = basis._replace(prompt=prompt, completion=completion)
    if experts := spec.model.experts:  # these systems have kernels
      basis = basis._replace(experts=experts.per_token)
    stages = step_time.estimate(run, held, basis)
    figure = sum(stages.values())
    if x.unit == "tokens/s":
      tokens = spec.num_prompts * spec.group_size * completion
      figure = tokens / stages["rollout"] / place.num
    lines.append(
      [
        x.what,
        x.hardware,
        f"{x.value:,.0f} {x.unit}",
        f"{figure:,.0f}" if figure > 100 else f"{figure:.1f}",
        f"{figure / x.value:.2f}",
      ]
    )
  reached = step_time.EFFICIENCY["gpu"][0]
  useful = 3 / 4 * reached  # without the recomputed pass
  lines += [
    [f"MFU, {name}", device, mfu, f"{useful:.2f}", f"{useful / mfu:.2f}"]
    for name, device, mfu in (
      ("Qwen3-30B-A3B (Megatron)", "H100", 0.24),
      ("Qwen3-32B (marin)", "v5p-256", 0.21),
      ("dense models (MaxText)", "v6e pod", 0.40),
    )
  ]
  head = ["published", "device", "figure", "plan", "plan / published"]
  return tables.markdown(head, lines)


if __name__ == "__main__":
  main()
