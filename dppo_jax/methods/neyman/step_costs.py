"""What steps have cost so far, for rules that set their own share."""

from collections.abc import Mapping

import jax
import numpy as np

from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.records import Measured, TrainState

DECAY = 0.95  # of earlier steps, at each further one
_NAMES = (
  *("steps", "update", "rollout", "step"),
  *("micros", "rows", "trained", "generated"),
)


def of_step(values: Mapping[str, float]) -> dict[str, float]:
  """What counts of a step's metrics; nothing of one that measures noise.

  Such a step takes longer than the others.
  """
  if values.get("noise/measured"):
    return dict.fromkeys(_NAMES, 0.0)
  seconds = lambda *stages: sum(
    values.get(f"{stage}/seconds", 0.0) for stage in stages
  )
  return {
    "steps": 1.0,
    "update": seconds("score", "update"),
    "rollout": seconds("rollout", "reward"),
    "step": seconds("step"),
    "micros": float(values["update/micro_batches"]),
    "rows": float(values["pack/rows"]),
    "trained": float(values["tokens/trained"]),
    "generated": float(values["tokens/generated"]),
  }


class Costs:
  """Seconds of the stages against tokens, smoothed over the last steps."""

  def __init__(self, rows_per_micro: int):
    self._rows_per_micro = rows_per_micro
    self._sums = dict.fromkeys(_NAMES, 0.0)

  def add(self, new: Mapping[str, float]) -> None:
    """Takes one more step, of `of_step`."""
    decay = DECAY if new["steps"] else 1.0
    self._sums = {x: decay * self._sums[x] + new[x] for x in _NAMES}

  def measured(self, state: TrainState) -> Measured:
    """What the next step may know; all seconds are 0 before the first."""
    s = self._sums
    ratio = lambda x, y: x / y if y > 0 else 0.0
    scaled = s["rollout"] + s["update"]
    numbers = (
      ratio(s["update"], s["micros"]),
      ratio(self._rows_per_micro * s["trained"], s["rows"]),
      ratio(s["step"] - s["update"], s["steps"]),
      ratio(scaled, s["generated"]),
      max(ratio(s["step"] - scaled, s["steps"]), 0.0),
    )
    noise_share = 1.0
    if state.noise:
      noise_share = gradient_noise.share(jax.device_get(state.noise))
    return Measured(*map(np.float32, (noise_share, *numbers)))
