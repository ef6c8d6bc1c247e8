"""Compilation: a cache, a count, and which messages of libraries are shown."""

import logging
import os
import pathlib

# Libraries whose log messages are not for users of this package.
_CHATTY = {"ml_collections", "orbax", "tensorflow_datasets"}


def enable_compilation_cache() -> None:
  """Caches compiled programs in `~/.cache/dppo_jax`, unless JAX has a cache."""
  import jax  # not before the flags are parsed
  from jax.experimental.compilation_cache import compilation_cache

  if jax.config.jax_compilation_cache_dir:
    return
  folder = pathlib.Path.home() / ".cache/dppo_jax"
  jax.config.update("jax_compilation_cache_dir", str(folder))
  compilation_cache.reset_cache()  # it may have settled on having none


class Compilations:
  """Counts the programs that XLA compiles while the context lasts."""

  _count = 0

  def __enter__(self) -> "Compilations":
    from jax import monitoring

    monitoring.register_event_duration_secs_listener(self._on_event)
    return self

  def __exit__(self, *unused) -> None:
    from jax import monitoring

    monitoring.unregister_event_duration_listener(self._on_event)

  def _on_event(self, name: str, seconds: float, **unused) -> None:
    self._count += name == "/jax/core/compile/backend_compile_duration"

  def since_last(self) -> int:
    """Returns the number of programs compiled since the last call."""
    count, self._count = self._count, 0
    return count


def _is_for_users(record: logging.LogRecord) -> bool:
  parts = set(pathlib.PurePath(record.pathname).parts)
  if record.levelno >= logging.ERROR:
    return "orbax" not in parts  # it raises its errors, too
  return not parts & _CHATTY


def quiet_libraries() -> None:
  """Drops what chatty libraries log through absl, except errors."""
  # Importing absl first lets its own logger class find the caller's file.
  from absl import logging as absl_logging

  absl_logging.get_absl_logger().addFilter(
    _is_for_users
  )  # once: it is the same
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
