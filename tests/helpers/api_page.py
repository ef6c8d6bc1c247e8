"""Writes dppo_jax/API.md: the public names with their signatures.

python -m tests.helpers.api_page
"""

import enum
import importlib
import inspect

from tests.helpers import commands

PAGE = commands.ROOT / "dppo_jax" / "API.md"
PACKAGES = "algo methods records rng rollout models step rewards data config"
_HEAD = """\
# Public names

Made by `python -m tests.helpers.api_page` from signatures and docstrings.
`help(NAME)` has shapes, units, errors and sources; [README.md](README.md) shows
the names in use.
"""


def text() -> str:
  """Returns the page."""
  return "\n".join([_HEAD, *map(_section, PACKAGES.split())])


def _section(package: str) -> str:
  module = importlib.import_module(f"dppo_jax.{package}")
  names = getattr(module, "__all__", None) or [
    name
    for name, value in vars(module).items()
    if name[0] != "_" and _place(value).startswith(module.__name__)
  ]
  lines = [_line(name, getattr(module, name)) for name in sorted(names)]
  title = f"## dppo_jax.{package}"
  return "\n".join([title, "", _summary(module), "", *filter(None, lines), ""])


class _Name(str):
  """A function's name, which a signature shows without quotes."""

  __repr__ = str.__str__


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
  """Returns a parameter without its type, its default as a reader writes it."""
  default = parameter.default
  if inspect.isfunction(default):
    default = _Name(default.__name__)
  return parameter.replace(annotation=inspect.Parameter.empty, default=default)


def _place(value: object) -> str:
  return getattr(value, "__module__", None) or ""


def _summary(value: object) -> str:
  paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
  return " ".join(paragraph.splitlines())


def _line(name: str, value: object) -> str:
  """Returns an item for a module, function or class; "" for an alias."""
  if not (inspect.ismodule(value) or _place(value).startswith("dppo_jax")):
    return ""
  is_plain = not callable(value) or isinstance(value, enum.EnumType)
  is_section = _place(value).startswith("dppo_jax.config.")
  if is_plain or (is_section and inspect.isclass(value)):
    return f"- `{name}`: {_summary(value)}"
  parameters = inspect.signature(value).parameters.values()
  plain = [_plain(x) for x in parameters]
  return f"- `{name}{inspect.Signature(plain)}`: {_summary(value)}"


if __name__ == "__main__":
  PAGE.write_text(text(), encoding="utf-8")
