"""Flags to config to run; everything else is a library."""

import pathlib
import re
import sys
import traceback

from absl import app, flags, logging
from ml_collections import config_flags

from dppo_jax.reporting import logs

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
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of any error.")


def main(argv: list[str]) -> None:
  """Trains under the config that the flags give."""
  if "--verbosity" not in " ".join(sys.argv):  # absl would show information
    logging.set_verbosity(logging.WARNING)
  try:
    _train(argv)
  except KeyboardInterrupt:
    sys.exit(130)
  except Exception as error:
    if _DEBUG.value or not _is_explained(error):
      raise
    sys.exit(f"error: {error}")


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


def _is_explained(error: Exception) -> bool:
  """Whether its message says all that a user needs.

  That is so of what the system refuses, and of errors that this package itself
  raises. What JAX or another library raises is our mistake or theirs, and the
  traceback says where.
  """
  if isinstance(error, OSError):
    return True
  raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
  is_ours = pathlib.Path(__file__).parent in pathlib.Path(raised_in).parents
  expected = (ValueError, RuntimeError, FloatingPointError)
  return is_ours and isinstance(error, expected)


def _parse(argv: list[str]) -> list[str]:
  """Parses the flags; what a user mistyped ends in one line."""
  try:
    return flags.FLAGS(argv)
  except Exception as error:  # a config file may raise anything
    if "--debug" in argv:
      raise
    sys.exit(f"error: {_reason(error, argv)}")


def _reason(error: Exception, argv: list[str]) -> str:
  """One line on what is wrong with the flags or the config's file."""
  from dppo_jax import options

  # Where loading a file fails, the reason comes last.
  reason = (str(error).strip() or repr(error)).splitlines()[-1].strip()
  if not isinstance(error, LookupError | AttributeError):
    return reason
  typed = [re.match(r"--config\.([\w.]+)", arg) for arg in argv]
  names = [match[1] for match in typed if match]
  # A config file that sets a field of a section that has no such field.
  missing = re.search(r"'(\w+)' object has no attribute '(\w+)'", reason)
  if missing:
    section = missing[1].lower().replace("config", "")
    names.append(f"{section}.{missing[2]}".strip("."))
  hints = [hint for name in names if (hint := options.renamed(name))]
  return hints[0] if hints else f"the config has no such field: {reason}"


def run() -> None:
  """Runs `main`."""
  logs.quiet_libraries()  # which speak while flags are parsed
  app.run(main, flags_parser=_parse)


if __name__ == "__main__":
  run()
