"""The config of a run that there is, which is also a file for --config."""

import json
import os
import pathlib

from dppo_jax.config.choose import use_method
from dppo_jax.config.options import renamed, walk
from dppo_jax.config.schema import Config


def read(path: str | os.PathLike) -> Config:
  """The config that a run wrote to its config.json.

  An option that is newer than the file has its default.

  Raises:
    ValueError: where it is no such file, or names what there is no more.
  """
  path = pathlib.Path(path)
  try:
    saved = json.loads(path.read_text(encoding="utf-8"))
    chosen = [
      saved.pop(f"{what}.source", None) or saved[f"{what}.name"]
      for what in ("method", "objective")
    ]
    del saved["method.name"], saved["objective.name"]
    saved.pop("fingerprints", None)  # of data and code: no options
  except (ValueError, LookupError, AttributeError, TypeError) as error:
    raise ValueError(f"{path} is no config of a run: {error}") from error
  config = Config()
  use_method(config, *chosen)
  for name, old, _ in walk(config):
    if name in saved:
      value = saved.pop(name)
      section, _, field = name.rpartition(".")
      holder = getattr(config, section) if section else config
      if isinstance(old, tuple):
        value = tuple(value)
      if isinstance(old, dict):
        value = old | value
      setattr(holder, field, value)
  if saved:
    hints = (renamed(name) or f"there is no config.{name}" for name in saved)
    raise ValueError(f"{path}: {'; '.join(hints)}")
  return config


get_config = read  # --config=dppo_jax/config/saved.py:RUN/config.json
