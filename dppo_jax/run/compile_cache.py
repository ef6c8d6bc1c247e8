"""Compilation: a cache, a count, and which messages of libraries are shown."""

from collections.abc import Iterator
import contextlib
import logging
import os
import pathlib

# Libraries whose log messages are not for users of this package.
_CHATTY = {"ml_collections", "orbax", "tensorflow_datasets", "tokamax"}


def enable_compilation_cache() -> None:
  """Caches compiled programs in `~/.cache/dppo_jax`, unless JAX has a cache.

  Quiets libraries too.
  """
  import jax  # not before the flags are parsed
  from jax.experimental.compilation_cache import compilation_cache

  quiet_libraries()
  if jax.config.jax_compilation_cache_dir:
    return
  with contextlib.suppress(RuntimeError):  # a user without a home directory
    folder = pathlib.Path.home() / ".cache/dppo_jax"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # A run has dozens of programs that compile in less than JAX's second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # it may have settled on having none


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
  """Collects the seconds of each program that XLA compiles in the context."""
  from jax import monitoring

  seconds = []

  def listen(event: str, duration_secs: float, **unused: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      seconds.append(duration_secs)

  monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seconds
  finally:
    monitoring.unregister_event_duration_listener(listen)


def _is_for_users(record: logging.LogRecord) -> bool:
  parts = set(pathlib.PurePath(record.pathname).parts)
  if record.levelno >= logging.ERROR:
    return "orbax" not in parts  # it raises its errors, too
  return not parts & _CHATTY


def quiet_libraries() -> None:
  """Drops what chatty libraries log through absl, except errors."""
  # Importing absl first lets its own logger class find the caller's file.
  from absl import logging as absl_logging

  absl_logging.get_absl_logger().addFilter(_is_for_users)
  # Hides XLA's banner of a slow compilation too.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
