"""Loads functions that a config names: FILE.py:FUNCTION, MODULE:FUNCTION."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import importlib.util
import os
import re
import sys
import traceback

from dppo_jax.errors import UserError
from dppo_jax.files import paths

# Files whose lines do not help to find a mistake in user code.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_INTERNAL = ("<frozen ", _PACKAGE, contextlib.__file__)


def is_reference(text: str) -> bool:
  """Returns True if the text reads as FILE.py:FUNCTION or MODULE:FUNCTION."""
  where, _, name = text.rpartition(":")
  is_module = all(part.isidentifier() for part in where.split("."))
  return name.isidentifier() and (where.endswith(".py") or is_module)


def load(reference: str) -> Callable:
  """Imports a function; raises UserError if that fails."""
  if not is_reference(reference):
    raise UserError(f"{reference!r} is neither FILE.py:NAME nor MODULE:NAME")
  where, _, name = paths.of_code(reference).rpartition(":")
  if where.endswith(".py") and not os.path.isfile(where):
    raise UserError(f"{reference!r}: there is no file {where}")
  with explained(f"{where} cannot be imported"):
    if where.endswith(".py"):
      module = _import_file(where, os.stat(where).st_mtime_ns)
    else:
      module = importlib.import_module(where)
  function = getattr(module, name, None)
  if not callable(function):
    value = f": it is {function!r}"[:60] if hasattr(module, name) else ""
    raise UserError(f"there is no function {name!r} in {where}{value}")
  return function


def file_of(reference: str) -> str:
  """Returns the file that `load` imports for a reference; "" if there is none.

  Imports the packages that a module is in, but not the module.
  """
  where = reference.rpartition(":")[0]
  with contextlib.suppress(Exception):  # `load` explains it
    is_file = where.endswith(".py")
    file = where if is_file else importlib.util.find_spec(where).origin
    is_there = is_reference(reference) and os.path.isfile(file or "")
    return file if is_there else ""
  return ""


def reference_of(function: Callable) -> str:
  """Returns the reference by which `load` finds a function or class."""
  if not hasattr(function, "__qualname__"):
    raise UserError(f"{function!r} has no name to save: define it with def")
  where = function.__module__
  file = getattr(sys.modules.get(where), "__file__", None) or ""
  if "." not in where and file.endswith(".py") and os.path.isfile(file):
    where = os.path.abspath(file)  # a file in no package
  return f"{where}:{function.__qualname__}"


def one_line(error: BaseException) -> str:
  """Returns an error's type, message and the line of user code it came from."""
  text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    is_user = not frame.filename.startswith(_INTERNAL)
    if is_user and "/jax/_src/" not in frame.filename:
      return f"{text} ({frame.filename}, line {frame.lineno})"
  return text


@contextlib.contextmanager
def explained(
  label: str, kinds: tuple[type[BaseException], ...] = (Exception, SystemExit)
) -> Iterator[None]:
  """Turns exceptions of user code into a UserError; also a decorator.

  Args:
    kinds: exceptions to explain, by default all and calls of `sys.exit`.
  """
  try:
    yield
  except UserError:
    raise
  except kinds as error:
    raise UserError(f"{label}: {one_line(error)}") from error


@functools.cache  # an edited file is imported again
def _import_file(path: str, modified: int):
  # Its folder goes behind the standard library and before site-packages.
  installed = (i for i, x in enumerate(sys.path) if x.endswith("-packages"))
  sys.path.insert(next(installed, len(sys.path)), os.path.dirname(path))
  name = "user_file_" + re.sub(r"\W", "_", path)  # unique, in no package
  spec = importlib.util.spec_from_file_location(name, path)
  module = sys.modules[name] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
