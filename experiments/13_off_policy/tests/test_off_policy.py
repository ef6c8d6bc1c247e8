"""Laws of off-policy corrections and schedules, by enumeration."""

import importlib
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import algo, records

_load = lambda name: importlib.import_module(
  f"experiments.13_off_policy.{name}"
)
corrections, ledger, policies = map(
  _load, ("corrections", "ledger", "policies")
)
report, schedules = map(_load, ("report", "schedules"))
RULES = {rule.name: rule for rule in corrections.RULES}
FOLDER = pathlib.Path(__file__).parents[1]
EXACT = ("sequence ratio", "prefix ratio, exact critic")


@pytest.fixture(scope="module")
def task():
  return policies.enumerate_task(limit=4)


@pytest.fixture(scope="module")
def path(task):
  """Policies two large updates apart, some ratios beyond every bound."""
  return policies.updates(task, policies.warm_up(task), 60.0, 2, seed=1)


@pytest.fixture(scope="module")
def stale(task, path):
  return ledger.setting(task, path[-1], policies.logprobs(task, path[0]))


def _mean(here, values):
  return np.einsum("qs,qsp->p", here.probs, values) / len(here.probs)


def test_completions_of_a_prompt_have_total_probability_1(task, path, stale):
  assert len(task.tokens) == 1 + 2 + 4 + 8 + 16
  np.testing.assert_allclose(stale.probs.sum(axis=1), 1)
  np.testing.assert_allclose(stale.target_probs.sum(axis=1), 1)
  carried = schedules.window_logprobs(task, path, 2, 2)
  np.testing.assert_allclose(np.exp(carried.sum(axis=-1)).sum(axis=1), 1)


def test_the_target_is_the_gradient_of_the_expected_reward(task, path, stale):
  value = lambda x: policies.values(task, policies.logprobs(task, x)).mean()
  steps = 1e-5 * np.eye(path[-1].size).reshape(-1, *path[-1].shape)
  new = path[-1]
  differences = [(value(new + x) - value(new - x)) / 2e-5 for x in steps]
  np.testing.assert_allclose(ledger.target(stale), differences, atol=1e-8)


def test_policies_are_far_enough_apart_to_reach_every_bound(stale):
  ratio = np.exp(stale.log_ratio)
  assert ratio.max() > corrections.CAP
  assert ratio.min() < corrections.TOKEN_BOUNDS[0]
  x = corrections.Sampled(stale.log_ratio, stale.advantage, stale.task.lengths)
  for mask in corrections.MASKS.values():
    assert 0 < (mask(x) == 0)[:, stale.task.is_token].mean() < 1


@pytest.mark.parametrize("name", EXACT)
def test_exact_ratios_have_no_bias(stale, name):
  assert ledger.row(stale, RULES[name])["bias"] < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_without_a_lag_no_rule_has_a_bias(task, path, name):
  here = ledger.setting(task, path[-1], policies.logprobs(task, path[-1]))
  assert ledger.row(here, RULES[name])["bias"] < 1e-6


def test_bias_of_the_prefix_ratio_with_rewards_is_that_of_its_future(stale):
  """Tokens after t come from the old policy: E[s_t (Q_old - Q_new)]."""
  task = stale.task
  old, new = (
    ledger.expected_rewards(task, x) for x in (stale.probs, stale.target_probs)
  )
  weight = stale.target_probs[..., None] * (old - new) / len(old)
  lost = np.einsum("qsl,qslp->p", weight, stale.scores)
  mean = _mean(stale, ledger.terms(stale, RULES["prefix ratio, rewards"]))
  np.testing.assert_allclose(mean - ledger.target(stale), lost, atol=1e-12)
  assert np.linalg.norm(lost) > 0.01 * np.linalg.norm(ledger.target(stale))


def _excess(stale, ratio):
  """Returns E[(ratio - cap)+ f]."""
  above = np.maximum(ratio - corrections.CAP, 0) * stale.advantage
  return _mean(stale, np.einsum("qsl,qslp->qsp", above, stale.scores))


@pytest.mark.parametrize(
  ("full", "capped"),
  [
    ("token ratio", "token TIS"),
    ("sequence ratio", "sequence ratio, at most 2"),
  ],
)
def test_a_cap_loses_the_excess_over_it(stale, full, capped):
  x = corrections.Sampled(stale.log_ratio, stale.advantage, stale.task.lengths)
  lost = _excess(stale, RULES[full].factor(x))
  means = [_mean(stale, ledger.terms(stale, RULES[n])) for n in (full, capped)]
  assert np.linalg.norm(lost) > 1e-4
  np.testing.assert_allclose(means[0] - means[1], lost, atol=1e-7)


@pytest.mark.parametrize(
  ("full", "mask"),
  [
    ("token ratio", "IcePop"),
    ("sequence ratio", "sequence mask"),
    ("sequence ratio", "geometric mask"),
  ],
)
def test_a_mask_loses_the_masked_terms(stale, full, mask):
  whole, kept = (ledger.factors(stale, RULES[n]) for n in (full, mask))
  dropped = np.where(kept == 0, whole, 0.0)
  lost = _mean(stale, np.einsum("qsl,qslp->qsp", dropped, stale.scores))
  means = [_mean(stale, ledger.terms(stale, RULES[n])) for n in (full, mask)]
  np.testing.assert_allclose(means[0] - means[1], lost, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_weights_of_a_draw_leave_every_expectation_unchanged(stale, name):
  """All draws of four completions, with probabilities by advantage."""
  values = ledger.terms(stale, RULES[name])[0, [0, 3, 8, 20]]
  size = np.abs(stale.advantage[0, [0, 3, 8, 20], 0])
  prob = np.where(size > np.median(size), 0.75, 0.25)
  mean = 0.0
  for bits in itertools.product((False, True), repeat=4):
    keep = np.array(bits)
    selection = records.Selection(jnp.array(keep), jnp.array(prob, jnp.float32))
    weights = np.asarray(algo.horvitz_thompson(selection))
    mean += np.where(keep, prob, 1 - prob).prod() * weights @ values
  np.testing.assert_allclose(mean, values.sum(axis=0), atol=1e-6)


def test_factors_are_gradients_of_the_loss_of_the_package(stale):
  """The clipped ratio and its weight are those that training uses."""
  objective = algo.dr_grpo(corrections.CLIP, corrections.CLIP)
  num, length = stale.task.tokens.shape
  log_ratio = jnp.asarray(stale.log_ratio[1], jnp.float32)
  advantages = jnp.asarray(stale.advantage[1, :, 0], jnp.float32)
  is_token = jnp.asarray(stale.task.is_token)
  loss = lambda x: algo.surrogate(
    objective, x, jnp.zeros((num, length)), advantages, jnp.ones(num), is_token
  )[0]
  ours = ledger.factors(stale, RULES["token ratio, PPO clip"])[1]
  ours = np.where(stale.task.is_token, ours, 0.0)
  np.testing.assert_allclose(-jax.grad(loss)(log_ratio), ours, atol=1e-5)


def _enumerated(here, choice, size):
  """Returns mass, mean and second moment by listing all groups."""
  terms, lengths = ledger.terms(here, schedules.EXACT), here.task.lengths
  mass, mean, second = 0.0, 0.0, 0.0
  for q, probs in enumerate(here.probs):
    for who in itertools.product(range(len(lengths)), repeat=size):
      last = lengths[list(who)].max()
      chance = probs[list(who)].prod() / len(here.probs)
      value = terms[q, list(who)].mean(axis=0) * choice.weight[last]
      chance *= choice.prob[last]
      mass += chance
      mean += chance * value
      second += chance * value @ value
  return mass, mean, second


def test_moments_of_groups_are_those_of_all_groups(stale):
  weight = np.array([1.0, 1.0, 2.0, 0.5, 3.0])
  choice = schedules.Choice(np.array([1, 0.9, 0.5, 0.7, 0.2]), weight)
  ours = schedules.sums(schedules.group(stale), choice, 2)
  for x, y in zip(ours, _enumerated(stale, choice, 2), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-9)


def test_first_to_finish_trains_half_of_the_groups(stale):
  x = schedules.group(stale)
  choice = schedules.first_to_finish(x)
  assert schedules.sums(x, choice).mass == pytest.approx(0.5)
  assert (np.diff(choice.prob) <= 0).all()


def test_schedules_that_train_every_group_once_have_no_bias(task, path):
  rows = {x["rule"]: x for x in schedules.rows(task, path, 2)}
  exact = ("no lag, each group once", "FIFO, each group once")
  for name in (*exact, "same, weights 1/pi"):
    assert rows[name]["bias"] < 1e-9
  for name in ("drop late groups", "first 4 of 8, abandon the others"):
    assert rows[name]["bias"] > 0.01


def test_a_queue_of_one_policy_is_unbiased_once_it_is_full(task, path):
  """Its bias comes from the start and from policies that differ."""
  rows = schedules.rows(task, [path[0]] * 3, 2)
  bias = {x["rule"]: x["bias"] for x in rows}
  assert bias["queue, first to finish: later"] < 1e-9
  assert bias["queue, first to finish: start"] > 0.01


def test_a_queue_of_single_completions_has_no_bias(task, path):
  """The rest of a queue's bias is that groups wait for their longest."""
  mean = 0.0
  for age in (1, 2):
    drawn = schedules.window_logprobs(task, path, 2, age)
    x = schedules.group(ledger.setting(task, path[-1], drawn))
    prob = schedules.finished_at(4, 2, age).prob
    mean += np.einsum("qlp,l->p", x.mean, prob) / len(x.mean)
  here = ledger.setting(task, path[-1], drawn)
  np.testing.assert_allclose(mean, ledger.target(here), atol=1e-12)


def test_the_table_is_that_of_the_results():
  lines = (FOLDER / "results.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert (FOLDER / "table.md").read_text() == report.page(rows)
