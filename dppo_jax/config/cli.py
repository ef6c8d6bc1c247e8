"""Command line: flags, the config they name, and --help."""

import argparse
import difflib
import functools
import hashlib
import inspect
import pathlib
import re
import textwrap
from typing import Any

from absl import flags as absl_flags
from ml_collections import config_flags

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.config.choose import read
from dppo_jax.config.options import absolute_paths, default_args, flatten, walk
from dppo_jax.config.schema import Config
from dppo_jax.errors import UserError
from dppo_jax.files import bucket, paths, user_code

_EXAMPLES = """\
Trains language models by group-based policy optimisation with unbiased pruning.

  python -m dppo_jax.main --config=configs/arithmetic.py
  python -m dppo_jax.main --config=configs/arithmetic.py:neyman,gspo
  python -m dppo_jax.main --config=configs/gsm8k.py --config.model.path=DIR
  python -m dppo_jax.main --mode=evaluate --workdir=RUN
  python -m dppo_jax.main --mode=export --workdir=RUN --to=DIR
  python -m dppo_jax.main --mode=sample --workdir=RUN --prompt="Is 7 prime?"
  python -m dppo_jax.main --mode=plan --config=FILE.py --hardware=h200:1
  python -m dppo_jax.main --mode=check --config=FILE.py
"""
_NOT_A_NUMBER = {  # Python's words, and ours
  "invalid literal for int() with base 10": "not a whole number",
  "could not convert string to float": "not a number",
}
_MODES = ("train", "evaluate", "export", "sample", "plan", "check")
_DTYPES = ("float32", "bfloat16", "float16")
_FORMATS = ("model", "adapter")
# Name, value or choices, modes that have the flag (empty: all), help.
_FLAGS = (
  ("config", "FILE", "", "FILE.py[:METHOD[,OBJECTIVE]] or a run's config.json"),
  ("mode", _MODES, "", "[train]"),
  (
    "workdir",
    "DIR",
    "",
    "of the run, or gs://...; resumes from its checkpoint",
  ),
  (
    "allow_change",
    ("optimizer",),
    "train",
    "(all but its function) may change on resume",
  ),
  ("step", "STEP", "evaluate export sample", "N or best [latest]"),
  (
    "prompt",
    "TEXT",
    "sample",
    "@FILE.txt reads lines, @SOURCE problems, @ data.eval [standard input]",
  ),
  ("to", "DIR", "export", "directory to export to"),
  ("push", "OWNER/NAME", "export", "repository of the hub to upload to"),
  ("dtype", _DTYPES, "export", "[the model's]"),
  ("format", _FORMATS, "export", "[model]; adapter: of LoRA, as PEFT has it"),
  ("hardware", "KIND:N,...", "plan", "devices, as in h200:8, or cpu"),
  ("topology", "KIND:AxB", "plan", "devices to compile for, as in v5e:4x4"),
  ("stages", "NAME,...", "plan", "stages to compile, as in update,roll_out"),
  (
    "assume",
    "NAME=X,...",
    "plan",
    "such as completion=800: see configs/README",
  ),
  ("price_per_hour", "PRICE", "plan", "of one device, for the cost"),
  ("coordinator", "ADDRESS", "train evaluate", "HOST:PORT of process 0"),
  ("num_processes", "N", "", "number of processes"),
  ("process_id", "N", "train evaluate", "index of this process, from 0"),
)
_OF_PROCESSES = {"coordinator", "process_id"}
_LEGEND = """\
options: --config.OPTION=VALUE
  *         may change on resume, unless the method or a schedule depends on it
  [...]     default
  FUNCTION  FILE.py:NAME or MODULE:NAME
"""


def parse(argv: list[str]) -> tuple[Config, pathlib.Path, argparse.Namespace]:
  """Returns the config, not yet validated, the directory and other flags.

  No path in them is relative.

  Raises UserError for a mistake in the command line.
  """
  try:
    flags, words = _parser().parse_known_args(argv[1:])
  except argparse.ArgumentError as error:
    raise UserError(str(error)) from error
  for name, _, modes, _ in _FLAGS:
    if (value := getattr(flags, name)) == "":
      raise UserError(f"--{name} is empty")
    if modes and value is not None and flags.mode not in modes:
      raise UserError(f"--{name} is for --mode={' or '.join(modes.split())}")
  if flags.mode == "export" and not flags.to:
    raise UserError("--to is missing: the directory to export to")
  workdir = bucket.workdir(flags.workdir or "")
  for path in (workdir, *workdir.parents):
    if path.is_file():
      raise UserError(f"--workdir: {str(path)!r} is a file: name a directory")
  name, _, choice = (flags.config or "").partition(":")
  path = pathlib.Path(paths.absolute(name) or workdir / "config.json")
  has_config = flags.config or (flags.workdir and path.is_file())
  config = _load(path, choice) if has_config else Config()
  before = _kept(config)
  config = _override(config, words)
  if not has_config:  # a model can be sampled without one
    model = config.model.path or config.model.hub_id
    if flags.mode != "sample" or not model:
      if flags.workdir:
        raise UserError(
          f"--workdir: {bucket.shown(workdir)} has no config.json: name the "
          "directory of a run, or the --config of a new one"
        )
      example = "--config=configs/arithmetic.py"
      raise UserError(f"--config is missing, as in {example}")
    path = pathlib.Path(model, "config.json")
  name = config.method.name
  if config.objective.name != "grpo":
    name += f"-{config.objective.name}"
  after = _kept(config).items()
  name += _suffix({x: value for x, value in after if before.get(x) != value})
  folder = pathlib.Path(f"runs/{path.stem}-{name}-seed{config.seed}")
  if path.suffix == ".json":  # of a run
    folder = path.parent
  if not flags.workdir:
    workdir = folder.absolute()
  return absolute_paths(config), workdir, flags


def arguments(flags: argparse.Namespace) -> dict[str, Any]:
  """Returns the given flags that are arguments of the mode's `run`."""
  names = {x for x, _, modes, _ in _FLAGS if flags.mode in modes.split()}
  given = {name: x for name, x in vars(flags).items() if x is not None}
  return {name: given[name] for name in given.keys() & names - _OF_PROCESSES}


def _kept(config: Config) -> dict[str, Any]:
  """Returns the options that a resumed run keeps, entry by entry."""
  flat, kept = flatten(config), dict[str, Any]()
  for name, _, metadata in walk(config):
    if metadata["may_change"] or name == "seed":
      continue
    if isinstance(flat[name], dict):
      prefix = name.removesuffix(".args")
      kept |= {f"{prefix}.{x}": value for x, value in flat[name].items()}
    else:
      kept[name] = flat[name]
  return kept


def _suffix(changes: dict[str, Any]) -> str:
  """Returns the part of a directory's name for options set by flags.

  Directories of paths are left out. A hash stands for what a name of a
  directory cannot hold.
  """
  values = {x: str(y).split("/")[-1] for x, y in changes.items()}
  full = "".join(f"-{name}={value}" for name, value in values.items())
  # Only what file systems and shells allow.
  short = re.sub(r"[^\w.=+-]+", "_", full)[:100]
  if short == full:
    return full
  digest = hashlib.sha256(repr(changes).encode()).hexdigest()
  return f"{short}-{digest[:6]}"


def _load(path: pathlib.Path, choice: str) -> Config:
  """Returns the config of FILE.py, or of a run's config.json."""
  if not path.is_file():
    place = bucket.shown(path)
    if path.is_dir():
      raise UserError(f"--config: {place!r} is a directory: name a file in it")
    raise UserError(f"--config: there is no file {place!r}")
  if path.suffix == ".json":
    if choice:
      raise UserError(
        f"--config: {bucket.shown(path)} has its own method: omit {choice!r}"
      )
    return read(path)
  get_config = user_code.load(f"{path}:get_config")
  with user_code.explained(str(path)):
    config = get_config(choice) if choice else get_config()
  if not isinstance(config, Config):
    raise UserError(
      f"get_config() in {str(path)!r} must return a dppo_jax.config.Config"
    )
  return config


def _override(config: Config, words: list[str]) -> Config:
  """Returns the config with options set by flags `--config.NAME=VALUE`."""
  known = [f"--{name}" for name, *_ in _FLAGS]
  for name, value, _ in walk(config):
    known.append(f"--config.{name}")
    if isinstance(value, dict):
      known += [f"--config.{name}.{key}" for key in value]
  for word in words:
    name = word.partition("=")[0]
    if match := re.fullmatch(r"--config\.data\.template_args\.(\w+)", name):
      # A dict that takes any key, with any literal as its value.
      config.data.template_args.setdefault(match[1], object())
    elif name.startswith("-") and name not in known:
      raise UserError(f"there is no option {name}: {_hint(name, known)}")
  values = absl_flags.FlagValues()
  try:
    holder = config_flags.DEFINE_config_dataclass(
      "config", config, flag_values=values, sys_argv=["", *words]
    )
    surplus = values(["", *words])[1:]
  except (absl_flags.Error, ValueError) as error:
    text = str(error)
    for kind, ours in _NOT_A_NUMBER.items():
      text = text.replace(kind, ours)
    raise UserError(text) from error
  if surplus:
    raise UserError(f"unexpected argument {surplus[0]!r}: flags start with --")
  return holder.value


def _hint(name: str, known: list[str]) -> str:
  """Suggests a known option for a mistyped one, at best of the same section."""
  if name.startswith("--config."):
    known = [x for x in known if x.startswith("--config.")]
  split = lambda x: x.removeprefix("--config.").lstrip("-").rpartition(".")[::2]
  section, field = split(name)
  near = difflib.get_close_matches(section, {split(x)[0] for x in known}, 1)
  fields = {split(x)[1]: x for x in known if split(x)[0] in near}
  options = {split(x)[1]: x for x in reversed(known)} | fields
  close = difflib.get_close_matches(field, options, 1)
  if close and not section.endswith(".args"):  # few, and all of them matter
    return f"did you mean {options[close[0]]}?"
  if section and near:
    return f"config.{near[0]} has {', '.join(fields)}"
  return "see --help"


def _parser() -> argparse.ArgumentParser:
  """Returns the parser of all flags but options, which --help shows too."""
  sections = [
    _table(
      "methods: --config=FILE.py:METHOD --config.method.args.NAME=VALUE",
      _factories(methods.METHODS),
    ),
    _table(
      "objectives: --config=FILE.py:METHOD,OBJECTIVE "
      "--config.objective.args.NAME=VALUE",
      _factories(objectives.OBJECTIVES),
    ),
    _table(_LEGEND, _options()),
  ]
  parser = argparse.ArgumentParser(
    usage="python -m dppo_jax.main --config=FILE.py [--FLAG=VALUE ...]",
    description=_EXAMPLES,
    epilog="\n\n".join(sections),
    formatter_class=functools.partial(
      argparse.RawDescriptionHelpFormatter, width=80, max_help_position=26
    ),
    allow_abbrev=False,
    add_help=False,
    exit_on_error=False,
  )
  add = parser.add_argument_group("flags").add_argument
  for name, value, modes, meaning in _FLAGS:
    text = ", ".join(modes.split()) + ": " * bool(modes)
    if isinstance(value, tuple):
      text += ", ".join(value) + " "
      metavar = name.rpartition("_")[2].upper()
      values: dict[str, Any] = {"metavar": metavar, "choices": value}
    else:
      types = {"DIR": paths.absolute, "N": int, "STEP": _step, "PRICE": float}
      values = {"metavar": value, "type": types.get(value, str)}
    add(f"--{name}", help=text + meaning, **values)
  parser.set_defaults(mode="train")
  add("--debug", action="store_true", help="show the tracebacks of user errors")
  add("-h", "--help", action="help", help="show this message")
  return parser


def _step(text: str) -> int | str:
  """Parses --step."""
  if text == "best" or text.isdecimal():
    return text if text == "best" else int(text)
  raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor best")


def _factories(factories: dict) -> dict[str, str]:
  """Returns the first docstring line and arguments of each factory."""
  lines = {}
  for name, factory in factories.items():
    args = ", ".join(f"{k}={v}" for k, v in default_args(factory).items())
    summary = (inspect.getdoc(factory) or "").partition("\n")[0]
    lines[name] = f"{summary}\n[{args}]".removesuffix("\n[]")
  return lines


def _options() -> dict[str, str]:
  """Returns meaning, default and choices of each option."""
  lines = {}
  for name, default, metadata in walk(Config()):
    text = metadata["meaning"]
    if choices := metadata["choices"]:
      text += f" {{{','.join(filter(None, choices))}}}"
    if default not in ("", ()) and not isinstance(default, dict):
      text += f" [{default}]"
    lines[name + " *" * metadata["may_change"]] = text
  return lines


def _table(title: str, items: dict[str, str]) -> str:
  """Formats a title, and names and texts as two columns."""
  column = 4 + max(map(len, items))
  lines = [title]
  for name, text in items.items():
    wrap = lambda x: textwrap.fill(x, 79 - column, break_on_hyphens=False)
    body = "\n".join(map(wrap, text.splitlines()))
    body = textwrap.indent(body, " " * column).lstrip()
    lines.append(f"  {name}".ljust(column) + body)
  return "\n".join(lines)
