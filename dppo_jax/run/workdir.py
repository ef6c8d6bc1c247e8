"""One directory, one run: its config is written down, or another is refused."""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import os
import pathlib
import tempfile
from typing import Any

from dppo_jax import config as configs
from dppo_jax.config.options import flatten, walk
from dppo_jax.metrics import jsonl, report
from dppo_jax.run import checkpoint, distributed

PRINTS = "fingerprints"  # in config.json, beside the options


def may_change(config: configs.Config) -> set[str]:
  """The options that a run that goes on may have changed, by dotted name.

  They say so themselves in `config/`; here are the exceptions.
  """
  free = {
    name for name, _, metadata in walk(config) if metadata.get("may_change")
  }
  method = configs.make_method(config)
  if config.optimizer.schedule != "constant" or method.has_schedule:
    free.discard("steps")  # the learning rate, or pruning, depends on it
  if method.tokens:  # tokens are drawn along the rows
    # The number of rows depends on them.
    free -= {"pack.rows_per_micro", "mesh.data", "mesh.replicas"}
  return free


def check(
  path: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
) -> None:
  """Refuses to go on with a run that has begun under another config.

  Args:
    path: of the config.json, which need not be there before a checkpoint is.
    prints: fingerprints of what the config names, where they are known.
  Raises:
    ValueError: it names every option that differs, or whose data or code do.
  """
  # Without a checkpoint there is nothing to go on from.
  if not any(x.name.isdigit() for x in path.parent.glob("checkpoints/*")):
    return
  old, new = _saved(path), flatten(config)
  old_prints = old.pop(PRINTS, {})
  free = may_change(config)
  differing = [
    f"config.{name} was {old.get(name)!r} and is now {new.get(name)!r}"
    for name in sorted(old.keys() | new.keys())
    if old.get(name) != new.get(name) and name not in free
  ]
  if differing:
    raise ValueError(
      f"{path.parent} holds a run of another config; choose another "
      f"--workdir, or restore: {'; '.join(differing)}"
    )
  for name, found in (prints or {}).items():
    if old_prints.get(name, found) != found:
      raise ValueError(
        f"what config.{name} names is not what it was when {path.parent} was "
        "begun: restore it, or choose another --workdir. Is it to go on with "
        f"what there is now, take the line of {name} under {PRINTS!r} out of "
        f"{path}"
      )


def _saved(path: pathlib.Path) -> dict[str, Any]:
  """The content of a run's config.json, which has to be there."""
  try:
    saved = json.loads(path.read_bytes().decode("utf-8"))
    if not isinstance(saved, dict) or not isinstance(
      saved.get(PRINTS, {}), dict
    ):
      raise ValueError("it is no object of options")
    return saved
  except (OSError, ValueError) as error:
    what = "no" if isinstance(error, FileNotFoundError) else "a damaged"
    raise ValueError(
      f"{path.parent} has checkpoints but {what} config.json ({error}), and so "
      "nobody knows under which options they came about: put it back, or "
      "choose another --workdir, where "
      f"--config.sft.from_run={path.parent}@STEP begins with their weights"
    ) from error


def write(
  path: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
) -> None:
  """Writes config and fingerprints down, if `check` has nothing against it."""
  check(path, config, prints)
  path.parent.mkdir(parents=True, exist_ok=True)
  content = flatten(config) | ({PRINTS: dict(prints)} if prints else {})
  jsonl.replace(path, [json.dumps(content, indent=2), "\n"])


def check_processes(config: configs.Config, workdir: pathlib.Path) -> None:
  """Refuses processes of several configs, or that share no `workdir`.

  Raises:
    ValueError: it names what differs.
  """
  if distributed.count() == 1:
    return
  first, *_ = of_each = distributed.gather(flatten(config))
  own = of_each[distributed.index()]
  place, *_ = distributed.gather(str(workdir.absolute()))
  with distributed.sharing_errors():
    if place != str(workdir.absolute()):
      raise ValueError(
        f"--workdir is {workdir.absolute()} but {place} in process 0: start "
        "all processes with the same flags"
      )
    for name in first.keys() | own.keys():
      if first.get(name) != own.get(name):
        raise ValueError(
          f"config.{name} is {own.get(name)!r} but {first.get(name)!r} in "
          "process 0: start all processes with the same flags"
        )
  with contextlib.ExitStack() as stack:
    name = ""
    with distributed.sharing_errors():
      if distributed.is_first():
        # One that there is: it may take a while until a new one is seen.
        folder = next(x for x in (workdir, *workdir.parents) if x.is_dir())
        folder = folder.absolute()
        file = tempfile.NamedTemporaryFile(prefix=".dppo_jax-", dir=folder)
        name = stack.enter_context(file).name
    name, *_ = distributed.gather(name)
    with distributed.sharing_errors():
      if not pathlib.Path(name).exists():
        raise ValueError(
          f"--workdir={workdir} is on another file system than process 0's: "
          "choose a directory that all processes share"
        )


@contextlib.contextmanager
def held(
  path: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
) -> Iterator[None]:
  """`_held` by the first process, on behalf of all."""
  with contextlib.ExitStack() as stack:
    with distributed.sharing_errors():
      if distributed.is_first():
        stack.enter_context(_held(path, config, prints))
    yield


@contextlib.contextmanager
def _held(
  path: pathlib.Path, config: configs.Config, prints: Mapping[str, str] | None
) -> Iterator[None]:
  """Writes the config down, and keeps other processes out while it lasts.

  Two of them in one directory would write over each other's files.

  Raises:
    ValueError: where another process is at it, and as `check` does.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    # Some file systems have no locks: then nobody is kept out.
    with contextlib.suppress(OSError):
      try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise ValueError(
          f"another process trains in {path.parent}: wait until it ends, or "
          "choose another --workdir"
        ) from error
    write(path, config, prints)
    yield
  finally:
    os.close(folder)


def is_done(config: configs.Config, workdir: pathlib.Path) -> bool:
  """Whether there is nothing left to do in `workdir`, which it then says."""
  if not (workdir / "checkpoints").is_dir():
    return False
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    latest = checkpoints.latest_step()
    if latest is None or latest < config.steps:
      return False
    check(workdir / "config.json", config)
    if not checkpoints.is_sound(latest):
      return False
    if not distributed.is_first():
      return True
  page, lines = workdir / "report.md", workdir / "metrics.jsonl"
  if not page.exists() or page.stat().st_mtime < lines.stat().st_mtime:
    report.write(workdir)
  more = ""
  if latest > config.steps:
    more = f", more than config.steps, which is {config.steps}"
  print(
    f"already done: {latest} steps{more}\n"
    f"report: {page}\n"
    "what else there is:\n"
    f"  --config.steps={2 * max(latest, 1)} goes on\n"
    "  --mode=evaluate measures its weights on any problems\n"
    "  --mode=export --to=DIR writes them for transformers\n"
    "  --workdir=DIR starts another run",
    flush=True,
  )
  return True
