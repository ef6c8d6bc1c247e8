"""Command line: flags, the config they name, and --help."""

from collections.abc import Iterable
import dataclasses
import difflib
import inspect
import pathlib
import re
import sys
import textwrap
from typing import NamedTuple

from absl import flags
from ml_collections import config_flags

from dppo_jax import methods, user_code
from dppo_jax.algo import objectives
from dppo_jax.config.choose import read
from dppo_jax.config.options import default_args, walk
from dppo_jax.config.schema import Config
from dppo_jax.errors import UserError

MODES = ("train", "evaluate", "export", "plan")
# Name: meaning and modes.
_FLAGS = {
  "config": (
    "Config file, as FILE.py, FILE.py:METHOD or FILE.py:METHOD,OBJECTIVE; or "
    "the config.json of a run (default: that of --workdir).",
    MODES,
  ),
  "mode": ("train | evaluate | export | plan (default: train).", MODES),
  "workdir": (
    "Directory of the run (default: runs/CONFIG-METHOD-seedSEED). Re-running a "
    "command resumes from the latest checkpoint.",
    MODES,
  ),
  "step": (
    "Checkpoint step to evaluate or export (default: latest).",
    ("evaluate", "export"),
  ),
  "to": ("Directory to export to.", ("export",)),
  "dtype": (
    "Dtype of exported weights: float32, bfloat16 or float16 (default: that of "
    "the initial checkpoint, else float32).",
    ("export",),
  ),
  "hardware": (
    "Comma-separated devices to estimate memory for, as in h200:8,v5p:16.",
    ("plan",),
  ),
  "topology": (
    "Devices to compile all stages for, without the hardware, as in v5e:4x4 or "
    "h200:8.",
    ("plan",),
  ),
  "stages": (
    "Comma-separated stages to compile, as in update,roll_out (default: all).",
    ("plan",),
  ),
  "coordinator": (
    "HOST:PORT of process 0 if several processes form one run; not needed on "
    "TPU pods and in Slurm.",
    ("train", "evaluate"),
  ),
  "num_processes": ("Number of processes.", MODES),
  "process_id": ("Index of this process, from 0.", ("train", "evaluate")),
}
_CHOICES = {"mode": MODES, "dtype": ("float32", "bfloat16", "float16")}
_INTEGERS = ("step", "num_processes", "process_id")
_HEAD = """\
Trains language models by group-based policy optimisation with unbiased pruning.

  python -m dppo_jax.main --config=configs/arithmetic.py
  python -m dppo_jax.main --config=configs/arithmetic.py:neyman,gspo
  python -m dppo_jax.main --config=configs/gsm8k.py --config.model.path=DIR
  python -m dppo_jax.main --mode=evaluate --workdir=RUN
  python -m dppo_jax.main --mode=export --workdir=RUN --to=DIR
  python -m dppo_jax.main --mode=plan --config=FILE.py --hardware=h200:1
"""


class Command(NamedTuple):
  """Parsed command line.

  Attributes:
    config: the named config with its overrides, not yet validated.
    workdir: --workdir or its default.
    flags: all flags but those of options, as attributes.
  """

  config: Config
  workdir: pathlib.Path
  flags: flags.FlagValues


def parse(argv: list[str]) -> Command:
  """Parses a command line; prints the help and exits if asked to.

  Raises:
    UserError: for an unknown flag, a malformed value or an unusable config.
  """
  if {"--help", "-h"} & set(argv):
    print(help_text())
    sys.exit()
  values = flags.FlagValues()
  values.set_gnu_getopt()  # flags may follow `--config.steps 3`
  for name, (meaning, _) in _FLAGS.items():
    if name in _CHOICES:
      flags.DEFINE_enum(name, None, _CHOICES[name], meaning, values)
    elif name in _INTEGERS:
      flags.DEFINE_integer(name, None, meaning, flag_values=values)
    else:
      flags.DEFINE_string(name, None, meaning, values)
  flags.DEFINE_bool("debug", False, "", values)
  try:
    words = values(argv, known_only=True)[1:]
  except flags.Error as error:
    raise UserError(str(error)) from error
  values.mode = values.mode or "train"
  for name, (_, modes) in _FLAGS.items():
    if values[name].present and values.mode not in modes:
      raise UserError(f"--{name} is for --mode={' or '.join(modes)}")
  if values.mode == "export" and not values.to:
    raise UserError("--to is missing: the directory to export to")
  path, _, choice = (values.config or "").partition(":")
  path = pathlib.Path(path or pathlib.Path(values.workdir or "", "config.json"))
  if not values.config and not (values.workdir and path.is_file()):
    raise UserError("--config is missing, as in --config=configs/arithmetic.py")
  config = override(load(path, choice), words)
  workdir = values.workdir or _default_workdir(config, path)
  return Command(config, pathlib.Path(workdir), values)


def _default_workdir(config: Config, path: pathlib.Path) -> str | pathlib.Path:
  if path.suffix == ".json":
    return path.parent
  name = config.method.name
  if config.objective.name != "grpo":
    name += f"-{config.objective.name}"
  return f"runs/{path.stem}-{name}-seed{config.seed}"


def load(path: pathlib.Path, choice: str = "") -> Config:
  """Returns the config of a file: FILE.py, or the config.json of a run.

  Args:
    choice: argument of the file's get_config(), such as "dppo,gspo".
  """
  if not path.is_file():
    raise UserError(f"--config: there is no file {str(path)!r}")
  if path.suffix == ".json":
    return read(path)
  try:
    get_config = user_code.load(f"{path}:get_config")
    config = get_config(choice) if choice else get_config()
  except UserError:
    raise
  except Exception as error:  # a config file may raise anything
    raise UserError(f"{path}: {user_code.one_line(error)}") from error
  if not isinstance(config, Config):
    raise UserError(
      f"get_config() in {str(path)!r} must return a dppo_jax.config.Config"
    )
  return config


def override(config: Config, words: list[str]) -> Config:
  """Returns the config with some options set.

  Args:
    words: flags `--config.NAME=VALUE`.
  Raises:
    UserError: for an unknown option, or a value of another type.
  """
  known = {f"--{name}" for name in _FLAGS}
  for name, value, metadata in walk(config):
    if metadata:  # factories are named with the config file
      known.add(f"--config.{name}")
    if isinstance(value, dict):
      known |= {f"--config.{name}.{key}" for key in value}
  for word in words:
    name = word.partition("=")[0]
    free = re.fullmatch(r"--config\.data\.template_args\.(\w+)", name)
    if free:  # a dict that takes any key, whose value may be any literal
      config.data.template_args.setdefault(free[1], object())
    elif name.startswith("-") and name not in known:
      close = difflib.get_close_matches(name, known, 1)
      hint = f"did you mean {close[0]}?" if close else "see --help"
      raise UserError(f"there is no option {name}: {hint}")
  values = flags.FlagValues()
  try:
    holder = config_flags.DEFINE_config_dataclass(
      "config", config, flag_values=values, sys_argv=["", *words]
    )
    rest = values(["", *words])[1:]
  except (flags.Error, ValueError) as error:
    raise UserError(str(error)) from error
  if rest:
    raise UserError(f"unexpected argument {rest[0]!r}: flags start with --")
  return holder.value


def help_text() -> str:
  """Returns the text of --help: flags, methods, objectives and options."""
  listed = {}
  for name, (meaning, modes) in _FLAGS.items():
    only = "" if len(modes) > 2 else f"[{', '.join(modes)}] "
    listed[f"--{name}"] = only + meaning
  listed["--debug"] = "Show the tracebacks of user errors."
  sections = [
    _HEAD + "\nflags\n" + _columns(listed),
    "methods: --config=FILE.py:METHOD, or MINE.py:FUNCTION as the METHOD\n"
    + _columns(_factories(methods.METHODS)),
    "objectives: --config=FILE.py:METHOD,OBJECTIVE\n"
    + _columns(_factories(objectives.OBJECTIVES)),
  ]
  fields = dataclasses.fields(Config)
  for field in fields:
    if dataclasses.is_dataclass(field.type):
      title = f"--config.{field.name}.OPTION: {inspect.getdoc(field.type)}"
      options = _options(dataclasses.fields(field.type))
      sections.append(f"{title}\n{options}")
  sections.append("--config.OPTION\n" + _options(fields))
  return "\n\n".join(sections)


def _factories(factories: dict) -> dict[str, str]:
  """Returns the first docstring line and arguments of each factory."""
  lines = {}
  for name, factory in factories.items():
    args = ", ".join(f"{k}={v}" for k, v in default_args(factory).items())
    text = f"{inspect.getdoc(factory).splitlines()[0]} [{args}]"
    lines[name] = text.removesuffix(" []")
  return lines


def _options(fields: Iterable[dataclasses.Field]) -> str:
  """Formats meaning, default and choices of each option."""
  lines = {}
  for field in fields:
    if not field.metadata:
      continue
    text = field.metadata["meaning"]
    if field.default not in ("", (), dataclasses.MISSING):
      text += f" [{field.default}]"
    if choices := field.metadata["choices"]:
      text += f" ({' | '.join(filter(None, choices))})"
    lines[field.name] = text
  return _columns(lines)


def _columns(items: dict[str, str]) -> str:
  """Formats names and texts as two columns."""
  column = 4 + max(map(len, items))
  lines = []
  for name, text in items.items():
    head = f"  {name}".ljust(column)
    lines += textwrap.wrap(
      text, 79, initial_indent=head, subsequent_indent=" " * column
    )
  return "\n".join(lines)
