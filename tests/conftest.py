"""Eight simulated devices, a compiler that remembers, no chance or clock."""

import atexit
import os
import shutil
import tempfile

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)

# Many tests build the same rooms, some in processes of their own: what one
# compiles, the others load.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
jax.config.update(
  "jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"]
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

hypothesis.settings.register_profile(
  "repeatable", derandomize=True, deadline=None, max_examples=50
)
hypothesis.settings.load_profile("repeatable")
