"""One decoder-only transformer: Qwen2/2.5, Qwen3, Qwen3-MoE, Llama 3, Gemma 3.

`parameters` declares its weights. Layers are stacked and scanned.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.models import attention, kv_cache, layers, lora, moe, parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.kv_cache import KVCache
from dppo_jax.models.parameters import Params

_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

# Rematerialisation: `layers` recomputes each layer in the backward pass, `dots`
# keeps the outputs of products with weights, `none` recomputes nothing.
REMAT: dict[str, Callable] = {
  "layers": jax.checkpoint,
  "dots": functools.partial(jax.checkpoint, policy=_DOTS),
  "none": lambda layer: layer,
}

# Most layers in one iteration of `forward`'s scan, whose activations are not
# copied into one array of all layers. Each takes time to compile.
UNROLL = 6


class Places(NamedTuple):
  """Positions of tokens as a layer reads them.

  Attributes:
    cos, sin: cosine and sine of the rotary angles.
    oldest: first position that each token sees; None for 0.
  """

  cos: Float[Array, "... 1 half"]
  sin: Float[Array, "... 1 half"]
  oldest: Int[Array, "..."] | None = None


def forward(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B L"],
  positions: Int[Array, "B L"],
  end: Int[Array, "B L"],
) -> Float[Array, "B L E"]:
  """Returns the hidden states of `forward_and_load`."""
  return forward_and_load(params, config, tokens, positions, end)[0]


def forward_and_load(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B L"],
  positions: Int[Array, "B L"],
  end: Int[Array, "B L"],
) -> tuple[Float[Array, "B L E"], moe.Load | None]:
  """Runs the model on packed rows.

  Args:
    positions: position of each token in its sequence.
    end: one past the last place in the row that sees a token; 0 is padding.
      The token at place `q` sees the one at `k` if k <= q < end[k].
  Returns:
    Hidden states after the final norm, and the load of each layer's experts;
    None for a dense model.
  """
  params = parameters.cast(params, config)
  # Padding sees itself, so that no softmax is empty.
  visible = attention.seen_by_itself(end)

  def attend(q, k, v, cache, oldest):
    out = attention.attention(
      q,
      k,
      v,
      visible,
      backend=config.attention,
      window=None if oldest is None else (positions, oldest),
    )
    return out, cache

  places = _places(config, positions, tokens.shape[1])

  @REMAT[config.remat]
  def run(x, p, kind, adapters):
    p = merge(p, adapters) if adapters else p
    here = _of_kind(places, kind)
    x, _, routing = _layer(x, p, None, config, here, attend)
    return x, routing and config.experts and moe.load(
      routing, end > 0, config.experts
    )

  # Merged again in the backward pass, so that no merged weights are kept.
  merge = jax.checkpoint(functools.partial(lora.merge, lora=config.lora))
  layer = lambda x, xs: run(x, parameters.place_layer(xs[0], config), *xs[1:])
  x = _embed(params, config, tokens)
  unroll = sharding.largest_divisor(config.layers, UNROLL)
  xs = params["layers"], _kinds(config), params.get(lora.KEY, {})
  x, loads = jax.lax.scan(layer, x, xs, unroll=unroll)
  return _norm(x, params["final_norm"], config), loads


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

  def attend(q, k, v, cache, oldest):
    out = attention.attend_prompts(q, k, v, lengths, config.attention, oldest)
    keys_last = not config.shares_prompts
    return out, kv_cache.write_prompts(cache, k, v, keys_last)

  places = _places(config, positions, tokens.shape[1])
  cache = kv_cache.init(config, len(tokens), sizes)
  has_shard_map = config.attention in attention.KERNELS
  return _layers_with_cache(
    params, config, tokens, places, attend, cache, has_shard_map
  )[1]


def decode(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B"],
  positions: Int[Array, "B"],
  cache: KVCache,
  prompts: kv_cache.SharedPrompts | None = None,
) -> tuple[Float[Array, "B E"], KVCache]:
  """Returns the final hidden states of one more token per slot, and the cache.

  Args:
    params: weights of `to_inference_params`.
    tokens: token that follows the slot's past, which the cache holds.
    positions: its position.
    cache: keys and values of the past, to be donated; new ones are added.
    prompts: shared prompts; `cache` then has only the tokens that follow them.
  """
  is_tpu = attention.KERNELS.get(config.attention) == "tpu"

  def attend(q, k, v, cache, oldest):
    if prompts is not None:
      out, part = attention.decode_kernel.attend(
        q,
        k,
        v,
        cache=cache.parts[0],
        prompts=cache.prompts[0],
        layer=cache.layer,
        place=prompts.slot,
        prompt=prompts.rank,
        positions=positions,
        count=prompts.num_following,
      )
      return out, cache._replace(parts=(kv_cache.KVPart(*part),))
    cache = kv_cache.write_tokens(cache, k, v, positions, is_tpu)
    return kv_cache.attend(q, cache, positions, oldest), cache

  num_positions = sum(kv_cache.sizes(cache[0]))
  shared = None if prompts is None else prompts.cache
  if shared is not None:
    num_positions += sum(kv_cache.sizes(shared[0]))
  places = _places(config, positions, num_positions)
  x, cache = _layers_with_cache(
    params,
    config,
    tokens,
    places,
    attend,
    cache,
    has_shard_map=shared is not None,
    prompts=shared,
  )
  return _norm(x, params["final_norm"], config), cache


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


def _embed(
  params: Params, config: ModelConfig, tokens: Int[Array, "B *L"]
) -> Float[Array, "B *L E"]:
  """Returns the embedded tokens, divided by rows."""
  # Each device looks up its part of the width, for all rows of its replica.
  by_replica = ("replica",) + (None,) * (tokens.ndim - 1)
  x = params["embed"][sharding.constrain(tokens, *by_replica)]
  x = sharding.constrain(x, *by_replica, "embed")
  x = sharding.constrain(x, "batch", *(None,) * tokens.ndim)
  if config.has_scaled_embedding:
    x = x * jnp.float32(config.embed**0.5).astype(x.dtype)
  return x


def _norm(x, weight, config: ModelConfig):
  if config.has_zero_centred_norms:
    weight = 1 + weight.astype(jnp.float32)
  return layers.rms_norm(x, weight, config.norm_eps)


def _kinds(config: ModelConfig) -> Int[Array, "Y"] | None:
  """Returns 1 for each local layer, else 0; None if all are global."""
  return config.local and jnp.array(config.local.is_local, jnp.int32)


def _places(
  config: ModelConfig, positions: Int[Array, "B *L"], num_positions: int
) -> Places:
  """Returns the tokens' places; with local layers, stacked by their kind."""

  def rotation(*options):
    table = layers.cos_sin_table(num_positions, config.head_dim, *options)
    # A lookup, since XLA would compute cosines again for each head and layer.
    return tuple(x[positions] for x in table)

  in_global = Places(*rotation(config.rope_theta, config.rope_scaling))
  if config.local is None:
    return in_global
  in_local = Places(*rotation(config.local.rope_theta))
  if config.local.window:
    # At most 0, for any position.
    in_global = in_global._replace(oldest=positions - num_positions)
    in_local = in_local._replace(oldest=positions - config.local.window + 1)
  return jax.tree.map(lambda *x: jnp.stack(x), in_global, in_local)


def _of_kind(places: Places, kind: Int[Array, ""] | None) -> Places:
  """Returns the places as layers of one kind read them."""
  return places if kind is None else jax.tree.map(lambda x: x[kind], places)


def _layer(
  x: Float[Array, "B *L E"],
  p: Params,
  cache: Any,
  config: ModelConfig,
  places: Places,
  attend: Callable,
) -> tuple[Float[Array, "B *L E"], Any, moe.Routing | None]:
  """Returns the tokens after one layer, its cache, and their experts.

  Training, prefill and decoding differ only in `attend(q, k, v, cache,
  oldest)`, which returns `(out, cache)`.
  """
  batch_axes = ("batch",) + (None,) * (x.ndim - 1)
  add = lambda x, out: sharding.constrain(x + out, *batch_axes)
  h = _norm(x, p["attention_norm"], config)
  q, k, v = _project(h, p | parameters.repeat_kv_heads(p, config), config)
  rotation = of_queries = places.cos, places.sin
  if config.query_size:
    scale = (config.head_dim / config.query_size) ** 0.5
    of_queries = tuple(x * scale for x in rotation)
  q, k = layers.apply_rope(q, *of_queries), layers.apply_rope(k, *rotation)
  out, cache = attend(q, k, v, cache, places.oldest)
  out = out.reshape(*out.shape[:-2], -1)
  out = layers.linear(out, p["o"].reshape(-1, config.embed))
  if config.has_post_norms:
    x = add(x, _norm(out, p["attention_post_norm"], config))
    h = _norm(x, p["mlp_pre_norm"], config)
  else:
    x = add(x, out)
    h = _norm(x, p["mlp_norm"], config)
  if config.experts:
    names = ("experts_gate", "experts_up", "experts_down")
    gate, up, down = (p[name] for name in names)
    out, routing = moe.mixture(h, p["router"], gate, up, down, config.experts)
  else:
    activation = layers.ACTIVATIONS[config.activation]
    h = activation(layers.linear(h, p["gate"])) * layers.linear(h, p["up"])
    out, routing = layers.linear(h, p["down"]), None
  if config.has_post_norms:
    out = _norm(out, p["mlp_post_norm"], config)
  return add(x, out), cache, routing


def _project(h, p, config):
  """Returns the queries, keys and values of tokens, normalised if need be."""
  q, k, v = (layers.linear(h, p[name]) for name in ("q", "k", "v"))
  if config.has_qkv_bias:
    q, k, v = q + p["q_bias"], k + p["k_bias"], v + p["v_bias"]
  if config.has_qk_norm:
    q, k = _norm(q, p["q_norm"], config), _norm(k, p["k_norm"], config)
  return q, k, v


def _layers_with_cache(
  params,
  config,
  tokens,
  places,
  attend,
  cache,
  has_shard_map=False,
  prompts=None,
) -> tuple[Float[Array, "B *L E"], KVCache]:
  """Returns the tokens after all layers, and the cache."""

  def run(x, layer, cache):
    p, kind = layer
    here = _of_kind(places, kind)
    return _layer(x, p, cache, config, here, attend)[:2]

  # The TPU compiler aborts if a scan in the rollout's shard_map calls a
  # function that has a shard_map of its own: around a kernel or a mixture of
  # experts. Its operations are copied instead.
  has_shard_map |= config.experts is not None
  x = _embed(params, config, tokens)
  kinds, num_groups = _kinds(config), len(cache)
  by_group = tuple(
    (weights, None if kinds is None else kinds[i::num_groups])
    for i, weights in enumerate(params["layers"])
  )
  return kv_cache.scan_layers(run, x, by_group, cache, has_shard_map, prompts)
