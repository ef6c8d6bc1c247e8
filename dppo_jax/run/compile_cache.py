"""Compilation: a cache, a count, and which messages of libraries are shown."""

import logging
import os
import pathlib

# Libraries whose log messages are not for users of this package.
_CHATTY = {"ml_collections", "orbax", "tensorflow_datasets"}


def enable_compilation_cache() -> None:
  """Keeps programs that took a second to compile in `~/.cache/dppo_jax`.

  Does nothing if JAX has a cache directory already.
  """
  import jax  # not before the flags are parsed
  from jax.experimental.compilation_cache import compilation_cache

  if jax.config.jax_compilation_cache_dir:
    return
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  folder = str(pathlib.Path(home) / "dppo_jax")
  jax.config.update("jax_compilation_cache_dir", folder)
  compilation_cache.reset_cache()  # it may have settled on having none


class Compilations:
  """Counts the programs that XLA compiles while the context lasts."""

  def __init__(self):
    self._count = 0

  def __enter__(self) -> "Compilations":
    from jax import monitoring

    monitoring.register_event_duration_secs_listener(self._on_event)
    return self

  def __exit__(self, *unused) -> None:
    from jax import monitoring

    monitoring.unregister_event_duration_listener(self._on_event)

  def _on_event(self, name: str, seconds: float, **unused) -> None:
    if name == "/jax/core/compile/backend_compile_duration":
      self._count += 1

  def since_last(self) -> int:
    """The number of programs compiled since the last call."""
    count, self._count = self._count, 0
    return count


def quiet_libraries() -> None:
  """Drops what chatty libraries log through absl, except errors."""
  # Importing absl first lets its own logger class find the caller's file.
  from absl import logging as absl_logging

  def is_for_users(record: logging.LogRecord) -> bool:
    parts = set(pathlib.PurePath(record.pathname).parts)
    if record.levelno >= logging.ERROR:
      return "orbax" not in parts  # it raises its errors, too
    return not parts & _CHATTY

  logger = absl_logging.get_absl_logger()
  if not any(getattr(f, "is_ours", False) for f in logger.filters):
    is_for_users.is_ours = True
    logger.addFilter(is_for_users)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
