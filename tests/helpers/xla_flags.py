"""Flags with which XLA compiles the programs of tests in half the time."""

import importlib.util
import mmap
import pathlib
import platform

# The lowest optimisation level, and one thread, as each worker has one core.
FLAGS = {
  "xla_backend_optimization_level": "0",
  "xla_cpu_parallel_codegen_split_count": "1",
}
# The older code generator for fusions takes a third of the time. It would use
# fused multiply-add in some programs only. AVX has none, so equal expressions
# have equal bits in all programs.
if platform.machine() in ("x86_64", "AMD64"):
  FLAGS |= {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_max_isa": "AVX"}


def known_flags() -> list[str]:
  """Returns the `FLAGS` that this JAX has; any other aborts the process."""
  folder = importlib.util.find_spec("jaxlib").submodule_search_locations[0]
  (path,) = pathlib.Path(folder).glob("libjax_common.*")
  with (
    path.open("rb") as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
  ):
    # A flag is a C string; protocol buffers keep the names of removed flags.
    names = [x for x in FLAGS if library.find(b"\0%b\0" % x.encode()) >= 0]
  return [f"--{name}={FLAGS[name]}" for name in names]
