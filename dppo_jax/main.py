"""Flags to config to one of the modes; everything else is a library."""

import ast
import os
import pathlib
import re
import sys
import traceback

from absl import app, flags, logging
from ml_collections import config_flags

from dppo_jax.metrics import progress
from dppo_jax.run import compile_cache

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "A file with get_config(); `file.py:METHOD` names a method and "
  "`file.py:METHOD,OBJECTIVE` an objective too. Or the config.json of a run, "
  "which is what --workdir alone stands for.",
)
_MODE = flags.DEFINE_enum(
  "mode",
  "train",
  ["train", "evaluate", "export", "plan"],
  "What to do: train a run or go on with it, evaluate its weights, write "
  "them as a checkpoint that transformers loads, or plan: say what a device "
  "would hold and do.",
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Directory of the run; by default runs/CONFIG-METHOD-seedSEED, with the "
  "objective after the method unless that is grpo. The same "
  "command run again goes on from its newest checkpoint.",
)
_STEP = flags.DEFINE_integer(
  "step", None, "Of the weights to evaluate or export; by default the newest."
)
_TO = flags.DEFINE_string("to", None, "Directory to export to.")
_DTYPE = flags.DEFINE_enum(
  "dtype",
  None,
  ["float32", "bfloat16", "float16"],
  "Of the exported weights; by default that of the checkpoint that training "
  "began with, or float32.",
)
_HARDWARE = flags.DEFINE_string(
  "hardware",
  None,
  "Comma-separated devices to estimate memory for, such as h200:8,v5p:16.",
)
_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "Devices to compile every stage for, without the hardware: v5e:4x4, "
  "v5p:2x2x1, h200:8.",
)
_STAGES = flags.DEFINE_string(
  "stages", None, "Comma-separated stages to compile (default: all)."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator",
  None,
  "HOST:PORT of process 0, where several processes run as one; with "
  "--num_processes and --process_id. TPU pods and Slurm need none of them.",
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "How many processes there are."
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Which of them this is, from 0."
)
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of any error.")


_OF_PLAN = ("hardware", "topology", "stages")

# The config of a run that there is, by its config.json.
_OF_RUN = pathlib.Path(__file__).parent / "config/saved.py"


def main(argv: list[str]) -> None:
  """Does what the flags say."""
  if "--verbosity" not in " ".join(sys.argv):  # absl would show information
    logging.set_verbosity(logging.WARNING)
  try:
    _do(argv)
  except KeyboardInterrupt:
    sys.exit(130)
  except Exception as error:
    _leave_if_alone(error)
    if _DEBUG.value or not _is_explained(error):
      raise
    sys.exit(f"error: {error}")


def _leave_if_alone(error: Exception) -> None:
  """Ends this process where another one has ended, for which JAX would wait."""
  from dppo_jax.run import distributed

  if distributed.has_lost_another(error):
    reason = str(error).strip().partition("\n")[0]
    print(
      f"error: another process has ended, or cannot be reached ({reason}): see "
      "what it said last; the same command goes on from the newest checkpoint",
      file=sys.stderr,
      flush=True,
    )
    os._exit(1)


def _do(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected argument {argv[1]!r}: flags start with --")
  if not flags.FLAGS["config"].present:
    raise ValueError("--config is missing, e.g. --config=configs/arithmetic.py")
  name = config_flags.get_config_filename(flags.FLAGS["config"])
  path, _, choice = name.partition(":")
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"--config: there is no file {str(path)!r}")
  for flag, modes in (
    ("to", ["export"]),
    ("dtype", ["export"]),
    ("step", ["evaluate", "export"]),
    *((name, ["plan"]) for name in _OF_PLAN),
  ):
    if flags.FLAGS[flag].present and _MODE.value not in modes:
      raise ValueError(f"--{flag} is for --mode={' or '.join(modes)}")
  if _MODE.value == "export" and not _TO.value:
    raise ValueError("--to is missing: the directory to export to")
  # After the flags: a wrong one fails at once.
  from dppo_jax import config as configs
  from dppo_jax.run import distributed

  distributed.initialize(
    _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
  )
  if distributed.count() > 1 and _MODE.value not in ("train", "evaluate"):
    raise ValueError(
      f"--mode={_MODE.value} is the work of one process, not of "
      f"{distributed.count()}: run it on one machine with --num_processes=1"
    )
  config = _CONFIG.value
  if not isinstance(config, configs.Config):
    raise ValueError(f"--config: get_config() of {str(path)!r} made no Config")
  configs.validate(config)
  workdir = pathlib.Path(
    _WORKDIR.value or _default_workdir(config, path, choice)
  )
  if workdir.exists() and not workdir.is_dir():
    raise ValueError(f"--workdir={workdir} is a file, not a directory")
  if _MODE.value == "train":
    is_silent = not distributed.is_first()
    with (
      progress.Progress(is_silent) as bar,
      bar.task("loading libraries", True),
    ):
      from dppo_jax import train

    train.run(config, workdir)
  elif _MODE.value == "evaluate":
    from dppo_jax import evaluate

    evaluate.run(config, workdir, _STEP.value)
  elif _MODE.value == "plan":
    from dppo_jax import plan

    plan.run(
      config,
      hardware=_HARDWARE.value or "",
      topology=_TOPOLOGY.value or "",
      stages=_STAGES.value or "",
    )
  else:
    from dppo_jax import export

    to = pathlib.Path(_TO.value)
    export.run(config, workdir, to, _STEP.value, _DTYPE.value)


def _default_workdir(config, path: pathlib.Path, choice: str) -> pathlib.Path:
  """Where a run goes that was given no directory.

  Args:
    choice: what follows the file in --config.
  """
  if path == _OF_RUN:
    return pathlib.Path(choice).parent
  what = config.method.name
  if config.objective.name != "grpo":
    what += f"-{config.objective.name}"
  return pathlib.Path(f"runs/{path.stem}-{what}-seed{config.seed}")


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
  if {"--help", "-h", "-help", "--helpfull"} & set(argv):
    from dppo_jax.config import usage

    sys.exit(print(usage.text(__name__)))
  try:
    argv, template_args = _without_template_args(_with_saved_config(argv))
    sys.argv[1:] = argv[1:]  # config_flags looks there for what it overrides
    rest = flags.FLAGS(argv)
    if template_args:
      _CONFIG.value.data.template_args.update(template_args)
    return rest
  except Exception as error:  # a config file may raise anything
    if "--debug" in argv:
      raise
    sys.exit(f"error: {_reason(error, argv)}")


def _with_saved_config(argv: list[str]) -> list[str]:
  """The flags, with a run's config.json by the file that reads it.

  Raises:
    ValueError: where --workdir stands alone and holds no run.
  """
  # `--config X` as `--config=X`, as all that follows has it.
  argv = [*argv]
  for i in reversed(range(len(argv) - 1)):
    if argv[i] in ("--config", "--workdir"):
      argv[i : i + 2] = [f"{argv[i]}={argv[i + 1]}"]
  given = dict(arg.lstrip("-").partition("=")[::2] for arg in argv[1:])
  _check_path(given.get("config", ""))
  if "config" not in given and given.get("workdir"):
    saved = pathlib.Path(given["workdir"]) / "config.json"
    if not saved.is_file():
      raise ValueError(
        f"--config is missing, and --workdir={given['workdir']} holds no run "
        "that would have one"
      )
    # Before the options of that config, which are flags only then.
    return [argv[0], f"--config={_OF_RUN}:{saved}", *argv[1:]]
  if given.get("config", "").endswith(".json"):
    if not pathlib.Path(given["config"]).is_file():
      raise ValueError(f"--config: there is no file {given['config']!r}")
    is_config = lambda arg: arg.lstrip("-").startswith("config=")
    saved = f"--config={_OF_RUN}:{given['config']}"
    return [saved if is_config(arg) else arg for arg in argv]
  return argv


def _check_path(config: str) -> None:
  """Refuses what is no file, and a path that the colon after it would cut."""
  path = pathlib.Path(config.partition(":")[0])
  if config and path.exists() and not path.is_file():
    raise ValueError(f"--config: {str(path)!r} is no file")
  match = re.match(r"(.*?:.*?\.(?:py|json))(?::|$)", config)
  if match and pathlib.Path(match[1]).is_file():
    raise ValueError(
      f"--config: {match[1]!r} has a colon, which stands before a method's "
      "name: rename its directory, or go there and name the file alone"
    )


def _without_template_args(
  argv: list[str],
) -> tuple[list[str], dict[str, object]]:
  """The flags but for config.data.template_args.NAME, and those by name.

  A field of a dict is otherwise a flag only where the config's file has it.
  """
  rest, found = [], {}
  words = iter(argv)
  for word in words:
    match = re.match(r"--?config\.data\.template_args\.(\w+)(=|$)", word)
    if not match:
      rest.append(word)
      continue
    text = word[match.end() :] if match[2] else next(words, "")
    try:
      found[match[1]] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      known = {"true": True, "false": False}
      found[match[1]] = known.get(text.lower(), text)
  return rest, found


def _reason(error: Exception, argv: list[str]) -> str:
  """One line on what is wrong with the flags or the config's file."""
  from dppo_jax import config as configs
  from dppo_jax.config import options

  lines = (str(error).strip() or repr(error)).splitlines()
  # Of a traceback, what follows the last line of code.
  is_code = [line.startswith("  ") for line in lines]
  if "Traceback (most recent call last):" in lines and any(is_code):
    lines = lines[len(lines) - is_code[::-1].index(True) :]
  reason = "; ".join(line.strip() for line in lines if line.strip())
  typed = [re.match(r"--config\.([\w.]+)", arg) for arg in argv]
  names = [match[1] for match in typed if match]
  if not isinstance(error, LookupError | AttributeError):
    for name in names:
      hint = options.renamed(name) or options.no_value(configs.Config(), name)
      if hint:
        return hint
    return reason.removeprefix("ValueError: ")
  # A config file that sets a field of a section that has no such field.
  missing = re.search(r"'(\w+)' object has no attribute '(\w+)'", reason)
  if missing:
    section = missing[1].lower().replace("config", "")
    names.append(f"{section}.{missing[2]}".strip("."))
  known = configs.Config()
  for name in names:
    if hint := options.renamed(name) or options.unknown(known, name):
      return hint
    owner, _, arg = name.rpartition(".")
    if reason == repr(arg) and owner.endswith(".args"):
      owner = owner.removesuffix(".args")
      return f"the {owner} has no option {arg!r}: --help lists those of each"
    if reason == repr(arg):  # a flag there only where the file has it
      return f"config.{owner} has no {arg!r}: add it in a config file"
  return f"the config has no such field: {reason}"


def run() -> None:
  """Runs `main`."""
  compile_cache.quiet_libraries()  # which speak while flags are parsed
  app.run(main, flags_parser=_parse)


if __name__ == "__main__":
  run()
