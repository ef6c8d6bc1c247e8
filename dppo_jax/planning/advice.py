"""Whether a config fits, and with which changes it would."""

from collections.abc import Iterator
import copy
from typing import NamedTuple

from dppo_jax import config as configs
from dppo_jax.planning import memory
from dppo_jax.planning.assumed import abstract_mesh, assumed_run
from dppo_jax.planning.hardware import CHIPS, Hardware

_MOST_DEVICES = 1024
_FEWEST_SLOTS = 8

# Which options lower a stage's memory, the first to try first.
LOWER = {
  "choose_prompts": ("mesh.model",),
  "to_inference_params": ("mesh.model",),
  "roll_out": ("rollout.num_slots", "rollout.prefill_batch", "mesh.model"),
  "evaluate": ("rollout.num_slots", "rollout.prefill_batch", "mesh.model"),
  "select": ("data.prompts_per_step", "rollout.max_tokens"),
  "score": ("pack.rows_per_micro", "pack.logit_chunk", "mesh.model"),
  "update": (
    "pack.rows_per_micro",
    "pack.logit_chunk",
    "model.remat=layers",
    "pack.row_length",
    "mesh.model",
  ),
}


class Change(NamedTuple):
  """A config that fits where another does not.

  Attributes:
    options: values that differ, by option.
    hardware: on which it fits.
    bytes: of one device at the largest moment.
  """

  options: dict[str, int]
  hardware: Hardware
  bytes: float


def largest(config: configs.Config, hardware: Hardware) -> tuple[str, float]:
  """The moment that takes the most of a device's memory, and its bytes.

  Raises:
    ValueError: for a config that cannot work on so many devices.
  """
  mesh = abstract_mesh(config.mesh, hardware.num)
  run = assumed_run(config, mesh, hardware.chip.platform)
  sums = {name: sum(x.values()) for name, x in memory.moments(run).items()}
  name = max(sums, key=sums.get)
  return name, sums[name]


def find(config: configs.Config, hardware: Hardware) -> Change | None:
  """The smallest change with which a config fits, by sums.

  First settings on the same devices: fewer slots, fewer rows, layers over more
  devices; then twice as many devices, and so on.
  """
  num = hardware.num
  while num <= _MOST_DEVICES:
    wider = hardware if num == hardware.num else Hardware(hardware.kind, num)
    for options in _settings(config):
      changed = copy.deepcopy(config)
      for name, value in options.items():
        section, _, field = name.partition(".")
        setattr(getattr(changed, section), field, value)
      try:
        _, size = largest(changed, wider)
      except ValueError:  # not on so many devices
        continue
      if size <= wider.memory:
        return Change(options, wider, size)
    num *= 2
  return None


def smallest(config: configs.Config) -> dict[str, tuple[int, str, float]]:
  """Of each kind of device how many hold a config as it is, by sums.

  Returns:
    By kind the number, the largest moment and its bytes; kinds of which not
    even the largest number does are missing.
  """
  found, num = {}, 1
  while num <= _MOST_DEVICES and len(found) < len(CHIPS):
    for kind in CHIPS.keys() - found.keys():
      hardware = Hardware(kind, num)
      try:
        name, size = largest(config, hardware)
      except ValueError:
        continue
      if size <= hardware.memory:
        found[kind] = num, name, size
    num *= 2
  return {kind: found[kind] for kind in CHIPS if kind in found}


def _settings(config: configs.Config) -> Iterator[dict[str, int]]:
  """Changes to try, from none to many."""
  slots, rows = config.rollout.num_slots, config.pack.rows_per_micro
  for model in (1, 2, 4, 8):
    split = {"mesh.model": config.mesh.model * model} if model > 1 else {}
    for divisor in (1, 2, 4, 8, 16):
      fewer = {}
      if divisor > 1:
        fewer["rollout.num_slots"] = max(slots // divisor, _FEWEST_SLOTS)
        fewer["pack.rows_per_micro"] = max(rows // divisor, 1)
      yield split | {
        name: x
        for name, x in fewer.items()
        if x < {"rollout.num_slots": slots, "pack.rows_per_micro": rows}[name]
      }
