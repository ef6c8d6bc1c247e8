"""One directory, one run: its config, data and code may not change on resume.

A run writes its config to config.json, with a name that its checkpoints repeat,
and with fingerprints of its data and of the user's own files, which may change
under the same name.
"""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import pathlib
from typing import Any
import uuid

from dppo_jax import config as configs
from dppo_jax import data, distributed, rewards
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket, json_object, jsonl
from dppo_jax.metrics import report
from dppo_jax.run import checkpoint, checkpoint_steps


def may_change(config: configs.Config, allowed: str = "") -> set[str]:
  """Dotted names of the options that a resumed run may have changed.

  They are marked in `config/`; a few depend on the method.

  Args:
    allowed: value of --allow_change, "" or "optimizer", which adds all options
      of the optimizer but its function: its state stays.
  """
  free = {
    x for x, _, metadata in configs.walk(config) if metadata.get("may_change")
  }
  method = configs.make_method(config)
  arguments = inspect.signature(configs.load_optimizer(config)).parameters
  has_schedule = config.optimizer.schedule != "constant"
  has_schedule |= "total_steps" in arguments
  if allowed:
    names = {x for x, *_ in configs.walk(config) if x.startswith("optimizer.")}
    free |= names - {"optimizer.function"}
  if method.has_schedule or (has_schedule and not allowed):
    free.discard("steps")  # the learning rate, or pruning, depends on it
  if method.tokens:  # tokens are drawn along the rows, which depend on these
    free -= {"pack.rows_per_micro", "mesh.data", "mesh.replicas"}
  return free


def check(
  path: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
  allowed: str = "",
) -> dict[str, tuple[Any, Any]]:
  """Raises UserError, naming what changed, unless `config` may resume a run.

  Args:
    path: config.json of the run; without checkpoints, any config may resume it.
    prints: result of `fingerprints`, if known.
    allowed: value of --allow_change.
  Returns:
    Old and new value of each option whose change only `allowed` permits.
  """
  if not checkpoint_steps.complete_steps(path.parent):
    return {}
  hint = (
    f"{path.parent} has checkpoints: restore it, or choose another --workdir"
  )
  # An option that is newer than the run had its default.
  old = configs.flatten(configs.Config()) | json_object.read(path, hint=hint)
  new = configs.flatten(config) | dict(prints or {})
  changed = {
    name: (old.get(name), new[name])
    for name in sorted(new.keys() - may_change(config))
    if old.get(name) != new[name]
  }
  rejected = [
    f"config.{name} was {before!r} and is now {after!r}"
    for name, (before, after) in changed.items()
    if name not in may_change(config, allowed)
  ]
  if rejected:
    flag = ", resume with --allow_change=optimizer"
    flag *= changed.keys() <= may_change(config, "optimizer")
    raise UserError(
      f"{path.parent} holds a run with another config: restore it "
      f"({'; '.join(rejected)}){flag}, or start from its weights "
      f"in another --workdir with --config.sft.from_run={path.parent}@STEP"
    )
  return changed


def write(
  path: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
  allowed: str = "",
) -> list[str]:
  """Writes config, fingerprints and `changes`, unless `check` raises.

  Returns:
    A line for each change of an option that `allowed` permits.
  """
  changed = check(path, config, prints, allowed)
  steps = checkpoint_steps.complete_steps(path.parent)
  changes = json_object.read(path).get("changes", {}) if steps else {}
  for name, (before, after) in changed.items():
    key = f"{name} after step {max(steps)}"
    changes[key] = f"{changes.get(key, before)} to {after}"
  path.parent.mkdir(parents=True, exist_ok=True)
  name = checkpoint.run_name(path.parent) or uuid.uuid4().hex[:8]
  content = configs.flatten(config) | dict(prints or {})
  content["fingerprints.run"] = name
  if changes:
    content["changes"] = changes
  jsonl.replace(path, [json.dumps(content, indent=2), "\n"])
  return [
    f"changed config.{name} from {before!r} to {after!r}, after step "
    f"{max(steps)}"
    for name, (before, after) in changed.items()
  ]


def check_processes(config: configs.Config, workdir: pathlib.Path) -> None:
  """Raises UserError unless all processes have the same config and workdir.

  Raises Unreachable if their copies of a run in a bucket differ.
  """
  options = configs.flatten(config)
  here = {f"config.{name}": value for name, value in options.items()}
  here["--workdir"] = bucket.shown(workdir.absolute())
  first = distributed.gather(here)[0]
  with distributed.sharing_errors():
    for name in first.keys() | here.keys():
      if first.get(name) != here.get(name):
        raise UserError(
          f"{name} is {here.get(name)!r} but {first.get(name)!r} in process 0: "
          "start all processes with the same flags"
        )
  is_copy = bool(bucket.url(workdir))
  steps = distributed.gather(
    is_copy and checkpoint_steps.complete_steps(workdir)
  )
  if any(x != steps[0] for x in steps):
    raise Unreachable(
      f"{bucket.shown(workdir)} has changed while processes read its "
      "checkpoints: run the command again"
    )


@contextlib.contextmanager
def held(
  path: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
  allowed: str = "",
) -> Iterator[list[str]]:
  """Keeps other runs out of the directory; yields the lines of `write`."""
  lines: list[str] = []
  with contextlib.ExitStack() as stack:
    with distributed.sharing_errors():
      if distributed.is_first() or bucket.url(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        stack.callback(os.close, folder)  # which unlocks it
        try:
          fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
          raise UserError(
            f"another process trains in {path.parent}: wait until it ends, or "
            "choose another --workdir"
          ) from error
        except OSError:  # some file systems have no locks
          pass
      if distributed.is_first():
        lines = write(path, config, prints, allowed)
        stack.enter_context(bucket.claimed(path.parent))
    yield lines


def is_done(
  config: configs.Config, workdir: pathlib.Path, allowed: str = ""
) -> bool:
  """True, after printing a summary, if no step is left to train."""
  latest = max(checkpoint_steps.complete_steps(workdir), default=-1)
  if latest < config.steps:
    return False
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    check(workdir / "config.json", config, allowed=allowed)
    if checkpoints.corruption(latest):
      return False
  if distributed.is_first():
    page, lines = workdir / "report.md", workdir / "metrics.jsonl"
    with bucket.claimed(workdir):
      if not page.exists() or page.stat().st_mtime < lines.stat().st_mtime:
        report.write(workdir)
    print(
      f"already done: {latest} of {config.steps} steps; report: "
      f"{bucket.shown(page)}\n"
      f"  --config.steps={2 * max(latest, 1)} to train longer\n"
      "  --mode=evaluate to evaluate the weights on any problems\n"
      "  --mode=export --to=DIR to write them for transformers\n"
      "  --workdir=DIR to start another run",
      flush=True,
    )
  return True


def describe_stop(workdir: pathlib.Path) -> str:
  """The last line of a run that a signal stopped."""
  if steps := checkpoint_steps.complete_steps(workdir):
    return f"stopped after step {max(steps)}; re-run the same command to resume"
  return "stopped before the first step; nothing was saved"


def fingerprints(
  config: configs.Config, train_set: data.ProblemSet
) -> dict[str, str]:
  """Hashes of prompt tokens and answers, and of the files of user code."""
  flat = configs.flatten(config)
  references = [x.reference for x in rewards.parse(config.reward.functions)]
  references += [flat.get(f"{x}.source", "") for x in ("method", "objective")]
  references.append(flat["optimizer.function"])
  files = filter(os.path.isfile, (x.rpartition(":")[0] for x in references))
  answers = json.dumps(train_set.answers).encode()
  contents = {
    "fingerprints.data": [train_set.tokens.tobytes(), answers],
    "fingerprints.code": [pathlib.Path(x).read_bytes() for x in files],
  }
  return {
    name: hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    for name, parts in contents.items()
  }
