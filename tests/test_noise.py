"""How noisy gradients are: by random signs, against every prompt's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.methods.neyman.step_costs import Costs, of_step
from dppo_jax.records import Selection, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step import optimizer as optimizers
from dppo_jax.step import select, update

NUM = 4
REWARDS = jnp.array([[1.0, 0, 0], [0, 1, 1], [1, 0, 1], [0, 0, 1]])
RNG = rng_at(jax.random.key(0), 0, Stage.COMPLETIONS)
# Rows so short that micro-batches cut through groups.
SPEC = select.PackingSpec(12, rows_per_micro=2, window=4, share_prefix=False)
GRPO = objectives.grpo()


@functools.partial(jax.jit, static_argnames="parts")
def _pack(is_kept, prob, is_here, parts=1):
  """Of the prompts that are kept, those that are here; others lie empty."""
  full = small.rollout(small.prompts(NUM))
  is_here = is_here & is_kept
  rollout = full.replace(
    lengths=jnp.where(is_here[:, None], full.lengths, 0),
    kept=Selection(is_here, prob),
  )
  return select.select(
    RNG,
    small.prompts(NUM),
    rollout,
    jnp.where(is_here[:, None], REWARDS, 0.0),
    method=methods.grpo(),
    objective=GRPO,
    spec=SPEC,
    train_zero_advantage=False,
    mini_batches=parts,
  )[:2]


def _config(**more):
  return update.UpdateConfig(
    small.MODEL, GRPO, logit_chunk=16, num_prompts=NUM, **more
  )


def _gradient(batch, num_used, signs):
  return _gradient_at(small.params(), batch, num_used, signs)


@jax.jit
def _gradient_at(params, batch, num_used, signs):
  change = functools.partial(gradient_noise.signed, signs=signs)
  sums = update.sum_gradients(
    batch, num_used, params, None, _config(), change=change
  )
  leaves = jax.tree.leaves(sums.grad)
  return jnp.concatenate([jnp.ravel(x) for x in leaves])


EVERY = np.ones(NUM, bool)
SOME = np.array([True, False, True, True])
KEPT = {
  "every prompt": (EVERY, np.ones(NUM, np.float32)),
  "some, weighted": (SOME, np.array([0.5, 1, 0.8, 0.4], np.float32)),
}


@functools.cache
def _alone(name):
  """`[N, P]`, the gradient of each prompt, packed alone."""
  one = np.ones(NUM, np.float32)
  found = [
    _gradient(*_pack(*KEPT[name], np.arange(NUM) == q), one) for q in range(NUM)
  ]
  return np.array(found, np.float64)


@pytest.mark.parametrize("name", KEPT)
def test_signs_measure_the_noise_of_a_prompt_without_bias(name):
  """By enumeration of all signs, against all pairs of prompts."""
  batch, num_used = _pack(*KEPT[name], EVERY)
  trained = np.where(batch.is_trained, batch.prompts, -1)[:num_used]
  micros = [{*x.ravel()} - {-1} for x in trained]
  assert sum(map(len, micros)) > NUM  # they cut through groups
  signs = np.array(list(np.ndindex(*(2,) * NUM))) * 2.0 - 1
  squares = [
    (np.asarray(_gradient(batch, num_used, x), np.float64) ** 2).sum()
    for x in signs.astype(np.float32)
  ]
  alone = _alone(name)
  np.testing.assert_allclose(
    np.mean(squares), (alone**2).sum(), rtol=1e-5
  )  # the sum over the prompts
  products = alone @ alone.T
  total = products.sum()
  pairs = (total - np.trace(products)) / (NUM * (NUM - 1))
  got = gradient_noise.measured(
    gradient_noise.init(),
    jnp.float32(total),
    jnp.float32(np.mean(squares)),
    NUM,
  )
  # |E g|^2 of a sum of N prompts, from all pairs of different ones.
  np.testing.assert_allclose(got.signal, NUM**2 * pairs, rtol=1e-4)
  np.testing.assert_allclose(got.noise, total - NUM**2 * pairs, rtol=1e-4)


@functools.cache
def _update(noise_every, mini_batches=1):
  optimizer = optimizers.make_optimizer(1e-3, 10)
  config = _config(noise_every=noise_every, mini_batches=mini_batches)
  step = jax.jit(
    functools.partial(update.update, config=config, optimizer=optimizer)
  )

  def run(number, parts=mini_batches):
    params = small.params()
    state = TrainState(
      *(jnp.int32(number), jnp.int32(0), params, optimizer.init(params), ()),
      noise=gradient_noise.init() if noise_every else None,
    )
    batch = _pack(*KEPT["some, weighted"], EVERY, parts)
    return step(state, None, *batch, jnp.float32(12))

  return run


def test_an_update_measures_now_and_then_and_is_otherwise_as_without():
  plain, wanted = _update(0)(4)
  for number in (4, 5):
    state, metrics = _update(4)(number)
    jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
    for name in wanted:
      np.testing.assert_array_equal(metrics[name], wanted[name])
    assert metrics["noise/measured"] == (number == 4)
    if number == 5:
      assert (
        state.noise == gradient_noise.init() and metrics["noise/share"] == 1
      )
      continue
    alone = _alone("some, weighted")
    total = (alone.sum(axis=0) ** 2).sum()
    signs = np.asarray(gradient_noise.signs(jnp.int32(4), NUM))
    signed = ((signs[:, None] * alone).sum(axis=0) ** 2).sum()
    signal = (total - signed) / (1 - 1 / NUM)
    np.testing.assert_allclose(state.noise.signal, signal, rtol=1e-4)
    np.testing.assert_allclose(state.noise.noise, total - signal, rtol=1e-4)


def test_of_mini_batches_the_first_is_measured():
  """That of every other prompt, at the parameters that sampled."""
  state, _ = _update(1, 2)(0)
  batch, ends = _pack(*KEPT["some, weighted"], EVERY, 2)
  trained = np.where(batch.is_trained, batch.prompts, -1)[: ends[0]]
  assert {*trained.ravel()} <= {-1, 0, 2}

  @jax.jit
  def squared(signs):
    change = functools.partial(gradient_noise.signed, signs=signs)
    config = _config(mini_batches=2)
    params = small.params()
    sums = update.sum_gradients(
      batch, ends[0], params, None, config, change=change
    )
    return optax.tree.norm(sums.grad, squared=True)

  total = squared(jnp.ones(NUM))
  signal = (total - squared(gradient_noise.signs(jnp.int32(0), NUM))) / (
    1 - 1 / 2
  )
  np.testing.assert_allclose(state.noise.signal, signal, rtol=1e-4, atol=1e-3)
  np.testing.assert_allclose(state.noise.noise, total - signal, rtol=1e-4)


def test_measurements_are_smoothed_and_what_is_not_finite_is_left_out():
  one = gradient_noise.measured(
    gradient_noise.init(), jnp.float32(3), jnp.float32(2), 2
  )
  assert (one.signal, one.noise) == (2, 1)
  assert gradient_noise.share(one) == pytest.approx(1 / 3)
  two = gradient_noise.measured(one, jnp.float32(1), jnp.float32(1), 2)
  assert two.signal == pytest.approx(gradient_noise.DECAY * 2)
  assert two.noise == pytest.approx(gradient_noise.DECAY + 1)
  assert (
    gradient_noise.measured(one, jnp.float32(np.nan), jnp.float32(1), 2) == one
  )
  told = gradient_noise.describe(one, 8)
  assert told["noise/scale"] == pytest.approx(4)  # half as much as signal
  assert gradient_noise.share(gradient_noise.init()) == 1  # unknown
  # One prompt has nothing to be compared with.
  assert (
    gradient_noise.share(gradient_noise.measured(one, *jnp.ones(2), 1)) > 1 / 3
  )


def _line(**changed):
  line = {
    **{"score/seconds": 0.5, "update/seconds": 1.5, "rollout/seconds": 3.0},
    **{"reward/seconds": 1.0, "step/seconds": 8.0, "noise/measured": 0.0},
    **{"update/micro_batches": 5, "pack/rows": 18, "tokens/trained": 900},
    "tokens/generated": 1000,
  }
  return of_step(line | changed)


def test_costs_are_seconds_of_stages_against_what_they_did():
  state = TrainState(0, 0, None, None, None)
  costs = Costs(rows_per_micro=4)
  nothing = costs.measured(state)
  assert nothing.noise_share == 1
  assert nothing.micro_seconds == nothing.other_seconds == 0
  assert nothing.token_seconds == nothing.fixed_seconds == 0
  for _ in range(3):
    costs.add(_line())
  costs.add(_line(**{"noise/measured": 1.0, "update/seconds": 99.0}))
  found = costs.measured(state.replace(noise=gradient_noise.Noise(3.0, 1.0)))
  assert found.noise_share == pytest.approx(0.25)
  assert found.micro_seconds == pytest.approx(2 / 5)
  assert found.micro_tokens == pytest.approx(4 * 900 / 18)  # of a full one
  assert found.other_seconds == pytest.approx(6)
  assert found.token_seconds == pytest.approx(6 / 1000)
  assert found.fixed_seconds == pytest.approx(2)
