"""Accelerators by name, and stages compiled for them without a device.

`libtpu` contains descriptions of TPUs; descriptions of GPUs are text files.
"""

from collections.abc import Collection, Iterator, Sequence
import math
import os
import pathlib
import re
import time
from typing import Any, NamedTuple

import jax

from dppo_jax.errors import UserError
from dppo_jax.eval import eval_sets
from dppo_jax.metrics import progress
from dppo_jax.planning import memory
from dppo_jax.planning.collectives import Collective, read_collectives
from dppo_jax.run.setup import Run
from dppo_jax.step import programs

# Platform, GiB, TFLOP/s in bfloat16 and GB/s of one device. Sources:
# cloud.google.com/tpu/docs; NVIDIA's driver and data sheets, without sparsity.
# KIND.txtpb describes a GPU to the compiler: facts from a100_sxm_80, h100_sxm,
# h200 and b200 of XLA's xla/backends/gpu/target_config/specs.
CHIPS = {
  "cpu": ("cpu", 0, 0, 0),  # this machine, which is measured
  "v4": ("tpu", 32, 275, 1228),
  "v5e": ("tpu", 16, 197, 819),
  "v5p": ("tpu", 95, 459, 2765),
  "v6e": ("tpu", 32, 918, 1638),
  "a100": ("gpu", 80, 312, 2039),
  "h100": ("gpu", 80, 989, 3352),
  "h200": ("gpu", 140, 989, 4814),
  "b200": ("gpu", 178, 2250, 7672),
}
# Compute capability; of TPUs 0.
_CAPABILITY = {"a100": 8.0, "h100": 9.0, "h200": 9.0, "b200": 10.0}
# JAX, the compiler and the driver take the rest.
_USABLE = {"tpu": 0.984, "gpu": 0.95}
# Keeps libtpu from asking this machine for its TPU, or claiming it.
_NO_TPU = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}


class Hardware(NamedTuple):
  """Devices of one kind; `name` is as given, such as h200:8 or v5e:4x4."""

  name: str
  kind: str
  num: int

  @property
  def platform(self) -> str:
    return CHIPS[self.kind][0]

  @property
  def capability(self) -> float:
    return _CAPABILITY.get(self.kind, 0.0)

  @property
  def memory(self) -> float:
    """Bytes of one device that a program can use."""
    if self.kind == "cpu":
      return memory.free_memory() / self.num
    return CHIPS[self.kind][1] * 2**30 * _USABLE[self.platform]

  @property
  def peaks(self) -> tuple[float, float]:
    """Operations and bytes a second of one device."""
    return CHIPS[self.kind][2] * 1e12, CHIPS[self.kind][3] * 1e9


def parse(text: str, flag: str = "--hardware") -> Hardware:
  """Parses KIND:NUMBER or KIND:SHAPE, such as h200:8 or v5e:4x4."""
  kind, _, size = text.partition(":")
  if flag == "--hardware":
    size = size or "1"
  kinds = [x for x in CHIPS if x != "cpu" or flag == "--hardware"]
  # The compiler needs the shape of TPUs, whose names begin with v.
  fewest = int(flag == "--topology" and kind.startswith("v"))
  shape = rf"[1-9]\d*(x[1-9]\d*){{{fewest},2}}"
  if kind not in kinds or not re.fullmatch(shape, size):
    raise UserError(
      f"{flag} is {text!r} but must be KIND:NUMBER or, of TPUs, KIND:SHAPE, "
      f"such as h200:8 or v5e:4x4, with KIND one of {', '.join(kinds)}"
    )
  return Hardware(text, kind, math.prod(map(int, size.split("x"))))


def devices(hardware: Hardware) -> Sequence[Any]:
  """Descriptions of the devices of a topology, for the compiler."""
  from jax.experimental import topologies

  target: dict[str, Any] = {"platform": "tpu", "topology_name": hardware.name}
  try:
    if hardware.platform == "gpu":
      path = pathlib.Path(__file__).with_name(f"{hardware.kind}.txtpb")
      text, shape = path.read_text(), f"1x1x{hardware.num}"
      target = {"platform": "cuda", "target_config": text, "topology": shape}
    elif hardware.num < 4:  # a part of a host, which has 2 x 2 chips
      bounds = [*map(int, hardware.name.partition(":")[2].split("x")), 1, 1]
      target["chips_per_host_bounds"] = bounds[:3]
    for name, value in _NO_TPU.items():
      os.environ.setdefault(name, value)
    return topologies.get_topology_desc(**target).devices
  except Exception as error:  # the compiler's
    reason = str(error).strip().partition("\n")[0]
    raise UserError(
      f"--topology={hardware.name}: no compiler for it ({reason}). Use a name "
      "such as v5e:4x4 or h200:8, and install its compiler with "
      "`pip install 'jax[tpu]'` or 'jax[cuda13]'"
    ) from None


class CompiledStage(NamedTuple):
  """A compiled stage; bytes are of one device.

  Attributes:
    held: arguments and results, donated ones once.
    temporary: other memory of the stage; infinite if it exceeds the device.
    seconds: compile time.
    text: compiled program.
    error: the compiler's message if the stage does not fit.
  """

  name: str
  held: float
  temporary: float
  seconds: float
  collectives: Sequence[Collective] = ()
  text: str = ""
  error: str = ""


def compile_stages(
  run: Run, task: progress.Task, names: Collection[str] = ()
) -> Iterator[CompiledStage]:
  """Compiles the named stages (default: all) for the devices of the mesh."""
  mesh = run.spec.mesh.abstract_mesh  # so that nothing is computed
  with task.part("tracing"), jax.sharding.use_abstract_mesh(mesh):
    table = programs.step_programs(run.spec)
    if run.eval_sets:  # a greedy evaluation is no larger
      table["evaluate"] = eval_sets.program(run, run.eval_samples)
  if unknown := [name for name in names if name not in table]:
    raise UserError(
      f"--stages has {unknown[0]!r} but the stages of this run are "
      f"{', '.join(table)}"
    )
  names = [name for name in table if not names or name in names]
  task.num_parts = len(names) + 1
  # The kernels for GPUs depend on the kind of the default device.
  is_gpu = run.spec.platform == "gpu"
  device = run.spec.mesh.devices.flat[0] if is_gpu else None
  for name in names:
    with task.part(name), jax.sharding.use_abstract_mesh(mesh):
      with jax.default_device(device):
        yield _compile(name, table[name])


def _compile(name: str, program: programs.Program) -> CompiledStage:
  start = time.monotonic()
  try:
    compiled = program().compile()
  except jax.errors.JaxRuntimeError as error:
    if not (message := re.search(r"Used .* hbm", str(error))):
      raise
    seconds = time.monotonic() - start
    return CompiledStage(name, 0, math.inf, seconds, error=message[0])
  sizes, text = compiled.memory_analysis(), compiled.as_text() or ""
  return CompiledStage(
    name,
    sizes.argument_size_in_bytes
    + sizes.output_size_in_bytes
    - sizes.alias_size_in_bytes,
    sizes.temp_size_in_bytes,
    time.monotonic() - start,
    read_collectives(text),
    text,
  )
