"""Shares that set themselves: which they choose, by noise and by seconds."""

import functools

from completions import groups_of
import jax
import jax.numpy as jnp
import numpy as np
from prompts import jitted
import pytest

from dppo_jax import methods
from dppo_jax.methods import neyman
from dppo_jax.methods.neyman import budget as self_setting
from dppo_jax.records import Groups, Measured
from dppo_jax.rng import StepRng

RNG = np.random.default_rng(0)
# Of 24 groups of 8, one in three without variance.
REWARDS = jnp.array(
  RNG.random((24, 8)) < np.repeat([[0.0], [0.3], [0.8]], 8, axis=0),
  jnp.float32,
)
LENGTHS = jnp.array(RNG.integers(5, 50, (24, 8)), jnp.int32)


def _measured(
  noise=1.0, micro=0.0, tokens=100.0, other=1.0, token=1.0, fixed=0
):
  numbers = (noise, micro, tokens, other, token, fixed)
  return Measured(*(jnp.float32(x) for x in numbers))


def _groups():
  centred = REWARDS - REWARDS.mean(axis=1, keepdims=True)
  return Groups(REWARDS, centred, LENGTHS)


@functools.cache
def _rule(**options):
  rule = neyman(**options).completions
  draw = lambda measured: rule(
    StepRng(jax.random.key(0), jnp.int32(0), measured), _groups()
  )
  return jax.jit(draw)


_TOKENS = int(LENGTHS[_groups().advantages != 0].sum())


def _told(measured=None, **options):
  chosen = _rule(**options)(measured)
  needed = int((_groups().advantages != 0).sum())
  told = {name.split("/")[1]: float(x) for name, x in chosen.told.items()}
  assert int(chosen.keep.sum()) == round(told["completions"] * needed)
  return told


def _at_cost(cost, noise=1.0):
  """By the clock; micro-batches of one token, so that they do not matter."""
  return _told(_measured(noise, micro=cost / _TOKENS, tokens=1.0))


def test_less_is_trained_the_dearer_the_update():
  found = [_at_cost(x) for x in (0.01, 0.3, 1.0, 3.0, 30.0)]
  shares = [told["completions"] for told in found]
  assert shares == sorted(shares, reverse=True)
  assert shares[0] > 0.8 and shares[-1] < 0.4
  gains = [told["completions_speedup"] for told in found]
  assert gains == sorted(gains) and gains[0] >= 1


def test_more_is_trained_the_noisier_the_gradient():
  shares = [_at_cost(1.0, x)["completions"] for x in (0.0, 0.1, 0.4, 1.0)]
  assert shares == sorted(shares) and shares[-1] > 2 * shares[0]
  assert shares[0] == pytest.approx(0.05, abs=0.01)  # near the least


def test_an_update_that_costs_nothing_is_not_pruned():
  told = _at_cost(1e-6)
  assert told["completions"] == told["completions_speedup"] == 1
  assert told["completions_variance"] == 0


def test_what_is_not_known_yet_costs_as_much_as_all_else():
  told = _told(_measured(micro=0.0, tokens=0.0, other=0.0))
  assert told == pytest.approx(_told(update_cost=1.0))
  assert 0.2 < told["completions"] < 0.8


def test_a_cost_that_is_given_counts_and_not_the_clock():
  """Noise counts likewise; where nobody measured it, it is all there is."""
  told = _told(_measured(0.3, micro=9.0, tokens=1.0), update_cost=2.0)
  assert told == pytest.approx(_at_cost(2.0, 0.3), rel=1e-3)
  assert told["update_cost"] == pytest.approx(2.0, rel=1e-5)
  assert _told(update_cost=2.0)["completions"] > told["completions"]
  # Tokens are in proportion to neither number nor size: near to the share.
  seconds = 1 + 2 * told["completions"]
  slower = 1 + 0.3 * told["completions_variance"]
  speedup = 3 / (seconds * slower)
  assert told["completions_speedup"] == pytest.approx(speedup, rel=0.25)


def test_a_micro_batch_is_the_least_that_an_update_takes():
  """There is nothing to gain below one."""
  one = _told(_measured(noise=0.0, micro=9.0, tokens=2.0 * _TOKENS, other=0.1))
  assert one["completions"] == 1
  two = _told(_measured(noise=0.0, micro=9.0, tokens=_TOKENS / 2, other=0.1))
  assert two["completions"] < 0.5


def test_no_share_falls_below_the_least():
  told = _told(_measured(noise=0.0), update_cost=50.0, least_completions=0.4)
  assert told["completions"] == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("num", [0, 1])
def test_where_next_to_nothing_is_needed_it_is_kept(num):
  values = np.zeros((2, 3))
  values.flat[:num] = 1
  rule = neyman(update_cost=9.0).completions
  chosen = jax.jit(rule)(jax.random.key(0), groups_of(values))
  assert chosen.keep.sum() == num and (chosen.prob[chosen.keep] == 1).all()
  assert chosen.told["shares/completions"] == num
  assert all(np.isfinite(x) for x in chosen.told.values())


def _of_prompts(size, tokens=None, measured=None, least=0.25):
  size = jnp.array(size, jnp.float32)
  tokens = jnp.ones_like(size) if tokens is None else jnp.array(tokens)
  budget = self_setting.SelfSet(least, 0.0 if measured else 1.0)
  number, told = self_setting.of_prompts(
    budget, measured, size, size * size, tokens
  )
  return int(number), {name: float(x) for name, x in told.items()}


def test_alike_prompts_are_all_kept():
  number, told = _of_prompts(np.full(16, 0.3))
  assert number == 16
  assert told["shares/prompts"] == told["shares/prompts_speedup"] == 1
  # Nor do small differences pay.
  assert _of_prompts(np.linspace(0.95, 1.05, 16))[0] == 16


def test_prompts_that_are_known_to_teach_nothing_are_left_out():
  size = np.r_[np.full(12, 0.02), np.ones(4)]
  number, told = _of_prompts(size)
  assert number < 8
  assert told["shares/prompts_speedup"] > 1.5
  # A gain of less than a fifth is not believed, unless they are long.
  few = np.r_[np.full(2, 0.02), np.ones(14)]
  assert _of_prompts(few)[0] == 16
  assert _of_prompts(few, tokens=np.r_[np.full(2, 40.0), np.ones(14)])[0] < 16
  # Where a step takes as long without them, they are not.
  fixed = _of_prompts(size, measured=_measured(token=1e-3, fixed=10.0))
  assert fixed[0] == 16
  scaled = _of_prompts(size, measured=_measured(token=1.0, fixed=0.0))
  assert scaled == (number, told)
  # Before the first step nothing is known of seconds.
  assert _of_prompts(size, measured=_measured(token=0.0, fixed=0.0))[0] == 16


def test_the_rule_prunes_prompts_once_it_has_seen_them():
  rule = jitted(neyman(update_cost=0.5).prompts)
  history = rule.init()
  ids = np.arange(8, dtype=np.int32)
  before = rule.select(history, ids)
  assert before.keep.all() and before.told["shares/prompts"] == 1
  rewards = np.zeros((8, 6))
  rewards[0, :3] = 1
  for step in range(3):
    history = rule.observe(history, step, ids, rewards)
  after = rule.select(history, ids, step=3)
  assert after.keep.sum() < 6 and after.told["shares/prompts"] < 0.7
  assert after.prob[0] == after.prob.max()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"prompt_budget": -0.1}, "prompt_budget is -0.1 .* 0 to set itself"),
    ({"completion_budget": 1.5}, "completion_budget is 1.5 .* set itself"),
    ({"least_prompts": 0.0}, "least_prompts is 0.0"),
    ({"least_completions": 1.1}, "least_completions is 1.1"),
    ({"update_cost": -1.0}, "update_cost is -1.0 .* at least 0"),
    ({"update_cost": float("inf")}, "update_cost is inf .* finite"),
  ],
)
def test_what_cannot_be_meant_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    neyman(**options)


@pytest.mark.parametrize("update_cost", [0.0, 0.5])
def test_without_seconds_there_has_to_be_a_cost(update_cost):
  method = methods.neyman(update_cost=update_cost)
  assert method.reads_measured
  assert not methods.neyman(0.5, 0.5).reads_measured
  draws = (
    lambda: method.completions(jax.random.key(0), _groups()),
    lambda: method.prompts.select(
      StepRng(jax.random.key(0), jnp.int32(0)),
      method.prompts.init(4),
      jnp.arange(4, dtype=jnp.int32),
    ),
  )
  for draw in draws:
    if update_cost:
      assert draw().keep.all() or draw().told["shares/completions"] < 1
      continue
    with pytest.raises(ValueError, match=r"no measured seconds.*update_cost"):
      draw()
