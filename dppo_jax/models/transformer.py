"""One decoder-only transformer: Qwen2/2.5, Qwen3 and Llama 3 are its settings.

Parameters are declared once, in `parameter_table`; initialisation, sharding,
counting, import and export are maps over it. Layers are stacked and scanned.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import math
import operator
from typing import NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from dppo_jax import buckets, sharding
from dppo_jax.models import attention, norm, rope

Params = PyTree[jax.Array]

# What the backward pass computes again of a layer.
REMAT = {
  "layers": jax.checkpoint,  # everything
  "dots": functools.partial(  # all but the products with weights
    jax.checkpoint,
    policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  ),
  "none": lambda layer: layer,
}


# Layers in a row that a program has side by side: their activations wait for
# the backward pass where they are, instead of being copied into one array of
# all layers, and a decoding step of no more layers than these finds weights and
# caches where they are. Each takes time to compile.
_UNROLL = 4


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The architecture; hashable, so that it can be a static argument."""

  vocab: int
  embed: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  rope_theta: float = 1e6
  rope_scaling: rope.RopeScaling | None = None
  norm_eps: float = 1e-6
  has_qkv_bias: bool = False
  has_qk_norm: bool = False
  is_tied: bool = True  # the output head is the embedding
  family: str = "Qwen3ForCausalLM"  # a key of families.FAMILIES
  dtype: str = "float32"  # of the computation
  remat: str = "layers"  # a key of REMAT
  attention: str = "xla"  # a key of attention.BACKENDS


class Param(NamedTuple):
  """One weight's declaration; it starts as normal(0, scale) + `fill`."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  scale: float = 0.0
  fill: float = 0.0


# At place i are parts of layers i, i + U, ...; `U` is `_unroll(config)`.
Cache = tuple[tuple[attention.Cells, ...], ...]


def empty_cache(
  config: ModelConfig, num_slots: int, sizes: Sequence[int]
) -> Cache:
  """Zeros: room for `sum(sizes)` cells of each slot, in parts of `sizes`."""
  unroll = _unroll(config)
  head = (config.layers // unroll, num_slots, config.kv_heads)
  parts = tuple(
    attention.Cells(
      jnp.zeros((*head, config.head_dim, size), config.dtype),
      jnp.zeros((*head, size, config.head_dim), config.dtype),
    )
    for size in sizes
  )
  return (parts,) * unroll


def _unroll(config: ModelConfig) -> int:
  return buckets.largest_divisor(config.layers, _UNROLL)


def parameter_table(config: ModelConfig) -> dict[str, Param]:
  """Every weight of the model by its `/`-separated name."""
  c = config
  inward, outward = c.embed**-0.5, (2 * c.layers) ** -0.5
  per_layer = {
    "attention_norm": Param((c.embed,), (None,), fill=1.0),
    "q": Param(
      (c.embed, c.heads, c.head_dim), ("embed", "heads", None), inward
    ),
    "k": Param(
      (c.embed, c.kv_heads, c.head_dim), ("embed", "kv_heads", None), inward
    ),
    "v": Param(
      (c.embed, c.kv_heads, c.head_dim), ("embed", "kv_heads", None), inward
    ),
    "o": Param(
      (c.heads, c.head_dim, c.embed),
      ("heads", None, "embed"),
      outward * (c.heads * c.head_dim) ** -0.5,
    ),
    "mlp_norm": Param((c.embed,), (None,), fill=1.0),
    "gate": Param((c.embed, c.mlp), ("embed", "mlp"), inward),
    "up": Param((c.embed, c.mlp), ("embed", "mlp"), inward),
    "down": Param((c.mlp, c.embed), ("mlp", "embed"), outward * c.mlp**-0.5),
  }
  if c.has_qkv_bias:
    per_layer["q_bias"] = Param((c.heads, c.head_dim), ("heads", None))
    per_layer["k_bias"] = Param((c.kv_heads, c.head_dim), ("kv_heads", None))
    per_layer["v_bias"] = Param((c.kv_heads, c.head_dim), ("kv_heads", None))
  if c.has_qk_norm:
    per_layer["q_norm"] = Param((c.head_dim,), (None,), fill=1.0)
    per_layer["k_norm"] = Param((c.head_dim,), (None,), fill=1.0)
  table = {"embed": Param((c.vocab, c.embed), ("vocab", "embed"), inward)}
  for name, p in per_layer.items():
    table[f"layers/{name}"] = p._replace(
      shape=(c.layers, *p.shape), axes=("layer", *p.axes)
    )
  table["final_norm"] = Param((c.embed,), (None,), fill=1.0)
  if not c.is_tied:
    table["head"] = Param((c.vocab, c.embed), ("vocab", "embed"), inward)
  return table


def unflatten(flat: dict[str, jax.Array]) -> Params:
  """The parameter tree of `/`-separated names."""
  return traverse_util.unflatten_dict(flat, sep="/")


def flatten(params: Params) -> dict[str, jax.Array]:
  """The inverse of `unflatten`."""
  return traverse_util.flatten_dict(params, sep="/")


def num_parameters(config: ModelConfig) -> int:
  """How many numbers the model has."""
  return sum(math.prod(p.shape) for p in parameter_table(config).values())


def shardings(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
  """Where each weight lives on `mesh`."""
  return unflatten(
    {
      name: sharding.sharding(mesh, *p.axes)
      for name, p in parameter_table(config).items()
    }
  )


def unstacked_shardings(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
  """Where each weight of `unstack` lives: whole on the data axis."""
  flat = {}
  for name, p in parameter_table(config).items():
    axes = (None if axis == "embed" else axis for axis in p.axes)
    flat[name] = sharding.sharding(mesh, *axes)
  places = unflatten(flat)
  return {**places, "layers": (places["layers"],) * _unroll(config)}


def init(config: ModelConfig, key: jax.Array) -> Params:
  """Fresh float32 weights; the key is consumed."""
  flat = {}
  for i, (name, p) in enumerate(parameter_table(config).items()):
    noise = jax.random.normal(jax.random.fold_in(key, i), p.shape)
    flat[name] = noise * p.scale + p.fill
  return unflatten(flat)


def cast(params: Params, config: ModelConfig) -> Params:
  """The weights in the dtype of the computation."""
  return jax.tree.map(lambda p: p.astype(config.dtype), params)


def unstack(params: Params, config: ModelConfig) -> Params:
  """For `prefill` and `decode`: cast, layers `i, i + U, ...` at place `i`."""
  params = cast(params, config)
  unroll = _unroll(config)
  layers = tuple(
    jax.tree.map(operator.itemgetter(slice(i, None, unroll)), params["layers"])
    for i in range(unroll)
  )
  return {**params, "layers": layers}


def forward(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B L"],
  positions: Int[Array, "B L"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"] | None = None,
) -> Float[Array, "B L E"]:
  """The hidden state after the last layer and its norm.

  Args:
    prefix_ids: the segment that a cell sees beside its own; None is its own.
  """
  params = cast(params, config)
  prefix_ids = segment_ids if prefix_ids is None else prefix_ids

  def attend(q, k, v, cache):
    return (
      attention.attention(q, k, v, segment_ids, prefix_ids, config.attention),
      cache,
    )

  x, layer = _enter(params, config, tokens, positions, tokens.shape[1], attend)
  layer = REMAT[config.remat](layer)
  x, _ = jax.lax.scan(
    lambda x, p: layer(x, p, None), x, params["layers"], unroll=_UNROLL
  )
  return norm.rms_norm(x, params["final_norm"], config.norm_eps)


def prefill(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B L"],
  lengths: Int[Array, "B"],
  sizes: Sequence[int],
) -> Cache:
  """The cache that prompts leave.

  Cells at or beyond a prompt's length hold values that no query may read.

  Args:
    params: of `unstack`.
    sizes: of the parts, which hold `L` cells or more.
  """
  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(index, tokens.shape)
  ends = list(itertools.accumulate(sizes))[:-1]

  def in_parts(x):
    room = sum(sizes) - x.shape[1]
    return jnp.split(jnp.pad(x, ((0, 0), (0, room), (0, 0), (0, 0))), ends, 1)

  def attend(q, k, v, cache):
    parts, index = cache
    new = [
      attention.Cells(
        part.keys.at[index].set(keys.transpose(0, 2, 3, 1)),
        part.values.at[index].set(values.transpose(0, 2, 1, 3)),
      )
      for part, keys, values in zip(
        parts, in_parts(k), in_parts(v), strict=True
      )
    ]
    return attention.attend_prompts(q, k, v, lengths), tuple(new)

  cache = empty_cache(config, len(tokens), sizes)
  return _each_layer(
    params, config, tokens, positions, tokens.shape[1], attend, cache
  )[1]


def decode(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B"],
  positions: Int[Array, "B"],
  cache: Cache,
) -> tuple[Float[Array, "B E"], Cache]:
  """The hidden state of one more token per slot, and the cache with it.

  Args:
    params: of `unstack`.
    tokens: each slot's newest token.
    positions: its position; cells before it hold the slot's history.
    cache: to be donated; the new token is written at `positions`.
  """
  slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)
  sizes = [part.keys.shape[-1] for part in cache[0]]

  def attend(q, k, v, cache):
    parts, index = cache
    new, start = [], 0
    # Cells before a part and beyond it are dropped.
    how = {"mode": "drop", "wrap_negative_indices": False}
    for (keys, values), size in zip(parts, sizes, strict=True):
      cell = positions - start
      new.append(
        attention.Cells(
          keys.at[index, slots, :, :, cell].set(k, **how),
          values.at[index, slots, :, cell].set(v, **how),
        )
      )
      start += size
    return attention.attend_cache(q, new, index, positions), tuple(new)

  return _each_layer(
    params, config, tokens, positions, sum(sizes), attend, cache
  )


def head(params: Params, config: ModelConfig) -> Float[Array, "V E"]:
  """The output head, which is the embedding where they are tied."""
  return params["embed"] if config.is_tied else params["head"]


def logits(
  params: Params, config: ModelConfig, hidden: Float[Array, "... E"]
) -> Float[Array, "... V"]:
  """Float32 scores of the next token."""
  return jnp.einsum(
    "...e,ve->...v",
    hidden,
    head(params, config).astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def _each_layer(
  params, config, tokens, positions, num_positions, attend, cache
):
  """`(hidden, cache)` after every layer has met its own place in the cache."""
  x, layer = _enter(params, config, tokens, positions, num_positions, attend)
  layer = jax.jit(layer)  # traced once for all places

  def group(carry, xs):
    x, cache = carry
    weights, index = xs
    new = []
    for p, parts in zip(weights, cache, strict=True):
      x, new_parts = layer(x, p, (parts, index))
      new.append(new_parts)
    return (x, tuple(new)), None

  index = jnp.arange(config.layers // _unroll(config), dtype=jnp.int32)
  (x, cache), _ = jax.lax.scan(group, (x, cache), (params["layers"], index))
  return norm.rms_norm(x, params["final_norm"], config.norm_eps), cache


def _enter(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B *L"],
  positions: Int[Array, "B *L"],
  num_positions: int,
  attend: Callable,
):
  """`(x, layer)`: embedded tokens and `layer(x, weights, cache)`.

  `attend(q, k, v, cache) -> (out, parts)` is all that training, prefill and
  decoding differ in; a layer returns the parts too.
  """
  batch_axes = ("batch",) + (None,) * tokens.ndim
  table = rope.turns(
    num_positions, config.head_dim, config.rope_theta, config.rope_scaling
  )
  # Looked up: else XLA computes them again for each head and layer.
  cos, sin = (x[positions] for x in table)

  def layer(x, p, cache):
    h = norm.rms_norm(x, p["attention_norm"], config.norm_eps)
    q, k, v = (_linear(h, p[name]) for name in ("q", "k", "v"))
    if config.has_qkv_bias:
      q, k, v = q + p["q_bias"], k + p["k_bias"], v + p["v_bias"]
    if config.has_qk_norm:
      q = norm.rms_norm(q, p["q_norm"], config.norm_eps)
      k = norm.rms_norm(k, p["k_norm"], config.norm_eps)
    q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
    out, parts = attend(q, k, v, cache)
    out = out.reshape(*out.shape[:-2], -1)
    x = x + _linear(out, p["o"].reshape(-1, config.embed))
    x = sharding.constrain(x, *batch_axes)
    h = norm.rms_norm(x, p["mlp_norm"], config.norm_eps)
    h = jax.nn.silu(_linear(h, p["gate"])) * _linear(h, p["up"])
    x = sharding.constrain(x + _linear(h, p["down"]), *batch_axes)
    return x, parts

  return sharding.constrain(params["embed"][tokens], *batch_axes), layer


def _linear(x, weight):
  """`x [..., E]` times `weight [E, ...]`.

  As a product of two matrices, whose slopes are such products again: of a
  product over several axes XLA makes one by copying an operand the other way
  round.
  """
  out = x.reshape(-1, x.shape[-1]) @ weight.reshape(x.shape[-1], -1)
  return out.reshape(*x.shape[:-1], *weight.shape[1:])
