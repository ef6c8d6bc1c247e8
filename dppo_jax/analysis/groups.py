"""Runs that differ in their seed alone, named after what they differ in.

Without jax, so that what only reads runs starts at once.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

from dppo_jax.analysis.runs import Run

# What makes a run no other experiment: they say how long it went on, what it
# looked at and what it told. Where `steps` decides a schedule, it counts.
IGNORED = {
  "seed",
  "steps",
  "eval.every",
  "checkpoint.every",
  "checkpoint.keep",
  "sft.from_run",
  "log.writers",
  "log.project",
}
MOST_NAMED = 3  # options in a label
# Words that say nothing without their section.
VAGUE = {"dtype", "eval", "every", "limit", "path", "prompts", "steps", "train"}


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs of one config, a seed each.

  Attributes:
    label: short; unlike those of the other groups.
    options: what differs from other groups, by dotted name.
  """

  label: str
  runs: list[Run]
  options: dict[str, Any]

  @property
  def seeds(self) -> list[int]:
    return [run.seed for run in self.runs]


def group(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
  """The groups in the order of their first runs.

  Returns:
    The groups, and a line for each run that is left out: of one seed a group
    takes one run, as copies would pass for independent ones.
  """
  found: list[tuple[dict, list[Run]]] = []
  left_out = []
  for run in runs:
    options = _options(run)
    same = next((group for group in found if _is_same(group[0], options)), None)
    if same is None:
      found.append((options, [run]))
      continue
    known, members = same
    same_seed = [other for other in members if other.seed == run.seed]
    if same_seed:
      left_out.append(
        f"{run.path}: left out, as {same_seed[0].path} has its config and its "
        f"seed {run.seed}"
      )
      continue
    members.append(run)
    known |= options  # those that are newer than the runs before
  differing = _differing([options for options, _ in found])
  labels = _labels([options for options, _ in found], differing)
  groups = [
    Group(label, members, options)
    for label, (_, members), options in zip(
      labels, found, differing, strict=True
    )
  ]
  return groups, left_out


def _options(run: Run) -> dict[str, Any]:
  """What makes the run the experiment that it is, by dotted name."""
  config = dict(run.config)
  config |= _start(run)
  ignored = set(IGNORED)
  if config.get("optimizer.schedule", "constant") != "constant":
    ignored.discard("steps")
  flat = {}
  for name, value in config.items():
    if name in ignored:
      continue
    if isinstance(value, dict):
      flat |= {f"{name}.{key}": x for key, x in value.items()}
    else:
      flat[name] = value
  return flat


def _start(run: Run) -> dict[str, Any]:
  """The fine-tuning that the run starts from, which may be another run's."""
  config, path = run.config, run.path
  for _ in range(10):  # a start of a start of ...
    start = config.get("sft.from_run")
    if not start:
      break
    places = (pathlib.Path(start), path.parent / pathlib.Path(start).name)
    path = next((x for x in places if (x / "config.json").exists()), None)
    try:
      config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError):  # gone, or not ours to read
      return {name: None for name in run.config if name.startswith("sft.")}
  return {name: x for name, x in config.items() if name.startswith("sft.")}


def _is_same(a: dict, b: dict) -> bool:
  """Whether two configs agree; an option that one lacks is newer than it."""
  method = ("method.", "objective.")
  names = (a.keys() & b.keys()) | {
    name for name in a.keys() ^ b.keys() if name.startswith(method)
  }
  return all(_value(a, name) == _value(b, name) for name in names)


def _value(options: dict, name: str) -> Any:
  return options.get(name)


def _differing(found: Sequence[dict]) -> list[dict[str, Any]]:
  """Of each group the options in which it differs from another.

  A method's arguments count among the groups of one method, an objective's
  among those of one objective: other methods have other arguments.
  """
  result = []
  for options in found:
    differing = {}
    for name, value in options.items():
      section, _, rest = name.partition(".")
      others = found
      if rest.startswith("args."):
        key = f"{section}.name"
        others = [x for x in found if x.get(key) == options.get(key)]
      if any(x.get(name, value) != value for x in others):
        differing[name] = value
    result.append(differing)
  return result


def _labels(found: Sequence[dict], differing: Sequence[dict]) -> list[str]:
  names = {name for options in differing for name in options}
  labels = []
  for options, differs in zip(found, differing, strict=True):
    label = str(options.get("method.name"))
    if "objective.name" in names:
      label += f", {options.get('objective.name')}"
    words = [
      f"{_short_name(name, names)}={_short_value(value)}"
      for name, value in differs.items()
      if name not in ("method.name", "objective.name")
    ]
    if len(words) > MOST_NAMED:
      words[MOST_NAMED:] = [f"+{len(words) - MOST_NAMED} more"]
    labels.append(" ".join([label, *words]))
  return [
    label if labels.count(label) == 1 else f"{label} #{labels[:i].count(label)}"
    for i, label in enumerate(labels)
  ]


def _short_name(name: str, names: set[str]) -> str:
  last = name.rpartition(".")[2]
  same = [x for x in names if x.rpartition(".")[2] == last]
  return name if len(same) > 1 or last in VAGUE else last


def _short_value(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:g}"
  if isinstance(value, str):
    return pathlib.PurePath(value).name or "none"
  if isinstance(value, list):
    return ",".join(map(str, value)) or "none"
  return str(value)
