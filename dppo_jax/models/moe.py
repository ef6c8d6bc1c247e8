"""A mixture of experts in place of a layer's feed-forward part."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import sharding
from dppo_jax.models import grouped


class Experts(NamedTuple):
  """Shape of a mixture of experts."""

  num: int  # experts of a layer
  per_token: int  # experts that each token goes through
  mlp: int  # width of an expert
  is_normalized: bool  # probabilities of the chosen experts sum to 1


class Routing(NamedTuple):
  """Experts that the router chose."""

  chosen: Int[Array, "B *L K"]  # numbers of each token's experts
  entropy: Float[Array, "B *L"]  # of the router's distribution, nats


class Load(NamedTuple):
  """Sums over the tokens of a batch, of one layer or stacked layers."""

  tokens: Float[Array, "*layers X"]  # of each expert
  entropy: Float[Array, "*layers"]  # of the router's distributions, nats


# With more tokens a GPU multiplies longer than it reads the weights: an H200
# makes 200 bfloat16 products in the time of reading a number.
FEW_TOKENS = 256

# Of the weights: router, gate, up and down.
_AXES = (
  ("embed", None),
  ("expert", "embed", None),
  ("expert", "embed", None),
  ("expert", None, "embed"),
)


def mixture(
  x: Float[Array, "B *L E"],
  router: Float[Array, "E X"],
  gate: Float[Array, "X E F"],
  up: Float[Array, "X E F"],
  down: Float[Array, "X F E"],
  experts: Experts,
) -> tuple[Float[Array, "B *L E"], Routing]:
  """Returns the sum of each token's experts, weighted by the router.

  Experts have no capacity limit: a token's experts do not depend on the other
  tokens. On a mesh, each shard of the batch routes its own tokens and each
  device of the model axis computes its own experts; tokens never move. The
  width of the weights is gathered inside, so that each device gets its own
  slice of their gradients.
  """
  weights = router, gate, up, down
  numbers = jnp.arange(experts.num, dtype=jnp.int32)
  axis_names = sharding.free_axes()
  if not axis_names:
    return _mixture(x, weights, numbers, experts, None)
  by_token = sharding.unclaimed_spec("batch")
  by_expert = sharding.unclaimed_spec("expert")
  # A rollout's shards already hold the full width of the weights.
  is_full = not set(sharding.RULES["embed"]) <= axis_names

  def on_device(x, weights, numbers):
    if not is_full:
      pairs = zip(weights, _AXES, strict=True)
      weights = [sharding.gather_width(w, *axes) for w, axes in pairs]
    return _mixture(x, weights, numbers, experts, by_expert[0])

  by_weight = tuple(sharding.unclaimed_spec(*axes) for axes in _AXES)
  run = jax.shard_map(
    on_device,
    in_specs=(by_token, by_weight, by_expert),
    out_specs=(by_token, by_token),
    axis_names=axis_names,
    check_vma=False,
  )
  return run(x, weights, numbers)


def route(
  tokens: Float[Array, "N E"], router: Float[Array, "E X"], experts: Experts
) -> tuple[Float[Array, "N K"], Routing]:
  """Chooses each token's experts, and weights them.

  Source: Qwen3 technical report, arXiv:2505.09388, section 2, as transformers
    computes it: softmax over all experts in float32, then the largest.
  """
  logits = (tokens @ router).astype(jnp.float32)
  probs = jax.nn.softmax(logits)
  prob, chosen = jax.lax.top_k(probs, experts.per_token)
  if experts.is_normalized:
    prob = prob / prob.sum(axis=-1, keepdims=True)
  entropy = -(probs * jax.nn.log_softmax(logits)).sum(axis=-1)
  routing = Routing(chosen, jax.lax.stop_gradient(entropy))
  return prob.astype(tokens.dtype), routing


def load(
  routing: Routing, is_real: Bool[Array, "B *L"], experts: Experts
) -> Load:
  """Returns the load of one layer's experts; `is_real` is False for padding."""
  number = jnp.where(is_real[..., None], routing.chosen, experts.num)
  every = jnp.arange(experts.num, dtype=number.dtype)
  counts = (number.reshape(-1, 1) == every).sum(0, dtype=jnp.float32)
  entropy = jnp.where(is_real, routing.entropy, 0).sum(dtype=jnp.float32)
  return Load(counts, entropy)


def zero_load(experts: Experts, num_layers: int) -> Load:
  """Returns the load of no tokens."""
  zeros = jnp.zeros((num_layers, experts.num), jnp.float32)
  return Load(zeros, zeros[:, 0])


def describe(
  load: Load, num_tokens: Float[Array, ""]
) -> dict[str, Float[Array, ""]]:
  """Returns metrics of how evenly `num_tokens` are spread over experts."""
  mean = load.tokens.mean(axis=1, keepdims=True)
  ratio = load.tokens / jnp.maximum(mean, 1.0)  # 1 everywhere is an even load
  return {
    "moe/load_max": ratio.max(),
    "moe/load_max_mean": ratio.max(axis=1).mean(),
    "moe/load_cv": ratio.std(axis=1).mean(),
    "moe/unused": (load.tokens == 0).mean(dtype=jnp.float32),
    "moe/router_entropy": load.entropy.mean() / jnp.maximum(num_tokens, 1.0),
  }


def _mixture(x, weights, numbers, experts: Experts, axis: str | None):
  """Computes `mixture` for this device's experts, which `axis` divides.

  Their numbers are an argument because inside the rollout's shard_map a TPU
  program cannot query its device index.
  """
  router, gate, up, down = weights
  tokens = x.reshape(-1, x.shape[-1])
  prob, routing = route(tokens, router, experts)
  number = routing.chosen - numbers[0]
  number = jnp.where((number >= 0) & (number < len(gate)), number, len(gate))
  ways = {"default": _by_pair}
  if len(tokens) <= FEW_TOKENS:
    ways["cuda"] = _by_expert
  out = jax.lax.platform_dependent(tokens, prob, number, gate, up, down, **ways)
  if axis:
    out = jax.lax.psum(out, axis)
  unmerge = lambda y: y.reshape(*x.shape[:-1], *y.shape[1:])
  return out.reshape(x.shape), jax.tree.map(unmerge, routing)


def _by_pair(tokens, prob, chosen, gate, up, down):
  """Sums each token's experts; `chosen` is `X` for experts of other devices.

  Pairs of a token and one of its experts are sorted by expert. Experts of other
  devices come last.
  """
  num, per_token = len(gate), chosen.shape[1]
  number = chosen.reshape(-1)
  order = jnp.argsort(number, stable=True)
  sizes = jnp.zeros(num + 1, jnp.int32).at[number].add(1)[:num]

  # The product of rows outside all groups depends on the platform: it must
  # reach neither the sum nor a gradient.
  is_in_group = (number[order] < num)[:, None]
  masked = lambda rows: jnp.where(is_in_group, rows, 0)
  pairs = masked(tokens[order // per_token])
  product = lambda rows, weights: grouped.product(rows, weights, sizes)
  h = jax.nn.silu(product(pairs, gate)) * product(pairs, up)
  out = masked(product(masked(h), down))

  # In the order of the tokens again. Unlike a scatter, it sums in fixed order.
  place = jnp.argsort(order)
  out = out[place].reshape(*chosen.shape, -1)
  return (out * prob[..., None]).sum(axis=1)


def _by_expert(tokens, prob, chosen, gate, up, down):
  """Computes `_by_pair` with every expert for every token, in few kernels.

  Few tokens take no longer than reading the experts, which nearly all of them
  together choose.
  """
  numbers = jnp.arange(len(gate), dtype=jnp.int32)
  weight = jnp.where(chosen.T[..., None] == numbers, prob.T[..., None], 0).sum(
    0
  )
  rows = jnp.broadcast_to(tokens, (len(gate), *tokens.shape))
  h = jax.nn.silu(rows @ gate) * (rows @ up) * weight.T[..., None]
  return jnp.einsum("xnf,xfe->ne", h, down)
