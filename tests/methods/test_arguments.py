"""Arguments of methods and rules outside their limits are rejected."""

import jax
import jax.numpy as jnp
import pytest

from dppo_jax import methods
from dppo_jax.errors import UserError
from dppo_jax.records import Groups
from dppo_jax.rng import rng_at

INVALID = [
  (methods.top_abs_advantage, {"keep": 0.0}),
  (methods.max_variance, {"keep": 1.5}),
  (methods.max_variance, {"keep": 0.5, "scope": "row"}),
  (methods.drop_small_advantage, {"rate": 1.0}),
  (methods.drop_small_advantage, {"rate": 0.5, "scope": "all"}),
  (methods.drop_by_history, {"rate": -0.1}),
  *(
    (methods.drop_zero_variance_streaks, {name: value})
    for name, value in (
      ("base", 0.0),
      ("floor", 0.0),
      ("target", 1.5),
      ("tuning", -0.01),
    )
  ),
  (methods.neyman_prompts, {"budget": 0.0}),
  (methods.neyman_prompts, {"budget": 0.5, "min_prob": 0.0}),
  (methods.neyman_prompts, {"budget": 0.5, "kappa": float("inf")}),
  (methods.neyman_prompts, {"budget": 0.5, "forgetting": 1.5}),
  (methods.neyman_prompts, {"budget": 0.5, "prior": 0.0}),
  (methods.neyman_completions, {"budget": float("nan")}),
  (methods.neyman_completions, {"budget": 0.5, "min_prob": 2.0}),
  (methods.neyman_tokens, {"budget": 0.0}),
  (methods.neyman_tokens, {"budget": 0.5, "min_prob": 1.5}),
  (methods.top_entropy, {"keep": 0.0}),
  (methods.neyman, {"prompt_budget": -0.1}),
  (methods.neyman, {"completion_budget": 1.5}),
  (methods.neyman, {"completion_budget": "half"}),
  (methods.neyman, {"update_cost": float("inf")}),
  (methods.neyman, {"completion_budget": 0.5, "update_cost": 2.0}),
  (methods.dppo, {"completion_rate": 1.0}),
  (methods.d3s, {"final_keep": 0.0}),
  (methods.greso, {"max_draws": 0}),
  (methods.greso, {"dynamic_sampling": "maybe"}),
]


@pytest.mark.parametrize(("factory", "options"), INVALID)
def test_arguments_outside_their_limits_are_rejected(factory, options):
  name, value = list(options.items())[-1]
  with pytest.raises(UserError) as error:
    factory(**options)
  assert str(error.value).startswith(f"{name} is {value!r} but must be ")
  assert str(error.value).endswith("; see config.method.args")


def test_a_schedule_needs_the_step():
  rule = methods.top_abs_advantage(lambda step: 0.5)
  rewards = jnp.array([[1.0, 0.0]])
  groups = Groups(rewards, rewards, jnp.full((1, 2), 3))
  with pytest.raises(ValueError, match="a scheduled rate needs a StepRng"):
    rule(jax.random.key(0), groups)


def test_a_rate_near_1_leaves_a_probability():
  rule = methods.drop_by_history(0.99999999)
  history = jnp.array([1.0, 0.1])
  prob = rule.select(rng_at(jax.random.key(0), 0), history, jnp.arange(2)).prob
  assert prob[0] == 1 and 0 < prob[1] < 1e-6
