"""The update takes tokens through the experts that the sampler took."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small

from dppo_jax import rollout
from dppo_jax.algo import objectives
from dppo_jax.models import moe, transformer
from dppo_jax.records import TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.step import optimizer, select, update

pytestmark = pytest.mark.slow

EXPERTS = moe.Experts(num=8, per_token=2, mlp=8, is_normalized=True)
MODEL = dataclasses.replace(small.MODEL, experts=EXPERTS)
CONFIG = update.UpdateConfig(MODEL, objectives.grpo(), logit_chunk=64)
OPTIMIZER = optimizer.make_optimizer(1e-3, 1)
SPEC = select.PackingSpec(row_length=24, rows_per_micro=2, window=4)


@functools.cache
def _rollout(record=True):
  sample = functools.partial(
    rollout.sample,
    model_config=MODEL,
    group_size=3,
    max_tokens=8,
    num_slots=5,
    prefill_batch=2,
    stop_ids=(small.STOP,),
    platform="tpu",  # one stage of decoding to compile
    record_experts=record,
  )
  rng = rng_at(jax.random.key(5), 0, Stage.ROLLOUT)
  return jax.jit(sample)(_params(), prompts=small.prompts(4), rng=rng)


def _params():
  return small.params(config=MODEL)


@jax.jit
def _perturbed(params):
  """Other routers, all else as it is."""
  layers = params["layers"]
  router = jax.random.normal(jax.random.key(9), layers["router"].shape)
  return {**params, "layers": {**layers, "router": router}}


@functools.cache
def _batch(share_prefix=True):
  advantages = jnp.broadcast_to(jnp.array([1.0, -2.0, 1.0]), (4, 3))
  pack = functools.partial(
    select.pack, spec=SPEC._replace(share_prefix=share_prefix)
  )
  return jax.jit(pack)(
    small.prompts(4), _rollout(), advantages, jnp.ones((4, 3))
  )[:2]


_score = jax.jit(update.score, static_argnums=1)


def _logprobs(params, batch, num):
  return _score(params, CONFIG, batch, num).logprobs


def test_recording_changes_no_completion():
  want, got = _rollout(record=False), _rollout()
  assert want.experts is None and want.prompt_experts is None
  assert got.experts.dtype == got.prompt_experts.dtype == jnp.uint8
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-6)


def test_with_the_samplers_weights_a_replay_changes_nothing():
  """Prompts that completions share, or that each has to itself."""
  for share_prefix in (True, False):
    batch, num = _batch(share_prefix)
    on = _logprobs(_params(), batch, num)
    off = _logprobs(_params(), batch.replace(experts=None), num)
    np.testing.assert_allclose(on, off, atol=2e-5)
    old = jnp.where(batch.is_trained, batch.old_logprobs, 0.0)
    np.testing.assert_allclose(on, old, atol=2e-5)


def test_with_other_routers_packed_is_alone():
  """Each completion by itself through the experts that were recorded."""
  params, got, prompts = _perturbed(_params()), _rollout(), small.prompts(4)
  forward = jax.jit(transformer.forward, static_argnums=1)
  of_token = {}
  for q, g in np.ndindex(4, 3):
    n, m = int(prompts.lengths[q]), int(got.lengths[q, g])
    text = np.zeros(16, np.int32)
    text[:n] = prompts.tokens[q, :n]
    text[n : n + m] = got.tokens[q, g, :m]
    experts = np.zeros((16, MODEL.layers, EXPERTS.per_token), np.uint8)
    experts[: n - 1] = got.prompt_experts[q, : n - 1]
    experts[n - 1 : n - 1 + m] = got.experts[q, g, :m]
    position = jnp.arange(16)[None]
    is_real = (position < n + m).astype(jnp.int32)
    rows = jnp.array(text)[None], position, is_real, None, experts[None]
    hidden = forward(params, MODEL, *rows)
    logprobs = jax.nn.log_softmax(transformer.logits(params, MODEL, hidden))[0]
    for t in range(m):
      at, token = n - 1 + t, int(got.tokens[q, g, t])
      # The sampler's log-probability is a name that no two tokens share.
      of_token[float(got.logprobs[q, g, t])] = float(logprobs[at, token])
  for share_prefix in (True, False):
    batch, num = _batch(share_prefix)
    found = np.asarray(_logprobs(params, batch, num))[batch.is_trained]
    names = np.asarray(batch.old_logprobs)[batch.is_trained]
    want = [of_token[float(name)] for name in names]
    assert len(want) == len(of_token) == int(got.lengths.sum())
    np.testing.assert_allclose(found, want, atol=2e-5)
    free = _logprobs(params, batch.replace(experts=None), num)
    assert np.abs(np.asarray(free)[batch.is_trained] - want).max() > 1e-3


@pytest.mark.parametrize("replays", [True, False])
def test_an_update_says_what_became_of_the_routing(replays):
  batch, num = _batch()
  if not replays:
    batch = batch.replace(experts=None)
  learn = jax.jit(
    functools.partial(update.update, config=CONFIG, optimizer=OPTIMIZER)
  )
  metrics = {}
  for name, params in (("same", _params()), ("other", _perturbed(_params()))):
    zero = jnp.int32(0)
    state = TrainState(zero, zero, params, OPTIMIZER.init(params), ())
    metrics[name] = learn(state, None, batch, num, jnp.float32(4))[1]
  same, other = metrics["same"], metrics["other"]
  assert ("moe/moved" in same) == replays
  if replays:
    assert same["moe/moved"] == 0 and 0.2 < other["moe/moved"] <= 1
    # The load is that of the recorded experts, whatever the router says.
    assert other["moe/load_max"] == same["moe/load_max"] > 1
  else:
    assert other["moe/load_max"] != same["moe/load_max"]
  assert 0 < same["moe/router_entropy"] < np.log(EXPERTS.num)


def test_a_gradient_reaches_the_routers_and_the_recorded_experts_alone():
  batch, num = _batch()
  params = _perturbed(_params())
  sum_gradients = jax.jit(update.sum_gradients, static_argnums=4)
  grad = sum_gradients(batch, num, params, None, CONFIG).grad["layers"]
  assert optax.tree.norm(grad["router"]) > 0
  is_read = np.asarray(batch.segment_ids[: int(num)]) > 0
  recorded = np.asarray(batch.experts[: int(num)])[is_read]
  for layer in range(MODEL.layers):
    used = np.unique(recorded[:, layer])
    moved = np.abs(grad["experts_down"][layer]).max((1, 2)) > 0
    assert set(np.flatnonzero(moved)) <= set(used)
