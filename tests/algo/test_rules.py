"""One table of all rules and the laws that every rule obeys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import keys
from dppo_jax.algo import advantages, completion_rules, prompt_rules
from dppo_jax.methods import METHODS
from dppo_jax.records import Groups

COMPLETION_RULES = {
  "every_completion": completion_rules.every_completion(),
  "drop_small_advantage": completion_rules.drop_small_advantage(0.6),
}
PROMPT_RULES = {
  "every_prompt": prompt_rules.every_prompt(),
  "drop_by_history": prompt_rules.drop_by_history(0.6),
}
for _name, _factory in METHODS.items():  # every method obeys the laws too
  COMPLETION_RULES[_name] = _factory().completions
  PROMPT_RULES[_name] = _factory().prompts

REWARDS = np.array(
  [[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0] * 6, [1] * 5 + [0]], np.float32
)


def _draw(seed):
  return keys.draw_at(jax.random.key(seed), 0, keys.Room.COMPLETIONS)


def _groups(rewards=REWARDS):
  rewards = jnp.array(rewards)
  return Groups(
    rewards,
    advantages.group_normalized(rewards),
    jnp.full(rewards.shape, 5, jnp.int32),
  )


@pytest.mark.parametrize("name", COMPLETION_RULES)
def test_completion_rule_laws(name):
  rule = COMPLETION_RULES[name]
  first, again = rule(_draw(0), _groups()), rule(_draw(0), _groups())
  assert first.keep.shape == first.prob.shape == REWARDS.shape
  assert first.keep.dtype == bool and first.prob.dtype == jnp.float32
  assert ((first.prob > 0) & (first.prob <= 1)).all()
  np.testing.assert_array_equal(
    first.keep, again.keep
  )  # same draw, same choice
  order = np.array([3, 1, 5, 0, 4, 2])
  permuted = rule(_draw(0), _groups(REWARDS[:, order]))
  np.testing.assert_array_equal(permuted.prob, first.prob[:, order])
  traces = []
  jitted = jax.jit(lambda d, g: traces.append(1) or rule(d, g))
  jitted(_draw(0), _groups()), jitted(_draw(1), _groups())
  assert len(traces) == 1


@pytest.mark.parametrize("name", COMPLETION_RULES)
def test_completions_are_kept_as_often_as_they_say(name):
  """Tolerance: 5 standard errors of 24 shares; false alarm below 2e-5."""
  rule, num = COMPLETION_RULES[name], 4000
  draws = jax.vmap(lambda key: rule(keys.Draw(key, jnp.int32(0)), _groups()))
  drawn = draws(jax.random.split(jax.random.key(0), num))
  prob = np.asarray(drawn.prob[0])
  error = 5 * np.sqrt(prob * (1 - prob) / num)
  assert (np.abs(drawn.keep.mean(axis=0) - prob) <= error + 1e-7).all()


def test_small_advantages_are_those_below_their_groups_mean():
  prob = np.asarray(
    completion_rules.drop_small_advantage(0.6)(_draw(0), _groups()).prob
  )
  np.testing.assert_allclose(prob[0], [1, 0.4, 0.4, 0.4, 0.4, 0.4], rtol=1e-6)
  # Half right: every |advantage| is the mean, up to rounding; so none is small.
  np.testing.assert_array_equal(prob[1], 1)
  np.testing.assert_array_equal(prob[2], 1)


@pytest.mark.parametrize("name", PROMPT_RULES)
def test_prompt_rule_laws(name):
  rule = PROMPT_RULES[name]
  history = rule.init(10)
  ids = jnp.array([7, 2, 9, 4], jnp.int32)
  unseen = rule.select(_draw(0), history, ids)
  assert unseen.keep.all() and (unseen.prob == 1).all()
  history = rule.observe(history, 0, ids, jnp.array(REWARDS))
  chosen = rule.select(_draw(1), history, ids)
  assert chosen.keep.shape == chosen.prob.shape == ids.shape
  assert ((chosen.prob > 0) & (chosen.prob <= 1)).all()
  # Order does not matter: a prompt's draw is its own.
  order = np.array([2, 0, 3, 1])
  permuted = rule.select(_draw(1), history, ids[order])
  np.testing.assert_array_equal(permuted.keep, chosen.keep[order])
  np.testing.assert_array_equal(permuted.prob, chosen.prob[order])
  outside = rule.observe(history, 1, jnp.full((4,), 10), jnp.array(REWARDS))
  jax.tree.map(np.testing.assert_array_equal, outside, history)


def test_history_prunes_what_taught_less_than_usual():
  rule = prompt_rules.drop_by_history(0.6)
  ids = jnp.arange(4, dtype=jnp.int32)
  history = rule.observe(rule.init(6), 0, ids, jnp.array(REWARDS))
  prob = rule.select(_draw(0), history, jnp.arange(6, dtype=jnp.int32)).prob
  # Mean |advantage|: 0.68, 0.91, 0, 0.68 and two never visited.
  np.testing.assert_allclose(prob, [1, 1, 0.4, 1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
@pytest.mark.parametrize(
  "rule", [completion_rules.drop_small_advantage, prompt_rules.drop_by_history]
)
def test_a_rate_that_leaves_no_chance_is_refused(rule, rate):
  with pytest.raises(ValueError, match=f"{rate}.*method.args"):
    rule(rate)


def test_unweighted_keeps_the_choice_and_forgets_the_probability():
  rule = COMPLETION_RULES["drop_small_advantage"]
  honest = rule(_draw(3), _groups())
  biased = completion_rules.unweighted(rule)(_draw(3), _groups())
  np.testing.assert_array_equal(honest.keep, biased.keep)
  assert (biased.prob == 1).all() and not (honest.prob == 1).all()
