"""Options of the config that source code reads, with their sections."""

import ast
from collections.abc import Iterator
import dataclasses
import itertools

from dppo_jax.config import schema

_ROOT = ""  # section of `seed`, `steps` and `callbacks`
SECTIONS = {
  field.name: field.default_factory
  for field in dataclasses.fields(schema.Config)
  if dataclasses.is_dataclass(field.default_factory)
}
_BY_CLASS = {cls.__name__: name for name, cls in SECTIONS.items()}
_BY_CLASS["Config"] = _ROOT


def reads(source: str) -> set[tuple[str, str]]:
  """Returns `(section, option)` of every read in functions but `validate`.

  Follows `run.config`, arguments annotated with a class of the schema, names
  that a function assigns, and `dataclasses.asdict`, which reads a section.
  """
  functions = (
    node
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.FunctionDef) and node.name != "validate"
  )
  return set(itertools.chain(*map(_reads, functions)))


def _reads(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
  names = {}
  for arg in (*function.args.args, *function.args.kwonlyargs):
    kind = ast.unparse(arg.annotation) if arg.annotation else ""
    if (name := kind.rpartition(".")[2]) in _BY_CLASS:
      names[arg.arg] = _BY_CLASS[name]

  def section(node: ast.AST) -> str | None:
    """Returns the section that an expression is, if it is one."""
    if isinstance(node, ast.Name):
      return names.get(node.id)
    if not isinstance(node, ast.Attribute):
      return None
    if node.attr in SECTIONS and section(node.value) == _ROOT:
      return node.attr
    return _ROOT if node.attr == "config" else None

  for node in ast.walk(function):
    if isinstance(node, ast.Assign):
      target, value = node.targets[0], node.value
      is_tuple = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
      pairs = (
        zip(target.elts, value.elts, strict=True)
        if is_tuple
        else [(target, value)]
      )
      for left, right in pairs:
        if isinstance(left, ast.Name) and section(right) is not None:
          names[left.id] = section(right)
  for node in ast.walk(function):
    if isinstance(node, ast.Attribute):
      if (name := section(node.value)) is not None:
        yield name, node.attr
    if isinstance(node, ast.Call) and "asdict" in ast.unparse(node.func):
      for name in filter(None, map(section, node.args)):
        yield from ((name, x.name) for x in dataclasses.fields(SECTIONS[name]))
