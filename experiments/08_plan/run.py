"""Compiles shipped configs for TPUs and GPUs without either.

  pip install -e '.[tpu]' or '.[cuda]'
  python -m experiments.08_plan.run [CASE ...]

Appends a line to results.jsonl for each stage as soon as it is compiled; stages
that have a line are not compiled again, and cases whose compiler is missing are
left out. `--table` only prints the table. A case takes two to five CPU minutes
for a TPU, and one to five for a GPU.
"""

import argparse
from collections.abc import Iterator
import json
import os
import pathlib
import time
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from dppo_jax import config as configs
from dppo_jax import plan, sharding
from dppo_jax.analysis import tables
from dppo_jax.errors import UserError
from dppo_jax.files import user_code
from dppo_jax.metrics import progress
from dppo_jax.planning import assumed, memory, targets
from dppo_jax.run import compile_cache

from ..common import hlo, results

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"
GIB = 2**30

# Evaluation uses the rollout of training; other stages take seconds.
STAGES = ("to_inference_params", "update", "select", "roll_out")
GPU_STAGES = ("update", "roll_out")


class Case(NamedTuple):
  """A config on a topology.

  Attributes:
    options: values that differ from the config's, by name.
  """

  config: str
  topology: str
  options: dict[str, Any]


_4B = {"model.hub_id": "Qwen/Qwen3-4B"}
_LORA = {"lora.rank": 16}
CASES = {
  "arithmetic": Case("arithmetic", "v5e:2x2", {"mesh.data": 4}),
  "qwen_math": Case("qwen_math", "v5e:4x4", {}),
  "qwen3_4b_v5e": Case(
    "qwen_math", "v5e:4x4", _4B | {"mesh.model": 2, "rollout.num_slots": 16}
  ),
  "qwen3_moe_math": Case("qwen3_moe_math", "v5p:2x2x4", {}),
  "qwen3_4b_v5p": Case("qwen_math", "v5p:2x2x1", _4B),
  "gsm8k": Case("gsm8k", "v5e:2x4", {}),
  "llama_math": Case("llama_math", "v5e:4x4", {}),
  "gsm8k_lora": Case("gsm8k", "v5e:2x4", _LORA),
  "qwen3_4b": Case("gsm8k", "v5e:2x4", _4B | {"rollout.num_slots": 8}),
  "qwen3_4b_lora": Case("gsm8k", "v5e:2x4", _4B | _LORA),
  "gemma_gsm8k": Case("gemma_gsm8k", "v5e:2x4", {}),
}
_TOPOLOGIES = "h200:1 h200:8 h100:8 a100:8 b200:8 v5p:2x2x1 v5p:2x2x2".split()
# Small ones first. Qwen3-30B-A3B needs its mesh of at least four devices.
_CONFIGS = ("arithmetic", "gsm8k", "gemma_gsm8k")
_CONFIGS += ("llama_math", "qwen_math", "qwen3_moe_math")
CASES |= {
  f"{config} {devices}": Case(config, devices, {})
  for devices in _TOPOLOGIES
  for config in _CONFIGS
  if config != "qwen3_moe_math" or not devices.endswith("1")
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
  parser.add_argument("--table", action="store_true")
  parser.add_argument("--stages", help="comma-separated; default: the largest")
  flags = parser.parse_args()
  for name in flags.cases or CASES if not flags.table else ():
    done = {(row["case"], row["stage"]) for row in rows()}
    stages = flags.stages.split(",") if flags.stages else stages_of(name)
    if missing := [x for x in stages if (name, x) not in done]:
      try:
        run(name, missing)
      except UserError as error:
        print(f"{name}: {error}")
  text = "\n\n".join(
    [
      "# Compiled without the hardware",
      "GiB on each device at the stage's largest moment, other memory in use "
      "included; seconds on a busy machine. Evaluation uses the rollout of "
      "training.",
      table(),
      "## Launches on GPUs",
      "Kernels and copies launched, and times that the host waits for the "
      "device, with loops inside counted as one turn.",
      launches(),
      "## Estimate and compiler",
      "Rollouts for TPUs without the kernel decode_attention had larger caches "
      "than the estimate has now. On GPUs, tokamax's kernels are mpmd_map.",
      agreement(),
    ]
  )
  (HERE / "table.csv").write_text(results.to_csv(text))
  print(text)


def stages_of(name: str) -> tuple[str, ...]:
  """Returns the stages that a case compiles."""
  is_gpu = targets.parse(CASES[name].topology).platform == "gpu"
  return GPU_STAGES if is_gpu else STAGES


def run(name: str, stages: list[str]) -> None:
  """Compiles the stages of a case; each appends its line."""
  compile_cache.quiet_libraries()
  case = CASES[name]
  config = configured(case)
  hardware = targets.parse(case.topology)
  m = config.mesh
  devices = targets.devices(hardware)
  mesh = sharding.make_mesh(m.data, m.model, m.replicas, devices=devices)
  planned = assumed.assumed_run(config, mesh, hardware.platform)
  planned = memory.choose_slots(planned, hardware.memory)
  with progress.Progress() as bar, bar.task(name) as task:
    start = time.process_time()
    for stage in targets.compile_stages(planned, task, stages):
      resident = plan.resident(planned, stage.name)
      is_gpu = hardware.platform == "gpu"
      launched = hlo.launches(stage.text) if is_gpu and stage.text else ()
      row = {
        "case": name,
        "stage": stage.name,
        "config": case.config,
        "options": case.options,
        "topology": case.topology,
        "device": devices[0].device_kind,
        "mesh": sharding.describe(mesh),
        "slots": planned.spec.num_slots,
        "usable": hardware.memory,
        "total": stage.held + stage.temporary + resident,
        "cpu_seconds": time.process_time() - start,
        **stage._asdict(),
        "kernels": hlo.kernels(stage.text),
        "launches": [x._asdict() for x in launched],
      }
      del row["name"], row["text"]
      with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
      start = time.process_time()


def configured(case: Case) -> configs.Config:
  path = HERE.parents[1] / "configs" / f"{case.config}.py"
  config = user_code.load(f"{path}:get_config")()
  for option, value in case.options.items():
    section, _, field = option.partition(".")
    setattr(getattr(config, section), field, value)
  return config


def rows() -> Iterator[dict[str, Any]]:
  if RESULTS.exists():
    yield from map(json.loads, RESULTS.read_text().splitlines())


def table() -> str:
  """One line per case."""
  cases: dict[str, list[dict[str, Any]]] = {}
  for row in rows():
    cases.setdefault(row["case"], []).append(row)
  lines = []
  for name, stages in cases.items():
    first = stages[0]
    options = [f"{k}={v}" for k, v in first["options"].items()]
    worst = max(stages, key=lambda x: x["total"])
    of = {x["stage"]: x for x in stages}
    cell = lambda stage, of=of: (
      f"{of[stage]['total'] / GIB:.2f}" if stage in of else ""
    )
    largest = set(GPU_STAGES)
    fits = "yes" if largest <= set(of) else "as far as compiled"
    if worst["total"] > first["usable"] or worst["error"]:
      fits = f"no: {worst['stage']}"
    lines.append(
      [
        " ".join([name, *options]),
        first["topology"],
        first["mesh"],
        str(of.get("roll_out", {}).get("slots", "")),
        *map(cell, STAGES),
        f"{first['usable'] / GIB:.2f}",
        fits,
        f"{sum(x['seconds'] for x in stages):,.0f}",
        f"{sum(x['cpu_seconds'] for x in stages):,.0f}",
      ]
    )
  head = ["case", "topology", "mesh", "slots", *STAGES, "usable", "fits"]
  return tables.markdown([*head, "compile s", "CPU s"], lines)


def launches() -> str:
  """One line per case for GPUs."""
  cases: dict[str, dict[str, str]] = {}
  for row in rows():
    for x in row.get("launches", ()):
      loops = cases.setdefault(row["case"], {})
      loops[x["loop"]] = f"{x['kernels']:,}, {x['syncs']:,}"
  lines = []
  for name, loops in cases.items():
    decode = [x for x in loops if x.startswith("decode_")]
    steps = [f"{x.removeprefix('decode_')}: {loops[x]}" for x in decode]
    others = [loops.get(x, "") for x in ("prefill", "micro_batch")]
    lines.append([name, "; ".join(steps), *others])
  head = ["case", "decode step by number of slots", "prefill", "micro-batch"]
  return tables.markdown(head, lines)


def agreement() -> str:
  """The estimate of today and the compiler's figure, by stage."""
  lines = []
  for row in rows():
    if row["stage"] not in ("roll_out", "update") or row["error"]:
      continue
    config = configured(Case(row["config"], row["topology"], row["options"]))
    slots = row["options"].get("rollout.num_slots", 64)
    config.rollout.num_slots = row.get("slots", slots)
    hardware = targets.parse(row["topology"])
    mesh = assumed.abstract_mesh(config.mesh, hardware.num)
    planned = assumed.assumed_run(config, mesh, hardware.platform)
    estimated = sum(memory.estimate(planned)[row["stage"]].values())
    case = [row["case"], row["topology"], row["mesh"], row["stage"]]
    sizes = [f"{x / GIB:.2f}" for x in (estimated, row["total"])]
    kernels = ", ".join(f"{n} {k}" for k, n in row.get("kernels", {}).items())
    lines.append([*case, *sizes, kernels])
  head = ["case", "topology", "mesh", "stage", "GiB estimated", "GiB compiled"]
  return tables.markdown([*head, "Pallas kernels"], lines)


if __name__ == "__main__":
  main()
