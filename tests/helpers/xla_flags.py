"""Flags with which XLA compiles the programs of tests in half the time."""

import importlib.util
import mmap
import pathlib
import platform

# The lowest level of optimisation, and one thread, as each worker has one core.
FLAGS = {
  "xla_backend_optimization_level": "0",
  "xla_cpu_parallel_codegen_split_count": "1",
}
# The older generator of code for fusions needs a third of the time. It fuses
# products and sums where it can, so it gets no instructions that do: equal
# expressions then have equal bits in every program.
if platform.machine() in ("x86_64", "AMD64"):
  FLAGS |= {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_max_isa": "AVX"}


def known_flags() -> list[str]:
  """Those of `FLAGS` that JAX's library has: another would end the process."""
  folder = importlib.util.find_spec("jaxlib").submodule_search_locations[0]
  (path,) = pathlib.Path(folder).glob("libjax_common.*")
  with (
    path.open("rb") as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
  ):
    names = [name for name in FLAGS if library.find(name.encode()) >= 0]
  return [f"--{name}={FLAGS[name]}" for name in names]
