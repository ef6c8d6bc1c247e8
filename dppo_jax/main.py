"""Entry point: `python -m dppo_jax.main --help`."""

import errno
import os
import pathlib
import sys

from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket, user_code
from dppo_jax.metrics import progress
from dppo_jax.run import compile_cache

# Errors of places that cannot be written, and of a reader that has ended.
_OF_PLACES = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
_OF_PLACES |= {errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EPIPE}


def main(argv: list[str]) -> None:
  """Runs one command, given the program's name and flags."""
  from dppo_jax import config as configs
  from dppo_jax import distributed
  from dppo_jax.config import cli

  config, workdir, flags = cli.parse(argv)
  with user_code.explained("user code ended the run", (SystemExit,)):
    configs.validate(config)
    distributed.initialize(
      flags.coordinator, flags.num_processes, flags.process_id
    )
    if distributed.count() > 1 and flags.mode not in ("train", "evaluate"):
      raise UserError(f"--mode={flags.mode} needs --num_processes=1")
    if flags.mode == "train":
      with progress.Progress(is_silent=not distributed.is_first()) as bar:
        with bar.task("loading libraries", True):
          from dppo_jax import train

      train.run(config, workdir, (), flags.allow_change or "")
    elif flags.mode == "evaluate":
      from dppo_jax import evaluate

      evaluate.run(config, workdir, flags.step)
    elif flags.mode == "export":
      from dppo_jax import export

      export.run(
        config,
        workdir,
        to=pathlib.Path(bucket.local(flags.to)),
        step=flags.step,
        dtype=flags.dtype,
        is_adapter=flags.format == "adapter",
        push=flags.push or "",
      )
    elif flags.mode == "sample":
      from dppo_jax import sample

      sample.run(config, workdir, flags.step, flags.prompt)
    else:
      from dppo_jax import plan

      names = ("hardware", "topology", "stages")
      plan.run(config, **{name: getattr(flags, name) or "" for name in names})


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
    if not isinstance(error, Unreachable):
      sys.exit(f"error: {error}")
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(os.EX_TEMPFAIL)
  except OSError as error:
    if error.errno not in _OF_PLACES or "--debug" in sys.argv:
      raise
    progress.drop_output()  # or Python would try to write more of it
    sys.exit(f"error: {error.filename or 'output'}: {error.strerror}")
  except Exception as error:
    from dppo_jax import distributed

    if not distributed.has_lost_another(error):
      raise
    reason = str(error).strip().partition("\n")[0]
    print(
      f"error: another process has ended or cannot be reached ({reason}): see "
      "its last output; re-run the command to resume",
      file=sys.stderr,
      flush=True,
    )
    # At once: JAX would wait for the other process.
    os._exit(os.EX_TEMPFAIL)


if __name__ == "__main__":
  run()
