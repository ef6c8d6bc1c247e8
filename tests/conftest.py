"""Eight simulated devices, fast cached compilation, repeatable randomness."""

import atexit
import ctypes
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile

from tests.helpers import xla_flags

# Tests compile longer than they compute. Set before JAX reads it, for child
# processes too.
os.environ["XLA_FLAGS"] = " ".join(
  [os.environ.get("XLA_FLAGS", ""), *xla_flags.known_flags()]
)

# A compilation cache that all processes share: workers of pytest-xdist and
# programs that tests start inherit the directory of the first process, which
# removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# A background job of a shell script ignores Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile(
  "repeatable", derandomize=True, deadline=None, max_examples=50
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
  """Frees the programs that a test file compiled."""
  yield
  jax.clear_caches()
  gc.collect()
  _return_memory()


@pytest.fixture
def gpu_kernels(monkeypatch):
  """Emulates the kernels for GPUs, and that of decoding for TPUs."""
  from jax.experimental import pallas

  call = functools.partial(pallas.pallas_call, interpret=True)
  monkeypatch.setattr(pallas, "pallas_call", call)


@pytest.fixture
def tpu_kernels(gpu_kernels, monkeypatch):
  """Emulates the kernels for TPUs."""
  from dppo_jax.models import attention

  splash = functools.partial(attention.splash_kernel.attention, interpret=True)
  monkeypatch.setitem(attention.BACKENDS, "splash", splash)


@pytest.fixture(autouse=True)
def return_memory(request):
  """Returns freed memory to the system after a slow test."""
  yield
  if request.node.get_closest_marker("slow"):
    _return_memory()


def _return_memory():
  """Asks glibc's allocator to return the memory that was freed."""
  if sys.platform == "linux":
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def pytest_collection_modifyitems(items):
  """Runs slow files first, so that the workers finish together."""
  items.sort(key=lambda item: item.parent.get_closest_marker("slow") is None)
