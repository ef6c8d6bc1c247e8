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
import threading

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
import jaxtyping
import pytest

# Types and shapes of every argument and result are checked where arrays are.
# An int is a float, as everywhere in Python. Not checked are modules that work
# on a host, since they take NumPy's arrays too, and records, since they are
# made of shapes and shardings as well.
_CHECKED = (
  "algo methods rng rollout "
  "models.attention models.grouped models.kv_cache models.layers "
  "models.lm_head models.moe models.transformer "
  "step.collect step.pack step.select step.tokens step.update"
)
jaxtyping.install_import_hook(
  [f"dppo_jax.{name}" for name in _CHECKED.split()],
  "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

jax.config.update("jax_num_cpu_devices", 8)

# Tests send these signals. A background job of a shell script ignores Ctrl-C,
# and one of nohup SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

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


@pytest.fixture(autouse=True, scope="session")
def fail_late_tests():
  """Raises an error where a command would end the process, a worker's here."""
  from dppo_jax import errors

  def give_up(text: str) -> None:
    print(f"error: {text}", file=sys.__stderr__, flush=True)
    main = ctypes.c_ulong(threading.main_thread().ident)
    error = ctypes.py_object(TimeoutError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, error)

  errors.give_up = give_up


@pytest.fixture
def tpu_kernels(monkeypatch):
  """Emulates the kernels for TPUs."""
  from jax.experimental import pallas

  from dppo_jax.models import attention

  call = functools.partial(pallas.pallas_call, interpret=True)
  monkeypatch.setattr(pallas, "pallas_call", call)
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


def pytest_addoption(parser):
  parser.addoption("--all", action="store_true", help="run slow tests too")


def pytest_collection_modifyitems(config, items):
  """Runs slow tests if asked to, and first: workers then end together."""
  slow = [x for x in items if x.get_closest_marker("slow")]
  is_chosen = config.option.all or config.option.markexpr
  if not is_chosen and len(slow) < len(items):
    config.hook.pytest_deselected(items=slow)
    items[:] = [x for x in items if not x.get_closest_marker("slow")]
  items.sort(key=lambda item: item.parent.get_closest_marker("slow") is None)
