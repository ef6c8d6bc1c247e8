"""The parts of a plan's page, each from what was computed."""

from collections.abc import Mapping, Sequence

from dppo_jax.models import transformer
from dppo_jax.planning import advice, seconds, topology, workload
from dppo_jax.planning.hardware import CHIPS, Hardware
from dppo_jax.planning.memory_estimate import Parts
from dppo_jax.planning.page import Block, Heading, Table, amount, duration, gib
from dppo_jax.run.setup import Run

Phases = Mapping[str, seconds.Phase]


def assumed(
  run: Run, work: workload.Work, given: workload.Assumptions
) -> list[Block]:
  """What the sums rest on."""
  kept, model = work.shares, run.model
  count = transformer.num_parameters(model)
  return [
    f"{model.family} with {count:,} parameters in {model.dtype}, "
    f"remat={model.remat}, attention={model.attention}; "
    f"{run.train_set.report}.",
    f"Assumed (--assume): prompts of {work.prompt:.0f} and completions of "
    f"{work.completion:.0f} tokens on average, "
    f"{given.zero_variance:.0%} of prompts always right or always wrong. "
    f"{run.config.method.name} then rolls out {kept.prompts:.0%} of the "
    f"prompts drawn and trains on {kept.completions:.0%} of their completions"
    + (f", drawing {kept.draws:.1f} times" if kept.draws > 1 else "")
    + f". Of the stated figures {given.compute:.0%} of the operations, "
    f"{given.bandwidth:.0%} of the memory's bandwidth and "
    f"{given.network:.0%} of the network's are reached, and what is slowest "
    "hides the others. Nothing of this was measured.",
  ]


def held(
  moments: Mapping[str, Parts], hardware: Hardware, change: advice.Change | None
) -> list[Block]:
  """A device's memory by moment, and whether it fits."""
  names = {x: None for parts in moments.values() for x in parts}
  rows = [
    [
      name,
      *(
        gib(parts[name]) if name in parts else "" for parts in moments.values()
      ),
    ]
    for name in names
    if any(parts.get(name, 0) >= 2**20 for parts in moments.values())
  ]
  sums = {name: sum(parts.values()) for name, parts in moments.items()}
  rows.append(["sum", *map(gib, sums.values())])
  return [
    Heading("Memory of a device, GiB, by sums"),
    Table(["what for", *sums], rows),
    verdict(sums, hardware, change),
  ]


def verdict(
  sums: Mapping[str, float], hardware: Hardware, change: advice.Change | None
) -> str:
  """Whether the largest moment fits and, if not, what would."""
  worst = max(sums, key=sums.get)
  over = sums[worst] - hardware.memory
  if over <= 0:
    return (
      f"Fits: {worst} takes the most, {gib(sums[worst])} of the "
      f"{gib(hardware.memory)} GiB that a program may use."
    )
  lower = ", ".join(advice.LOWER.get(worst, ("mesh.model",)))
  text = (
    f"Does not fit: {worst} takes {gib(sums[worst])} GiB, {gib(over)} more "
    f"than a device has. Lower {lower}, or take more devices."
  )
  return f"{text} {_proposal(change, hardware)}"


def _proposal(change: advice.Change | None, hardware: Hardware) -> str:
  if change is None:
    return "No change of slots, rows, mesh or number of devices was found."
  flags = [f"--config.{name}={x}" for name, x in change.options.items()]
  where = f"{change.hardware.num} devices"
  if change.hardware.num == hardware.num:
    where = "these devices"
  settings = " ".join(flags) or "the config as it is"
  return f"By sums {settings} fits on {where} ({gib(change.bytes)} GiB)."


def times(found: Mapping[str, Phases]) -> list[Block]:
  """A step's phases, by method; the first is the one that was chosen."""
  blocks = [Heading("A step on each device")]
  for method, phases in found.items():
    rows = [
      [
        name,
        amount(x.flops),
        gib(x.read),
        gib(x.received),
        duration(x.seconds),
        x.bound,
      ]
      for name, x in phases.items()
    ]
    total = duration(seconds.total(phases))
    rows.append(["step", "", "", "", total, ""])
    head = [method, "operations", "GiB moved", "GiB received", "seconds", "by"]
    blocks.append(Table(head, rows))
  if len(found) > 1:
    chosen, grpo = (seconds.total(x) for x in found.values())
    name = next(iter(found))
    blocks.append(
      f"{name} takes {chosen / grpo:.0%} of GRPO's time for the same prompts "
      "drawn, by these sums."
    )
  return blocks


def compiled(
  stages: Sequence[topology.Stage], hardware: Hardware, kind: str
) -> list[Block]:
  """What the compiler says of each stage, and the verdict."""
  rows = [
    [
      x.name,
      gib(x.held) if not x.error else "",
      gib(x.temporary) if not x.error else "",
      gib(x.beside),
      gib(x.total),
      amount(x.flops),
      f"{x.seconds:.0f}",
    ]
    for x in stages
  ]
  head = ["stage", "held", "temporary", "beside", "sum", "FLOPs", "compile s"]
  blocks = [
    Heading(f"Compiled for {hardware.name} ({kind}), GiB of a device"),
    Table(head, rows),
    "Held are arguments and results, beside is what else is in memory "
    "meanwhile. The compiler counts the operations of a loop once.",
  ]
  for x in stages:
    words = [f"{n} x {kernel}" for kernel, n in x.kernels.items()]
    words += [
      f"{c.kind} {c.bytes / 2**20:,.1f} MiB{_turns(c.depth)}"
      for c in x.collectives
      if c.bytes >= 2**20
    ]
    if words:
      blocks.append(f"{x.name}: {', '.join(words)}")
    if x.error:
      blocks.append(f"{x.name}, the compiler: {x.error}")
  sums = {x.name: x.total for x in stages}
  worst = max(sums, key=sums.get)
  over = sums[worst] - hardware.memory
  refused = [x.name for x in stages if x.error]
  if over <= 0 and not refused:
    blocks.append(
      f"Fits, says the compiler: {worst} takes the most, {gib(sums[worst])} "
      f"of {gib(hardware.memory)} GiB."
    )
  for name, size in sums.items():
    if name in refused or size > hardware.memory:
      lower = ", ".join(advice.LOWER.get(name, ("mesh.model",)))
      blocks.append(
        f"Does not fit, says the compiler: {name} takes {gib(size)} GiB, "
        f"{gib(size - hardware.memory)} more than a device has. Lower {lower}."
      )
  return blocks


def _turns(depth: int) -> str:
  return ("", " a turn", " a turn of the inner loop")[min(depth, 2)]


def sizes(found: Mapping[str, tuple[int, str, float]]) -> list[Block]:
  """How many devices of each kind hold a config."""
  rows = []
  for kind, chip in CHIPS.items():
    limit = gib(Hardware(kind, 1).memory)
    if kind not in found:
      rows.append([kind, "none", "", "", limit])
      continue
    num, moment, size = found[kind]
    wide = f"{num}, beyond its network" if num > chip.domain else str(num)
    rows.append([kind, wide, moment, gib(size), limit])
  return [
    Heading("Devices that hold the config as it is, by sums"),
    Table(["kind", "devices", "largest moment", "GiB", "of"], rows),
    "With --hardware=KIND:NUMBER a step is planned on them, with "
    "--topology=KIND:SHAPE its stages are compiled too.",
  ]
