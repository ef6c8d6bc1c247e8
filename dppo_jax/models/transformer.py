"""One decoder-only transformer: Qwen2/2.5, Qwen3, Qwen3-MoE or Llama 3.

Its weights are those of `parameters`. Layers are stacked and scanned.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.models import attention, kv_cache, layers, moe, parameters
from dppo_jax.models.kv_cache import KVCache
from dppo_jax.models.parameters import (  # noqa: F401, for callers
  ModelConfig,
  Params,
  flatten,
  inference_shardings,
  init,
  num_parameters,
  parameter_table,
  shardings,
  to_inference_params,
  unflatten,
)

_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

# Rematerialisation: `layers` recomputes each layer in the backward pass, `dots`
# keeps the outputs of products with weights, `none` recomputes nothing.
REMAT = {
  "layers": jax.checkpoint,
  "dots": functools.partial(jax.checkpoint, policy=_DOTS),
  "none": lambda layer: layer,
}

# Layers in one iteration of `forward`'s scan, whose activations are not copied
# into one array of all layers. Each takes time to compile. On GPUs it is all.
_UNROLL = 4


def forward(*args) -> Float[Array, "B L E"]:
  """Returns the hidden states of `forward_and_load`."""
  return forward_and_load(*args)[0]


def forward_and_load(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B L"],
  positions: Int[Array, "B L"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B L E"], moe.Load | None]:
  """Runs the model on packed rows.

  Args:
    positions: position of each token in its sequence.
    segment_ids: a token attends to the past of its segment; 0 is padding.
    prefix_ids: segment that a token attends to in addition to its own, if any.
  Returns:
    Hidden states after the final norm, and the tokens of each expert in every
    layer; None for a dense model.
  """
  params = parameters.cast(params, config)

  ids = segment_ids, prefix_ids, config.attention
  ranges = attention.block_ranges(*ids)

  def attend(q, k, v, cache):
    return attention.attention(q, k, v, *ids, ranges), cache

  rotation = _rotation(config, positions, tokens.shape[1])

  @REMAT[config.remat]
  def run(x, p):
    x, _, routing = _layer(x, p, None, config, rotation, attend)
    return x, routing and moe.load(routing, segment_ids > 0, config.experts)

  layer = lambda x, p: run(x, parameters.place_layer(p, config))
  x = _embed(params, tokens)
  unroll = config.layers if config.unrolls_layers else _UNROLL
  x, loads = jax.lax.scan(layer, x, params["layers"], unroll=unroll)
  return layers.rms_norm(x, params["final_norm"], config.norm_eps), loads


def prefill(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B L"],
  lengths: Int[Array, "B"],
  sizes: Sequence[int],
) -> KVCache:
  """Returns the cache of `B` prompts, one in each slot.

  Positions at or beyond a prompt's length hold values that no query may read.

  Args:
    params: weights of `to_inference_params`.
    sizes: positions of each part of the cache, `L` or more in total.
  """
  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(index, tokens.shape)

  def attend(q, k, v, cache):
    out = attention.attend_prompts(q, k, v, lengths, config.attention)
    keys_last = not config.has_gpu_layout
    return out, kv_cache.write_prompts(cache, k, v, keys_last)

  rotation = _rotation(config, positions, tokens.shape[1])
  cache = kv_cache.init(config, len(tokens), sizes)
  has_shard_map = config.attention in attention.KERNELS
  return _layers_with_cache(
    params, config, tokens, rotation, attend, cache, has_shard_map
  )[1]


def decode(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B n"],
  positions: Int[Array, "B"],
  cache: KVCache,
  prompts: kv_cache.SharedPrompts | None = None,
) -> tuple[Float[Array, "B n E"], KVCache]:
  """Returns the final hidden states of `n` more tokens per slot, and the cache.

  Args:
    params: weights of `to_inference_params`.
    tokens: tokens that follow the slot's past, which the cache holds.
    positions: position of the first of them.
    cache: to be donated; the new keys and values are written from there on.
    prompts: if given, `cache` has only the tokens that follow them.
  """
  is_tpu = attention.KERNELS.get(config.attention) == "tpu"

  def attend(q, k, v, cache):
    if prompts is not None:
      where = cache.layer, prompts.slot, prompts.row, positions, prompts.count
      arrays = q, k, v, cache.parts[0], cache.prompts[0]
      out, part = attention.decode_kernel.attend(*arrays, *where)
      return out, cache._replace(parts=(kv_cache.KVPart(*part),))
    cache = kv_cache.write_tokens(cache, k, v, positions, is_tpu)
    return kv_cache.attend(q, cache, positions), cache

  num_positions = sum(kv_cache.sizes(cache[0]))
  shared = None if prompts is None else prompts.cache
  if shared is not None:
    num_positions += sum(kv_cache.sizes(shared[0]))
  each = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
  rotation = _rotation(config, each, num_positions)
  x, cache = _layers_with_cache(
    params,
    config,
    tokens,
    rotation,
    attend,
    cache,
    has_shard_map=shared is not None,
    prompts=shared,
  )
  return layers.rms_norm(x, params["final_norm"], config.norm_eps), cache


def head(params: Params, config: ModelConfig) -> Float[Array, "V E"]:
  """Returns the output head: the embedding if they are tied."""
  return params["embed"] if config.is_tied else params["head"]


def logits(
  params: Params, config: ModelConfig, hidden: Float[Array, "... E"]
) -> Float[Array, "... V"]:
  """Returns float32 logits of the next token."""
  weight = head(params, config).astype(hidden.dtype)
  return jnp.einsum(
    "...e,ve->...v", hidden, weight, preferred_element_type=jnp.float32
  )


def _embed(params, tokens: Int[Array, "B *L"]) -> Float[Array, "B *L E"]:
  """Returns the embedded tokens, divided by rows."""
  # Each device looks up its part of the width, for all rows of its replica.
  by_replica = ("replica",) + (None,) * (tokens.ndim - 1)
  x = params["embed"][sharding.constrain(tokens, *by_replica)]
  x = sharding.constrain(x, *by_replica, "embed")
  return sharding.constrain(x, "batch", *(None,) * tokens.ndim)


def _rotation(
  config: ModelConfig, positions: Int[Array, "B *L"], num_positions: int
) -> tuple[Float[Array, "B *L 1 D/2"], ...]:
  """Returns cosines and sines of the tokens' rotary angles."""
  options = config.head_dim, config.rope_theta, config.rope_scaling
  table = layers.cos_sin_table(num_positions, *options)
  # A lookup, since XLA would compute cosines again for each head and layer.
  return tuple(x[positions] for x in table)


def _layer(
  x: Float[Array, "B *L E"],
  p: Params,
  cache: Any,
  config: ModelConfig,
  rotation: tuple[Float[Array, "B *L 1 D/2"], ...],
  attend: Callable,
) -> tuple[Float[Array, "B *L E"], Any, moe.Routing | None]:
  """Returns the tokens after one layer, its cache, and their experts.

  Training, prefill and decoding differ only in `attend(q, k, v, cache)`, which
  returns `(out, cache)`.
  """
  batch_axes = ("batch",) + (None,) * (x.ndim - 1)
  h = layers.rms_norm(x, p["attention_norm"], config.norm_eps)
  q, k, v = _project(h, p | parameters.repeat_kv_heads(p, config), config)
  q, k = (layers.apply_rope(x, *rotation) for x in (q, k))
  out, cache = attend(q, k, v, cache)
  out = out.reshape(*out.shape[:-2], -1)
  x = x + layers.linear(out, p["o"].reshape(-1, config.embed))
  x = sharding.constrain(x, *batch_axes)
  h = layers.rms_norm(x, p["mlp_norm"], config.norm_eps)
  if config.experts:
    names = ("router", "experts_gate", "experts_up", "experts_down")
    weights = (p[name] for name in names)
    out, routing = moe.mixture(h, *weights, config.experts)
  else:
    h = jax.nn.silu(layers.linear(h, p["gate"])) * layers.linear(h, p["up"])
    out, routing = layers.linear(h, p["down"]), None
  return sharding.constrain(x + out, *batch_axes), cache, routing


def _project(h, p, config):
  """Returns the queries, keys and values of tokens, normalised if need be."""
  norm = lambda x, scale: layers.rms_norm(x, scale, config.norm_eps)
  if config.has_gpu_layout:  # by heads of keys, so that each step is one kernel
    p = parameters.fuse_projections(p, config)
    qkv = layers.linear(h, p["qkv"])
    if config.has_qkv_bias:
      qkv = qkv + p["qkv_bias"]
    v = qkv[..., -1, :]
    if config.has_qk_norm:
      ones = jnp.ones(config.head_dim, qkv.dtype)
      qkv = norm(qkv, ones) * p["qkv_norm"]
    q = qkv[..., :-2, :].reshape(*h.shape[:-1], config.heads, config.head_dim)
    return q, qkv[..., -2, :], v
  q, k, v = (layers.linear(h, p[name]) for name in ("q", "k", "v"))
  if config.has_qkv_bias:
    q, k, v = q + p["q_bias"], k + p["k_bias"], v + p["v_bias"]
  if config.has_qk_norm:
    q, k = norm(q, p["q_norm"]), norm(k, p["k_norm"])
  return q, k, v


def _layers_with_cache(
  params,
  config,
  tokens,
  rotation,
  attend,
  cache,
  has_shard_map=False,
  prompts=None,
) -> tuple[Float[Array, "B *L E"], KVCache]:
  """Returns the tokens after all layers, and the cache."""

  def run(x, p, cache):
    p = parameters.gather_layer(p, config)
    return _layer(x, p, cache, config, rotation, attend)[:2]

  # The TPU compiler aborts if a scan in the rollout's shard_map calls a
  # function that has a shard_map of its own: around a gathered weight, a
  # kernel or a mixture of experts. Its operations are copied instead.
  has_shard_map |= parameters.gathers_layers(config)
  has_shard_map |= config.experts is not None
  x = _embed(params, tokens)
  weights = params["layers"]
  return kv_cache.scan_layers(run, x, weights, cache, has_shard_map, prompts)
