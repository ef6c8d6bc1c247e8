"""The mode plan: does a config fit, and how does a step of it divide?"""

from collections.abc import Sequence
import copy
import pathlib
from typing import Any

import jax

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.metrics import progress
from dppo_jax.planning import (
  advice,
  assumed,
  memory_estimate,
  page,
  seconds,
  sections,
  topology,
  workload,
)
from dppo_jax.planning import hardware as hardwares
from dppo_jax.planning.hardware import Hardware
from dppo_jax.run import compile_cache


def run(
  config: configs.Config,
  workdir: pathlib.Path | None = None,
  *,
  on: str = "",
  shape: str = "",
  assume: str = "",
  stages: str = "",
) -> dict[str, Any]:
  """Plans a run; prints the plan and returns its numbers.

  No weights, data, tokenizer or accelerator are needed.

  Args:
    workdir: the plan is also written to its folder `plan`; None writes none.
    on: devices, as h200:8 or v5e:4x4, several separated by commas; empty says
      how many devices of each kind it takes.
    shape: a TPU topology for which all stages are compiled.
    assume: `NAME=NUMBER,...`, see `workload.Assumptions`.
    stages: names of those to compile, separated by commas; empty is all.
  Raises:
    ValueError: for whatever cannot work, naming value, limit and option.
  """
  jax.config.update("jax_platforms", "cpu")  # an accelerator is not touched
  compile_cache.quiet_libraries()
  given = workload.parse(assume)
  places = [hardwares.parse(x) for x in on.split(",") if x.strip()]
  target = hardwares.parse(shape, "--topology") if shape else None
  if target and target.chip.platform != "tpu":
    raise ValueError(f"--topology is {shape!r} but only TPUs have topologies")
  only = [x.strip() for x in stages.split(",") if x.strip()]
  blocks: list[page.Block] = []
  values: dict[str, Any] = {"assumed": given.__dict__, "plans": {}}
  with progress.Progress() as bar:

    def show(more: Sequence[page.Block]) -> None:
      blocks.extend(more)
      bar.say("\n" + page.terminal(more))

    if not places and not target:
      with bar.task("counting devices", True):
        found = advice.smallest(config)
      values["devices"] = {kind: x[0] for kind, x in found.items()}
      show(sections.sizes(found))
    for hardware in [*([target] if target else []), *places]:
      with bar.task(f"planning on {hardware.name}", True):
        more, numbers = _plan(config, hardware, given)
      values["plans"][hardware.name] = numbers
      show(more)
    if target and not topology.is_installed():
      show([topology.HOW_TO_INSTALL])
    elif target:
      more, numbers = _compile(config, target, only, bar)
      values["compiled"] = numbers
      show(more)
    if workdir:
      named = [x.name for x in [*([target] if target else []), *places]]
      name = "+".join(named).replace(":", "-") or "devices"
      title = f"Plan of {config.method.name} on {name}"
      path = page.write(workdir / "plan", name, title, blocks, values)
      bar.say(f"\nplan: {path}")
  return values


def _plan(
  config: configs.Config, hardware: Hardware, given: workload.Assumptions
) -> tuple[list[page.Block], dict[str, Any]]:
  """Sums: what a device holds, and what it does in a step."""
  chip = hardware.chip
  mesh = assumed.abstract_mesh(config.mesh, hardware.num)
  run = assumed.assumed_run(config, mesh, chip.platform)
  work = workload.of_step(run, given)
  moments = memory_estimate.moments(run)
  sums = {name: sum(parts.values()) for name, parts in moments.items()}
  change = None
  if max(sums.values()) > hardware.memory:
    change = advice.find(config, hardware)
  phases = {config.method.name: seconds.phases(run, work, chip, given)}
  if config.method.name != "grpo":
    plain = copy.deepcopy(config)
    configs.use_method(plain, "grpo")
    baseline = assumed.assumed_run(plain, mesh, chip.platform)
    of_all = workload.of_step(baseline, given)
    phases["grpo"] = seconds.phases(baseline, of_all, chip, given)
  used = f", {mesh.size} of them used" if mesh.size < hardware.num else ""
  blocks = [
    page.Heading(
      f"{hardware.name}: {hardware.num} x {hardware.kind}{used}, mesh "
      f"{sharding.describe(mesh)}"
    ),
    *sections.assumed(run, work, given),
    *sections.held(moments, hardware, change),
    *sections.times(phases),
  ]
  if mesh.size > chip.domain:
    blocks.append(
      f"More than {chip.domain} devices are not joined by the fast network: "
      "between such groups set config.mesh.replicas, and expect longer steps."
    )
  numbers = {
    "mesh": dict(mesh.shape),
    "memory": moments,
    "usable": hardware.memory,
    "work": {k: v for k, v in work._asdict().items() if k != "shares"},
    "shares": work.shares._asdict(),
    "phases": {
      method: {name: x._asdict() for name, x in found.items()}
      for method, found in phases.items()
    },
    "change": change and change.options | {"devices": change.hardware.num},
  }
  return blocks, numbers


def _compile(
  config: configs.Config,
  hardware: Hardware,
  only: Sequence[str],
  bar: progress.Progress,
) -> tuple[list[page.Block], dict[str, Any]]:
  """What the TPU compiler makes of each stage."""
  devices = topology.devices(hardware)
  mesh = sharding.make_mesh(
    config.mesh.data,
    config.mesh.model,
    config.mesh.replicas,
    devices=devices,
  )
  run = assumed.assumed_run(config, mesh, "tpu")
  with bar.task(f"compiling for {hardware.name}") as task:
    stages = [*topology.compile_stages(run, task, only)]
  kind = devices[0].device_kind
  numbers = {
    "device": kind,
    "mesh": dict(mesh.shape),
    "stages": {
      x.name: x._asdict()
      | {"collectives": [c._asdict() for c in x.collectives]}
      for x in stages
    },
  }
  return sections.compiled(stages, hardware, kind), numbers
