"""Accelerators by name, and stages compiled for them without a device.

A compiler needs only descriptions of devices: `libtpu` contains those of TPUs,
and XLA reads those of GPUs as text.
"""

from collections.abc import Collection, Iterator, Sequence
import importlib.util
import math
import os
import pathlib
import re
import time
from typing import Any, NamedTuple

import jax

from dppo_jax.errors import UserError
from dppo_jax.metrics import progress
from dppo_jax.planning import hlo
from dppo_jax.run.setup import Run
from dppo_jax.step import programs

# Platform and GiB of memory of one device. Sources: cloud.google.com/tpu/docs;
# NVIDIA's driver. A GPU with a description in KIND.txtpb can be compiled for;
# XLA has more of them in xla/backends/gpu/target_config/specs.
CHIPS = {
  "v4": ("tpu", 32),
  "v5e": ("tpu", 16),
  "v5p": ("tpu", 95),
  "v6e": ("tpu", 32),
  "a100": ("gpu", 80),
  "h100": ("gpu", 80),
  "h200": ("gpu", 140),
}
# JAX, the compiler and the driver take the rest.
_USABLE = {"tpu": 0.984, "gpu": 0.95}
# Importable if the compiler is installed, and the extra that installs it.
_COMPILERS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda13_plugin", "cuda")}


class Hardware(NamedTuple):
  """Devices of one kind.

  Attributes:
    name: as given, such as h200:8 or v5e:4x4.
    kind: a key of `CHIPS`.
    num: devices.
  """

  name: str
  kind: str
  num: int

  @property
  def platform(self) -> str:
    return CHIPS[self.kind][0]

  @property
  def memory(self) -> float:
    """Bytes of one device that a program can use."""
    platform, gib = CHIPS[self.kind]
    return gib * 2**30 * _USABLE[platform]


def parse(text: str, flag: str = "--hardware") -> Hardware:
  """Parses KIND:NUMBER or KIND:SHAPE, such as h200:8 or v5e:4x4."""
  kind, _, size = text.strip().partition(":")
  if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", size):
    raise UserError(
      f"{flag} is {text!r} but must be KIND:NUMBER or KIND:SHAPE, such as "
      f"h200:8 or v5e:4x4, with KIND one of {', '.join(CHIPS)}"
    )
  num = math.prod(int(side) for side in size.split("x"))
  return Hardware(text.strip(), kind, num)


def missing_compiler(platform: str) -> str:
  """Instructions to install the compiler; empty if it is installed."""
  module, extra = _COMPILERS[platform]
  if importlib.util.find_spec(module):
    return ""
  return (
    f"{module} is not installed, so nothing was compiled: "
    f"`pip install 'dppo_jax[{extra}]'` (no accelerator is needed)"
  )


def devices(hardware: Hardware) -> Sequence[Any]:
  """Descriptions of the devices of a topology, for the compiler."""
  from jax.experimental import topologies

  if hardware.platform == "tpu":
    # Keeps libtpu from asking this machine for its TPU.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    target = {"platform": "tpu", "topology_name": hardware.name}
  else:
    path = pathlib.Path(__file__).with_name(f"{hardware.kind}.txtpb")
    if not path.exists():
      raise UserError(f"--topology={hardware.name}: {path.name} is missing")
    target = {
      "platform": "cuda",
      "target_config": path.read_text(),
      "topology": f"1x1x{hardware.num}",
    }
  try:
    described = topologies.get_topology_desc(**target).devices
  except Exception as error:  # the compiler's
    reason = str(error).strip().partition("\n")[0]
    raise UserError(
      f"the compiler rejects --topology={hardware.name} ({reason}): use one "
      "such as v5e:4x4, v5p:2x2x1 or h200:8"
    ) from None
  if len(described) != hardware.num:
    raise UserError(
      f"--topology={hardware.name} has {len(described)} cores rather than "
      f"{hardware.num} chips: use --hardware={hardware.kind}:{hardware.num}"
    )
  return described


class Stage(NamedTuple):
  """A compiled stage; bytes are of one device.

  Attributes:
    held: arguments and results, donated ones once.
    temporary: memory in use only while the stage runs.
    seconds: compile time.
    kernels: number of calls of each custom kernel.
    needed: bytes that the compiler asked for if the stage did not fit, else 0.
    error: the compiler's message in that case.
  """

  name: str
  held: float = 0.0
  temporary: float = 0.0
  seconds: float = 0.0
  kernels: dict[str, int] = {}
  collectives: Sequence[hlo.Collective] = ()
  needed: float = 0.0
  error: str = ""

  @property
  def total(self) -> float:
    return self.needed or self.held + self.temporary


def compile_stages(
  run: Run, task: progress.Task, names: Collection[str] = ()
) -> Iterator[Stage]:
  """Compiles the stages of a run for the devices of its mesh, one by one.

  Args:
    task: shows the progress.
    names: stages to compile; none means all.
  """
  mesh = run.mesh.abstract_mesh  # so that nothing is computed
  with task.part("tracing"), jax.sharding.use_abstract_mesh(mesh):
    table = programs.programs(run)
  if unknown := [name for name in names if name not in table]:
    raise UserError(
      f"--stages has {unknown[0]!r} but the stages of this run are "
      f"{', '.join(table)}"
    )
  names = [name for name in table if not names or name in names]
  task.num_parts = len(names) + 1
  for name in names:
    with task.part(name), jax.sharding.use_abstract_mesh(mesh):
      start = time.monotonic()
      stage = _compile(name, table[name])
      yield stage._replace(seconds=time.monotonic() - start)


def _compile(name: str, program: programs.Program) -> Stage:
  try:
    compiled = program.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    message = re.search(r".*Used ([\d.]+)([KMGT]) of .* hbm.*", str(error))
    if not message:
      raise
    needed = float(message[1]) * 1024 ** (1 + "KMGT".index(message[2]))
    return Stage(name, needed=needed, error=message[0].strip())
  sizes, text = compiled.memory_analysis(), compiled.as_text()
  held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
  return Stage(
    name,
    held - sizes.alias_size_in_bytes,
    sizes.temp_size_in_bytes,
    kernels=hlo.kernels(text),
    collectives=hlo.collectives(text),
  )
