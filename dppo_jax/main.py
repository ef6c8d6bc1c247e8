"""Flags to config to run; everything else is a library."""

import os
import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "A file with get_config(); `file.py:METHOD` names a method and "
  "`file.py:METHOD,OBJECTIVE` an objective too.",
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Directory of the run; by default runs/CONFIG-METHOD-seedSEED, with the "
  "objective after the method unless that is grpo. The same "
  "command run again goes on from its newest checkpoint.",
)
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an error.")


def main(argv: list[str]) -> None:
  """Trains under the config that the flags give."""
  try:
    _train(argv)
  except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
    if _DEBUG.value:
      raise
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    sys.exit(130)


def _train(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected argument {argv[1]!r}: flags start with --")
  if not flags.FLAGS["config"].present:
    raise ValueError("--config is missing, e.g. --config=configs/arithmetic.py")
  path = config_flags.get_config_filename(flags.FLAGS["config"])
  path = pathlib.Path(path.partition(":")[0])
  if not path.is_file():
    raise ValueError(f"--config: there is no file {str(path)!r}")
  # After the flags: a wrong one fails at once.
  from dppo_jax import config as configs
  from dppo_jax import train

  config = _CONFIG.value
  if not isinstance(config, configs.Config):
    raise ValueError(f"--config: get_config() of {str(path)!r} made no Config")
  what = config.method.name
  if config.objective.name != "grpo":
    what += f"-{config.objective.name}"
  name = f"{path.stem}-{what}-seed{config.seed}"
  train.run(config, pathlib.Path(_WORKDIR.value or f"runs/{name}"))


def _parse(argv: list[str]) -> list[str]:
  """Parses the flags; what a user mistyped ends in one line."""
  try:
    return flags.FLAGS(argv)
  except Exception as error:  # a config file may raise anything
    if "--debug" in argv:
      raise
    # Where loading a file fails, the reason comes last.
    reason = (str(error).strip() or repr(error)).splitlines()[-1].strip()
    if isinstance(error, LookupError | AttributeError):
      reason = f"the config has no such field: {reason}"
    sys.exit(f"error: {reason}")


def run() -> None:
  """Runs `main` with quiet libraries and a cache of compiled programs."""
  # Orbax and TFDS tell all; what matters of it is raised as well.
  logging.set_verbosity(logging.FATAL)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  # Programs that took a second or more to compile are kept for the next run.
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  programs = str(pathlib.Path(home) / "dppo_jax")
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
  app.run(main, flags_parser=_parse)


if __name__ == "__main__":
  run()
