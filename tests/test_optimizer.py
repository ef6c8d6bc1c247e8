"""Optimizers of the user: steps, learning rate, resume, errors."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dppo_jax import train
from dppo_jax.errors import UserError
from dppo_jax.models import lora, parameters
from dppo_jax.run import checkpoint, resume
from dppo_jax.run.setup import setup_run
from dppo_jax.step import abstract_values
from dppo_jax.step.optimizer import adamw, call_factory, make_optimizer
from tests.helpers import commands, small

OWN = """
import optax

def halved(learning_rate, *, weight_decay, total_steps):
  rate = lambda count: 1e-2 * 0.5**count
  return optax.lion(rate, weight_decay=weight_decay), rate
"""
TINY = {
  "steps": 2,
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__train": "arithmetic:20:1",
  "data__prompts_per_step": 8,
  "data__eval": "",
  "rollout__group_size": 4,
  "rollout__max_tokens": 8,
  "rollout__num_slots": 4,
  "pack__row_length": 24,
  "pack__rows_per_micro": 8,
  "sft__steps": 2,
}


def _factory(result):
  def own(learning_rate):
    return result(learning_rate) if callable(result) else result

  return own


def test_step_of_sgd_is_the_clipped_gradient_times_the_rate():
  optimizer = make_optimizer(0.1, 10, "linear", factory=optax.sgd)
  params = {"w": jnp.zeros(2)}
  state = optimizer.init(params)
  for rate in (0.1, 0.09):
    updates, state = optimizer.update({"w": jnp.array([3.0, 4.0])}, state)
    np.testing.assert_allclose(-updates["w"] / rate, [0.6, 0.8], rtol=1e-6)
  updates, state = optimizer.update({"w": jnp.array([np.nan, 1])}, state)
  assert not updates["w"].any() and state.total_notfinite == 1


def longer(learning_rate):
  double = lambda x: jnp.concatenate([x, x])
  return optax.stateless(lambda updates, _: jax.tree.map(double, updates))


def forgetful(learning_rate):
  inner = optax.adam(learning_rate)
  update = lambda *args: (inner.update(*args)[0], ())
  return optax.GradientTransformation(inner.init, update)


def wider(learning_rate):
  init = lambda params: jnp.int32(0)
  return optax.GradientTransformation(init, lambda u, s, p: (u, s + 0.5))


def _falling(learning_rate):
  return optax.sgd(lambda count: 0.1 if count < 3 else 0.01)


@pytest.mark.parametrize(
  ("factory", "message"),
  [
    (lambda rate: 1 / 0, "ZeroDivisionError: division by zero .*test_optimi"),
    (lambda: optax.sgd(0.1), r"<lambda>\(\): TypeError: .*positional"),
    (_factory(None), r"own\(\) returned NoneType but must return an optax.Gr"),
    (_factory(lambda rate: (optax.sgd(rate), 0.1)), "float as the schedule"),
    # They need a number, the loss, or a count that is not traced.
    (optax.rprop, r"rprop\(\): TypeError"),
    (optax.lbfgs, r"lbfgs\(\): TypeError: .*'value_fn'"),
    (optax.polyak_sgd, r"polyak_sgd\(\): TypeError: .*'value'"),
    (_falling, r"_falling\(\): TracerBoolConv.*test_optimizer.py, line"),
  ],
)
def test_optimizer_that_a_run_cannot_use_is_rejected_in_one_line(
  factory, message
):
  def step(params):
    optimizer = make_optimizer(0.1, 10, factory=factory)
    return optimizer.update(params, optimizer.init(params), params)

  with pytest.raises(UserError, match=message) as error:
    jax.eval_shape(step, {"w": jnp.ones(3)})
  assert "\n" not in str(error.value)


def test_every_weight_but_norms_and_biases_decays_as_in_transformers():
  """Without a gradient; the state has the form that older runs have saved."""
  model = dataclasses.replace(
    small.MODEL, has_qkv_bias=True, lora=lora.Lora(2, 4.0, ("q",))
  )
  params = jax.tree.map(lambda x: x + 1, small.params(0, model))
  rate = optax.constant_schedule(0.1)
  for weights in (params, lora.trainable(params)):
    optimizer, _ = call_factory(adamw, rate, 0.5, 10)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = jax.jit(optimizer.init)(weights)
    expected = jax.eval_shape(optax.adamw(rate).init, weights)
    chex.assert_trees_all_equal_structs(state, expected)
    updates, _ = jax.jit(optimizer.update)(zeros, state, weights)
    kept = set()
    for name, x in parameters.flatten(updates).items():
      want = -0.05 * parameters.flatten(weights)[name]
      if not x.any():
        kept.add(name.rpartition("/")[2])
        want = 0 * want
      np.testing.assert_allclose(x, want, rtol=1e-5)
    norms = {"final_norm", "mlp_norm", "attention_norm", "q_norm", "k_norm"}
    norms |= {"q_bias", "k_bias", "v_bias"}
    assert kept == (norms if weights is params else set())


def test_weight_decay_needs_a_factory_that_takes_it():
  rate = optax.constant_schedule(0.1)
  with pytest.raises(UserError, match=r"weight_decay is 0.1 but .* sgd\(\)"):
    call_factory(optax.sgd, rate, 0.1, 10)
  optimizer, _ = call_factory(optax.lion, rate, 0.5, 10)
  params = {"w": jnp.ones(3)}
  updates, _ = optimizer.update(
    {"w": jnp.zeros(3)}, optimizer.init(params), params
  )
  np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)


@pytest.mark.parametrize(
  ("reference", "message"),
  [
    ("none.py:lion", "config.optimizer.function: .*there is no file .*none.py"),
    ("optax:lions", "there is no function 'lions' in optax"),
    ("json:dumps", r"dumps\(\): TypeError: Object of type function is not"),
    (f"{__name__}:longer", "config.optimizer.function: an update must have"),
    (f"{__name__}:forgetful", "config.optimizer.function: an update must have"),
    (f"{__name__}:wider", "config.optimizer.function: an update must have"),
  ],
)
def test_run_with_a_wrong_optimizer_does_not_start(
  tmp_path, reference, message
):
  c = commands.config("arithmetic", **TINY, optimizer__function=reference)
  with pytest.raises(UserError, match=message):
    train.run(c, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_state_of_any_optimizer_is_laid_out_as_the_weights_are(tmp_path):
  """Moments as their weight; what has another shape is on every device."""
  for name in ("sgd", "lion", "adafactor", "adamw"):
    mesh = {"mesh__data": 2, "mesh__model": 2}
    function = {"optimizer__function": f"optax:{name}"}
    run = setup_run(commands.config("arithmetic", **TINY, **function, **mesh))
    with jax.set_mesh(run.spec.mesh):
      state = abstract_values.abstract_train_state(run.spec)
    weights = jax.tree.leaves(state.params)
    split = [
      x
      for x in jax.tree.leaves(state.opt_state)
      if not x.sharding.is_fully_replicated
    ]
    split_weights = [x for x in weights if not x.sharding.is_fully_replicated]
    copies = {"sgd": 0, "lion": 1, "adafactor": 1, "adamw": 2}[name]
    assert split_weights
    assert sorted(x.shape for x in split) == sorted(
      x.shape for x in split_weights * copies
    )


@pytest.mark.slow
def test_own_optimizer_logs_its_rate_and_resumes_bit_identical(tmp_path):
  (tmp_path / "my.py").write_text(OWN)
  options = TINY | {
    "optimizer__function": f"{tmp_path}/my.py:halved",
    "checkpoint__every": 1,
  }
  c = commands.config("arithmetic", **options)
  assert "steps" not in resume.may_change(c)  # it takes total_steps

  def stop(step, info, state):
    raise SystemExit

  train.run(c, tmp_path / "undisturbed")
  with pytest.raises(SystemExit):
    train.run(c, tmp_path / "stopped", [lambda *x: x[0] == 2 and stop(*x)])
  train.run(c, tmp_path / "stopped")
  states = []
  for name in ("undisturbed", "stopped"):
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(x)["update/learning_rate"] for x in lines]
    np.testing.assert_allclose(rates, [1e-2, 5e-3], rtol=1e-6)
    with checkpoint.Checkpoints(tmp_path / name, 2) as checkpoints:
      like = abstract_values.abstract_train_state(setup_run(c).spec)
      states.append(jax.device_get(checkpoints.restore(2, like)))
  chex.assert_trees_all_equal(*states)
  assert states[0].opt_state.total_notfinite == 0
  (tmp_path / "my.py").write_text(OWN + "\n")
  with pytest.raises(UserError, match=r"fingerprints\.code was"):
    run = setup_run(c)
    prints = resume.fingerprints(c, run.train_set, run.eval_sets)
    resume.check(tmp_path / "stopped", c, prints)


def test_optimizer_is_made_while_its_state_is_traced():
  """A plan does so; the schedule is called once beforehand, with a number."""
  init = lambda x: make_optimizer(0.1, 10, "cosine", warmup_steps=2).init(x)
  assert jax.eval_shape(init, jnp.zeros(3)).total_notfinite.shape == ()
