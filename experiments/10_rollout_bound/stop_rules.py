"""Rules of stopping that are learned from logs, by dynamic programming.

A rule sees a few things of a prefix, in bins, and sets the probability with
which a completion continues; the last stage may choose which of the completions
that lived are trained on, by their residuals, as `neyman` does.
"""

import itertools

import numpy as np

from . import bounds
from .logged import Logged
from .moments import Moments, Objective, last_visit, live_tokens

STOPS = (0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the longest
BINS = 4
DRAWS = 32
_PROBS = np.geomspace(1.0, 0.05, 16)
_PRICES = np.geomspace(0.1, 30.0, 13)


def costs(log: Logged) -> np.ndarray:
  """`[2, K, G]`: seconds of a completion's rollout and of its update."""
  live = live_tokens(log.rewards, log.lengths)
  return np.stack(
    [
      log.shares.rollout * log.lengths / log.lengths.sum(),
      log.shares.update * live / max(live.sum(), 1),
    ]
  )


def quantile_bins(x: np.ndarray, num: int) -> np.ndarray:
  edges = np.quantile(x, np.arange(1, num) / num)
  return np.searchsorted(np.unique(edges), x)


def baselined(rewards, weights, prior, is_exact: bool) -> np.ndarray:
  """`[..., G]`: what the completions' gradients are multiplied by, times G.

  Args:
    rewards: `[..., G]`; those of weight 0 are not looked at.
    weights: `[..., G]`, 1 / probability; 0 for those that were stopped.
    prior: a guess of the rewards' mean from before the step.
    is_exact: the mean over stops is the leave-one-out gradient of these very
      completions; else the baseline is the weighted mean of the others that
      lived, and the mean over completions too is the policy gradient, if they
      count as sums of their tokens.
  """
  others = lambda x: x.sum(axis=-1, keepdims=True) - x
  if is_exact:
    num = rewards.shape[-1]
    baseline = prior + others(weights * (rewards - prior)) / (num - 1)
  else:
    lived = others(weights)
    mean = others(weights * rewards) / np.where(lived > 1e-9, lived, 1.0)
    baseline = np.where(lived > 1e-9, mean, prior)
  return weights * (rewards - baseline)


def learned(
  log: Logged,
  objective: Objective,
  m: Moments,
  folds,
  with_visit: bool,
  chooses: bool,
  stops: bool = True,
) -> dict[str, float]:
  """Gains of a rule fitted on some groups and used on others.

  Args:
    folds: pairs of `[K]`, the groups to fit on and those to use it on.
    with_visit: it also knows how many of the prompt's others were right.
    chooses: among those that lived, by the residuals of their tokens.
    stops: False to do nothing but that.
  """
  # A mean over tokens ties a gradient to its length: no other baseline than
  # the exact one leaves its expectation alone.
  baselines = (True,) if objective.is_mean else (True, False)
  paths = _paths(log, m, with_visit, chooses, stops)
  fixed = log.shares.rest + (0.0 if stops else log.shares.rollout)
  outcomes = {}
  for fold, (train, test) in enumerate(folds):
    for price in _PRICES:
      policy = _fit(paths, np.repeat(train, log.rewards.shape[1]), price)
      cost, *probs = _run(paths, policy, chooses)
      for is_exact in baselines:
        outcomes[fold, price, is_exact] = [
          (cost[rows].sum(), _added(log, m, paths, probs, rows, is_exact))
          for rows in (train, test)
        ]
  gains, whole = {}, paths["segments"].sum(axis=0) + paths["end"]
  for r in bounds.RATIOS:
    cost, added = fixed, 0.0
    for fold, (train, test) in enumerate(folds):

      def took(key, fold=fold, train=train, r=r):
        share, (spent, noise) = train.mean(), outcomes[fold, *key][0]
        return bounds.seconds(fixed + spent / share, noise / share, r)

      best = min(itertools.product(_PRICES, baselines), key=took)
      spent, noise = outcomes[fold, *best][1]
      if took(best) > 1:  # to do nothing is a rule as well
        spent, noise = whole.reshape(len(test), -1)[test].sum(), 0.0
      cost, added = cost + spent, added + noise
    gains[bounds.name(r)] = 1 / bounds.seconds(cost, added, r)
  return gains


def _added(log, m, paths, probs, rows, is_exact: bool) -> float:
  """Variance added to the gradients of these groups, by draws."""
  generator = np.random.default_rng(0)
  lived, trained = (prob[rows] for prob in probs)
  shape, products = (DRAWS, *lived.shape), m.products[rows]
  prior = paths["prior"][rows, None]
  weights = (generator.random(shape) < lived) / lived
  factors = baselined(log.rewards[rows], weights, prior, is_exact)
  chosen = trained / lived
  factors = factors * (generator.random(shape) < chosen) / chosen
  square = lambda x: np.einsum(
    "...kg,kgh,...kh->...", x, products, x, optimize=True
  )
  more = square(factors / lived.shape[1]).mean() - square(m.factors[rows])
  return more / (len(rows) * m.variance)


def _paths(log, m: Moments, with_visit: bool, chooses: bool, stops: bool):
  """Every completion's life: what it costs, is worth and shows at each stage.

  Returns:
    segments: `[S, U]`, seconds from each stop to the next or the end; of the
      update, if that is a stage.
    end: `[U]`, seconds of the update, if it is not.
    value: `[U]`, the second moment. alive: `[S, U]`, at that stage.
    shows: `[S, U]`, the bin that it is in.
    prior: `[K]`, a guess of the group's mean reward.
  """
  rollout, update = costs(log).reshape(2, -1)
  before, group = last_visit(log), log.rewards.shape[1]
  segments, alive, shows = [], [], []
  if stops:
    visit = np.repeat(np.digitize(before, [0.01, 1.0]) * with_visit, group)
    segments, alive, shows = _stops(log, rollout, visit)
  if chooses:
    squares = ((1 - np.exp(log.logprobs)) ** 2).sum(axis=2)
    guess = (m.factors**2 * m.share**2 * squares).ravel()
    bins = np.zeros(len(guess), int)
    bins[guess > 0] = 1 + quantile_bins(guess[guess > 0], 2 * BINS)
    segments, shows = [*segments, update], [*shows, bins]
    alive = [*alive, np.ones(len(guess), bool)]
  prior = before if with_visit else np.full(len(before), log.rewards.mean())
  return {
    "segments": np.stack(segments),
    "end": update * (not chooses),
    "value": m.values.ravel(),
    "alive": np.stack(alive),
    "shows": np.stack(shows),
    "prior": prior,
  }


def _stops(log: Logged, rollout: np.ndarray, visit: np.ndarray):
  """Segments, who is alive, and bins of the mean log-probability so far."""
  lengths, group = log.lengths.ravel(), log.rewards.shape[1]
  stops = np.unique((np.array(STOPS) * lengths.max()).astype(int))
  until = np.append(stops[1:], lengths.max())
  in_segment = np.clip(lengths, stops[:, None], until[:, None]) - stops[:, None]
  total = log.logprobs.reshape(len(lengths), -1).cumsum(axis=1)
  shows = []
  for stop in stops:
    seen = (
      total[:, stop - 1] / stop if stop else log.prompt_lengths.repeat(group)
    )
    bins, is_alive = np.zeros(len(lengths), int), lengths > stop
    bins[is_alive] = quantile_bins(seen[is_alive], BINS)
    shows.append(visit * BINS + bins)
  segments = in_segment * (rollout / lengths)
  return list(segments), list(lengths > stops[:, None]), shows


def _fit(paths: dict, rows: np.ndarray, price: float) -> list[np.ndarray]:
  """Backwards: in each bin, the best probability not above what is left.

  Minimises cost + price * variance; `[bins, P]` of each stop: from the index of
  the probability so far to that of the next.
  """
  u = np.flatnonzero(rows)
  # By index of the probability with which a completion lives to its end.
  later = (
    paths["end"][u, None] * _PROBS + price * paths["value"][u, None] / _PROBS
  )
  num, policy = paths["shows"].max() + 1, []
  for stop in reversed(range(len(paths["segments"]))):
    alive, shows = paths["alive"][stop, u], paths["shows"][stop, u]
    here = paths["segments"][stop, u, None] * _PROBS + later
    total = np.zeros((num, len(_PROBS)))
    np.add.at(total, shows[alive], here[alive])
    # An empty bin continues with probability 1.
    total[np.bincount(shows[alive], minlength=num) == 0] = np.arange(
      len(_PROBS)
    )
    best = np.stack(
      [p + total[:, p:].argmin(axis=1) for p in range(len(_PROBS))], axis=1
    )
    moved = np.take_along_axis(here, best[shows], axis=1)
    later = np.where(alive[:, None], moved, later)
    policy.append(best)
  return policy[::-1]


def _run(paths: dict, policy: list, chooses: bool):
  """`[K, G]` each: mean cost, and probabilities to live and to be trained."""
  cost, at = 0.0, np.zeros(len(paths["end"]), int)
  lived = at
  for stage, best in enumerate(policy):
    alive, lived = paths["alive"][stage], at
    at = np.where(alive, best[paths["shows"][stage], at], at)
    cost = cost + paths["segments"][stage] * _PROBS[at] * alive
  cost = cost + paths["end"] * _PROBS[at]
  shape = (len(paths["prior"]), -1)
  lived = lived if chooses else at
  return tuple(x.reshape(shape) for x in (cost, _PROBS[lived], _PROBS[at]))
