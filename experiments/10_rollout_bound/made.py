"""Lengths that are made: lognormal, which real completions resemble.

Nothing is known here of gradients; a completion's second moment is taken to go
as a power of its length: -1 for a mean over tokens whose gradients point
nowhere in particular, 1 for their sum, 0 between.
"""

import statistics

import numpy as np

from . import bounds, slots
from .bounds import Cells

SPREADS = (0.5, 1.0)  # standard deviations of the log
POWERS = (-1, 0, 1)
SHARES = (1.0, 0.6)  # of rollout in a step
MEDIAN = 256  # tokens
COMPLETIONS = 512


def lengths(spread: float, num: int) -> np.ndarray:
  """`[num]`, quantiles of the distribution, in whole tokens."""
  normal = statistics.NormalDist()
  at = (np.arange(num) + 0.5) / num
  return MEDIAN * np.exp(spread * np.array([normal.inv_cdf(x) for x in at]))


def measure() -> list[dict]:
  rows = []
  for spread in SPREADS:
    tokens = lengths(spread, 4096)
    for power in POWERS:
      value = tokens**power / (tokens**power).sum()
      cost = tokens / tokens.sum()
      for share in SHARES:
        cells = Cells(share * cost, value, 1 - share)
        rows.append(
          {
            "rule": "stopping while generating",
            "objective": f"second moment as length^{power}",
            "knows": "length",
            "is": "bound",
            "batch": f"lognormal, {spread:g}, rollout {share:.0%}",
            "cauchy_schwarz": bounds.cauchy_schwarz(value, cost),
            **bounds.gains(cells),
          }
        )
    rows += _tails(spread)
  return rows


def _tails(spread: float) -> list[dict]:
  """Bounds the cost of a batch's longest completions in slots."""
  queue = np.random.default_rng(0).permutation(lengths(spread, COMPLETIONS))
  queue = np.ceil(queue).astype(int)
  rows = []
  for share, knowledge in ((1, "a slot each"), (8, "a slot for eight")):
    num_slots = COMPLETIONS // share
    steps, _ = slots.simulate(queue, num_slots, "tpu")
    busy = queue.sum() / num_slots
    rows += [
      {
        "rule": "no tail at all",
        "objective": "any",
        "knows": knowledge,
        "is": "bound",
        "batch": f"lognormal, {spread:g}, rollout {rollout:.0%}",
        "decode_steps": steps,
        "without_tail": busy,
        "r=inf": 1 / (1 - rollout * (1 - busy / steps)),
      }
      for rollout in SHARES
    ]
  return rows
