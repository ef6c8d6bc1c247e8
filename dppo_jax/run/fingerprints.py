"""What a run depends on beside its config: its data, and the user's own code.

Both may become other under the same name. A run that goes on is to notice.
"""

from collections.abc import Callable
import hashlib
import importlib
import inspect
import json
import pathlib
from typing import Any

from dppo_jax import config as configs
from dppo_jax import data, rewards, user_code

_LENGTH = 32  # hexadecimal digits: two of 10**15 data sets are told apart


def of_run(
  config: configs.Config, train_set: data.ProblemSet
) -> dict[str, str]:
  """A fingerprint of what each of these options names.

  Of the problems counts what a step sees: text, answers, solutions, columns
  and the prompts as tokens, and so tokenizer and template too. Of a user's
  functions it is the file that they are in.
  """
  found = {"data.train": _of_problems(train_set)}
  references = {
    "method": [_reference(config.method.factory)],
    "objective": [_reference(config.objective.factory)],
    "reward.functions": [
      spec.reference
      for spec in rewards.parse(config.reward.functions)
      if not spec.is_ours
    ],
  }
  for name, some in references.items():
    files = [file for x in some if x and (file := _file(x))]
    if files:
      found[name] = _digest(*(file.read_bytes() for file in files))
  return found


def _of_problems(problems: data.ProblemSet) -> str:
  texts = (
    problems.names,
    problems.problems,
    problems.answers,
    problems.solutions,
    problems.columns,
  )
  # One at a time: the columns of a large source take much as one text.
  return _digest(
    *(json.dumps(x, default=_plain, sort_keys=True).encode() for x in texts),
    problems.tokens.tobytes(),
    problems.lengths.tobytes(),
  )


def _plain(value: Any) -> Any:
  """What JSON has no word for: nothing whose text holds an address."""
  if isinstance(value, bytes):
    return value.hex()
  if hasattr(value, "tolist"):
    return value.tolist()
  return type(value).__name__


def _digest(*parts: bytes) -> str:
  whole = hashlib.sha256()
  for part in parts:
    whole.update(hashlib.sha256(part).digest())
  return whole.hexdigest()[:_LENGTH]


def _reference(factory: Callable) -> str:
  """Of a user's function; empty for one of ours."""
  if factory.__module__.startswith("dppo_jax."):
    return ""
  return user_code.reference_of(factory)


def _file(reference: str) -> pathlib.Path | None:
  """The file that a reference points into, where it is known and there."""
  place = reference.rpartition(":")[0]
  if not place.endswith(".py"):
    try:
      place = inspect.getsourcefile(importlib.import_module(place)) or ""
    except Exception:  # whatever an import may raise: the grader tells of it
      return None
  return pathlib.Path(place) if pathlib.Path(place).is_file() else None
