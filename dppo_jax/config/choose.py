"""Checked options, and the functions that they name."""

from collections.abc import Callable, Iterable
import inspect
from numbers import Integral
import os
from typing import Any

from dppo_jax import algo, methods, rewards
from dppo_jax.algo import objectives
from dppo_jax.config.options import (
  assign,
  check_option,
  default_args,
  flatten,
  walk,
)
from dppo_jax.config.schema import (
  TINY,
  Config,
  LoraConfig,
  MethodConfig,
  ObjectiveConfig,
)
from dppo_jax.data import sources
from dppo_jax.errors import UserError
from dppo_jax.files import json_object, user_code
from dppo_jax.metrics import trackers

# A name, a reference to a user's function, or the function.
Choice = str | Callable


def use_method(
  config: Config, choice: Choice, objective: Choice | None = None
) -> None:
  """Sets the method and optionally the objective, with default arguments.

  Args:
    choice: "METHOD" or "METHOD,OBJECTIVE", each of them a name,
      `FILE.py:FUNCTION` or `MODULE:FUNCTION`; or a function that returns a
      `methods.Method` and has a default for every argument.
    objective: the objective, if it is not part of `choice`.
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
  factory = _function(f"the {kind}", choice)
  for name, default in default_args(factory).items():
    if default is inspect.Parameter.empty:
      raise UserError(
        f"argument {name!r} of the {kind} {factory.__name__} must have a "
        "default value"
      )
  return factory


def _function(label: str, choice: Choice) -> Callable:
  """Returns a function, loaded first if it is given as a reference."""
  try:
    choice = user_code.load(choice) if isinstance(choice, str) else choice
  except UserError as error:
    raise UserError(f"{label}: {error}") from error
  if not inspect.isfunction(choice):
    raise UserError(f"{label} is {choice!r} but must be a function")
  return choice


def load_callbacks(config: Config) -> tuple[Callable, ...]:
  """Returns the functions that `config.callbacks` names.

  From Python the option may also be a function, or a list of functions.
  """
  callbacks = _callbacks(config.callbacks)
  return tuple(_function("config.callbacks", x) for x in callbacks)


def _callbacks(value: Any) -> list:
  """Returns the functions in `config.callbacks`, or references to them."""
  if isinstance(value, str):
    return [x.strip() for x in value.split(",") if x.strip()]
  return [value] if callable(value) else value


def load_optimizer(config: Config) -> Callable | None:
  """Returns the optimizer factory that the config names; None for AdamW."""
  choice = config.optimizer.function
  return _function("config.optimizer.function", choice) if choice else None


def user_functions(config: Config, names: Iterable[str]) -> dict[str, str]:
  """Returns the files of a user's functions by their references.

  Args:
    names: options that may name functions.
  """
  flat, references = flatten(config), list[str]()
  specs = rewards.parse(config.reward.functions)
  flat["reward.functions"] = [x.reference for x in specs]
  flat["data.eval"] = sources.parse_named(flat["data.eval"])
  flat["callbacks"] = _callbacks(flat["callbacks"])
  for name in names:
    value = flat.get(name, "")
    if isinstance(value, dict):
      value = value.values()
    values = [value] if isinstance(value, str) else value
    references += (str(x).strip() for x in values)
  return {x: file for x in references if (file := user_code.file_of(x))}


def read(path: str | os.PathLike) -> Config:
  """Returns the config in a run's config.json; raises UserError."""
  config = Config()
  kinds: dict[str, Any] = {"method.name": str, "objective.name": str}
  kinds |= {"method.source": str | None, "objective.source": str | None}
  saved = json_object.read(path, kinds, "it is not the config of a run")
  choices = [
    saved.get(f"{x}.source") or saved[f"{x}.name"]
    for x in ("method", "objective")
  ]
  try:
    use_method(config, *choices)
    options = {name: metadata for name, _, metadata in walk(config)}
    for name, value in saved.items():
      if name in kinds or name.startswith(("fingerprints.", "changes")):
        continue
      if name not in options:
        raise UserError(f"there is no option config.{name}")
      check_option(name, value, options[name])
      is_tuple = options[name]["type"] is tuple
      assign(config, name, tuple(value) if is_tuple else value)
    for chosen in (config.method, config.objective):
      defaults = default_args(chosen.factory)
      for name, value in chosen.args.items():
        is_text = isinstance(defaults.get(name), str)
        is_function = isinstance(value, str) and user_code.is_reference(value)
        if is_function and not is_text:
          chosen.args[name] = user_code.load(value)
  except UserError as error:
    raise UserError(f"{path}: {error}") from error
  return config


def make_method(config: Config) -> methods.Method:
  """Returns the config's method."""
  parameters = inspect.signature(config.method.factory).parameters
  known = {"total_steps": config.steps} if "total_steps" in parameters else {}
  return _make(config.method, methods.Method, "method", **known)


def make_objective(config: Config) -> algo.Objective:
  """Returns the config's objective."""
  return _make(config.objective, algo.Objective, "objective")


def _make(
  chosen: MethodConfig | ObjectiveConfig, returns: type, kind: str, **known
) -> Any:
  names = default_args(chosen.factory)
  for name in chosen.args.keys() - names:
    raise UserError(
      f"config.{kind}.args.{name} is set but the arguments of {chosen.name} "
      f"are {', '.join(names) or 'none'}"
    )
  for name, value in chosen.args.items():
    if not getattr(value, "__qualname__", "named").isidentifier():
      raise UserError(
        f"config.{kind}.args.{name} is {value.__qualname__}, which config.json "
        "cannot name: define it with def, outside of other functions"
      )
  with user_code.explained(f"the {kind} {chosen.name}"):
    result = chosen.factory(**chosen.args, **known)
  if not isinstance(result, returns):
    raise UserError(
      f"the {kind} {chosen.name}() returned {type(result).__name__}, not "
      f"{returns.__name__}"
    )
  return result


def validate(config: Config, trains: bool = True) -> None:
  """Raises UserError for values out of range and options that conflict.

  Args:
    trains: False to import neither callbacks nor the optimizer.
  """
  for name, value, metadata in walk(config):
    check_option(name, value, metadata)
  make_method(config)
  make_objective(config)
  if trains:
    load_callbacks(config)
    load_optimizer(config)
  rewards.parse(config.reward.functions)
  trackers.parse(config.log.writers)
  if "" in config.rollout.stop_strings:
    raise UserError("config.rollout.stop_strings has an empty text")
  shape = config.model.shape
  if shape.keys() != TINY.keys():
    raise UserError(
      f"config.model.shape has {', '.join(shape)} but must have "
      f"{', '.join(TINY)}"
    )
  # In reverse, so that kv_heads is checked before it divides heads.
  for name, size in sorted(shape.items(), reverse=True):
    divisor = {"heads": shape["kv_heads"], "head_dim": 2}.get(name, 1)
    _check_multiple(f"model.shape.{name}", size, divisor)
  _check_multiple("pack.row_length", config.pack.row_length, 8)
  if config.mesh.data == 0:
    raise UserError("config.mesh.data is 0 but must be at least 1, or -1")
  lora, unused = config.lora, LoraConfig()
  for name in () if lora.rank or lora.adapter else ("alpha", "targets"):
    if (value := getattr(lora, name)) != getattr(unused, name):
      raise UserError(
        f"config.lora.{name} is {value!r} but config.lora.rank is 0"
      )


def _check_multiple(name: str, value: Any, divisor: int) -> None:
  if not isinstance(value, Integral) or value < 1 or value % divisor:
    raise UserError(
      f"config.{name} is {value!r} but must be a positive multiple of {divisor}"
    )
