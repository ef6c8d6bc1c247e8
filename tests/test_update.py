"""The update: exact in expectation, for any division into rows."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dppo_jax import methods
from dppo_jax.algo import objectives, policy_loss
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.metrics import health
from dppo_jax.models.config import LocalLayers
from dppo_jax.records import TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.rollout import Sampling
from dppo_jax.step import choose_tokens, select, tokens, update
from dppo_jax.step.optimizer import make_optimizer
from tests.helpers import small

pytestmark = pytest.mark.slow

REWARDS = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
RNG = rng_at(jax.random.key(0), 0, Stage.COMPLETIONS)
# Clipping and the penalty at work: the sampler's log-probabilities are random.
ACTIVE = objectives.grpo(clip_low=0.1, clip_high=0.15, beta=0.3)


# Windows of three tokens in every other layer: shorter than the prompts.
WITH_WINDOWS = dataclasses.replace(
  small.MODEL, local=LocalLayers((True, False), window=3, rope_theta=100.0)
)


def _spec(objective=ACTIVE, inner_updates=2, **fields):
  return small.spec(objective=objective, inner_updates=inner_updates, **fields)


@functools.partial(jax.jit, static_argnames=("objective", "packing", "lavish"))
def _select(
  rollout,
  objective=ACTIVE,
  packing=small.PACKING,
  lavish=False,
  rewards=REWARDS,
):
  return select.select(
    RNG,
    small.prompts(),
    rollout,
    rewards,
    spec=small.spec(
      method=methods.grpo()._replace(trains_zero_advantage=lavish),
      objective=objective,
      packing=packing,
    ),
  )


def _update(inner_updates, optimizer):
  spec = _spec(inner_updates=inner_updates, optimizer=optimizer)
  return jax.jit(functools.partial(update.update, spec=spec))


@functools.partial(jax.jit, static_argnames="spec")
def _gradient(params, reference, batch, num_micro, spec):
  return update.sum_gradients(batch, num_micro, params, reference, spec=spec)


def _gradient_of(rollout, objective=ACTIVE, inner_updates=2, **kwargs):
  batch, num_micro, *_ = _select(rollout, objective, **kwargs)
  spec = _spec(objective, inner_updates)
  return _gradient(small.params(0), small.params(1), batch, num_micro, spec)


def _flat(tree):
  """One vector; NumPy, which compiles nothing."""
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def _assert_close(actual, want, rtol=2e-5):
  actual, want = _flat(actual), _flat(want)
  scale = np.linalg.norm(want)
  assert scale > 0
  assert np.linalg.norm(actual - want) <= rtol * scale


def test_zero_advantage_adds_nothing_where_there_is_no_penalty():
  rollout, plain = small.rollout(small.prompts()), objectives.grpo()
  lean = _gradient_of(rollout, objective=plain)
  heavy = _gradient_of(rollout, objective=plain, lavish=True)
  assert lean.sums["tokens"] < heavy.sums["tokens"]
  _assert_close(lean.grad, heavy.grad, rtol=1e-6)
  # With a penalty those completions are trained on without being asked for.
  held = _gradient_of(rollout)
  assert held.sums["tokens"] == heavy.sums["tokens"]


def test_sampler_mismatch_is_corrected_by_weights():
  """On-policy case; otherwise `choose_tokens` corrects before the update."""
  plain, capped = objectives.grpo(), objectives.grpo(sampler_cap=1.1)
  batch, num_micro, *_ = _select(small.rollout(small.prompts()), plain)
  params, spec = small.params(0), _spec(plain, inner_updates=1)
  stats = update.score(params, batch, num_micro, spec=spec)
  factor = policy_loss.sampler_correction(
    stats.logprobs, batch.old_logprobs, 1.1
  )
  assert factor.min() < 1 < factor.max() <= jnp.float32(1.1)
  weighted = batch.replace(weights=batch.weights * factor)
  want = _gradient(params, None, weighted, num_micro, spec)
  spec = dataclasses.replace(spec, objective=capped)
  actual = _gradient(params, None, batch, num_micro, spec)
  _assert_close(actual.grad, want.grad)


@pytest.mark.parametrize(
  "packing", [PackingSpec(11, 1, 1), PackingSpec(40, 3, 9)]
)
def test_gradient_does_not_depend_on_rows_or_micro_batches(packing):
  rollout = small.rollout(small.prompts())
  _assert_close(
    _gradient_of(rollout, packing=packing).grad, _gradient_of(rollout).grad
  )


def test_an_empty_batch_saves_no_positions():
  rollout, same = small.rollout(small.prompts()), jnp.ones_like(REWARDS)
  *_, info, _ = _select(rollout, objectives.grpo(), rewards=same)
  assert info["pack/rows"] == info["pack/fill"] == info["pack/shared"] == 0


@pytest.mark.parametrize(
  ("objective", "model"),
  [
    (ACTIVE, small.MODEL),
    (objectives.gspo(beta=0.3), small.MODEL),
    (ACTIVE, WITH_WINDOWS),
  ],
)
def test_gradient_does_not_depend_on_whether_prompts_are_shared(
  objective, model
):
  rollout = small.rollout(small.prompts())
  sums = {}
  for shares in (False, True):
    packing = PackingSpec(40, 2, 9, share_prefix=shares)
    batch, num_micro, info, _ = _select(rollout, objective, packing)
    assert (info["pack/shared"] > 0) == shares
    spec = _spec(objective, model=model)
    sums[shares] = _gradient(
      small.params(0), small.params(1), batch, num_micro, spec
    )
  _assert_close(sums[True].grad, sums[False].grad)
  _assert_close(sums[True].sums, sums[False].sums)


@jax.jit
def _score(params, batch, num_micro):
  spec = _spec(sampling=Sampling(5, (small.STOP,), top_p=0.9))
  stats = update.score(params, batch, num_micro, spec=spec)
  return choose_tokens(RNG, batch, stats, spec=spec)[0]


def test_packed_equals_alone():
  """Each sequence in a row of its own gives the same log-probabilities."""
  rollout = small.rollout(small.prompts())
  alone = PackingSpec(row_length=10, rows_per_micro=9, window=1)
  scored = {}
  for name, packing in {"packed": small.PACKING, "alone": alone}.items():
    batch, num_micro, *_ = _select(rollout, packing=packing)
    batch = _score(small.params(), batch, num_micro)
    flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1), batch)
    # A token is known by what was sampled there: its random log-probability.
    was = _select(rollout, packing=packing)[0].old_logprobs.reshape(-1)
    scored[name] = {
      float(old): float(new)
      for old, new, t in zip(
        was, flat.old_logprobs, flat.is_trained, strict=True
      )
      if t
    }
  assert len(scored["packed"]) == int(rollout.lengths.sum())
  assert scored["packed"].keys() == scored["alone"].keys()
  for token, value in scored["packed"].items():
    np.testing.assert_allclose(value, scored["alone"][token], atol=2e-5)


def test_on_policy_gradient_is_that_of_weighted_log_likelihood():
  rollout, objective = small.rollout(small.prompts()), objectives.grpo()
  batch, num_micro, *_ = _select(rollout, objective=objective)
  actual = _gradient_of(rollout, objective=objective, inner_updates=1)
  assert actual.sums["clipped"] == 0

  @jax.jit
  def likelihood(params):
    total = 0.0
    for i in range(int(num_micro)):
      rows = jax.tree.map(lambda x, i=i: x[i], batch)
      logprobs = update.logprobs(params, rows, rows.is_trained, spec=_spec())
      total -= (logprobs * rows.advantages * rows.weights).sum()
    return total

  _assert_close(actual.grad, jax.grad(likelihood)(small.params()))


@pytest.mark.parametrize(
  ("cap", "inner_updates", "is_needed"), [(0.0, 2, False), (2.0, 1, False)]
)
def test_no_pass_computes_old_logprobs_that_are_known(
  cap, inner_updates, is_needed
):
  spec = _spec(objectives.grpo(sampler_cap=cap), inner_updates)
  assert tokens.is_needed(spec) == is_needed


def test_a_sampler_is_corrected_for_before_several_updates():
  """The trainer's probabilities are 1.05 and 1.5 times the sampler's."""
  spec = _spec(objectives.grpo(sampler_cap=1.2), inner_updates=2)
  batch, num_micro, *_ = _select(small.rollout(small.prompts()))
  stats = update.score(small.params(), batch, num_micro, spec=spec)
  for ratio, want in ((1.05, 1.05), (1.5, 1.2)):
    sampled = batch.replace(old_logprobs=stats.logprobs - np.log(ratio))
    scored, _ = tokens.score(RNG, small.params(), sampled, num_micro, spec=spec)
    is_used = np.asarray(batch.is_trained & (batch.weights != 0))
    np.testing.assert_allclose(
      scored.weights[is_used], want * batch.weights[is_used], rtol=1e-4
    )


def _state(optimizer):
  params = small.params()
  zero = jnp.int32(0)
  return TrainState(zero, zero, params, jax.jit(optimizer.init)(params), ())


@pytest.mark.parametrize(
  "objective", [objectives.gspo(), objectives.cispo(1e-4, 1e-4)]
)
def test_ratios_of_the_first_of_several_updates_are_1(objective):
  """The sampler's rounding clips tokens of the second alone."""
  rollout, optimizer = small.rollout(small.prompts()), make_optimizer(1e-3, 10)
  batch, num_micro, *_ = _select(rollout, objective)
  run, alone = (
    jax.jit(
      functools.partial(
        update.update, spec=_spec(objective, num, optimizer=optimizer)
      )
    )
    for num in (2, 1)
  )
  args = _state(optimizer), None, batch, num_micro, jnp.float32(9)
  first, second = (run(*args, jnp.int32(i)) for i in range(2))
  share = "update/clip_share"
  assert first[1][share] == 0 < second[1][share]
  want = alone(*args)
  assert first[1]["update/loss"] == want[1]["update/loss"]
  chex.assert_trees_all_close(first[0].params, want[0].params, rtol=1e-6)


def test_one_compilation_serves_every_number_of_micro_batches():
  optimizer = make_optimizer(1e-3, 10)

  @jax.jit
  @chex.assert_max_traces(n=1)
  def step(state, reference, batch, num_micro):
    return update.update(
      state,
      reference,
      batch,
      num_micro,
      jnp.float32(9),
      spec=_spec(optimizer=optimizer),
    )

  batch, num_micro, *_ = _select(small.rollout(small.prompts()))
  seen = set()
  for num in range(int(num_micro) + 1):
    _, info = step(_state(optimizer), small.params(1), batch, jnp.int32(num))
    seen.add(float(info["update/loss"]))
  assert len(seen) == int(num_micro) + 1


@pytest.mark.parametrize("factor", [np.nan, 1e25])  # whose square is infinite
def test_non_finite_gradient_changes_no_weight_and_is_counted(factor):
  optimizer = make_optimizer(1e-3, 10)
  batch, num_micro, *_ = _select(small.rollout(small.prompts()))
  bad = batch.replace(weights=batch.weights * np.float32(factor))
  step = _update(1, optimizer)
  nine = jnp.float32(9)
  start = _state(optimizer)
  state, info = step(start, small.params(1), bad, num_micro, nine)
  chex.assert_trees_all_equal(state.params, start.params)
  assert info["update/skipped"] == info["update/skipped_in_a_row"] == 1
  state, info = step(state, small.params(1), bad, num_micro, nine)
  assert info["update/skipped_in_a_row"] == 2
  state, info = step(state, small.params(1), batch, num_micro, nine)
  assert info["update/skipped"] == 2 and info["update/skipped_in_a_row"] == 0
  assert info["update/nonfinite_params"] == 0
  assert not np.allclose(state.params["embed"], start.params["embed"])


def test_weights_that_the_optimizer_destroys_are_counted():
  """A non-finite moment destroys weights although the gradient is finite."""
  optimizer = make_optimizer(
    1e-3, 10, factory=lambda rate: optax.adam(rate, b1=float("nan"))
  )
  start = _state(optimizer)
  sums = update.zero_sums(start.params, small.MODEL)
  sums = sums._replace(grad=jax.tree.map(jnp.ones_like, sums.grad))
  apply = jax.jit(update.apply_gradient, static_argnums=3)
  state, info = apply(start, sums, jnp.float32(9), optimizer)
  num_params = sum(x.size for x in jax.tree.leaves(state.params))
  assert info["update/skipped"] == 0
  assert info["update/nonfinite_params"] == num_params


def test_a_batch_without_a_gradient_changes_no_weight():
  """Holds until the optimizer has nonzero moments."""
  prompts = small.prompts()
  rollout, nothing = small.rollout(prompts), small.everything(3)
  pruned = rollout.replace(
    kept=nothing.replace(keep=~nothing.keep), lengths=0 * rollout.lengths
  )
  optimizer, grpo = make_optimizer(1e-2, 10), objectives.grpo()
  step = functools.partial(
    update.update, spec=_spec(grpo, 1, optimizer=optimizer)
  )
  step, start = jax.jit(step), _state(optimizer)
  for sampled, rewards in ((pruned, REWARDS), (rollout, jnp.ones((3, 3)))):
    batch, num_micro, selected, _ = _select(sampled, grpo, rewards=rewards)
    state, info = step(start, None, batch, num_micro, jnp.float32(9))
    chex.assert_trees_all_equal(state.params, start.params)
    values = jax.device_get(selected | info) | {"step/seconds": 1.0}
    assert values["completions/trained"] == values["update/grad_norm"] == 0
    assert all(np.isfinite(x) for x in values.values())
    watch = health.Health(1)
    _, messages = [watch.check(i, values) for i in range(10)][-1]
    assert any("no token was trained on" in x for x in messages)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rate_rises_and_falls(schedule):
  """A constant gradient makes AdamW move a weight by the learning rate."""
  optimizer = make_optimizer(0.1, 10, schedule, warmup_steps=2, clip_norm=1e9)
  params, moved = {"w": jnp.zeros(())}, []
  state = optimizer.init(params)
  for _ in range(10):
    updates, state = optimizer.update({"w": jnp.ones(())}, state, params)
    moved.append(-float(updates["w"]))
  np.testing.assert_allclose(moved[:3], [0.05, 0.1, 0.1], rtol=1e-4)
  if schedule == "constant":
    np.testing.assert_allclose(moved[9], 0.1, rtol=1e-4)
  else:
    assert moved[9] < 0.02
