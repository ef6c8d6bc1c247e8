"""What --help prints: flags, modes, methods, objectives and every option."""

import dataclasses
import inspect
import textwrap

from absl import flags

from dppo_jax import config as configs
from dppo_jax import methods
from dppo_jax.algo import objectives

WIDTH = 79
_EXAMPLES = """\
  python -m dppo_jax.main --config=configs/arithmetic.py
  python -m dppo_jax.main --config=configs/arithmetic.py:neyman,gspo
  python -m dppo_jax.main --config=configs/gsm8k.py --config.model.path=DIR
  python -m dppo_jax.main --mode=evaluate --workdir=RUN
  python -m dppo_jax.main --mode=export --workdir=RUN --to=DIR
  python -m dppo_jax.main --mode=plan --config=configs/gsm8k.py --hardware=h200:1
"""


def text(module: str) -> str:
  """The whole page.

  Args:
    module: whose flags are listed.
  """
  given = flags.FLAGS.get_flags_for_module(module)
  our_flags = {f"--{f.name}": f.help for f in given if "." not in f.name}
  parts = [
    "Trains, evaluates and exports language models by group-based policy\n"
    "optimisation with unbiased pruning, and plans such runs.\n\n"
    + _EXAMPLES.rstrip(),
    "flags\n" + _list(our_flags),
    "methods, --config=FILE.py:METHOD, or MINE.py:FUNCTION for METHOD\n"
    + _list(_lines(methods.METHODS)),
    "objectives, --config=FILE.py:METHOD,OBJECTIVE\n"
    + _list(_lines(objectives.OBJECTIVES)),
  ]
  for field in dataclasses.fields(configs.Config):
    if dataclasses.is_dataclass(field.type):
      about = inspect.getdoc(field.type).splitlines()[0]
      about = textwrap.fill(f"--config.{field.name}.OPTION: {about}", WIDTH)
      parts.append(f"{about}\n{_options(field)}")
  top = [f for f in dataclasses.fields(configs.Config) if f.metadata]
  options = {f.name: _option(f) for f in top}
  parts.append("--config.OPTION\n" + _list(options))
  return "\n\n".join(parts) + "\n"


def _lines(factories: dict) -> dict[str, str]:
  """Each factory's first line and its arguments."""
  return {
    name: f"{inspect.getdoc(factory).splitlines()[0]} "
    f"[{', '.join(_arguments(factory))}]".replace(" []", "")
    for name, factory in factories.items()
  }


def _arguments(factory) -> list[str]:
  parameters = inspect.signature(factory).parameters.values()
  return [
    f"{p.name}={p.default}" for p in parameters if p.kind != p.KEYWORD_ONLY
  ]


def _options(section: dataclasses.Field) -> str:
  fields = dataclasses.fields(section.type)
  return _list({f.name: _option(f) for f in fields if f.metadata})


def _option(field: dataclasses.Field) -> str:
  is_made = field.default is dataclasses.MISSING
  default = field.default_factory() if is_made else field.default
  words = field.metadata["meaning"]
  if default not in ("", (), {}):
    words += f" [{default}]"
  if isinstance(default, dict) and field.name == "args":
    words = field.metadata["meaning"] + " [its own defaults, above]"
  choices = filter(None, field.metadata.get("choices") or ())
  choices = " | ".join(choices)
  return f"{words} ({choices})" if choices else words


def _list(items: dict[str, str]) -> str:
  """`name  words`, the words in a column of their own."""
  column = 4 + max(len(name) for name in items)
  lines = []
  for name, words in items.items():
    lines += textwrap.wrap(
      words,
      WIDTH,
      initial_indent=f"  {name}".ljust(column),
      subsequent_indent=" " * column,
      break_long_words=False,
    )
  return "\n".join(lines)
