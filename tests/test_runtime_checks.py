"""Invalid probabilities and non-finite weights stop a run."""

import jax
import jax.numpy as jnp
import pytest
import small

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.records import Selection
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import runtime_checks
from dppo_jax.step import select

SPEC = select.PackingSpec(row_length=24, rows_per_micro=2, window=4)


def _select(method, spec=SPEC):
  """Metrics of choosing from random completions, as a run computes them."""
  rewards = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
  choose = lambda rollout: select.select(
    rng_at(jax.random.key(0), 0, Stage.COMPLETIONS),
    small.prompts(),
    rollout,
    rewards,
    method=method,
    objective=objectives.grpo(),
    spec=spec,
    train_zero_advantage=False,
  )[2]
  return jax.device_get(jax.jit(choose)(small.rollout(small.prompts())))


def _reporting(prob):
  def rule(rng, groups):
    keep = jnp.ones(groups.rewards.shape, bool)
    return Selection(keep, jnp.full(keep.shape, prob))

  return methods.grpo()._replace(completions=rule)


@pytest.mark.parametrize("prob", [2.0, 0.0, -0.5, float("nan")])
def test_a_rule_that_reports_no_probability_is_refused(prob):
  metrics = _select(_reporting(prob))
  assert metrics["weights/invalid_probs"] == 9
  with pytest.raises(ValueError, match=r"9 prompts or completions .*\(0, 1\]"):
    runtime_checks.check_selection(metrics)


def test_a_rule_that_reports_one_is_not():
  runtime_checks.check_selection(_select(_reporting(0.5)))


def test_tokens_of_no_probability_are_refused():
  with pytest.raises(ValueError, match="4 tokens were kept"):
    runtime_checks.check_selection({"tokens/invalid_probs": 4.0})


def test_a_batch_that_lacks_a_place_is_refused():
  """A row shorter than a prompt with its completion."""
  metrics = _select(methods.grpo(), SPEC._replace(row_length=4))
  assert metrics["pack/unplaced"] > 0
  with pytest.raises(RuntimeError, match="have no place"):
    runtime_checks.check_selection(metrics)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_weights_that_are_not_finite_are_named(value):
  params = small.params()
  runtime_checks.check_params(params, "mend it")
  layers = jax.tree.map(lambda x: x, params["layers"])
  layers["mlp_norm"] = layers["mlp_norm"].at[0, 0].set(value)
  match = r"1 values .*mlp_norm are .*mend it"
  with pytest.raises(FloatingPointError, match=match):
    runtime_checks.check_params(params | {"layers": layers}, "mend it")


def test_weights_that_an_update_destroyed_end_the_run():
  values = {"update/nonfinite_params": 0.0, "update/skipped_in_a_row": 0}
  runtime_checks.check_update(3, values)
  with pytest.raises(FloatingPointError, match="update of step 3 made 7 weig"):
    runtime_checks.check_update(3, values | {"update/nonfinite_params": 7.0})
