"""Entry point: `python -m dppo_jax.main --help`."""

import os
import pathlib
import sys

from dppo_jax.errors import UserError
from dppo_jax.metrics import progress
from dppo_jax.run import compile_cache


def main(argv: list[str]) -> None:
  """Runs one command.

  Args:
    argv: program name and flags.
  """
  from dppo_jax import config as configs
  from dppo_jax.config import cli
  from dppo_jax.run import distributed

  config, workdir, flags = cli.parse(argv)
  configs.validate(config)
  if workdir.exists() and not workdir.is_dir():
    raise UserError(f"--workdir={workdir} is a file, not a directory")
  distributed.initialize(
    flags.coordinator, flags.num_processes, flags.process_id
  )
  if distributed.count() > 1 and flags.mode not in ("train", "evaluate"):
    raise UserError(
      f"--mode={flags.mode} runs in one process, not in "
      f"{distributed.count()}: add --num_processes=1"
    )
  if flags.mode == "train":
    is_silent = not distributed.is_first()
    with (
      progress.Progress(is_silent) as bar,
      bar.task("loading libraries", True),
    ):
      from dppo_jax import train

    train.run(config, workdir)
  elif flags.mode == "evaluate":
    from dppo_jax import evaluate

    evaluate.run(config, workdir, flags.step)
  elif flags.mode == "export":
    from dppo_jax import export

    export.run(config, workdir, pathlib.Path(flags.to), flags.step, flags.dtype)
  else:
    from dppo_jax import plan

    plan.run(
      config,
      hardware=flags.hardware or "",
      topology=flags.topology or "",
      stages=flags.stages or "",
    )


def _exit_if_disconnected(error: Exception) -> None:
  """Exits at once if another process has ended; JAX would wait for it."""
  from dppo_jax.run import distributed

  if distributed.has_lost_another(error):
    reason = str(error).strip().partition("\n")[0]
    print(
      f"error: another process has ended or cannot be reached ({reason}): see "
      "its last output; re-run the command to resume",
      file=sys.stderr,
      flush=True,
    )
    os._exit(1)


def run() -> None:
  """Runs the command of `sys.argv`; user errors end in one line."""
  compile_cache.quiet_libraries()
  try:
    main(sys.argv)
  except KeyboardInterrupt:
    sys.exit(130)
  except UserError as error:
    if "--debug" in sys.argv:
      raise
    sys.exit(f"error: {error}")
  except Exception as error:
    _exit_if_disconnected(error)
    raise


if __name__ == "__main__":
  run()
