"""Arithmetic of the ledger of rules: its formulas, by enumeration."""

import importlib
import itertools
import json
import pathlib
import types

import numpy as np
import pytest

from experiments.common import results

_load = lambda name: importlib.import_module(
  f"experiments.02_design_variance.{name}"
)
allocations, ledger = _load("allocations"), _load("ledger")
pool, prefixes = _load("pool"), _load("prefixes")
baselines, group_sizes = _load("baselines"), _load("group_sizes")
FOLDER = pathlib.Path(__file__).parents[1]


def _centred(rewards):
  """Advantages that depend on the group's size, as normalised ones do."""
  return (rewards - rewards.mean(axis=1, keepdims=True)) * rewards.shape[1]


def test_the_mean_of_the_full_batch_is_that_over_all_groups(monkeypatch):
  monkeypatch.setattr(pool, "GROUP", 3)
  rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]])
  run = types.SimpleNamespace(
    spec=types.SimpleNamespace(
      objective=types.SimpleNamespace(advantage=_centred)
    )
  )
  fake = types.SimpleNamespace(run=run)
  some = pool.Pool(fake, None, rewards, rewards, rewards[:, 0])
  mean = np.zeros(rewards.shape)
  for index in itertools.product(range(4), repeat=3):
    advantages = _centred(rewards[:, index])
    for place, i in enumerate(index):
      mean[:, i] += advantages[:, place] / 4**3
  np.testing.assert_allclose(pool.expected(some), mean, atol=1e-12)


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_moments_of_group_sizes_are_those_over_all_groups(objective):
  advantage, includes_self = group_sizes.OBJECTIVES[objective]
  rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
  scores = np.random.default_rng(0).normal(size=(2, 3, 5))
  lengths = np.array([[1.0, 2.0, 4.0], [3.0, 5.0, 7.0]])
  flat = scores.reshape(6, 5)
  some = pool.Pool(None, None, rewards, lengths, rewards[:, 0])
  sizes = [2, 3]
  tables = [group_sizes.group_advantages(objective, size) for size in sizes]
  actual = group_sizes.moments(some, flat @ flat.T, tables)
  for q, size in enumerate(sizes):
    mean, square, trained = np.zeros(5), 0.0, 0.0
    for index in map(list, itertools.product(range(3), repeat=size)):
      advantages = np.asarray(advantage(rewards[q, index][None]))[0]
      share = (16 - includes_self) / (size - includes_self)
      estimate = advantages * share @ scores[q, index] / 3**size
      mean += estimate
      square += estimate @ estimate * 3**size
      trained += lengths[q, index][advantages != 0].sum() / 3**size
    np.testing.assert_allclose(actual.mean[q] @ scores[q], mean, rtol=1e-5)
    np.testing.assert_allclose(actual.square[q], square, rtol=1e-5)
    np.testing.assert_allclose(actual.trained[q], trained)


@pytest.mark.parametrize("snaps", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_baseline_from_history_leaves_the_mean_gradient(size, snaps):
  rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
  scores = np.random.default_rng(0).normal(size=(2, 3, 5))
  scores -= scores.mean(axis=1, keepdims=True)  # as under the policy
  seen = np.array([0.1, 0.5])
  some = pool.Pool(None, None, rewards, np.ones((2, 3)), seen)
  tables = baselines.history_advantages(some, size, snaps)
  for q, table in enumerate(tables):
    mean = np.zeros(5)
    for index in map(list, itertools.product(range(3), repeat=size)):
      kinds = rewards[q, index].astype(int)
      mean += table[kinds.sum(), kinds] @ scores[q, index] / 3**size
    exact = 16 * rewards[q] @ scores[q] / 3
    np.testing.assert_allclose(mean, exact, atol=1e-12)


def test_history_is_the_baseline_of_experiment_16():
  module = importlib.import_module("experiments.16_history_baseline.baseline")
  first = np.repeat([[1.0, 0.0]], 16, axis=0).T  # a visit of 16 completions
  history = module.History(2, decay=0.75, prior=1.0, snaps=False)
  history.add(np.arange(2), first)
  rewards = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
  some = pool.Pool(None, None, rewards, rewards, first.mean(axis=1))
  tables = baselines.history_advantages(some, 3, snaps=False)
  actual = rewards - history.baselines(np.arange(2), rewards)
  for q, table in enumerate(tables):
    kinds = rewards[q].astype(int)
    expected = table[kinds.sum(), kinds] * 3 / 16
    np.testing.assert_allclose(actual[q], expected, atol=1e-12)


@pytest.mark.parametrize("total", [8, 10, 12, 16])
def test_no_other_sizes_by_history_have_less_variance(monkeypatch, total):
  monkeypatch.setattr(group_sizes, "GROUP", 4)
  right, wrong = np.array([3.0, 4.0, 0.0, 1.0]), np.array([3.0, 0.0, 0.0, 9.0])
  sizes = group_sizes.by_history(right, wrong, np.full(4, 5.0), total)
  a, b = right + 0.2, wrong + 0.2
  spread = a * b / ((a + b) * (a + b + 1))
  variance = lambda sizes: (spread / (np.array(sizes) - 1)).sum()
  options = [*itertools.product(range(2, 5), repeat=4)]
  best = min(variance(x) for x in options if sum(x) == total)
  assert sizes.sum() == total
  assert variance(sizes) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("is_prefix", [False, True])
def test_the_variance_of_a_choice_of_tokens_is_that_over_all_choices(is_prefix):
  gradients = np.random.default_rng(0).normal(size=(3, 5))
  prob = np.array([0.9, 0.5, 0.2])
  square = 0.0
  for bits in itertools.product((0, 1), repeat=3):
    keep = np.array(bits)
    chance = np.where(keep, prob, 1 - prob).prod()
    if is_prefix:  # the cut is after the last that is kept
      if (np.diff(keep) > 0).any():
        continue
      chance = -np.diff([1.0, *prob, 0.0])[keep.sum()]
    error = (keep / prob - 1) @ gradients
    square += chance * error @ error
  added = prefixes._added(gradients @ gradients.T, prob, is_prefix)
  assert added == pytest.approx(square)


def test_pools_never_grow_and_keep_their_sum():
  pooled = prefixes._pool
  np.testing.assert_allclose(pooled(np.array([1.0, 3, 2, 1, 4])), [2.2] * 5)
  np.testing.assert_allclose(pooled(np.array([5.0, 1, 3, 1])), [5, 2, 2, 1])
  assert pooled(np.zeros(0)).shape == (0,)


def test_an_allocation_spends_its_total_within_bounds():
  rates = np.array([0.0, 0.5, 0.9, 1.0])
  for name in ("even", "vip_like", "knapsack_like", "duet_like"):
    sizes = getattr(allocations, name)(rates, 32, 2, 16)
    assert sizes.sum() == 32
    assert (sizes >= 2).all() and (sizes <= 16).all()
  sizes = allocations.vip_like(rates, 32, 2, 16)
  assert sizes[1] > sizes[2] > sizes[0] == sizes[3]


def test_at_equal_length_only_noise_and_angle_are_left():
  batch = {"batch": "b", "level": "batch", "squared_length": 10.0}
  full = {"batch": "b", "level": "rollouts", "method": "full", "variance": 0.5}
  row = {"batch": "b", "variance": 4.0, "scale": 2.0, "cosine": 1.0}
  at_length = lambda level, **more: ledger.at_length(
    [batch, full], row | more, ledger.Rule("", level, "", ledger.BIASED, "")
  )
  assert at_length("completions") == 1.0
  # The full batch draws its rollouts too: 4.5 / 4 against 0.5.
  assert at_length("rollouts") == pytest.approx(0.625)
  # |a - b|^2 of two vectors of the full length is 2 |a|^2 (1 - cos).
  assert at_length("completions", cosine=0.9) == pytest.approx(3.0)


def test_every_rule_of_the_ledger_was_measured_on_both_batches():
  lines = (FOLDER / "results.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  measured = {
    (r["batch"], r["level"], r["method"]) for r in rows if "method" in r
  }
  for rules in ledger.RULES.values():
    for rule in rules:
      for batch in ("arithmetic", "rings"):
        assert (batch, rule.level, rule.method) in measured
  table = (FOLDER / "table.csv").read_text()
  assert table == results.to_csv(ledger.pages(rows))
