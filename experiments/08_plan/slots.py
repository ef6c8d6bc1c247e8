"""Decode slots that are busy on lognormal lengths, simulated.

  python -m experiments.08_plan.slots

Half of the variance of a completion's log-length is that of its prompt. The
means of 20 batches are printed as a table.
"""

import importlib

import numpy as np

from dppo_jax.analysis import tables
from dppo_jax.rollout import decode

simulate = importlib.import_module(
  "experiments.10_rollout_bound.slots"
).simulate_stages

GROUP, BATCHES = 8, 20
# Completions, slots, their median and longest length, in tokens.
CASES = (
  (512, 64, 200, 512),
  (512, 64, 150, 1024),
  (1024, 64, 300, 2048),
  (512, 128, 200, 512),
  (512, 512, 200, 512),
)


def by_quarters(num_slots: int) -> list[int]:
  """Returns the schedule of accelerators before it was halved."""
  sizes = [num_slots]
  while sizes[-1] // 4 >= 16:
    sizes.append(sizes[-1] // 4)
  return sizes


SCHEDULES = {
  "before": by_quarters,
  "tpu, gpu": lambda num: decode.slot_schedule(num, "tpu"),
  "cpu": lambda num: decode.slot_schedule(num, "cpu"),
}


def draw(
  rng: np.random.Generator, num: int, median: int, most: int, deviation: float
) -> tuple[np.ndarray, np.ndarray]:
  """Returns lengths, and those of the same batch with long prompts first."""
  prompts = rng.normal(size=(num // GROUP, 1)) * 0.5**0.5
  each = rng.normal(size=(num // GROUP, GROUP)) * 0.5**0.5
  lengths = median * np.exp(deviation * (prompts + each))
  lengths = np.clip(np.ceil(lengths), 1, most).astype(int)
  ordered = lengths[np.argsort(-prompts[:, 0])]
  return lengths.ravel(), ordered.ravel()


def rows() -> list[list[str]]:
  """Returns the fraction of busy slots in each case, and with known lengths."""
  rng, lines = np.random.default_rng(0), []
  for num, slots, median, most in CASES:
    for deviation in (0.4, 0.6, 0.8):
      busy = {name: [] for name in [*SCHEDULES, "known"]}
      for _ in range(BATCHES):
        lengths, ordered = draw(rng, num, median, most, deviation)
        for name, schedule in SCHEDULES.items():
          _, total = simulate(lengths, schedule(slots))
          busy[name].append(lengths.sum() / total)
        _, total = simulate(ordered, SCHEDULES["tpu, gpu"](slots))
        busy["known"].append(lengths.sum() / total)
      case = map(str, (num, slots, median, most, deviation))
      lines.append([*case, *(f"{np.mean(x):.3f}" for x in busy.values())])
  return lines


def main() -> None:
  head = ["completions", "slots", "median", "limit", "deviation", *SCHEDULES]
  print(tables.markdown([*head, "expected lengths known"], rows()))


if __name__ == "__main__":
  main()
