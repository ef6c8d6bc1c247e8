"""Predictions of a problem's next group from its earlier ones.

The posterior is that of `neyman_prompts`, with its defaults. Gains are of
gradients a second, if seconds are proportional to the prompts: of probabilities
`p` over the uniform choice of equally many prompts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dppo_jax.methods.neyman import pass_rates

from . import run

FORGETTING, PRIOR, KAPPA = 0.5, 0.2, 0.25  # defaults of `neyman_prompts`
LEAST = 0.1  # least probability over the mean one
RATES = (0.5, 0.7)  # of dppo
NAMES = (
  "possible gain of the posterior",
  "its gain seen",
  *(f"gain of dppo's threshold at {x}" for x in RATES),
)


class Knowledge(NamedTuple):
  """Predictions for the groups of an epoch, and how they came out.

  Attributes:
    groups: groups of problems that were visited before.
    predicted, true: fraction of them without variance.
    gains: as `NAMES`.
  """

  groups: int
  predicted: float
  true: float
  gains: tuple[float, ...]


def knowledge(lines: Sequence[dict]) -> Knowledge | None:
  """Returns what earlier epochs know of the last line's groups, if anything.

  Args:
    lines: measurements of the epochs of a run.
  """
  size = run.GROUP
  counts: dict[int, np.ndarray] = {}
  scores: dict[int, float] = {}
  for line in lines[:-1]:
    counts = {key: FORGETTING * x for key, x in counts.items()}
    for problem, right in line["groups"]:
      old = counts.get(problem, np.zeros(2))
      counts[problem] = old + FORGETTING * np.array([right, size - right])
      scores[problem] = _score(right, size)
  known = [x for x in lines[-1]["groups"] if x[0] in counts]
  if not known:
    return None
  beta = np.array([counts[x] for x, _ in known]).T + PRIOR
  right, wrong = jnp.asarray(beta, jnp.float32)
  now = np.array([x for _, x in known])
  mixed = pass_rates.prob_mixed(right, wrong, jnp.int32(size))
  moment = pass_rates.second_moment(right, wrong, jnp.int32(size), KAPPA)
  moment = np.asarray(moment, float)
  is_mixed = (now > 0) & (now < size)
  rate = now / size
  square = is_mixed + 4 * KAPPA * rate * (1 - rate)  # of the group's gradient
  root = np.sqrt(moment)
  root = np.maximum(root, LEAST * root.mean())
  last = np.array([scores[x] for x, _ in known])
  is_low = last < last.mean()
  gains = [moment.mean() / np.sqrt(moment).mean() ** 2, gain(root, square)]
  gains += [gain(np.where(is_low, 1 - x, 1.0), square) for x in RATES]
  return Knowledge(
    len(known),
    float(1 - np.mean(mixed)),
    float(1 - is_mixed.mean()),
    tuple(map(float, gains)),
  )


def gain(prob: np.ndarray, square: np.ndarray) -> float:
  """Returns the second moment of uniform choices over that of a weighted one.

  Args:
    prob: probabilities up to a factor.
    square: squared norms of the groups' gradients.
  """
  return float(square.mean() / (prob.mean() * (square / prob).mean()))


def _score(right: int, size: int) -> float:
  """Returns the mean |advantage| up to a factor, as dppo's history has it."""
  return float(np.sqrt(right * (size - right)))
