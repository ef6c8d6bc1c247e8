"""Rules of how many completions to sample, each as draws from the pool.

A rule is `(pool, rng, budget) -> Drawn`; its budget is a share of the tokens
that the full batch generates. All arrays are `[D, Q, n]`: draws, prompts, and
completions in the order in which they are sampled.
"""

from typing import NamedTuple

import numpy as np

from . import allocations
from . import pool as pools
from .pool import GROUP, Pool

DRAWS = 500
MOST = 32  # completions of a prompt
HEAD = 0.8  # of ARRoL-like: predictions that are right
SMALL = 0.3  # of two-phase groups: p where the pilot's rewards are all alike


class Drawn(NamedTuple):
  """Estimates of one rule.

  Attributes:
    factors: `[D, Q, K]`, of the pool's scores. The full batch's gradient is a
      sum over 16 completions of each prompt, and so are these.
    generated, trained: tokens, means over draws.
    example: `[Q, n]`, lengths of what one draw trains on, 0 for what it does
      not.
    aim: `[Q, K]`, mean factors of what the objective is changed to, if it is.
  """

  factors: np.ndarray
  generated: float
  trained: float
  example: np.ndarray
  aim: np.ndarray | None = None


def full(pool: Pool, rng) -> Drawn:
  """The full batch: 16 completions of each prompt."""
  return _grouped(pool, rng, np.full(len(pool.rates), GROUP))


def _grouped(pool: Pool, rng, sizes: np.ndarray) -> Drawn:
  """Groups of `sizes`, advantages within each; 16 times the mean of each."""
  index, rewards, lengths = _draw(pool, rng, int(sizes.max()))
  is_made = np.arange(index.shape[2]) < sizes[:, None]
  terms = np.zeros(index.shape)
  for q, n in enumerate(sizes):
    right = rewards[:, q, :n]
    table = pool.advantages(int(n))
    terms[:, q, :n] = table[right.sum(axis=1)[:, None], right] * GROUP / n
  return _drawn(pool, index, terms, lengths * is_made)


def _allocated(allocate):
  """Samples as many of each prompt as an allocation says."""

  def rule(pool: Pool, rng, budget: float) -> Drawn:
    total = round(budget * GROUP * len(pool.rates))
    return _grouped(pool, rng, allocate(pool.seen, total, 2, MOST))

  return rule


def _fewer_prompts(pool: Pool, rng, budget: float) -> Drawn:
  """Whole groups of prompts drawn by chance, weight 1 / probability."""
  index, rewards, lengths = _draw(pool, rng, GROUP)
  keep = _by_chance(rng, len(pool.rates), budget * len(pool.rates))[..., None]
  terms = _advantages(pool, rewards) * keep / keep.mean()
  return _drawn(pool, index, terms, lengths * keep)


def _two_phase(pool: Pool, rng, budget: float) -> Drawn | None:
  """A pilot; with a known probability p, what its group adds to it.

  `g_pilot + Z / p (g_group - g_pilot)`, whose mean is that of the group for
  any advantages. A quarter of the group is the pilot, or two where the budget
  has no more.
  """
  pilot = 4 if budget >= 0.5 else 2
  share = (budget * GROUP - pilot) / (GROUP - pilot)
  if share <= 0:
    return None
  index, rewards, lengths = _draw(pool, rng, GROUP)
  right = rewards[..., :pilot].sum(axis=2)
  size = np.where((right == 0) | (right == pilot), SMALL, 1.0)
  prob = np.minimum(size * share / size.mean(axis=1, keepdims=True), 1.0)
  goes_on = rng.random(prob.shape) < prob
  of_pilot = np.zeros(rewards.shape)
  of_pilot[..., :pilot] = _advantages(pool, rewards[..., :pilot])
  of_pilot *= GROUP / pilot
  of_group = _advantages(pool, rewards)
  terms = of_pilot + (goes_on / prob)[..., None] * (of_group - of_pilot)
  is_made = (np.arange(GROUP) < pilot) | goes_on[..., None]
  return _drawn(pool, index, terms, lengths * is_made)


def _pilot_commit_like(pool: Pool, rng, budget: float) -> Drawn:
  """A quarter of a group; the rest where 1/8 to 3/4 of that is right.

  Trains on the mean over the groups that were completed. Prompts are as many,
  by chance, as the budget buys.
  """
  num, pilot = len(pool.rates), GROUP // 4
  index, rewards, lengths = _draw(pool, rng, GROUP)
  is_open = lambda rate: (rate >= 0.125) & (rate <= 0.75)
  goes_on = is_open(rewards[..., :pilot].mean(axis=2))
  cost = pilot + (GROUP - pilot) * goes_on.mean()
  rolled = _by_chance(rng, num, budget * GROUP * num / cost)
  keep = (rolled & goes_on)[..., None]
  count = np.maximum(keep.sum(axis=1, keepdims=True), 1)
  terms = _advantages(pool, rewards) * keep * num / count
  is_made = (np.arange(GROUP) < pilot) | keep
  of_pilot = pools.binomial(pilot, pool.rates)
  chance = of_pilot @ is_open(np.arange(pilot + 1) / pilot)
  aim = pools.expected(pool) * (chance * num / chance.sum())[:, None]
  return _drawn(pool, index, terms, lengths * is_made * rolled[..., None], aim)


def _reinforce_ada_like(pool: Pool, rng, budget: float) -> Drawn:
  """Rounds of 8 until 4 are right and 4 wrong, at most 4 rounds; 8 are kept.

  Kept are 4 of either kind, or more of one where the other has fewer; the
  advantage is the reward less the mean over all that were sampled. Prompts are
  as many, by chance, as the budget buys.
  """
  num, size, rounds = len(pool.rates), 8, 4
  index, rewards, lengths = _draw(pool, rng, size * rounds)
  right = rewards.cumsum(axis=2)[..., size - 1 :: size]
  num_sampled = size * np.arange(1, rounds + 1)
  is_enough = (right >= size // 2) & (num_sampled - right >= size // 2)
  last = np.where(is_enough.any(axis=2), is_enough.argmax(axis=2), rounds - 1)
  last = last[..., None]
  is_made = np.arange(size * rounds) < num_sampled[last]
  count = np.take_along_axis(right, last, axis=2)
  num_right = np.clip(size // 2, size - (num_sampled[last] - count), count)
  keep = np.zeros(rewards.shape, bool)
  for kind, number in ((1, num_right), (0, size - num_right)):
    is_kind = (rewards == kind) & is_made
    keep |= is_kind & (is_kind.cumsum(axis=2) <= number)
  rolled = _by_chance(rng, num, budget * GROUP * num / num_sampled[last].mean())
  rolled = rolled[..., None]
  terms = keep * (rewards - count / num_sampled[last]) * rolled
  terms *= GROUP / size / rolled.mean()
  p = pool.rates[:, None]
  has_both = (p > 0) & (p < 1)
  number = np.where(pool.rewards > 0, p, 1 - p) * pool.rewards.shape[1]
  aim = (pool.rewards - p) * GROUP / 2 / np.where(has_both, number, 1.0)
  return _drawn(pool, index, terms, lengths * is_made * rolled, aim * has_both)


def _duet_like(pool: Pool, rng, budget: float) -> Drawn:
  """More of what was mixed before; of what gets long, one in two is stopped.

  A completion that reaches half of the mean length continues with probability
  1/2 and then counts twice. Weights are divided by their sum in each group; the
  mean and deviation of the rewards are weighted too.
  """
  stop = pool.lengths.mean() / 2
  gets_long = pool.lengths > stop
  cost = np.where(gets_long, (stop + pool.lengths) / 2, pool.lengths)
  total = budget * GROUP * pool.lengths.sum(axis=1).sum() / cost.mean()
  total = round(total / pool.rewards.shape[1])
  sizes = allocations.duet_like(pool.seen, total, 2, MOST)
  index, rewards, lengths = _draw(pool, rng, int(sizes.max()))
  is_made = np.arange(index.shape[2]) < sizes[:, None]
  is_long = lengths > stop
  goes_on = ~is_long | (rng.random(index.shape) < 0.5)
  weight = np.where(is_made & goes_on, 1.0 + is_long, 0.0)
  weight /= np.maximum(weight.sum(axis=2, keepdims=True), 1e-9)
  mean = (weight * rewards).sum(axis=2, keepdims=True)
  square = (weight * (rewards - mean) ** 2).sum(axis=2, keepdims=True)
  advantages = (rewards - mean) / np.sqrt(np.maximum(square, 1e-9))
  terms = weight * np.where(square > 1e-9, advantages, 0.0) * GROUP
  sampled = np.where(goes_on, lengths, stop) * is_made
  return _drawn(pool, index, terms, sampled)


def _arrol_like(pool: Pool, rng, budget: float) -> Drawn:
  """Half of a group is stopped at half of the mean length, for balance.

  A head predicts whether a completion will be right, with a probability of
  `HEAD`. The completions that are continued have equally many predicted right
  and predicted wrong, if the group has them. Advantages are within these.
  """
  stop = pool.lengths.mean() / 2
  cost = (pool.lengths + np.minimum(pool.lengths, stop)).mean() / 2
  num = round(budget * GROUP * pool.lengths.mean() / cost / 2) * 2
  index, rewards, lengths = _draw(pool, rng, num)
  is_true = rng.random(rewards.shape) < HEAD
  predicted = np.where(is_true, rewards, 1 - rewards)
  num_right = predicted.sum(axis=2, keepdims=True)
  size = num // 2
  number = np.clip(size // 2, size - (num - num_right), num_right)
  keep = np.zeros(rewards.shape, bool)
  for kind, most in ((1, number), (0, size - number)):
    is_kind = predicted == kind
    keep |= is_kind & (is_kind.cumsum(axis=2) <= most)
  right = (rewards * keep).sum(axis=2)
  terms = pool.advantages(size)[right[..., None], rewards] * keep * GROUP / size
  return _drawn(
    pool, index, terms, np.where(keep, lengths, np.minimum(lengths, stop))
  )


def _dynamic_sampling(skip_base: float):
  """The mean over the groups within a budget whose rewards differ.

  Here the number rolled out is fixed by the budget and that of the groups left
  is random; published, it is the other way round. A prompt whose group had no
  variance before is passed over with probability 1 - skip_base.
  """

  def rule(pool: Pool, rng, budget: float) -> Drawn:
    num = len(pool.rates)
    index, rewards, lengths = _draw(pool, rng, GROUP)
    was_alike = (pool.seen == 0) | (pool.seen == 1)
    kept = np.where(was_alike, skip_base, 1.0)
    is_open = rng.random((DRAWS, num)) < kept
    keep = is_open & _by_chance(rng, num, budget * num, is_open)
    terms = _advantages(pool, rewards) * keep[..., None]
    count = (terms != 0).any(axis=2).sum(axis=1)[:, None, None]
    terms *= num / np.maximum(count, 1)
    p = pool.rates
    alive = kept * (1 - p**GROUP - (1 - p) ** GROUP)
    aim = pools.expected(pool) * (kept * num / alive.sum())[:, None]
    return _drawn(pool, index, terms, lengths * keep[..., None], aim)

  return rule


def _draw(pool: Pool, rng, size: int):
  """`[D, Q, size]`: which completions, their rewards and their lengths."""
  num, most = pool.rewards.shape
  index = rng.integers(0, most, (DRAWS, num, size))
  take = lambda x: np.take_along_axis(x[None], index, axis=2)
  return index, take(pool.rewards).astype(int), take(pool.lengths)


def _advantages(pool: Pool, rewards: np.ndarray) -> np.ndarray:
  """`[D, Q, n]`, within each group of n."""
  table = pool.advantages(rewards.shape[2])
  return table[rewards.sum(axis=2)[..., None], rewards]


def _by_chance(rng, num: int, kept: float, is_open=None) -> np.ndarray:
  """`[D, num]`, exactly `round(kept)` of the open prompts in each draw."""
  order = rng.random((DRAWS, num))
  if is_open is not None:
    order = np.where(is_open, order, 1 + order)
  return order.argsort(axis=1).argsort(axis=1) < round(kept)


def _drawn(pool: Pool, index, terms, sampled, aim=None) -> Drawn:
  """The estimates `terms` of the completions `index`, of which `made` exist."""
  factors = np.zeros((len(index), *pool.rewards.shape))
  draw, prompt, _ = np.indices(index.shape, sparse=True)
  np.add.at(factors, (draw, prompt, index), terms)
  lengths = np.take_along_axis(pool.lengths[None], index, axis=2)
  used = lengths * (terms != 0)
  total = lambda x: x.sum() / len(index)
  return Drawn(factors, total(sampled), total(used), used[0], aim)


RULES = {
  "prompts by chance": _fewer_prompts,
  "fewer of each": _allocated(allocations.even),
  "two-phase groups": _two_phase,
  "VIP-like": _allocated(allocations.vip_like),
  "Knapsack-like": _allocated(allocations.knapsack_like),
  "DUET-like": _duet_like,
  "Pilot-Commit-like": _pilot_commit_like,
  "Reinforce-Ada-like": _reinforce_ada_like,
  "dynamic sampling": _dynamic_sampling(1.0),
  "GRESO": _dynamic_sampling(0.5),
  "ARRoL-like": _arrol_like,
}
