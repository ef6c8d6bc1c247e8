"""Compiles shipped configs for TPU slices that are not there.

  pip install -e '.[tpu]'
  python experiments/08_plan/run.py [CASE ...]

A line of results.jsonl for each stage, as soon as it is compiled; a stage that
has its line is not compiled again. `--table` only prints the table. On two
cores a config takes some ten minutes, most of them for the sampler.
"""

import argparse
from collections.abc import Iterator
import importlib.util
import json
import os
import pathlib
import time
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.analysis import tables
from dppo_jax.metrics import progress
from dppo_jax.models import transformer
from dppo_jax.planning import assumed, memory_estimate, topology, traffic
from dppo_jax.planning import hardware as hardwares
from dppo_jax.rollout import decode, generate
from dppo_jax.run import compile_cache

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"
GIB = 2**30

# The evaluation's sampler is that of training; what is left takes seconds.
STAGES = ("to_inference_params", "update", "select", "roll_out")


class Case(NamedTuple):
  """A config on a topology.

  Attributes:
    options: that differ from the config's, by name.
  """

  config: str
  topology: str
  options: dict[str, Any]


_4B = {"model.hub_id": "Qwen/Qwen3-4B"}
CASES = {
  "arithmetic": Case("arithmetic", "v5e:2x2", {"mesh.data": 4}),
  "qwen_math": Case("qwen_math", "v5e:4x4", {}),
  "qwen3_4b_v5e": Case(
    "qwen_math",
    "v5e:4x4",
    _4B | {"mesh.model": 2, "rollout.num_slots": 16},
  ),
  "qwen3_moe_math": Case("qwen3_moe_math", "v5p:2x2x4", {}),
  "qwen3_4b_v5p": Case("qwen_math", "v5p:2x2x1", _4B),
  "gsm8k": Case("gsm8k", "v5e:2x4", {}),
  "llama_math": Case("llama_math", "v5e:4x4", {}),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
  parser.add_argument("--table", action="store_true")
  parser.add_argument("--stages", default=",".join(STAGES))
  parser.add_argument(
    "--lean",
    action="store_true",
    help="programs that compile in a third of the time: see lean()",
  )
  flags = parser.parse_args()
  if flags.lean:
    lean()
  for name in flags.cases or CASES if not flags.table else ():
    done = {(row["case"], row["stage"]) for row in rows()}
    missing = [x for x in flags.stages.split(",") if (name, x) not in done]
    if missing:
      run(name, missing, flags.lean)
  text = "\n\n".join(
    [
      "# Compiled for TPUs that are not there",
      "GiB of a device at the stage's largest moment, what else is in memory "
      "included; seconds with the machine's other work. The evaluation's "
      "sampler is training's.",
      table(),
      "## Sums and compiler",
      "Bytes received by a device; in the update, in one micro-batch.",
      agreement(),
    ]
  )
  (HERE / "table.md").write_text(text + "\n")
  print(text)


def lean() -> None:
  """Compiles less of the same: for machines that have not the time.

  A scan over layers has one in each iteration of the update, not four, and the
  decode loop one number of slots. Memory is the same but for the cache of the
  second number of slots, which is added by sums.
  """
  transformer._UNROLL = 1
  every = decode.slot_schedule
  generate.slot_schedule = lambda *rest: every(*rest)[:1]


def run(name: str, stages: list[str], is_lean: bool = False) -> None:
  """Compiles the stages of a case, each in its line."""
  compile_cache.quiet_libraries()
  case = CASES[name]
  config = load(case.config)
  for option, value in case.options.items():
    section, _, field = option.partition(".")
    setattr(getattr(config, section), field, value)
  hardware = hardwares.parse(case.topology)
  m = config.mesh
  devices = topology.devices(hardware)
  mesh = sharding.make_mesh(m.data, m.model, m.replicas, devices=devices)
  planned = assumed.assumed_run(config, mesh, "tpu")
  added = {}
  if is_lean:
    parts = memory_estimate.moments(planned)["roll_out"]
    added["roll_out"] = parts["cache, next stage"]
  by_sums = {
    x: sum(p.values()) for x, p in memory_estimate.moments(planned).items()
  }
  formula = {
    "to_inference_params": traffic.weights_of_rollout(planned),
    "update": sum(traffic.micro_batch(planned).values()),
  }
  with progress.Progress() as bar, bar.task(name) as task:
    start = time.process_time()
    for stage in topology.compile_stages(planned, task, stages):
      row = {
        "case": name,
        "stage": stage.name,
        "config": case.config,
        "options": case.options,
        "topology": case.topology,
        "device": devices[0].device_kind,
        "mesh": sharding.describe(mesh),
        "usable": hardware.memory,
        "is_lean": is_lean and stage.name in ("roll_out", "update"),
        "total": stage.total + added.get(stage.name, 0.0),
        "by_sums": by_sums.get(stage.name),
        "received_by_formula": formula.get(stage.name),
        "cpu_seconds": time.process_time() - start,
        **stage._asdict(),
        "collectives": [x._asdict() for x in stage.collectives],
      }
      del row["name"]
      with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
      start = time.process_time()


def load(name: str) -> configs.Config:
  path = HERE.parents[1] / "configs" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def rows() -> Iterator[dict[str, Any]]:
  if RESULTS.exists():
    yield from map(json.loads, RESULTS.read_text().splitlines())


def table() -> str:
  """A line for each case."""
  found: dict[str, list[dict[str, Any]]] = {}
  for row in rows():
    found.setdefault(row["case"], []).append(row)
  lines = []
  for name, stages in found.items():
    first = stages[0]
    options = [f"{k}={v}" for k, v in first["options"].items()]
    worst = max(stages, key=lambda x: x["total"])
    of = {x["stage"]: x for x in stages}
    mark = lambda row: " (lean)" if row.get("is_lean") else ""
    cell = lambda stage, of=of, mark=mark: (
      f"{of[stage]['total'] / GIB:.2f}{mark(of[stage])}" if stage in of else ""
    )
    fits = "yes" if set(STAGES) <= set(of) else "as far as compiled"
    if worst["total"] > first["usable"] or worst["error"]:
      fits = f"no: {worst['stage']}"
    lines.append(
      [
        " ".join([name, *options]),
        first["topology"],
        first["mesh"],
        *map(cell, STAGES),
        f"{first['usable'] / GIB:.2f}",
        fits,
        f"{sum(x['seconds'] for x in stages):,.0f}",
        f"{sum(x['cpu_seconds'] for x in stages):,.0f}",
      ]
    )
  head = ["case", "topology", "mesh", *STAGES, "usable", "fits"]
  return tables.markdown([*head, "compile s", "CPU s"], lines)


def agreement() -> str:
  """Our sums beside the compiler's figures, by stage."""
  lines = []
  for row in rows():
    received = sum(x["bytes"] for x in row["collectives"] if x["depth"] <= 1)
    formula = row["received_by_formula"]
    if not row["by_sums"] or row["error"]:
      continue
    lines.append(
      [
        row["case"],
        row["topology"],
        row["mesh"],
        row["stage"],
        f"{row['by_sums'] / GIB:.2f}",
        f"{row['total'] / GIB:.2f}",
        f"{formula / GIB:.2f}" if formula else "",
        f"{received / GIB:.2f}" if formula else "",
        ", ".join(f"{n} {k}" for k, n in row["kernels"].items()),
      ]
    )
  head = ["case", "topology", "mesh", "stage", "GiB by sums", "GiB compiled"]
  head += ["GiB received by sums", "compiled", "Pallas kernels"]
  return tables.markdown(head, lines)


if __name__ == "__main__":
  main()
