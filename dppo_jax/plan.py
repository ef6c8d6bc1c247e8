"""The mode plan: memory, time and disk of a run before hardware is rented."""

from collections.abc import Sequence
import dataclasses
import inspect
import math
import pathlib
from typing import Any

import jax

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.analysis import tables
from dppo_jax.errors import UserError
from dppo_jax.eval import eval_sets
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.planning import assumed, memory, step_time, targets
from dppo_jax.planning.memory import gib
from dppo_jax.run import compile_cache
from dppo_jax.run.description import kernels
from dppo_jax.run.setup import Run
from dppo_jax.step import programs

# Parts of the train state that an argument of a stage holds.
_HELD = {
  "state": ("weights", "optimizer"),
  "params": ("weights",),
  "opt_state": ("optimizer",),
  "reference": ("reference",),
}


def run(
  config: configs.Config,
  workdir: pathlib.Path | None = None,
  *,
  hardware: str = "",
  topology: str = "",
  stages: str = "",
  assume: str = "",
  price_per_hour: float = 0.0,
) -> dict[str, Any]:
  """Prints the memory, time and disk that a run takes; returns the numbers.

  Args:
    workdir: unused, as nothing is written.
    hardware: devices such as `h200:8,v5p:16,cpu` to estimate for; `cpu` is this
      machine, whose rates are measured.
    topology: devices such as `v5e:4x4` or `h200:8` to compile all stages for.
    stages: comma-separated names of the stages to compile; empty means all.
    assume: values of `step_time.Assumptions`, such as `completion=800`.
    price_per_hour: of one device.
  """
  config = configs.absolute_paths(config)
  jax.config.update("jax_platforms", "cpu")  # accelerators are not touched
  compile_cache.quiet_libraries()
  places = [targets.parse(x) for x in hardware.split(",") if x]
  target = targets.parse(topology, "--topology") if topology else None
  if not places and not target:
    raise UserError(
      "--mode=plan needs --hardware (such as h200:8) or --topology (v5e:4x4)"
    )
  if stages and not target:
    raise UserError(f"--stages={stages} needs --topology, which compiles them")
  if not 0 <= price_per_hour < math.inf:
    raise UserError(
      f"--price_per_hour is {price_per_hour} but must be at least 0"
    )
  values: dict[str, dict] = {"estimated": {}, "compiled": {}, "time": {}}
  with progress.Progress() as bar:
    for place in filter(None, [target, *places]):
      mesh = assumed.abstract_mesh(config.mesh, place.num)
      planned = assumed.assumed_run(
        config, mesh, place.platform, place.capability
      )
      eval_sets.check_metric(planned, config.checkpoint.best)
      planned = memory.choose_slots(planned, place.memory)
      estimate = values["estimated"][place.name] = memory.estimate(planned)
      basis = step_time.assume(planned, place, assume)
      bar.say(_estimated(planned, config, estimate, place))
      seconds = step_time.estimate(planned, estimate, basis)
      values["time"][place.name] = seconds
      price = price_per_hour * place.num
      bar.say(_timed(planned, config, estimate, basis, seconds, price))
    if target:
      names = [x for x in stages.split(",") if x]
      values["compiled"] = _compile(config, target, names, bar)
  return values


def _estimated(
  run: Run,
  config: configs.Config,
  stages: dict[str, memory.Parts],
  hardware: targets.Hardware,
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
  kernel_lines = kernels(run, config)
  lines = [
    f"{model.family}, {parameters.num_parameters(model):,} parameters, "
    f"{model.dtype}, remat={model.remat}, {run.spec.num_slots} slots a device",
    *(kernel_lines or [f"attention: {model.attention}"]),
  ]
  head = progress.wrapped("\n".join(lines))
  return (
    f"\n{head}\n"
    f"Estimated GiB on each device of {hardware.name}, mesh "
    f"{sharding.describe(run.spec.mesh)}\n\n"
    f"{tables.aligned(['', *sums], rows)}\n\n"
    f"{_verdict(sums, hardware.memory)}"
  )


def _verdict(sums: dict[str, float], limit: float) -> str:
  if too_large := memory.shortage(sums, limit):
    return progress.wrapped(f"Does not fit: {too_large}")
  stage, size = max(sums.items(), key=lambda x: x[1])
  return f"Fits: {stage} needs the most, {gib(size)} of {gib(limit)} GiB"


def _timed(
  run: Run,
  config: configs.Config,
  held: step_time.Stages,
  assumed: step_time.Assumptions,
  seconds: dict[str, float],
  price: float,
) -> str:
  """Seconds of a step as a table, what a run takes, and what pruning gains.

  Args:
    price: of all devices for an hour; 0 if unknown.
  """
  spec, step = run.spec, sum(seconds.values())
  rows = [
    [name, f"{x:,.{2 if step > 1 else 4}f}", f"{x / step:.0%}"]
    for name, x in (seconds | {"step": step}).items()
    if x
  ]
  steps = config.steps * step / 3600
  num = num_evaluations(config)
  evals = step_time.evaluation_seconds(run, num, held, assumed) / 3600
  sizes = step_time.checkpoint_sizes(spec, num_checkpoints(config))
  tokens = spec.num_prompts * spec.group_size * assumed.completion
  tokens /= spec.mesh.size
  facts = {
    "tokens a second": f"{tokens / step:,.0f} on each device, "
    f"{tokens / seconds['rollout']:,.0f} in the rollout",
    "time": f"{_hours(steps + evals)}: {config.steps} steps {_hours(steps)}, "
    f"evaluations {_hours(evals)}",
    "cost": price and f"{price * (steps + evals):,.2f} at {price:,.2f} an hour",
    "checkpoints": f"{gib(sum(sizes))} GiB: {len(sizes)} kept; "
    f"{gib(max(sizes))} more while one is written",
    "assumed": f"prompt={assumed.prompt:.0f} tokens, "
    f"completion={assumed.completion:.0f}, trained={assumed.trained:.2f}, "
    f"groups={assumed.groups:.2f}",
    "(--assume)": f"products={assumed.products:.2f} of "
    f"{assumed.flops / 1e12:,.3g} TFLOP/s, memory={assumed.memory:.2f} of "
    f"{assumed.bandwidth / 1e9:,.0f} GB/s",
    "": f"experts={assumed.experts:.0f}" * bool(spec.model.experts),
  }
  lines = [f"{name:16} {fact}" for name, fact in facts.items() if fact]
  return (
    f"\nEstimated seconds of a step, {spec.num_prompts} prompts x "
    f"{spec.group_size} completions, before pruning\n"
    "and without messages between devices\n\n"
    f"{tables.aligned(['', 'seconds', 'of a step'], rows)}\n\n"
    + "\n".join([*lines, "", progress.wrapped(_advice(seconds))])
  )


def num_evaluations(config: configs.Config) -> int:
  """Returns the evaluations of a run: before it, when due, and at its end."""
  every = config.eval.every
  return 1 + (-(-config.steps // every) if every else config.steps > 0)


def num_checkpoints(config: configs.Config) -> int:
  """Returns the number of kept checkpoints, not counting step 0."""
  c = config.checkpoint
  return min(-(-config.steps // (c.every or 1)), c.keep + bool(c.best))


def _hours(hours: float) -> str:
  return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min"


def _advice(seconds: dict[str, float]) -> str:
  """Says how much faster a step without an update would be."""
  step, kept = sum(seconds.values()), seconds["rollout"] + seconds["rest"]
  text = (
    f"Rollouts take {seconds['rollout'] / step:.0%} of a step: pruning "
    f"completions gains at most {step / kept:.2f} even if the update were free"
  )
  if step < 1.2 * kept:
    return f"{text}. It pays from 1.2 on: use grpo"
  return (
    f"{text}. It pays if ten steps of neyman, with "
    "--config.optimizer.clip_norm=1e9, predict 1.2 or more"
  )


def _compile(
  config: configs.Config,
  hardware: targets.Hardware,
  names: Sequence[str],
  bar: progress.Progress,
) -> dict[str, Any]:
  """Compiles stages, prints what the compiler reports, and returns it."""
  devices = targets.devices(hardware)
  mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
  run = assumed.assumed_run(
    config, mesh, hardware.platform, hardware.capability
  )
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
  names = ["params"]  # of an evaluation
  if known := programs.STAGES.get(stage):
    names = list(inspect.signature(known.function).parameters)
  arguments = set().union(*(_HELD.get(x, ()) for x in names))
  parts = memory.estimate(run)["update"]
  state = {"weights", "optimizer", "reference"} - arguments
  return sum(parts.get(name, 0.0) for name in state)
