"""Eight simulated devices, a quick compiler that remembers, no chance."""

import atexit
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from unittest import mock

import xla_flags

# Tests compile longer than they compute. Set before JAX looks, for child
# processes too.
os.environ["XLA_FLAGS"] = " ".join(
  [os.environ.get("XLA_FLAGS", ""), *xla_flags.known_flags()]
)

# What one process compiles, the others load: workers of pytest-xdist and
# programs that tests start get the directory from the first process, which
# removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# What a shell's script starts with & ignores Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile(
  "repeatable", derandomize=True, deadline=None, max_examples=50
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def quick_compiler():
  """Runs in this process compile at that level too, not at their own."""
  from dppo_jax.step import programs

  quick = lambda lowered, platform: lowered.compile()
  with mock.patch.object(programs, "compile_program", quick):
    yield


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
  """What a file compiled leaves the memory with it."""
  yield
  jax.clear_caches()
  gc.collect()
  _return_memory()


@pytest.fixture(autouse=True)
def return_memory(request):
  """After a test that compiles much, what that took goes back."""
  yield
  if request.node.get_closest_marker("slow"):
    _return_memory()


def _return_memory():
  """The allocator of glibc keeps what was freed until it is asked."""
  if sys.platform == "linux":
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def pytest_collection_modifyitems(items):
  """Files marked slow go first: a worker that ends early has others to do."""
  items.sort(key=lambda item: item.parent.get_closest_marker("slow") is None)
