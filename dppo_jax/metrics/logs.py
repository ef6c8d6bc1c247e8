"""What a library does for a run, set up by the run itself, not by `main`."""

import logging
import os
import pathlib
import sys

# Their information is for their developers; what matters of it is raised too.
_CHATTY = ("ml_collections", "orbax", "tensorflow_datasets")
# Even what it calls an error is raised, by what waits for its threads.
_RAISES = "orbax"


def quiet_libraries() -> None:
  """Drops what chatty libraries log through absl, errors mostly aside."""

  def is_worth_reading(record: logging.LogRecord) -> bool:
    parts = set(pathlib.PurePath(record.pathname).parts)
    if record.levelno >= logging.ERROR:
      return _RAISES not in parts
    return not parts & set(_CHATTY)

  logger = logging.getLogger("absl")
  if not any(getattr(f, "is_ours", False) for f in logger.filters):
    is_worth_reading.is_ours = True
    logger.addFilter(is_worth_reading)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


class _Outlives:
  """A stream that goes on, unheard, when nobody reads it any more."""

  def __init__(self, stream):
    self._stream = stream

  def __getattr__(self, name: str):
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    return self._try(lambda: self._stream.write(text)) or len(text)

  def flush(self) -> None:
    self._try(self._stream.flush)

  def _try(self, act):
    try:
      return act()
    except BrokenPipeError:
      null = os.open(os.devnull, os.O_WRONLY)
      os.dup2(null, self._stream.fileno())
      os.close(null)


def outlive_readers() -> None:
  """Lets a run go on where what reads its output ends, as `| head` does."""
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)  # None where a shell closed it
    if stream is not None and not isinstance(stream, _Outlives):
      setattr(sys, name, _Outlives(stream))


def keep_programs() -> None:
  """Keeps compiled programs for the next run, unless JAX has a place for them.

  Those that took a second or more to compile go to `~/.cache/dppo_jax`.
  """
  import jax  # not before the flags are read
  from jax.experimental.compilation_cache import compilation_cache

  if jax.config.jax_compilation_cache_dir:
    return
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  folder = str(pathlib.Path(home) / "dppo_jax")
  jax.config.update("jax_compilation_cache_dir", folder)
  compilation_cache.reset_cache()  # it may have settled on having none
