"""The advice to prune less makes each method keep more, at smaller weights."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from dppo_jax import methods
from dppo_jax.algo.advantages import group_normalized
from dppo_jax.config.options import default_args
from dppo_jax.metrics import health
from dppo_jax.records import Groups
from dppo_jax.rng import rng_at

# Arguments with which a method prunes in each of its ways.
CHANGES = {
  "greso": {"dynamic_sampling": "none", "tuning": 0.0},
  "neyman": {
    "completion_budget": 0.3,
    "prompt_budget": 0.3,
    "token_budget": 0.3,
    "min_prob": 0.01,
  },
}
PRUNING = sorted(methods.METHODS.keys() - {"grpo"})


@functools.partial(jax.jit, static_argnums=0)
def _largest_weights(method: methods.Method) -> jax.Array:
  """Largest inverse probability of a prompt and of a completion."""
  keys = iter(jax.random.split(jax.random.key(0), 100))
  num, size, ids = 16, 8, jnp.arange(16)
  history, root = method.prompts.init(num), jax.random.key(1)
  for step in range(3):  # most groups have equal rewards
    rewards = jax.random.bernoulli(next(keys), 0.1, (num, size))
    rewards = rewards.astype(jnp.float32)
    lengths = jax.random.randint(next(keys), (num, size), 1, 50)
    history = method.prompts.observe(
      history, jnp.int32(step), ids, rewards, rewards, lengths
    )
  prompts = method.prompts.select(rng_at(root, 3), history, ids)
  rewards = jax.random.normal(next(keys), (num, size))
  groups = Groups(rewards, group_normalized(rewards), lengths)
  chosen = method.completions(rng_at(root, 3), groups)
  return jnp.stack([1 / x.prob.min() for x in (prompts, chosen)])


@pytest.mark.parametrize("name", PRUNING)
def test_advice_to_prune_less_lowers_the_weights(name):
  factory = methods.METHODS[name]
  args = default_args(factory) | CHANGES.get(name, {})
  before = factory(**args)
  direction, *words = re.findall(r"\w+", before.prune_less)
  advised = {*words} - {"or"}
  assert direction in ("raise", "lower") and advised <= args.keys()
  end = 0.95 if direction == "raise" else 0.05
  args |= {x: end for x in advised if args[x] not in (0, 1)}
  after = factory(**args)
  before, after = _largest_weights(before), _largest_weights(after)
  assert (after <= before).all() and after.sum() < before.sum() - 0.5


@pytest.mark.parametrize("name", PRUNING)
def test_warnings_give_the_advice_of_the_method(name):
  advice = methods.METHODS[name]().prune_less
  watch, messages = health.Health(1, advice), []
  for step in range(10):
    line = {"step/seconds": 1, "weights/max": 200, "completions/trained": 0}
    messages += watch.check(step, line)[1]
  assert sum(advice in x for x in messages) == 2
