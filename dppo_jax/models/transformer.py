"""One decoder-only transformer: Qwen2/2.5, Qwen3 and Llama 3 are its settings.

Parameters are declared once, in `parameter_table`; initialisation, sharding,
counting, import and export are maps over it. Layers are stacked and scanned.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from dppo_jax import sharding
from dppo_jax.models import attention, norm

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


# Layers in a row whose activations wait for the backward pass where they are,
# instead of being copied into one array of all layers and back.
_UNROLL = 4


class RopeScaling(NamedTuple):
  """Llama 3's stretch of slow rotary frequencies to longer contexts."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_length: int  # tokens of the context before the stretch


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
  rope_scaling: RopeScaling | None = None
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


class Cache(NamedTuple):
  """Keys and values of `B` slots in `n` blocks of `c` cells each.

  A decoding step reads whole blocks: one of all slots lies in one piece, keys
  with the cells last, as the products with a single query like them.
  """

  keys: Float[Array, "Y n B K D c"]
  values: Float[Array, "Y n B K c D"]


def empty_cache(
  config: ModelConfig, num_slots: int, num_blocks: int, block: int
) -> Cache:
  """Room for `num_blocks * block` cells of each slot."""
  c = config
  shape = (c.layers, num_blocks, num_slots, c.kv_heads)
  return Cache(
    jnp.zeros((*shape, c.head_dim, block), c.dtype),
    jnp.zeros((*shape, block, c.head_dim), c.dtype),
  )


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
  prefix_ids = segment_ids if prefix_ids is None else prefix_ids

  def attend(q, k, v, cache, layer):
    out = attention.attention(
      q, k, v, segment_ids, prefix_ids, config.attention
    )
    return out, cache, None

  hidden, _, _ = _layers(
    params, config, tokens, positions, tokens.shape[1], attend, None, _UNROLL
  )
  return hidden


def prefill(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B L"],
  lengths: Int[Array, "B"],
  block: int,
) -> Cache:
  """The cache that prompts leave, of as many blocks as hold `L` cells.

  Cells at or beyond a prompt's length hold values that no query may read.
  """
  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(index, tokens.shape)

  def in_blocks(x):
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))
    return x.reshape(x.shape[0], -1, block, *x.shape[2:])

  def attend(q, k, v, cache, layer):
    out = attention.attend_prompts(q, k, v, lengths)
    k, v = in_blocks(k), in_blocks(v)
    return (
      out,
      cache,
      Cache(k.transpose(1, 0, 3, 4, 2), v.transpose(1, 0, 3, 2, 4)),
    )

  return _layers(
    params, config, tokens, positions, tokens.shape[1], attend, None
  )[2]


def decode(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B"],
  positions: Int[Array, "B"],
  cache: Cache,
) -> tuple[Float[Array, "B E"], Cache]:
  """The hidden state of one more token per slot, and the cache with it.

  Args:
    tokens: each slot's newest token.
    positions: its position; cells before it hold the slot's history.
    cache: to be donated; the new token is written at `positions`.
  """
  slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)
  place, cell = jnp.divmod(positions, cache.keys.shape[-1])

  def attend(q, k, v, cache, layer):
    cache = Cache(
      cache.keys.at[layer, place, slots, :, :, cell].set(k),
      cache.values.at[layer, place, slots, :, cell].set(v),
    )
    return attention.attend_cache(q, *cache, layer, positions), cache, None

  num_positions = cache.keys.shape[1] * cache.keys.shape[-1]
  return _layers(
    params, config, tokens, positions, num_positions, attend, cache
  )[:2]


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


def _layers(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B *L"],
  positions: Int[Array, "B *L"],
  num_positions: int,
  attend: Callable,
  cache: Cache | None,
  unroll: int = 1,
):
  """Runs every layer: `(hidden, cache, what each attend saved)`.

  `attend(q, k, v, cache, layer)` returns `(out, cache, saved)`; it is all that
  training, prefill and decoding differ in. The program has `unroll` layers
  side by side, and is compiled as much longer.
  """
  params = cast(params, config)
  batch_axes = ("batch",) + (None,) * tokens.ndim
  # Looked up: else XLA computes them again for each head and layer.
  every_position = jnp.arange(num_positions, dtype=jnp.int32)
  cos, sin = (x[positions] for x in _rotations(config, every_position))

  def layer(carry, xs):
    x, cache = carry
    p, index = xs
    h = norm.rms_norm(x, p["attention_norm"], config.norm_eps)
    q, k, v = (_linear(h, p[name]) for name in ("q", "k", "v"))
    if config.has_qkv_bias:
      q, k, v = q + p["q_bias"], k + p["k_bias"], v + p["v_bias"]
    if config.has_qk_norm:
      q = norm.rms_norm(q, p["q_norm"], config.norm_eps)
      k = norm.rms_norm(k, p["k_norm"], config.norm_eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    out, cache, saved = attend(q, k, v, cache, index)
    out = out.reshape(*out.shape[:-2], -1)
    x = x + _linear(out, p["o"].reshape(-1, config.embed))
    x = sharding.constrain(x, *batch_axes)
    h = norm.rms_norm(x, p["mlp_norm"], config.norm_eps)
    h = jax.nn.silu(_linear(h, p["gate"])) * _linear(h, p["up"])
    x = sharding.constrain(x + _linear(h, p["down"]), *batch_axes)
    return (x, cache), saved

  x = sharding.constrain(params["embed"][tokens], *batch_axes)
  index = jnp.arange(config.layers, dtype=jnp.int32)
  body = REMAT[config.remat](layer)
  (x, cache), saved = jax.lax.scan(
    body, (x, cache), (params["layers"], index), unroll=unroll
  )
  return norm.rms_norm(x, params["final_norm"], config.norm_eps), cache, saved


def _linear(x, weight):
  """`x [..., E]` times `weight [E, ...]`.

  As a product of two matrices, whose slopes are such products again: of a
  product over several axes XLA makes one by copying an operand the other way
  round.
  """
  out = x.reshape(-1, x.shape[-1]) @ weight.reshape(x.shape[-1], -1)
  return out.reshape(*x.shape[:-1], *weight.shape[1:])


def _rotations(config: ModelConfig, positions: Int[Array, "..."]):
  """Cosines and sines `[..., 1, head_dim / 2]` of each position, float32."""
  half = config.head_dim // 2
  exponent = jnp.arange(half, dtype=jnp.float32) / half
  frequency = config.rope_theta**-exponent
  if config.rope_scaling is not None:
    frequency = _stretch(frequency, config.rope_scaling)
  angle = positions[..., None, None].astype(jnp.float32) * frequency
  return jnp.cos(angle), jnp.sin(angle)


def _stretch(frequency, scaling: RopeScaling):
  """Slow frequencies divided by `factor`, fast ones kept, a ramp between."""
  turns = scaling.original_length * frequency / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return frequency * (kept + (1 - kept) / scaling.factor)


def _rotate(x, cos, sin):
  """`x` with each pair (i, i + D/2) of its last axis turned by its angle."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)
