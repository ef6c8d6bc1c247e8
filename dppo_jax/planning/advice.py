"""Whether a config fits, and with which changes it would."""

import copy
import itertools
from typing import NamedTuple

from dppo_jax import config as configs
from dppo_jax.planning import memory_estimate
from dppo_jax.planning.assumed import abstract_mesh, assumed_run
from dppo_jax.planning.hardware import CHIPS, Hardware

_MOST_DEVICES = 1024
_FEWEST_SLOTS = 8

# Which options lower a stage's memory, the first to try first.
_ROLLOUT = (
  "rollout.num_slots",
  "mesh.model",
  "rollout.shard_weights=True",
)
LOWER = {
  "choose_prompts": ("mesh.model",),
  "to_inference_params": ("mesh.model", "rollout.shard_weights=True"),
  "roll_out": _ROLLOUT,
  "evaluate": _ROLLOUT,
  "select": ("data.prompts_per_step", "rollout.max_tokens"),
  "score": ("pack.rows_per_micro", "mesh.model"),
  "update": (
    "pack.rows_per_micro",
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


def sums(config: configs.Config, hardware: Hardware) -> dict[str, float]:
  """Bytes of one device by moment.

  Raises:
    ValueError: for a config that cannot work on so many devices.
  """
  mesh = abstract_mesh(config.mesh, hardware.num)
  run = assumed_run(config, mesh, hardware.chip.platform)
  return {
    name: sum(x.values()) for name, x in memory_estimate.moments(run).items()
  }


def find(config: configs.Config, hardware: Hardware) -> Change | None:
  """The smallest change with which a config fits, by sums.

  First settings on the same devices: fewer slots and rows, the weights of the
  rollout divided, layers over more devices; then twice as many devices.
  """
  num = hardware.num
  while num <= _MOST_DEVICES:
    wider = hardware if num == hardware.num else Hardware(hardware.kind, num)
    for factor, divided in itertools.product((1, 2, 4, 8), (False, True)):
      changed = copy.deepcopy(config)
      changed.mesh.model *= factor
      changed.rollout.shard_weights |= divided
      try:
        size = _lower(changed, wider)
      except ValueError:  # not on so many devices
        continue
      if size:
        was = dict((name, x) for name, x, _ in configs.walk(config))
        options = {
          name: x for name, x, _ in configs.walk(changed) if x != was[name]
        }
        return Change(options, wider, size)
    num *= 2
  return None


def _lower(config: configs.Config, hardware: Hardware) -> float:
  """Halves slots and rows until they fit; bytes then, 0 where nothing helps."""
  while True:
    found = sums(config, hardware)
    over = {name for name, size in found.items() if size > hardware.memory}
    if not over:
      return max(found.values())
    r, p = config.rollout, config.pack
    if "roll_out" in over and r.num_slots > _FEWEST_SLOTS:
      r.num_slots = max(r.num_slots // 2, _FEWEST_SLOTS)
    elif "update" in over and p.rows_per_micro > 1:
      p.rows_per_micro //= 2
    else:
      return 0.0


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
        moments = sums(config, hardware)
      except ValueError:
        continue
      name = max(moments, key=moments.get)
      if moments[name] <= hardware.memory:
        found[kind] = num, name, moments[name]
    num *= 2
  return {kind: found[kind] for kind in CHIPS if kind in found}
