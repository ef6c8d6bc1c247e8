"""Flags to config to run; everything else is a library."""

import os
import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A file with get_config(); `file.py:METHOD` names a method."
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Directory of the run; by default runs/CONFIG-METHOD-seedSEED. The same "
  "command run again goes on from its newest checkpoint.",
)


def main(argv: list[str]) -> None:
  """Trains under the config that the flags give."""
  if len(argv) > 1:
    raise ValueError(f"unexpected argument {argv[1]!r}; flags start with --")
  if _CONFIG.value is None:
    raise ValueError("--config is missing, e.g. --config=configs/arithmetic.py")
  from dppo_jax import train  # flags first: a wrong one should fail at once

  config = _CONFIG.value
  workdir = _WORKDIR.value
  if workdir is None:
    name = config_flags.get_config_filename(flags.FLAGS["config"])
    stem = pathlib.Path(name.partition(":")[0]).stem
    workdir = f"runs/{stem}-{config.method.name}-seed{config.seed}"
  train.run(config, pathlib.Path(workdir))


def _parse(argv: list[str]) -> list[str]:
  return flags.FLAGS(argv)


def run() -> None:
  """Runs `main`; a user's mistake ends in one line, not in a traceback."""
  # TFDS, orbax and XLA tell of their inner life at these levels.
  logging.set_verbosity(logging.ERROR)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  try:
    app.run(main, flags_parser=_parse)
  except (ValueError, KeyError, AttributeError, flags.Error) as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  run()
