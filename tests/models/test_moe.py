"""A mixture of experts against a loop over tokens, alone and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import sharding
from dppo_jax.models import grouped, moe

EXPERTS = moe.Experts(num=8, per_token=3, mlp=6, is_normalized=True)
EMBED = 12  # a mesh divides it


def weights(seed=0):
  rng = np.random.default_rng(seed)
  x, e, f = EXPERTS.num, EMBED, EXPERTS.mlp
  shapes = (e, x), (x, e, f), (x, e, f), (x, f, e)
  return [jnp.asarray(rng.normal(0, 0.5, s), jnp.float32) for s in shapes]


def tokens(*shape, seed=1):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(0, 1, (*shape, EMBED)), jnp.float32)


def one_by_one(x, router, gate, up, down, experts=EXPERTS):
  """Applies each token's experts one by one."""

  def expert(token, i):
    return (jax.nn.silu(token @ gate[i]) * (token @ up[i])) @ down[i]

  out = []
  for token in x.reshape(-1, EMBED):
    prob = jax.nn.softmax(token @ router)
    chosen = jnp.argsort(-prob)[: experts.per_token]
    total = prob[chosen].sum() if experts.is_normalized else 1.0
    out.append(sum(prob[i] / total * expert(token, i) for i in chosen))
  return jnp.stack(out).reshape(x.shape)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_a_mixture_is_the_sum_over_each_tokens_experts(is_normalized):
  experts = EXPERTS._replace(is_normalized=is_normalized)
  x, target = tokens(2, 3), tokens(2, 3, seed=2)

  def with_grads(f):
    def loss(*args):
      out = f(*args, experts)
      return (out * target).sum(), out

    grads, out = jax.jit(jax.grad(loss, range(5), has_aux=True))(x, *weights())
    return out, *grads

  actual = with_grads(lambda *args: moe.mixture(*args)[0])
  for f, e in zip(actual, with_grads(one_by_one), strict=True):
    assert np.abs(e).max() > 0.01
    np.testing.assert_allclose(f, e, atol=1e-5)


def test_gpus_sum_the_experts_of_few_tokens_at_once():
  """Three of eight experts are on other devices."""
  x, (router, *matrices) = tokens(7), weights()
  prob, routing = moe.route(x, router, EXPERTS)
  chosen = jnp.where(routing.chosen < 5, routing.chosen, 5)
  args = x, prob, chosen, *(w[:5] for w in matrices)
  assert (chosen == 5).any() and (chosen < 5).any()
  want = moe._by_pair(*args)
  np.testing.assert_allclose(moe._by_expert(*args), want, atol=1e-5)


@pytest.mark.parametrize("data, model", [(1, 8), (4, 2), (2, 4)])
def test_a_mixture_on_a_mesh_is_that_of_one_device(data, model):
  x, target = tokens(4, 3), tokens(4, 3, seed=2)

  def loss(x, *w):
    out, _ = moe.mixture(x, *w, EXPERTS)
    return (out * target).sum(), out

  run = jax.jit(jax.value_and_grad(loss, range(5), has_aux=True))
  expected = run(x, *weights())
  with jax.set_mesh(sharding.make_mesh(data, model)):
    actual = run(x, *weights())
  jax.tree.map(
    lambda f, e: np.testing.assert_allclose(f, e, atol=1e-4), actual, expected
  )


def test_mixture_in_a_rollout_does_not_query_its_device_index():
  """XLA rejects such a query inside the rollout's shard_map on TPUs."""
  x = tokens(4, 3)
  run = lambda x, *w: moe.mixture(x, *w, EXPERTS)[0]
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    shards = sharding.spec(("batch",))
    divided = jax.shard_map(
      run,
      in_specs=(shards, *(jax.P(),) * 4),
      out_specs=shards,
      axis_names=set(sharding.RULES["batch"]),
      check_vma=False,
    )
    lowered = jax.jit(divided).lower(x, *weights())
  assert "partition_id" not in lowered.as_text("hlo").replace("-", "_")
  np.testing.assert_allclose(
    lowered.compile()(x, *weights()), run(x, *weights()), atol=1e-5
  )


def test_rows_of_other_devices_have_no_effect(monkeypatch):
  """Fills rows outside all groups with NaN: their product is undefined."""
  product = grouped.product

  def spoilt(rows, weights, sizes):
    is_in = jnp.arange(len(rows))[:, None] < sizes.sum()
    return jnp.where(is_in, product(rows, weights, sizes), jnp.nan)

  monkeypatch.setattr(grouped, "product", spoilt)
  x = tokens(4, 3)
  loss = lambda x, *w: (moe.mixture(x, *w, EXPERTS)[0] ** 2).sum()
  with jax.set_mesh(sharding.make_mesh(1, 4)):
    actual = jax.jit(jax.grad(loss, range(5)))(x, *weights())
  monkeypatch.undo()
  expected = jax.jit(jax.grad(loss, range(5)))(x, *weights())
  jax.tree.map(
    lambda f, e: np.testing.assert_allclose(f, e, atol=1e-4), actual, expected
  )


def test_load_counts_tokens_of_each_expert_without_padding():
  x, is_real = tokens(4, 5), jnp.arange(20).reshape(4, 5) % 3 > 0
  router = weights()[0]
  _, routing = moe.mixture(x, *weights(), EXPERTS)
  load = moe.load(routing, is_real, EXPERTS)
  want, entropy = np.zeros(EXPERTS.num), 0.0
  for token in x[is_real]:
    prob = np.asarray(jax.nn.softmax(token @ router))
    want[np.argsort(-prob)[: EXPERTS.per_token]] += 1
    entropy -= (prob * np.log(prob)).sum()
  np.testing.assert_array_equal(load.tokens, want)
  np.testing.assert_allclose(load.entropy, entropy, rtol=1e-5)


def test_load_metrics_in_closed_form():
  """Two layers: an even one, and one with all tokens at two of four experts."""
  load = moe.Load(
    jnp.array([[5.0, 5, 5, 5], [10, 10, 0, 0]]), jnp.array([10.0, 0])
  )
  actual = moe.describe(load, jnp.float32(10))
  assert actual == {
    "moe/load_max": 2.0,
    "moe/load_max_mean": 1.5,
    "moe/load_cv": 0.5,
    "moe/unused": 0.25,
    "moe/router_entropy": 0.5,
  }
