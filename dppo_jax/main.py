"""Entry point: `python -m dppo_jax.main --help`."""

import importlib
import os
import sys

from dppo_jax import errors
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import user_code
from dppo_jax.metrics import progress
from dppo_jax.run import compile_cache

# Options that name functions, the last three for training only.
_CODE = (
  "method.source method.args objective.source objective.args reward.functions "
  "data.template data.eval data.train optimizer.function callbacks"
).split()


def main(argv: list[str]) -> None:
  """Runs one command, given the program's name and flags."""
  from dppo_jax import config as configs
  from dppo_jax import distributed
  from dppo_jax.config import cli

  config, workdir, flags = cli.parse(argv)
  with user_code.explained("user code ended the run", (SystemExit,)):
    trains = flags.mode in ("train", "plan", "check")
    code = configs.user_functions(config, _CODE[: None if trains else -3])
    if code and not flags.process_id:
      print(progress.wrapped(f"user code: {', '.join(code)}"), flush=True)
    configs.validate(config, trains)
    distributed.initialize(
      flags.coordinator, flags.num_processes, flags.process_id
    )
    if distributed.count() > 1 and flags.mode not in ("train", "evaluate"):
      raise UserError(f"--mode={flags.mode} needs --num_processes=1")
    mode = importlib.import_module(f"dppo_jax.{flags.mode}")
    result = mode.run(config, workdir, **cli.arguments(flags))
  if flags.mode == "check" and not all(row.is_right for row in result):
    sys.exit(1)


def run() -> None:
  """Runs the command of `sys.argv`; user errors end in one line."""
  compile_cache.quiet_libraries()
  for name in ("stdout", "stderr"):  # closed, or of few characters
    if not getattr(sys, name):
      setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    getattr(sys, name).reconfigure(errors="backslashreplace")
  try:
    main(sys.argv)
  except KeyboardInterrupt:
    sys.exit(130)
  except UserError as error:
    if "--debug" in sys.argv:
      raise
    if not isinstance(error, Unreachable):
      sys.exit(f"error: {error}")
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(os.EX_TEMPFAIL)
  except OSError as error:
    is_known = isinstance(error, BrokenPipeError) or errors.of_disk(error)
    if "--debug" in sys.argv or not is_known:
      raise
    progress.drop_output()  # or Python would try to write more of it
    sys.exit(f"error: {error.filename or 'output'}: {error.strerror}")
  except MemoryError:
    sys.exit("error: out of memory: see Troubleshooting in metrics/README.md")
  except Exception as error:
    from dppo_jax import distributed

    if not distributed.has_lost_another(error):
      raise
    # At once: JAX would wait for the other process.
    distributed.end_with_others(f" ({errors.first_line(error)})")


if __name__ == "__main__":
  run()
