"""Training on a random prefix of each completion: `P(cut >= t) = q_t`.

Token t has the weight `1 / q_t`. With `T_t` the gradient of a completion from
token t to its end, the variance that this adds is

  sum_t (1 / q_t - 1) (|T_t|^2 - |T_(t+1)|^2),

exactly, since two tokens are both trained as often as the later of them. It
saves time in the update alone, and is compared with a choice of completions.
"""

import numpy as np

from . import bounds
from .bounds import Cells
from .logged import PARTS, Logged
from .moments import OBJECTIVES, live_tokens, moments


def measure(log: Logged) -> list[dict]:
  """Measures gains of the step, and of the update alone (`update r=...`)."""
  is_live = live_tokens(log.rewards, log.lengths) > 0
  is_kept = is_live.ravel()[log.parts_of]
  log = log._replace(parts=log.parts[is_kept], parts_of=log.parts_of[is_kept])
  # Of the tokens of an update; siblings share their prompt's.
  prompts = log.prompt_lengths[is_live.any(axis=1)].sum()
  prompts = prompts / (prompts + log.lengths[is_live].sum())
  update = log.shares.update
  rows = []
  for name, objective in OBJECTIVES.items():
    for (rule, knows), way in _ways(*_part_values(log, objective)).items():
      row = {"rule": rule, "objective": name, "knows": knows}
      row["is"] = "bound" if knows == "everything" else "rule"
      # A rule pays for all prompts; a bound for none.
      paid = prompts if row["is"] == "rule" else 0.0
      for prefix, share in (("", update), ("update ", 1.0)):
        took = _gains(log, *way, share * (1 - paid))
        row |= {prefix + r: gain for r, gain in took.items()}
      rows.append(row)
  return rows


def _ways(true: np.ndarray, guessed: np.ndarray) -> dict:
  """Rule and knowledge to the arguments of `_gains` after the log."""
  one = lambda x: x.sum(axis=1, keepdims=True)
  law = true.sum(axis=0, keepdims=True)
  return {
    ("Neyman's completions", "everything"): (one(true), one(true), False, 0),
    ("Neyman's completions", "residuals"): (one(true), one(guessed), False, 0),
    ("prefix cuts, one law for all", "everything"): (law, law, True, 0),
    ("prefix cuts, none left out", "everything"): (true, true, True, 1),
    ("prefix cuts", "everything"): (true, true, True, 0),
    ("prefix cuts", "residuals"): (true, guessed, True, 0),
  }


def _part_values(log: Logged, objective) -> tuple[np.ndarray, np.ndarray]:
  """`[M, PARTS]`, true and guessed: how the tails' second moments fall.

  The guess takes tokens' gradients to be uncorrelated, and their squares to be
  in proportion to (1 - p)^2. Over the unpruned variance, scaled to all that are
  trained.
  """
  m = moments(log, objective)
  lengths = log.lengths.ravel()[log.parts_of]
  factors = (m.factors * m.share).ravel()[log.parts_of]
  live = live_tokens(log.rewards, log.lengths)
  scale = (live > 0).sum() / len(lengths) / (len(log.rewards) * m.variance)
  true = tail_values(log.parts)
  logprobs = log.logprobs.reshape(-1, log.logprobs.shape[2])[log.parts_of]
  squares = (1 - np.exp(logprobs)) ** 2
  ends = np.arange(1, PARTS + 1) * lengths[:, None] // PARTS
  until = np.append(np.zeros((len(squares), 1)), squares.cumsum(axis=1), axis=1)
  sums = np.take_along_axis(until, ends, axis=1)
  guessed = np.diff(sums, axis=1, prepend=0.0)
  guessed *= true.sum() / guessed.sum()
  return tuple(x * (factors**2 * scale)[:, None] for x in (true, guessed))


def tail_values(products: np.ndarray) -> np.ndarray:
  """`[M, P]`: |T_t|^2 - |T_(t+1)|^2 from the parts' inner products."""
  num = products.shape[1]
  tails = [products[:, k:, k:].sum(axis=(1, 2)) for k in range(num)]
  return -np.diff(np.stack(tails, axis=1), axis=1, append=0.0)


def _gains(log, value, guess, is_cut: bool, first: int, update: float) -> dict:
  """Gains of the best probabilities for the guess, at the true values.

  Args:
    value, guess: `[M, parts]`; `[1, parts]` is one law for all.
    first: so many parts are trained always.
    update: share of a step's seconds that goes as the tokens trained.
  """
  lengths = log.lengths.ravel()[log.parts_of]
  if len(value) == 1:
    lengths = lengths.sum(keepdims=True)
  parts = np.repeat(lengths[:, None] / value.shape[1], value.shape[1], axis=1)
  cost = update * parts / lengths.sum()
  fixed = 1 - update + cost[:, :first].sum()
  cost, value, guess = cost[:, first:], value[:, first:], guess[:, first:]
  pools = [
    _pools(c, v) if is_cut else np.zeros(1, int)
    for c, v in zip(cost, guess, strict=True)
  ]
  base = np.cumsum([0, *(p[-1] + 1 for p in pools)])
  cell = np.concatenate([p + b for p, b in zip(pools, base, strict=False)])
  add = lambda x: np.bincount(cell, x.ravel())
  guessed = Cells(add(cost), np.maximum(add(guess), 0.0), fixed)
  true = Cells(guessed.cost, add(value), fixed)
  gains, floor = {}, 0.02 if (guess != value).any() else 0.0
  for r in bounds.RATIOS:
    prob = bounds.optimum(guessed, r, floor)
    took = bounds.seconds(*bounds.outcome(true, prob), r)
    gains[bounds.name(r)] = 1 / took
  return gains


def _pools(cost: np.ndarray, value: np.ndarray) -> np.ndarray:
  """Returns the pool of each entry; see `bounds.pool`."""
  pooled = bounds.pool(Cells(cost, value)).cost
  return np.searchsorted(
    pooled.cumsum() - 1e-12 * cost.sum(), cost.cumsum() - 0.5 * cost
  )
