"""The method and the objective that a config names."""

from collections.abc import Callable
import inspect
from typing import Any

from dppo_jax import algo, methods, user_code
from dppo_jax.algo import objectives
from dppo_jax.config.options import default_args
from dppo_jax.config.schema import Config, Method, Objective

# A name, a reference to a function of one's own, or the function.
Choice = str | Callable


def use_method(
  config: Config, choice: Choice, objective: Choice | None = None
) -> None:
  """Sets the method, and perhaps the objective, with their default options.

  Args:
    choice: a method, or a method and an objective: "dppo", "dppo,gspo". Each is
      a name, `FILE.py:FUNCTION` or `MODULE:FUNCTION`; from Python also the
      function, which returns a `methods.Method` or an `algo.Objective` and has
      a default for every option.
    objective: one more way to name it, for paths with a comma and functions.
  Raises:
    ValueError: for a name that is unknown, or a function that there is not.
  """
  if isinstance(choice, str) and objective is None:
    choice, _, objective = choice.partition(",")
  factory = _factory(methods.METHODS, "method", choice)
  config.method = Method(factory, default_args(factory))
  if objective:
    factory = _factory(objectives.OBJECTIVES, "objective", objective)
    config.objective.factory = factory
    config.objective.args = default_args(factory)


def _factory(ours: dict[str, Callable], what: str, choice: Choice) -> Callable:
  if isinstance(choice, str) and choice in ours:
    return ours[choice]
  if isinstance(choice, str) and ":" not in choice:
    raise ValueError(
      f"the {what} is {choice!r} but must be one of {', '.join(ours)}, "
      "FILE.py:FUNCTION or MODULE:FUNCTION"
    )
  try:
    factory = user_code.load(choice) if isinstance(choice, str) else choice
  except ValueError as error:
    raise ValueError(f"the {what}: {error}") from error
  if not inspect.isfunction(factory):
    raise ValueError(f"the {what} is {choice!r} but must be a function")
  for name, default in default_args(factory).items():
    if default is inspect.Parameter.empty:
      raise ValueError(
        f"the {what} {factory.__name__} has no default for {name!r}, as every "
        "option must have"
      )
  return factory


def make_method(config: Config) -> methods.Method:
  """The method that the config names, with its options."""
  parameters = inspect.signature(config.method.factory).parameters
  known = {"total_steps": config.steps}
  known = {name: x for name, x in known.items() if name in parameters}
  return _make(config.method, methods.Method, "method", **known)


def make_objective(config: Config) -> algo.Objective:
  """The objective that the config names, with its options."""
  return _make(config.objective, algo.Objective, "objective")


def _make(chosen: Method | Objective, kind: type, what: str, **known) -> Any:
  try:
    made = chosen.factory(**chosen.args, **known)
  except TypeError as error:
    raise ValueError(
      f"config.{what}.args do not fit {chosen.name}: {error}; naming it in "
      "--config=FILE.py:grpo sets the options that it has"
    ) from error
  if not isinstance(made, kind):
    raise ValueError(
      f"the {what} {chosen.name}() returned {type(made).__name__}, not "
      f"{kind.__name__}"
    )
  return made
