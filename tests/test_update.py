"""The update: exact in expectation, and blind to how the rows were cut."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from dppo_jax import batch as batches
from dppo_jax import keys, methods, update
from dppo_jax.algo import objectives, weights
from dppo_jax.models import head
from dppo_jax.records import Selection, TrainState

REWARDS = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
DRAW = keys.draw_at(jax.random.key(0), 0, keys.Room.COMPLETIONS)
ROWS = batches.Rows(length=24, per_micro=2, window=4)
# Clipping and the penalty at work: the sampler's log-probabilities are random.
ACTIVE = objectives.grpo(clip_low=0.1, clip_high=0.15, beta=0.3)


def _settings(objective=ACTIVE, inner_updates=2):
  return update.Settings(
    small.MODEL, objective, head_tokens=16, inner_updates=inner_updates
  )


@functools.partial(jax.jit, static_argnames=("objective", "rows", "lavish"))
def _select(rollout, chosen=None, objective=ACTIVE, rows=ROWS, lavish=False):
  """Micro-batches of a rollout whose completions were chosen beforehand."""
  chosen = chosen or small.everything(*REWARDS.shape)
  return batches.select(
    DRAW,
    small.prompts(),
    rollout,
    REWARDS,
    method=methods.grpo()._replace(completions=lambda draw, groups: chosen),
    objective=objective,
    rows=rows,
    train_zero_advantage=lavish,
  )


def _update(inner_updates, optimizer):
  return jax.jit(
    functools.partial(
      update.update,
      settings=_settings(inner_updates=inner_updates),
      optimizer=optimizer,
    )
  )


@functools.partial(jax.jit, static_argnames="settings")
def _gradient(params, reference, batch, num_micro, settings):
  add = lambda i, total: update.add_gradient(
    total, params, reference, settings, jax.tree.map(lambda x: x[i], batch)
  )
  return jax.lax.fori_loop(0, num_micro, add, update.no_gradient(params))


def _gradient_of(
  rollout, chosen=None, objective=ACTIVE, inner_updates=2, **kwargs
):
  batch, num_micro, _ = _select(rollout, chosen, objective, **kwargs)
  settings = _settings(objective, inner_updates)
  return _gradient(small.params(0), small.params(1), batch, num_micro, settings)


def _flat(tree):
  """One vector; NumPy, which compiles nothing."""
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def _assert_close(got, want, rtol=2e-5):
  got, want = _flat(got), _flat(want)
  scale = np.linalg.norm(want)
  assert scale > 0
  assert np.linalg.norm(got - want) <= rtol * scale


def _draws(prompt_prob, prob):
  """Every draw of prompts and completions with its chance, if it has one."""
  num, shape = len(prompt_prob), prob.shape
  for bits in itertools.product((False, True), repeat=num + prob.size):
    prompts = np.array(bits[:num])
    completions = np.array(bits[num:]).reshape(shape)
    chance = np.where(prompts, prompt_prob, 1 - prompt_prob).prod()
    chance *= np.where(completions, prob, 1 - prob).prod()
    if chance:
      yield chance, prompts, completions


def _mean_gradient(estimate):
  """The mean over every draw that DPPO can make in a batch of 3 x 3.

  The probabilities are those of its rules: one prompt of history below the
  mean, and the completions below their group's mean |advantage|.
  """
  prompt_prob = np.array([0.4, 1.0, 1.0], np.float32)
  rule = methods.dppo(completion_rate=0.7).completions
  groups = batches.Groups(
    REWARDS,
    methods.dppo().advantage(REWARDS),
    small.rollout(small.prompts()).lengths,
  )
  prob = np.asarray(rule(DRAW, groups).prob)
  assert (prob < 1).sum() >= 4
  mean, total = 0.0, 0.0
  for chance, prompts, completions in _draws(prompt_prob, prob):
    full = small.rollout(small.prompts())
    rollout = full.replace(
      lengths=jnp.where(prompts[:, None], full.lengths, 0),
      kept=Selection(jnp.array(prompts), jnp.array(prompt_prob)),
    )
    chosen = Selection(jnp.array(completions), jnp.array(prob))
    mean = mean + chance * _flat(estimate(rollout, chosen))
    total += chance
  np.testing.assert_allclose(total, 1.0, rtol=1e-6)
  return mean


def _weighted(rollout, chosen):
  return _gradient_of(rollout, chosen).gradient


def test_pruned_gradient_averages_to_that_of_the_full_batch():
  full = _gradient_of(small.rollout(small.prompts()))
  assert full.sums["clipped"] > 2 and full.sums["kl"] > 0
  _assert_close(_mean_gradient(_weighted), full.gradient)


def _unweighted(rollout, chosen):
  certain = lambda x: x.replace(prob=jnp.ones_like(x.prob))
  rollout = rollout.replace(kept=certain(rollout.kept))
  return _weighted(rollout, certain(chosen))


def _by_retained_count(rollout, chosen):
  kept = rollout.kept.keep[:, None] & chosen.keep
  scale = kept.size / max(float(kept.sum()), 1)
  return scale * _flat(_unweighted(rollout, chosen))


def _hajek(rollout, chosen):
  total = weights.horvitz_thompson(rollout.kept, chosen).sum()
  scale = chosen.keep.size / max(float(total), 1e-6)
  return scale * _flat(_weighted(rollout, chosen))


@pytest.mark.parametrize("wrong", [_unweighted, _by_retained_count, _hajek])
def test_the_enumeration_has_teeth(wrong):
  full = _gradient_of(small.rollout(small.prompts())).gradient
  with pytest.raises(AssertionError):
    _assert_close(_mean_gradient(wrong), full, rtol=1e-2)


def test_zero_advantage_adds_nothing_where_there_is_no_penalty():
  rollout, plain = small.rollout(small.prompts()), objectives.grpo()
  lean = _gradient_of(rollout, objective=plain)
  heavy = _gradient_of(rollout, objective=plain, lavish=True)
  assert lean.sums["tokens"] < heavy.sums["tokens"]
  _assert_close(lean.gradient, heavy.gradient, rtol=1e-6)
  # With a penalty those completions are trained on without being asked for.
  held = _gradient_of(rollout)
  assert held.sums["tokens"] == heavy.sums["tokens"]


@pytest.mark.parametrize(
  "rows", [batches.Rows(11, 1, 1), batches.Rows(40, 3, 9)]
)
def test_gradient_does_not_depend_on_rows_or_micro_batches(rows):
  rollout = small.rollout(small.prompts())
  _assert_close(
    _gradient_of(rollout, rows=rows).gradient, _gradient_of(rollout).gradient
  )


@jax.jit
def _score(params, batch, num_micro):
  return update.score(params, _settings(), batch, num_micro)


def test_packed_equals_alone():
  """Each sequence in a row of its own gives the same log-probabilities."""
  rollout = small.rollout(small.prompts())
  alone = batches.Rows(length=10, per_micro=9, window=1)
  scored = {}
  for name, rows in {"packed": ROWS, "alone": alone}.items():
    batch, num_micro, _ = _select(rollout, rows=rows)
    batch = _score(small.params(), batch, num_micro)
    flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1), batch)
    # A cell is known by what was sampled there: its random log-probability.
    was = _select(rollout, rows=rows)[0].old_logprobs.reshape(-1)
    scored[name] = {
      float(old): float(new)
      for old, new, t in zip(
        was, flat.old_logprobs, flat.is_trained, strict=True
      )
      if t
    }
  assert len(scored["packed"]) == int(rollout.lengths.sum())
  assert scored["packed"].keys() == scored["alone"].keys()
  for cell, value in scored["packed"].items():
    np.testing.assert_allclose(value, scored["alone"][cell], atol=2e-5)


def test_on_policy_gradient_is_that_of_weighted_log_likelihood():
  rollout, objective = small.rollout(small.prompts()), objectives.grpo()
  batch, num_micro, _ = _select(rollout, objective=objective)
  got = _gradient_of(rollout, objective=objective, inner_updates=1)
  assert got.sums["clipped"] == 0

  @jax.jit
  def likelihood(params):
    total = 0.0
    for i in range(int(num_micro)):
      rows = jax.tree.map(lambda x, i=i: x[i], batch)
      logprobs = update.logprobs(params, _settings(), rows)
      total -= (logprobs * rows.advantages * rows.weights).sum()
    return total

  _assert_close(got.gradient, jax.grad(likelihood)(small.params()))


def _state(optimizer):
  params = small.params()
  return TrainState(jnp.int32(0), params, jax.jit(optimizer.init)(params), ())


def test_one_compilation_serves_every_number_of_micro_batches():
  optimizer = update.make_optimizer(1e-3, 10)
  traces = []

  @jax.jit
  def step(state, reference, batch, num_micro):
    traces.append(1)
    return update.update(
      state,
      reference,
      batch,
      num_micro,
      jnp.float32(9),
      settings=_settings(),
      optimizer=optimizer,
    )

  batch, num_micro, _ = _select(small.rollout(small.prompts()))
  seen = set()
  for num in range(int(num_micro) + 1):
    _, info = step(_state(optimizer), small.params(1), batch, jnp.int32(num))
    seen.add(float(info["update/loss"]))
  assert len(traces) == 1 and len(seen) == int(num_micro) + 1


def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_counted():
  optimizer = update.make_optimizer(1e-3, 10)
  batch, num_micro, _ = _select(small.rollout(small.prompts()))
  bad = batch.replace(weights=batch.weights * jnp.nan)
  step = _update(1, optimizer)
  nine = jnp.float32(9)
  start = _state(optimizer)
  state, info = step(start, small.params(1), bad, num_micro, nine)
  jax.tree.map(np.testing.assert_array_equal, state.params, start.params)
  assert info["update/skipped"] == info["update/skipped_in_a_row"] == 1
  state, info = step(state, small.params(1), bad, num_micro, nine)
  assert info["update/skipped_in_a_row"] == 2
  state, info = step(state, small.params(1), batch, num_micro, nine)
  assert info["update/skipped"] == 2 and info["update/skipped_in_a_row"] == 0
  assert not np.allclose(state.params["embed"], start.params["embed"])


def test_inner_updates_are_steps_from_one_old_policy():
  """Two at once equal one and one, with the same old log-probabilities."""
  optimizer = update.make_optimizer(1e-2, 10)
  batch, num_micro, _ = _select(small.rollout(small.prompts()))
  batch = _score(small.params(), batch, num_micro)
  args = (_state(optimizer), small.params(1), batch, num_micro, jnp.float32(9))
  twice, info = _update(2, optimizer)(*args)
  assert info["update/policy_ratio_max"] > 1.01
  once, _ = _update(1, optimizer)(*args)
  # The second of two single steps must not take itself for on-policy.
  by_hand = _gradient(
    once.params, small.params(1), batch, num_micro, _settings()
  )
  apply = jax.jit(update.apply_gradient, static_argnums=3)
  second, _ = apply(once, by_hand, jnp.float32(9), optimizer)
  _assert_close(twice.params, second.params, rtol=1e-6)


@pytest.mark.parametrize("head_tokens", [1, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_head_equals_log_softmax(head_tokens, temperature):
  keys_ = jax.random.split(jax.random.key(0), 4)
  hidden = jax.random.normal(keys_[0], (2, 12, 8))
  weight = jax.random.normal(keys_[1], (20, 8))
  targets = jax.random.randint(keys_[2], (2, 12), 0, 20)
  slopes = jax.random.normal(keys_[3], (2, 12))

  def plain(hidden, weight):
    scores = jnp.einsum("ble,ve->blv", hidden, weight) / temperature
    logprobs = jax.nn.log_softmax(scores)
    chosen = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
    return (chosen * slopes).sum(), chosen

  def chunked(hidden, weight):
    chosen = head.token_logprobs(
      hidden, weight, targets, temperature, head_tokens
    )
    return (chosen * slopes).sum(), chosen

  want = jax.value_and_grad(plain, (0, 1), has_aux=True)(hidden, weight)
  got = jax.value_and_grad(chunked, (0, 1), has_aux=True)(hidden, weight)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    got,
    want,
  )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rate_ramps_and_falls(schedule):
  """A constant slope makes AdamW move a weight by the learning rate."""
  optimizer = update.make_optimizer(
    0.1, 10, schedule, ramp_steps=2, clip_norm=1e9
  )
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


def test_an_unknown_schedule_is_refused():
  with pytest.raises(ValueError, match=r"schedule.*'warm'.*cosine"):
    update.make_optimizer(0.1, 10, "warm")
