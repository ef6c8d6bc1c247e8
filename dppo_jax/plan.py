"""The mode plan: memory of a run on hardware that need not be present."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.analysis import tables
from dppo_jax.errors import UserError
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.planning import assumed, memory, targets
from dppo_jax.planning.memory import gib
from dppo_jax.run import compile_cache
from dppo_jax.run.setup import Run


def run(
  config: configs.Config,
  *,
  hardware: str = "",
  topology: str = "",
  stages: str = "",
) -> dict[str, Any]:
  """Prints the memory that a run takes and returns the numbers.

  Args:
    hardware: devices such as `h200:8,v5p:16` to estimate memory for.
    topology: devices such as `v5e:4x4` or `h200:8` to compile all stages for.
    stages: comma-separated names of the stages to compile; empty means all.
  """
  jax.config.update("jax_platforms", "cpu")  # accelerators are not touched
  compile_cache.quiet_libraries()
  places = [targets.parse(x) for x in hardware.split(",") if x]
  target = targets.parse(topology, "--topology") if topology else None
  if not places and not target:
    raise UserError(
      "--mode=plan needs --hardware (such as h200:8) or --topology (v5e:4x4)"
    )
  values = {"estimated": {}, "compiled": {}}
  with progress.Progress() as bar:
    for place in filter(None, [target, *places]):
      mesh = assumed.abstract_mesh(config.mesh, place.num)
      planned = assumed.assumed_run(config, mesh, place.platform)
      planned = memory.choose_slots(planned, place.memory)
      estimate = values["estimated"][place.name] = memory.estimate(planned)
      bar.say(_estimated(planned, estimate, place))
    if target:
      names = [x for x in stages.split(",") if x]
      values["compiled"] = _compile(config, target, names, bar)
  return values


def _estimated(
  run: Run, stages: dict[str, memory.Parts], hardware: targets.Hardware
) -> str:
  """The estimate as a table, and whether it fits."""
  model = run.spec.model
  purposes = dict.fromkeys(
    name for parts in stages.values() for name, size in parts.items() if size
  )
  cell = lambda size: gib(size) if size else ""
  rows = [
    [name, *(cell(parts.get(name)) for parts in stages.values())]
    for name in purposes
  ]
  sums = {name: sum(parts.values()) for name, parts in stages.items()}
  rows.append(["sum", *map(gib, sums.values())])
  return (
    f"\n{model.family}, {parameters.num_parameters(model):,} parameters, "
    f"{model.dtype}, remat={model.remat}, attention={model.attention}, "
    f"{run.spec.num_slots} slots a device\n"
    f"Estimated GiB on each device of {hardware.name}, mesh "
    f"{sharding.describe(run.spec.mesh)}\n\n"
    f"{tables.aligned(['', *sums], rows)}\n\n"
    f"{_verdict(sums, hardware.memory)}"
  )


def _verdict(sums: dict[str, float], limit: float) -> str:
  if too_large := memory.shortage(sums, limit):
    return progress.wrapped(f"Does not fit: {too_large}")
  stage = max(sums, key=sums.get)
  return f"Fits: {stage} needs the most, {gib(sums[stage])} of {gib(limit)} GiB"


def _compile(
  config: configs.Config,
  hardware: targets.Hardware,
  names: Sequence[str],
  bar: progress.Progress,
) -> dict[str, Any]:
  """Compiles stages, prints what the compiler reports, and returns it."""
  devices = targets.devices(hardware)
  mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
  run = assumed.assumed_run(config, mesh, hardware.platform)
  run = memory.choose_slots(run, hardware.memory)
  with bar.task(f"compiling for {hardware.name}") as task:
    stages = list(targets.compile_stages(run, task, names))
  rows, lines, sums = [], [], {}
  for stage in stages:
    sizes = (stage.held, stage.temporary, resident(run, stage.name))
    sums[stage.name] = sum(sizes)
    cells = map(gib, (*sizes, sum(sizes)))
    rows.append([stage.name, *cells, f"{stage.seconds:.0f}"])
    words = [
      f"{x.count} x {x.kind}, {x.bytes / 2**20:,.1f} MiB"
      + (f" in {x.depth} nested loop(s)" if x.depth > 0 else "")
      for x in stage.collectives
      if x.bytes >= 2**20
    ]
    if words or stage.error:
      lines.append(f"{stage.name}: {stage.error or ', '.join(words)}")
  head = ["stage", "held", "temporary", "other", "sum", "compile s"]
  bar.say(
    f"\nCompiled for {devices[0].device_kind}, GiB on each device (held: "
    "arguments and results)\n\n"
    + "\n\n".join([tables.aligned(head, rows), *map(progress.wrapped, lines)])
    + f"\n\n{_verdict(sums, hardware.memory)}"
  )
  return {stage.name: stage._asdict() for stage in stages}


def resident(run: Run, stage: str) -> float:
  """Bytes of the train state in memory that are not arguments of a stage."""
  arguments = {
    "to_inference_params": {"weights"},
    "score": {"weights"},
    "evaluate": {"weights"},
    "update": {"weights", "optimizer", "reference"},
  }.get(stage, set())
  parts = memory.estimate(run)["update"]
  state = {"weights", "optimizer", "reference"} - arguments
  return sum(parts.get(name, 0.0) for name in state)
