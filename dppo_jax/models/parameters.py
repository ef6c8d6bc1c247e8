"""The model's weights: declared once, laid out for training and for rollouts.

Initialisation, sharding, counting, import and export are maps over
`parameter_table`. Layers are stacked.
"""

import functools
import math
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from dppo_jax import sharding
from dppo_jax.models import kv_cache, lora
from dppo_jax.models.config import ModelConfig

Params = dict[str, Any]  # nested, of arrays

_KV = ("k", "v", "k_bias", "v_bias")  # weights that make keys and values


class Param(NamedTuple):
  """One weight's declaration; its initial value is normal(0, scale) + fill."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  scale: float = 0.0
  fill: float = 0.0


def parameter_table(config: ModelConfig) -> dict[str, Param]:
  """Declares every weight of the model by its `/`-separated name."""
  c = config
  inward, outward = c.embed**-0.5, (2 * c.layers) ** -0.5
  norm_fill = 0.0 if c.has_zero_centred_norms else 1.0
  norm = lambda size: Param((size,), (None,), fill=norm_fill)
  to_heads = lambda num, axis: Param(
    (c.embed, num, c.head_dim), ("embed", axis, None), inward
  )
  kv = to_heads(c.kv_heads, "kv_heads")
  per_layer = {
    "attention_norm": norm(c.embed),
    "q": to_heads(c.heads, "heads"),
    "k": kv,
    "v": kv,
    "o": Param(
      (c.heads, c.head_dim, c.embed),
      ("heads", None, "embed"),
      outward * (c.heads * c.head_dim) ** -0.5,
    ),
  }
  if c.has_post_norms:
    # No `mlp_norm`: files use the name of its tensor for `attention_post_norm`.
    for name in ("attention_post_norm", "mlp_pre_norm", "mlp_post_norm"):
      per_layer[name] = norm(c.embed)
  else:
    per_layer["mlp_norm"] = norm(c.embed)
  if c.experts:
    x, mlp = c.experts.num, c.experts.mlp
    wide = Param((x, c.embed, mlp), ("expert", "embed", None), inward)
    per_layer["router"] = Param((c.embed, x), ("embed", None), inward)
    per_layer["experts_gate"] = per_layer["experts_up"] = wide
    per_layer["experts_down"] = Param(
      (x, mlp, c.embed), ("expert", None, "embed"), outward * mlp**-0.5
    )
  else:
    wide = Param((c.embed, c.mlp), ("embed", "mlp"), inward)
    per_layer["gate"] = per_layer["up"] = wide
    per_layer["down"] = Param(
      (c.mlp, c.embed), ("mlp", "embed"), outward * c.mlp**-0.5
    )
  if c.has_qkv_bias:
    bias = Param((c.kv_heads, c.head_dim), ("kv_heads", None))
    per_layer["q_bias"] = Param((c.heads, c.head_dim), ("heads", None))
    per_layer["k_bias"] = per_layer["v_bias"] = bias
  if c.has_qk_norm:
    per_layer["q_norm"] = per_layer["k_norm"] = norm(c.head_dim)
  table = {"embed": Param((c.vocab, c.embed), ("vocab", "embed"), inward)}
  for name, p in per_layer.items():
    table[f"layers/{name}"] = p._replace(
      shape=(c.layers, *p.shape), axes=("layer", *p.axes)
    )
  table["final_norm"] = norm(c.embed)
  if not c.is_tied:
    table["head"] = Param((c.vocab, c.embed), ("vocab", "embed"), inward)
  return table


# Between parameter trees and dicts with `/`-separated names.
flatten = functools.partial(traverse_util.flatten_dict, sep="/")
unflatten = functools.partial(traverse_util.unflatten_dict, sep="/")


def trainable_table(config: ModelConfig) -> dict[str, Param]:
  """Declares the weights that gradients update: adapters, if there are any."""
  table = parameter_table(config)
  return lora.adapter_table(table, config.lora) or table


def num_parameters(config: ModelConfig) -> int:
  """Returns the number of scalar weights of the model, without adapters."""
  return sum(math.prod(p.shape) for p in parameter_table(config).values())


def shardings(config: ModelConfig, mesh: sharding.AnyMesh) -> PyTree:
  """Returns the sharding of each weight on `mesh`."""
  axes = _weight_axes(config, sharding.num_shards(mesh, "kv_heads"))
  return unflatten({k: sharding.sharding(mesh, *x) for k, x in axes.items()})


def _weight_axes(
  config: ModelConfig, shards: int
) -> dict[str, tuple[str | None, ...]]:
  """Returns each weight's logical axes; uneven `kv_heads` are replicated."""
  replicated = "kv_heads" if config.kv_heads % shards else None
  return {
    name: tuple(None if axis == replicated else axis for axis in p.axes)
    for name, p in (parameter_table(config) | trainable_table(config)).items()
  }


def inference_shardings(config: ModelConfig, mesh: sharding.AnyMesh) -> PyTree:
  """Returns the sharding of each weight of `to_inference_params`."""
  axes = _inference_axes(config)
  tree = unflatten({k: sharding.sharding(mesh, *x) for k, x in axes.items()})
  return {**tree, "layers": (tree["layers"],) * kv_cache.num_groups(config)}


def init(config: ModelConfig, key: jax.Array) -> Params:
  """Returns randomly initialised weights and adapters; consumes the key.

  Trained weights are float32, frozen ones in the dtype of the computation.
  """
  weights = _init(parameter_table(config), key)
  if not config.lora:
    return weights
  return cast(weights, config) | init_adapters(config, key)


def init_adapters(config: ModelConfig, key: jax.Array) -> Params:
  """Returns new adapters, `{"adapters": ...}`, float32."""
  return _init(trainable_table(config), jax.random.fold_in(key, 2**31))


def _init(table: dict[str, Param], key: jax.Array) -> Params:
  flat = {}
  for i, (name, p) in enumerate(table.items()):
    noise = jax.random.normal(jax.random.fold_in(key, i), p.shape)
    flat[name] = noise * p.scale + p.fill
  return unflatten(flat)


def cast(params: Params, config: ModelConfig) -> Params:
  """Casts the weights to the dtype of the computation, adapters excluded."""
  cast = lambda p: p.astype(config.dtype)
  return {
    name: tree if name == lora.KEY else jax.tree.map(cast, tree)
    for name, tree in params.items()
  }


def to_inference_params(params: Params, config: ModelConfig) -> Params:
  """Returns weights for `prefill` and `decode`: cast, grouped like the cache.

  Adapters are merged. Heads of keys and values are repeated as the mesh needs
  them. One layer of each group is gathered at a time: all at once would need
  twice the memory.
  """
  axes = unflatten(_inference_axes(config))
  num_groups = kv_cache.num_groups(config)
  stacks = params["layers"], params.get(lora.KEY, {})

  def place(weights, axes):
    put = lambda name, w: sharding.constrain(w, *axes[name][-w.ndim :])
    return {name: put(name, w) for name, w in weights.items()}

  def layer(number):
    take = lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False)
    weights, adapters = jax.tree.map(take, stacks)
    weights = cast(lora.merge(weights, adapters, config.lora), config)
    weights |= repeat_kv_heads(weights, config)
    return place(weights, axes["layers"])

  groups = jax.lax.map(
    lambda numbers: tuple(layer(number) for number in numbers),
    tuple(jnp.arange(i, config.layers, num_groups) for i in range(num_groups)),
  )
  outer = {k: w for k, w in params.items() if k not in ("layers", lora.KEY)}
  return {**place(cast(outer, config), axes), "layers": groups}


def place_layer(weights: Params, config: ModelConfig) -> Params:
  """Divides a layer's weights, and so their gradients, as in `shardings`."""
  axes = _weight_axes(config, sharding.num_shards_here("kv_heads"))
  return {
    name: sharding.constrain(w, *axes[f"layers/{name}"][1:])
    for name, w in weights.items()
  }


def _inference_axes(config: ModelConfig) -> dict[str, tuple[str | None, ...]]:
  """Returns the logical axes of each weight of `to_inference_params`.

  The width is full.
  """
  full = lambda axes: tuple(None if a == "embed" else a for a in axes)
  return {name: full(p.axes) for name, p in parameter_table(config).items()}


def repeat_kv_heads(weights: Params, config: ModelConfig) -> Params:
  """Returns the key and value weights that need more heads on the mesh."""
  wanted = sharding.num_kv_heads(config.kv_heads)
  return {
    name: jnp.repeat(w, wanted // w.shape[-2], axis=-2)
    for name, w in weights.items()
    if name in _KV and w.shape[-2] < wanted
  }
