"""An option: a dataclass field with its meaning, range and resume rule."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import difflib
import inspect
import json
import math
import numbers
import operator
from typing import Any

from dppo_jax import user_code

LARGEST = 2**31 - 1  # whole number that arrays of int32 hold

# What a value may be, by the type of the default.
_KINDS = {
  bool: (bool, "true or false"),
  int: (numbers.Integral, "a whole number"),
  float: (numbers.Real, "a number"),
  str: (str, "text"),
  Callable: ((str, Callable, list, tuple), "text or a function"),
  tuple: ((tuple, list), "a tuple"),
  dict: (Mapping, "a dict"),
}


def option(
  default: Any,
  meaning: str,
  *,
  least: float | None = None,
  above: float | None = None,
  most: float | None = None,
  below: float | None = None,
  choices: tuple[str, ...] | None = None,
  may_change: bool = False,
  is_code: bool = False,
) -> Any:
  """A field of the config.

  Args:
    meaning: what it is, with its unit; for people.
    least, above, most, below: its range; whole numbers are at most LARGEST.
    choices: the values that there are.
    may_change: a resumed run may have another value, since it alters what a
      step trains by no more than rounding (`resume.py` has exceptions).
    is_code: from Python it may also be a function, or a list of them.
  """
  if type(default) is int and most is None:
    most = LARGEST
  metadata = {
    "meaning": meaning,
    "kind": Callable if is_code else type(default),
    "limits": {
      "at least": (least, operator.ge),
      "above": (above, operator.gt),
      "at most": (most, operator.le),
      "below": (below, operator.lt),
    },
    "choices": choices,
    "may_change": may_change,
  }
  if isinstance(default, dict):
    return dataclasses.field(default_factory=default.copy, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


def default_args(factory: Callable) -> dict[str, Any]:
  """The options of a factory with their defaults: each becomes a flag.

  Keyword-only arguments are what the run knows, such as its steps.
  """
  parameters = inspect.signature(factory).parameters.values()
  return {p.name: p.default for p in parameters if p.kind != p.KEYWORD_ONLY}


def walk(config) -> Iterator[tuple[str, Any, dict[str, Any]]]:
  """`(dotted name, value, metadata)` of every option."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if not dataclasses.is_dataclass(value):
      yield field.name, value, field.metadata
      continue
    for inner in dataclasses.fields(value):
      name = f"{field.name}.{inner.name}"
      yield name, getattr(value, inner.name), inner.metadata


def check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
  """Refuses a value outside the kind, range or choices of its option.

  Raises:
    ValueError: naming value, limit and option.
  """
  if "kind" in metadata:
    kinds, words = _KINDS[metadata["kind"]]
    is_bool = isinstance(value, bool) and metadata["kind"] is not bool
    if is_bool or not isinstance(value, kinds):
      raise ValueError(f"config.{name} is {shown(value)} but must be {words}")
    if metadata["kind"] is dict:
      _check_json(name, value)
  choices = metadata.get("choices")
  if choices and value not in choices:
    raise ValueError(
      f"config.{name} is {shown(value)} but must be one of {', '.join(choices)}"
    )
  _check_finite(name, value)
  for words, (limit, holds) in metadata.get("limits", {}).items():
    if limit is not None and not holds(value, limit):
      raise ValueError(
        f"config.{name} is {shown(value)} but must be {words} {limit}"
      )


def _check_finite(name: str, value: Any) -> None:
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f"config.{name} is {value} but must be finite")
  if isinstance(value, float) and abs(value) > 3e38:
    raise ValueError(f"config.{name} is {value} but must be finite in float32")


def _check_json(name: str, values: Mapping[str, Any]) -> None:
  """Refuses what config.json cannot hold."""
  for key, value in values.items():
    _check_finite(f"{name}.{key}", value)
    try:
      json.dumps({key: value}, allow_nan=False)
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"config.{name}.{key} is {shown(value)} but must be text, a finite "
        f"number, a list or a dict ({error})"
      ) from error


def shown(value: Any) -> str:
  """A value for a message, the middle left out of a long one."""
  if isinstance(value, int) and abs(value) >= 10**30:  # str() has a limit
    return f"a whole number of {value.bit_length()} bits"
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"


def flatten(config) -> dict[str, Any]:
  """Every value by its dotted name, as JSON has it; `args` stay whole."""
  flat = {}
  for name, value, _ in walk(config):
    if name.endswith(".factory"):
      flat[name.replace("factory", "name")] = value.__name__
      if not value.__module__.startswith("dppo_jax."):  # a user's
        source = user_code.reference_of(value)
        flat[name.replace("factory", "source")] = source
    else:
      flat[name] = value
  # From Python a source, template or reward may be given as the function, and
  # a number may be NumPy's.
  plain = lambda x: (
    x.item() if hasattr(x, "item") else user_code.reference_of(x)
  )
  return json.loads(json.dumps(flat, default=plain))


# What an option was called before, for those who still type it.
RENAMED = {
  "method.factory": "set after the config's file, as in FILE.py:METHOD",
  "method.name": "set after the config's file, as in FILE.py:METHOD",
  "objective.factory": "set after the method, as in FILE.py:METHOD,OBJECTIVE",
  "objective.name": "set after the method, as in FILE.py:METHOD,OBJECTIVE",
  "optimizer.ramp_steps": "config.optimizer.warmup_steps",
  "pack.head_tokens": "config.pack.logit_chunk",
  "pack.rows": "config.pack.rows_per_micro, a device's",
  "pack.shares_prompts": "config.pack.share_prefix",
  "reward.format_reward": "config.reward.functions, as in math:1.0,boxed:0.5",
  "reward.kind": "config.reward.functions",
  "rollout.prefill_prompts": "config.rollout.prefill_batch, a device's",
  "warmup": "config.sft",
}


def unknown(config, name: str) -> str | None:
  """What to say to somebody who typed an option that there is not.

  Args:
    config: has every option that there is.
    name: dotted, without `config.`. What is within a dict is nobody's guess.
  """
  known = [option for option, _, _ in walk(config)]
  dicts = [x for x, value, _ in walk(config) if isinstance(value, Mapping)]
  if name in known or any(name.startswith(f"{x}.") for x in dicts):
    return None
  last = name.rpartition(".")[2]
  close = [x for x in known if x.rpartition(".")[2] == last]
  close = close or difflib.get_close_matches(name, known, n=1)
  guess = " or ".join(f"config.{x}" for x in close)
  hint = f"did you mean {guess}?" if guess else "--help lists them all"
  return f"there is no option config.{name}: {hint}"


def no_value(config, name: str) -> str | None:
  """What to say to somebody who gave a value to what has parts.

  Args:
    config: has every option that there is.
    name: dotted, without `config.`.
  """
  inner = [x for x, _, _ in walk(config) if x.startswith(f"{name}.")]
  inner += [
    f"{x}.{key}"
    for x, value, _ in walk(config)
    if x == name and isinstance(value, Mapping)
    for key in [*value, "NAME"][:1]
  ]
  if not inner:
    return None
  return (
    f"config.{name} has parts, which are set one by one, as --config.{inner[0]}"
  )


def renamed(name: str) -> str | None:
  """What to say to somebody who typed an option's former name.

  Args:
    name: dotted, without `config.`.
  """
  for old in (name, name.partition(".")[0]):
    if old in RENAMED:
      return f"config.{old} is now {RENAMED[old]}"
  return None
