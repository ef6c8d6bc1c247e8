"""Invalid probabilities and non-finite weights stop a run."""

import jax
import jax.numpy as jnp
import pytest

from dppo_jax import methods
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.errors import UserError
from dppo_jax.records import Selection
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step import runtime_checks, select
from tests.helpers import small

SPEC = PackingSpec(row_length=24, rows_per_micro=2)


def _check(method, spec=SPEC):
  """Selects from random completions, and checks the result as a run does."""
  rewards = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
  choose = lambda rollout: select.select(
    rng_at(jax.random.key(0), 0, Stage.COMPLETIONS),
    small.prompts(),
    rollout,
    rewards,
    spec=small.spec(method=method, packing=spec),
  )
  results = jax.device_get(jax.jit(choose)(small.rollout(small.prompts())))
  runtime_checks.check_choice(results[2])


def _reporting(prob):
  def rule(rng, groups, budget):
    keep = jnp.ones(groups.rewards.shape, bool)
    return Selection(keep, jnp.full(keep.shape, prob))

  return methods.grpo()._replace(completions=rule)


@pytest.mark.parametrize("prob", [2.0, 0.0, -0.5, float("nan")])
def test_a_rule_must_report_probabilities(prob):
  with pytest.raises(UserError, match=r"9 prompts or completions .*\(0, 1\]"):
    _check(_reporting(prob))
  _check(_reporting(0.5))


def test_tokens_must_have_probabilities():
  with pytest.raises(UserError, match="4 tokens were kept"):
    runtime_checks.check_choice({"tokens/invalid_probs": 4.0})


def test_every_completion_has_a_place():
  """A row shorter than a prompt with its completion has none."""
  with pytest.raises(RuntimeError, match="no place"):
    _check(methods.grpo(), SPEC._replace(row_length=4))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_non_finite_weights_are_named(value):
  params = small.params()
  runtime_checks.check_params(params, "fix it")
  layers = jax.tree.map(lambda x: x, params["layers"])
  layers["mlp_norm"] = layers["mlp_norm"].at[0, 0].set(value)
  with pytest.raises(UserError, match=r"mlp_norm.*fix it"):
    runtime_checks.check_params(params | {"layers": layers}, "fix it")


def test_weights_that_an_update_destroyed_end_the_run():
  metrics = {"update/nonfinite_params": 0.0, "update/skipped_in_a_row": 0}
  runtime_checks.check_update(3, metrics)
  with pytest.raises(UserError, match=r"step 3 .* 7 weig"):
    runtime_checks.check_update(3, metrics | {"update/nonfinite_params": 7.0})
