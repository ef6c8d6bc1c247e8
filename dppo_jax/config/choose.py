"""Methods and objectives by name, and configs by file."""

from collections.abc import Callable
import inspect
import json
import os
import pathlib
from typing import Any

from dppo_jax import algo, methods, user_code
from dppo_jax.algo import objectives
from dppo_jax.config.options import assign, default_args, walk
from dppo_jax.config.schema import Config, MethodConfig, ObjectiveConfig
from dppo_jax.errors import UserError

# A name, a reference to a user's function, or the function.
Choice = str | Callable


def use_method(
  config: Config, choice: Choice, objective: Choice | None = None
) -> None:
  """Sets the method and optionally the objective, with default arguments.

  Args:
    choice: a method, or a method and an objective: "dppo", "dppo,gspo". Each is
      a name, `FILE.py:FUNCTION` or `MODULE:FUNCTION`. From Python it may also
      be a function that returns a `methods.Method` or an `algo.Objective` and
      has a default for every argument.
    objective: alternative place for the objective, for functions and for paths
      that contain a comma.
  Raises:
    UserError: for an unknown name, or a function that cannot be loaded.
  """
  if isinstance(choice, str) and objective is None:
    choice, _, objective = choice.partition(",")
  factory = _factory(methods.METHODS, "method", choice)
  config.method = MethodConfig(factory, default_args(factory))
  if objective:
    factory = _factory(objectives.OBJECTIVES, "objective", objective)
    config.objective.factory = factory
    config.objective.args = default_args(factory)


def _factory(known: dict[str, Callable], kind: str, choice: Choice) -> Callable:
  if isinstance(choice, str) and choice in known:
    return known[choice]
  if isinstance(choice, str) and ":" not in choice:
    raise UserError(
      f"the {kind} is {choice!r} but must be one of {', '.join(known)}, "
      "FILE.py:FUNCTION or MODULE:FUNCTION"
    )
  try:
    factory = user_code.load(choice) if isinstance(choice, str) else choice
  except ValueError as error:
    raise UserError(f"the {kind}: {error}") from error
  if not inspect.isfunction(factory):
    raise UserError(f"the {kind} is {choice!r} but must be a function")
  for name, default in default_args(factory).items():
    if default is inspect.Parameter.empty:
      raise UserError(
        f"argument {name!r} of the {kind} {factory.__name__} must have a "
        "default value"
      )
  return factory


def read(path: str | os.PathLike) -> Config:
  """Returns the config in a run's config.json.

  Raises:
    UserError: if the file is not a config, or names an unknown option.
  """
  path = pathlib.Path(path)
  config = Config()
  try:
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved.pop("fingerprints", None)  # of data and code
    names = [saved.pop(f"{kind}.name") for kind in ("method", "objective")]
    use_method(
      config,
      saved.pop("method.source", names[0]),
      saved.pop("objective.source", names[1]),
    )
    defaults = {name: value for name, value, _ in walk(config)}
    for name, value in saved.items():
      is_tuple = isinstance(defaults[name], tuple)
      assign(config, name, tuple(value) if is_tuple else value)
  except UserError:
    raise
  except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
    raise UserError(
      f"{path} is not the config of a run: {type(error).__name__} {error}"
    ) from error
  return config


def make_method(config: Config) -> methods.Method:
  """Returns the config's method."""
  known = {"total_steps": config.steps}
  if "total_steps" not in inspect.signature(config.method.factory).parameters:
    known = {}
  return _make(config.method, methods.Method, "method", **known)


def make_objective(config: Config) -> algo.Objective:
  """Returns the config's objective."""
  return _make(config.objective, algo.Objective, "objective")


def _make(
  chosen: MethodConfig | ObjectiveConfig, returns: type, kind: str, **known
) -> Any:
  known_names = default_args(chosen.factory)
  for name in chosen.args:
    if name not in known_names:
      raise UserError(
        f"config.{kind}.args.{name} is set but the arguments of {chosen.name} "
        f"are {', '.join(known_names) or 'none'}"
      )
  result = chosen.factory(**chosen.args, **known)
  if not isinstance(result, returns):
    raise UserError(
      f"the {kind} {chosen.name}() returned {type(result).__name__}, not "
      f"{returns.__name__}"
    )
  return result


def load_callbacks(config: Config) -> tuple[Callable, ...]:
  """Loads the functions that `config.callbacks` names."""
  named = config.callbacks
  if isinstance(named, str):
    named = [x for x in named.split(",") if x]
  named = named if isinstance(named, list | tuple) else [named]
  return tuple(user_code.load(x) if isinstance(x, str) else x for x in named)
