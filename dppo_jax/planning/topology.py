"""Stages compiled for TPUs that are not there: what the compiler says of them.

`libtpu` holds XLA's compiler for TPUs; it needs a chip's description, no chip.
"""

from collections.abc import Collection, Iterator, Sequence
import functools
import importlib.util
import os
import re
import time
from typing import Any, NamedTuple

import jax

from dppo_jax.metrics import progress
from dppo_jax.planning import hlo, memory_estimate
from dppo_jax.planning.hardware import Hardware
from dppo_jax.run.setup import Run
from dppo_jax.step import compiler
from dppo_jax.step import programs as compiled

HOW_TO_INSTALL = (
  "libtpu is not installed, so nothing was compiled: "
  "`pip install 'dppo_jax[tpu]'`, or libtpu alone, brings the compiler to any "
  "Linux machine"
)

_NO_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # whatever the topology is
}

# What is in memory during a stage and is no argument of it: keys of
# `memory.resident`, and the rollout's copy of the weights.
_COPY = "rollout copy"
_STATE = ("weights", "optimizer", "history", "reference")
_BESIDE = {
  "choose_prompts": ("weights", "optimizer", "reference", _COPY),
  "to_inference_params": ("optimizer", "history", "reference"),
  "roll_out": _STATE,
  "select": _STATE,
  "score": ("optimizer", "history", "reference"),
  "update": (),
  "update_history": ("weights", "optimizer", "reference", _COPY),
  "evaluate": ("optimizer", "history", "reference"),
  "init_buffer": (*_STATE, _COPY),
  "add_groups": (*_STATE, _COPY),
}


class Stage(NamedTuple):
  """A stage as compiled; bytes are of one device.

  Attributes:
    held: arguments and results, what is donated once.
    temporary: what it needs while it runs.
    beside: what else is in memory meanwhile.
    seconds: that compiling took.
    flops, bytes: operations and bytes moved, as the compiler counts them:
      each loop as if it turned once.
    kernels: Pallas kernels and how often they stand in the program.
    collectives: traffic between devices.
    needed: bytes that the compiler asked for where it gave up; 0 where it
      did not.
    error: its message then.
  """

  name: str
  held: float
  temporary: float
  beside: float
  seconds: float
  flops: float
  bytes: float
  kernels: dict[str, int]
  collectives: Sequence[hlo.Collective]
  needed: float = 0.0
  error: str = ""

  @property
  def total(self) -> float:
    """Bytes in memory at its largest moment."""
    return self.beside + (self.needed or self.held + self.temporary)


def is_installed() -> bool:
  return importlib.util.find_spec("libtpu") is not None


def devices(hardware: Hardware) -> Sequence[Any]:
  """Descriptions of the devices of a topology.

  Raises:
    ValueError: where the compiler knows no such topology.
  """
  from jax.experimental import topologies

  # This machine is no TPU: what libtpu would ask it, and complain about.
  for name, value in _NO_TPU.items():
    os.environ.setdefault(name, value)
  try:
    found = topologies.get_topology_desc(
      platform="tpu", topology_name=hardware.name
    ).devices
  except Exception as error:  # the compiler's
    reason = str(error).strip().partition("\n")[0]
    raise ValueError(
      f"--topology is {hardware.name!r}, which the TPU compiler refuses "
      f"({reason}): give one such as v5e:4x4 or v5p:2x2x1"
    ) from None
  if len(found) != hardware.num:
    raise ValueError(
      f"--topology is {hardware.name!r}, of which the TPU compiler describes "
      f"{len(found)} cores rather than {hardware.num} chips: plan for it with "
      f"--hardware={hardware.kind}:{hardware.num}"
    )
  return found


def compile_stages(
  run: Run, task: progress.Task, only: Collection[str] = ()
) -> Iterator[Stage]:
  """Compiles the stages of a run for the devices of its mesh, one by one.

  Args:
    task: is told what is under way.
    only: stages to compile; none is all.
  Raises:
    ValueError: for a stage that the run does not have.
  """
  # Abstract: what JAX computes at once, it computes on this machine.
  mesh = run.mesh.abstract_mesh
  abstract = functools.partial(jax.sharding.use_abstract_mesh, mesh)
  with task.part("tracing"), abstract():
    programs = compiled.programs(run)
  for name in only:
    if name not in programs:
      raise ValueError(
        f"--stages has {name!r} but the stages of this run are "
        f"{', '.join(programs)}"
      )
  names = [name for name in programs if not only or name in only]
  task.num_parts = len(names) + 1
  beside = memory_estimate.resident(run)
  beside[_COPY] = memory_estimate.rollout_copy(run)
  for name in names:
    others = sum(beside.get(x, 0.0) for x in _BESIDE.get(name, _STATE))
    with task.part(name), abstract():
      stage = _compile(name, programs[name], others)
    yield stage


def _compile(name: str, program: compiler.Program, beside: float) -> Stage:
  start = time.monotonic()
  try:
    stage = program.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    needed = _needed(str(error))
    if not needed:
      raise
    line = next(x for x in str(error).splitlines() if "Used " in x)
    seconds = time.monotonic() - start
    nothing = (0.0, 0.0, {}, ())
    return Stage(
      name, 0.0, 0.0, beside, seconds, *nothing, needed, line.strip()
    )
  used, cost = stage.memory_analysis(), stage.cost_analysis() or {}
  held = used.argument_size_in_bytes + used.output_size_in_bytes
  text = stage.as_text()
  return Stage(
    name,
    held - used.alias_size_in_bytes,
    used.temp_size_in_bytes,
    beside,
    time.monotonic() - start,
    cost.get("flops", 0.0),
    cost.get("bytes accessed", 0.0),
    hlo.kernels(text),
    hlo.collectives(text),
  )


def _needed(message: str) -> float:
  """Bytes that a program needs which the compiler found too large; or 0."""
  found = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message)
  if not found:
    return 0.0
  return float(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))
