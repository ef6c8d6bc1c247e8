"""One directory, one run: its config, data and code may not change on resume.

A run writes its config to config.json, with a name that its checkpoints repeat,
and with fingerprints of its data and of the user's own files, which may change
under the same name.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import fcntl
import hashlib
import inspect
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
from typing import Any
import uuid

from dppo_jax import config as configs
from dppo_jax import data, distributed
from dppo_jax.errors import UserError
from dppo_jax.files import bucket, json_object, jsonl, paths
from dppo_jax.metrics import report
from dppo_jax.run import checkpoint, checkpoint_steps

_CONFIG = "config.json"
_EVAL = "fingerprints.eval"


def may_change(config: configs.Config, allowed: str = "") -> set[str]:
  """Dotted names of the options that a resumed run may have changed.

  They are marked in `config/`; a few depend on the method.

  Args:
    allowed: value of --allow_change, "" or "optimizer", which adds all options
      of the optimizer but its function: its state stays.
  """
  free = {
    x for x, _, metadata in configs.walk(config) if metadata["may_change"]
  }
  method = configs.make_method(config)
  has_schedule = config.optimizer.schedule != "constant"
  if factory := configs.load_optimizer(config):
    has_schedule |= "total_steps" in inspect.signature(factory).parameters
  if allowed:
    names = {x for x, *_ in configs.walk(config) if x.startswith("optimizer.")}
    free |= names - {"optimizer.function"}
  if method.has_schedule or (has_schedule and not allowed):
    free.discard("steps")  # the learning rate, or pruning, depends on it
  return free


def check(
  workdir: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
  allowed: str = "",
) -> dict[str, tuple[Any, Any]]:
  """Raises UserError, naming what changed, unless `config` may resume a run.

  Args:
    workdir: of the run; without checkpoints, any config may resume it.
    prints: result of `fingerprints`, if known.
    allowed: value of --allow_change.
  Returns:
    Old and new value of each option whose change only `allowed` permits, and
    of the fingerprint of the evaluation sets.
  """
  if not checkpoint_steps.complete_steps(workdir):
    return {}
  place = bucket.place(workdir)
  hint = f"{place} has checkpoints: restore it, or choose another --workdir"
  new = configs.flatten(config) | dict(prints or {})
  # An option that is newer than the run had its default.
  old = configs.flatten(configs.Config()) | {_EVAL: new.get(_EVAL)}
  old |= json_object.read(workdir / _CONFIG, hint=hint)
  options = {x for x in old if not x.startswith(("fingerprints.", "changes"))}
  changed = {
    name: (old.get(name), new.get(name))
    for name in sorted((new.keys() | options) - may_change(config))
    if not _is_same(name, old.get(name), new.get(name))
  }
  rejected = [
    f"config.{name} was {before!r} and is now {after!r}"
    for name, (before, after) in changed.items()
    if name not in may_change(config, allowed)
    # The best checkpoint is the best by one set.
    and (name != _EVAL or config.checkpoint.best)
  ]
  if rejected:
    flag = ", resume with --allow_change=optimizer"
    flag *= changed.keys() <= may_change(config, "optimizer")
    raise UserError(
      f"{place} holds a run with another config: restore it "
      f"({'; '.join(rejected)}){flag}, or start from its weights in another "
      f"--workdir with --config.sft.from_run={place}@STEP or, with adapters, "
      "from its export by config.model.path"
    )
  return changed


def _is_same(name: str, before: Any, after: Any) -> bool:
  """Returns True for equal values, and for paths to what has only moved."""
  options = {x: metadata for x, _, metadata in configs.walk(configs.Config())}
  of_code = {"absolute": paths.of_code, "type": Callable}
  options |= {"method.source": of_code, "objective.source": of_code}
  option = options.get(name, {})
  if before == after or not (option.get("absolute") and before and after):
    return before == after
  if option["absolute"](before) == after:
    return True
  is_moved = paths.last_parts(before) == paths.last_parts(after)
  # Fingerprints cover the content of data and code.
  is_covered = option["type"] is Callable
  path = re.sub(r"@\d+$", "", before)
  is_gone = os.path.isabs(path) and not os.path.exists(path)
  return is_moved and (is_covered or is_gone)


def write(
  workdir: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
  allowed: str = "",
) -> list[str]:
  """Writes config, fingerprints and `changes`, unless `check` raises.

  Damaged checkpoints are set aside before, so that the latest one is intact.

  Returns:
    A line for each change of an option that `allowed` permits, and of the
      evaluation sets.
  """
  changed = check(workdir, config, prints, allowed)
  steps = checkpoint_steps.complete_steps(workdir)
  path, kinds = workdir / _CONFIG, {"changes": dict | None}
  changes = json_object.read(path, kinds).get("changes", {}) if steps else {}
  for name, (before, after) in changed.items():
    key = f"{name} after step {max(steps)}"
    changes[key] = f"{changes.get(key, before)} to {after}"
  workdir.mkdir(parents=True, exist_ok=True)
  labels = checkpoint_steps.read_labels(workdir)
  names = [checkpoint.run_name(workdir), *(x["run"] for _, x in labels if x)]
  name = next(filter(None, names), uuid.uuid4().hex[:8])
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
  """Raises UserError unless all processes have the same config and workdir."""
  options = configs.flatten(config)
  here = {f"config.{name}": value for name, value in options.items()}
  here["--workdir"] = bucket.url(workdir) or str(workdir)
  first = distributed.gather(here)[0]
  with distributed.sharing_errors():
    for name in first.keys() | here.keys():
      if first.get(name) != here.get(name):
        raise UserError(
          f"{name} is {here.get(name)!r} but {first.get(name)!r} in process 0: "
          "start all processes with the same flags"
        )


@contextlib.contextmanager
def held(
  workdir: pathlib.Path,
  config: configs.Config,
  prints: Mapping[str, str] | None = None,
  allowed: str = "",
) -> Iterator[None]:
  """Keeps other runs out of a directory that the config may resume.

  A new directory is removed if an error of the user's or a signal ends the run
  before it has logged or saved anything.
  """
  is_new = distributed.is_first() and not workdir.exists()
  with contextlib.ExitStack() as stack:
    with distributed.sharing_errors():
      if distributed.is_first():
        workdir.mkdir(parents=True, exist_ok=True)
        folder = os.open(workdir, os.O_RDONLY)
        stack.callback(os.close, folder)  # which unlocks it
        try:
          fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
          raise UserError(
            f"another process trains in {workdir}: wait until it ends, or "
            "choose another --workdir"
          ) from error
        except OSError:  # some file systems have no locks
          pass
        check(workdir, config, prints, allowed)  # before another run's end
        stack.enter_context(bucket.claimed(workdir))
    try:
      yield
    except (UserError, KeyboardInterrupt):
      logs = workdir / "metrics.jsonl"
      if is_new and not (
        checkpoint_steps.complete_steps(workdir) or jsonl.read(logs)
      ):
        shutil.rmtree(workdir, ignore_errors=True)
      raise


def is_done(
  config: configs.Config, workdir: pathlib.Path, allowed: str = ""
) -> bool:
  """True, after printing a summary, if no step is left to train."""
  latest = max(checkpoint_steps.complete_steps(workdir), default=-1)
  if allowed and latest < 0:
    raise UserError(
      f"--allow_change: {bucket.shown(workdir)} has no checkpoint: name the "
      "--workdir of the run to resume"
    )
  if latest < config.steps:
    return False
  with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
    check(workdir, config, allowed=allowed)
    if checkpoints.corruption(latest):
      return False
  if distributed.is_first():
    page, lines = workdir / "report.md", workdir / "metrics.jsonl"
    times = [x.stat().st_mtime for x in (page, lines) if x.exists()]
    with bucket.reaching(page) as there:
      is_old = not there.exists() or times[:1] < times[1:]
    if is_old:
      bucket.fetch_logs(workdir)
      try:
        report.write(workdir)
        bucket.send(workdir)
      except UserError as error:  # a directory to read only
        print(f"warning: {error}", flush=True)
    changing = ("", ""), (" --allow_change=optimizer", "optimizer")
    flags = [x for x, y in changing if "steps" in may_change(config, y)]
    longer = f"  --config.steps={2 * max(latest, 1)}{{}} trains longer\n"
    print(
      f"already done: {latest} of {config.steps} steps; report: "
      f"{bucket.shown(page)}\n"
      f"{''.join(map(longer.format, flags[:1]))}"
      "  --workdir=DIR starts another run\n"
      f"{next_commands(workdir)}",
      flush=True,
    )
  return True


def next_commands(workdir: pathlib.Path) -> str:
  """Returns commands for what usually follows a run, as lines."""
  place = shlex.quote(bucket.shown(workdir))
  return (
    "next:\n"
    f"  python -m dppo_jax.main --mode=evaluate --workdir={place} "
    "--config.eval.samples=8\n"
    f"  python -m dppo_jax.main --mode=export --workdir={place} --to=DIR\n"
    f"  python -m dppo_jax.analysis.compare {place} OTHER_RUN"
  )


@distributed.on_first_process
def last_evaluation(workdir: pathlib.Path) -> dict[str, float]:
  """Returns the metrics of a run's last evaluation; none before the first."""
  lines = jsonl.read(workdir / "metrics.jsonl")
  lines = [x for x in lines if "eval/samples" in x]
  return {k: x for k, x in (lines or [{}])[-1].items() if k != "step"}


def describe_stop(workdir: pathlib.Path) -> str:
  """The last line of a run that a signal stopped."""
  if steps := checkpoint_steps.complete_steps(workdir):
    return f"stopped after step {max(steps)}; re-run the same command to resume"
  return "stopped before the first step; nothing was saved"


def fingerprints(
  config: configs.Config,
  train_set: data.ProblemSet,
  eval_sets: Mapping[str, data.ProblemSet],
) -> dict[str, str]:
  """Hashes of prompt tokens and answers, and of the files of user code."""
  names = "method.source method.args objective.source objective.args"
  names = f"reward.functions {names} optimizer.function"
  named = configs.user_functions(config, names.split()).values()
  files = [x for x in named if "-packages" not in x]  # not of the user
  encode = lambda x: json.dumps(x, default=str).encode()
  content = lambda x: (x.tokens.tobytes(), encode(x.answers))
  texts = []
  if configs.user_functions(config, ["reward.functions"]):  # may read more
    texts = [train_set.problems, train_set.columns]
  digest = lambda *x: hashlib.sha256(b"\0".join(x)).hexdigest()[:16]
  of_sets = itertools.chain(*map(content, eval_sets.values()))
  return {
    "fingerprints.data": digest(*content(train_set), *map(encode, texts)),
    _EVAL: digest(*of_sets),
    "fingerprints.code": digest(*(pathlib.Path(x).read_bytes() for x in files)),
  }
