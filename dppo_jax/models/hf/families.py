"""The supported architectures: their keys in config.json and their tensors.

Each is declared once, in a table; import and export are maps over it.
"""

from collections.abc import Iterator, Mapping
import math
from typing import Any, NamedTuple

import numpy as np

from dppo_jax.errors import UserError
from dppo_jax.models.layers import RopeScaling
from dppo_jax.models.moe import Experts
from dppo_jax.models.transformer import ModelConfig

Shape = tuple[int, ...]


class Family(NamedTuple):
  """Properties of an architecture that its config.json does not set."""

  model_type: str
  has_qkv_bias: bool = False
  has_qk_norm: bool = False
  head_dim: int | None = None  # default; None for embed / heads
  has_experts: bool = False


# A family whose layers differ, such as in the activation, needs a change of
# `transformer` too.
FAMILIES = {
  "LlamaForCausalLM": Family("llama"),
  "Qwen2ForCausalLM": Family("qwen2", has_qkv_bias=True),
  "Qwen3ForCausalLM": Family("qwen3", has_qk_norm=True, head_dim=128),
  "Qwen3MoeForCausalLM": Family(
    "qwen3_moe", has_qk_norm=True, has_experts=True
  ),
}

# Field of ModelConfig -> key of config.json.
KEYS = {
  "vocab": "vocab_size",
  "embed": "hidden_size",
  "layers": "num_hidden_layers",
  "heads": "num_attention_heads",
  "kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "mlp": "intermediate_size",
  "norm_eps": "rms_norm_eps",
  "is_tied": "tie_word_embeddings",
}

# Field of Experts -> key of config.json.
EXPERT_KEYS = {
  "num": "num_experts",
  "per_token": "num_experts_per_tok",
  "mlp": "moe_intermediate_size",
  "is_normalized": "norm_topk_prob",
}

# Field of RopeScaling -> key of config.json's rope_parameters.
ROPE_KEYS = {
  "factor": "factor",
  "low_freq_factor": "low_freq_factor",
  "high_freq_factor": "high_freq_factor",
  "original_length": "original_max_position_embeddings",
}

# Option -> its supported values, the default among them.
SUPPORTED = {
  "hidden_act": ("silu",),
  "attention_dropout": (0.0,),
  "mlp_bias": (False,),
  "partial_rotary_factor": (1.0,),
  "use_sliding_window": (False,),
  "quantization_config": (),
  "decoder_sparse_step": (1,),  # every layer has experts
  "mlp_only_layers": ([],),
  "rope_type": ("default", "llama3"),
}


class Tensor(NamedTuple):
  """A weight's name in the file and the order of its axes there."""

  name: str  # one `{}` for each leading axis along which our weight is stacked
  ours: str  # our remaining axes, a letter each
  theirs: str  # the file's axes; adjacent letters are merged into one axis


TENSORS = {
  "embed": Tensor("model.embed_tokens.weight", "ve", "v e"),
  "final_norm": Tensor("model.norm.weight", "e", "e"),
  "head": Tensor("lm_head.weight", "ve", "v e"),
} | {
  f"layers/{name}": Tensor("model.layers.{}." + suffix, ours, theirs)
  for name, suffix, ours, theirs in (
    ("attention_norm", "input_layernorm.weight", "e", "e"),
    ("q", "self_attn.q_proj.weight", "ehd", "hd e"),
    ("k", "self_attn.k_proj.weight", "ehd", "hd e"),
    ("v", "self_attn.v_proj.weight", "ehd", "hd e"),
    ("q_bias", "self_attn.q_proj.bias", "hd", "hd"),
    ("k_bias", "self_attn.k_proj.bias", "hd", "hd"),
    ("v_bias", "self_attn.v_proj.bias", "hd", "hd"),
    ("q_norm", "self_attn.q_norm.weight", "d", "d"),
    ("k_norm", "self_attn.k_norm.weight", "d", "d"),
    ("o", "self_attn.o_proj.weight", "hde", "e hd"),
    ("mlp_norm", "post_attention_layernorm.weight", "e", "e"),
    ("gate", "mlp.gate_proj.weight", "em", "m e"),
    ("up", "mlp.up_proj.weight", "em", "m e"),
    ("down", "mlp.down_proj.weight", "me", "e m"),
    ("router", "mlp.gate.weight", "ex", "x e"),
    ("experts_gate", "mlp.experts.{}.gate_proj.weight", "em", "m e"),
    ("experts_up", "mlp.experts.{}.up_proj.weight", "em", "m e"),
    ("experts_down", "mlp.experts.{}.down_proj.weight", "me", "e m"),
  )
}


def parts(name: str, shape: Shape) -> Iterator[tuple[Shape, str]]:
  """Yields the index and the tensor of each part of our weight `name`."""
  pattern = TENSORS[name].name
  for index in np.ndindex(shape[: pattern.count("{}")]):
    yield index, pattern.format(*index)


def file_shape(name: str, shape: Shape) -> Shape:
  """Returns the shape in the file of each part of our weight `name`."""
  _, ours, theirs = TENSORS[name]
  size = dict(zip(ours, shape[-len(ours) :], strict=True))
  return tuple(math.prod(size[a] for a in word) for word in theirs.split())


def to_file(name: str, part: np.ndarray) -> np.ndarray:
  """Returns one part of our weight `name` in the file's layout."""
  _, ours, theirs = TENSORS[name]
  order = [ours.index(a) for a in theirs.replace(" ", "")]
  return part.transpose(order).reshape(file_shape(name, part.shape))


def from_file(name: str, tensor: np.ndarray, shape: Shape) -> np.ndarray:
  """Inverts `to_file`; `shape` is that of the full weight."""
  _, ours, theirs = TENSORS[name]
  axes = theirs.replace(" ", "")
  size = dict(zip(ours, shape[-len(ours) :], strict=True))
  split = tensor.reshape([size[a] for a in axes])
  return split.transpose([axes.index(a) for a in ours])


def from_settings(
  settings: Mapping[str, Any], dtype: str = "float32", remat: str = "layers"
) -> ModelConfig:
  """Returns the model that a config.json of transformers 4 or 5 describes."""
  settings = {k: v for k, v in settings.items() if v is not None}
  name = next(iter(_get(settings, "architectures")), None)
  if name not in FAMILIES:
    known = ", ".join(FAMILIES)
    raise UserError(
      f"config.json has architecture {name!r}: use one of {known}"
    )
  family = FAMILIES[name]
  rope = {k: v for k, v in settings.items() if k == "rope_theta"}
  rope |= settings.get("rope_scaling") or settings.get("rope_parameters") or {}
  rope.setdefault("rope_type", rope.get("type", "default"))
  _check_supported({**settings, **rope}, family)
  heads = _get(settings, "num_attention_heads")
  defaults = {
    "num_key_value_heads": heads,
    "head_dim": family.head_dim or _get(settings, "hidden_size") // heads,
    "tie_word_embeddings": False,
  }
  experts = None
  if family.has_experts:
    keys = {"norm_topk_prob": False, **settings}
    if "num_local_experts" in settings:  # written by transformers 5
      keys.setdefault("num_experts", settings["num_local_experts"])
    experts = Experts(**{k: _get(keys, key) for k, key in EXPERT_KEYS.items()})
    if not 0 < experts.per_token <= experts.num:
      raise UserError(
        f"config.json sets num_experts_per_tok to {experts.per_token}, but a "
        f"layer has {experts.num} experts"
      )
  scaling = None
  if rope["rope_type"] == "llama3":
    scaling = RopeScaling(**{k: _get(rope, x) for k, x in ROPE_KEYS.items()})
  return ModelConfig(
    **{k: _get({**defaults, **settings}, key) for k, key in KEYS.items()},
    rope_theta=_get(rope, "rope_theta"),
    rope_scaling=scaling,
    has_qkv_bias=family.has_qkv_bias,
    has_qk_norm=family.has_qk_norm,
    experts=experts,
    family=name,
    dtype=dtype,
    remat=remat,
  )


def to_settings(config: ModelConfig) -> dict[str, Any]:
  """Returns the content of a config.json that describes this model.

  The style is that of transformers 4, which 5 reads as well. From the style of
  5, transformers 4 would silently take its default theta.
  """
  experts = config.experts._asdict() if config.experts else {}
  scaling = None
  if config.rope_scaling:
    scaling = config.rope_scaling._asdict().items()
    scaling = {ROPE_KEYS[k]: x for k, x in scaling} | {"rope_type": "llama3"}
  return {
    "architectures": [config.family],
    "model_type": FAMILIES[config.family].model_type,
    "hidden_act": "silu",
    **{key: getattr(config, k) for k, key in KEYS.items()},
    **{EXPERT_KEYS[k]: x for k, x in experts.items()},
    "rope_theta": config.rope_theta,
    "rope_scaling": scaling,
  }


def _get(settings: Mapping[str, Any], key: str) -> Any:
  if key not in settings:
    raise UserError(f"config.json lacks {key!r}")
  return settings[key]


def _check_supported(settings: Mapping[str, Any], family: Family) -> None:
  # transformers chooses the model by model_type and ignores the architecture.
  supported = SUPPORTED | {"model_type": (family.model_type,)}
  if not family.has_qkv_bias:  # Qwen2 has no such option, and ignores the key
    supported["attention_bias"] = (False,)
  if set(settings.get("layer_types", ())) - {"full_attention"}:
    supported["layer_types"] = ()
  for key, values in supported.items():
    if key in settings and settings[key] not in values:
      known = " or ".join(map(repr, values)) or "none"
      raise UserError(
        f"config.json sets {key} to {settings[key]!r}, which is not "
        f"supported (use {known})"
      )
