"""The supported architectures: their keys in config.json and their tensors.

Each is declared once, in a table; import and export are maps over it.
"""

from collections.abc import Iterator, Mapping
import math
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dppo_jax.errors import UserError
from dppo_jax.files import json_object
from dppo_jax.models import lora
from dppo_jax.models.config import LocalLayers, ModelConfig
from dppo_jax.models.layers import RopeScaling
from dppo_jax.models.moe import Experts

Shape = tuple[int, ...]


class Family(NamedTuple):
  """Properties of an architecture that its config.json does not set.

  Attributes:
    fields: further fields of ModelConfig.
    defaults: of keys of config.json.
  """

  model_type: str
  has_qkv_bias: bool = False
  has_qk_norm: bool = False
  head_dim: int | None = None  # default; None for embed / heads
  has_experts: bool = False
  has_local_layers: bool = False  # with a window and rotary settings of theirs
  fields: Mapping[str, Any] = MappingProxyType({})
  defaults: Mapping[str, Any] = MappingProxyType({})


# A family whose layers differ, such as in their order, needs a change of
# `transformer` too.
FAMILIES = {
  "LlamaForCausalLM": Family("llama"),
  "Qwen2ForCausalLM": Family("qwen2", has_qkv_bias=True),
  "Qwen3ForCausalLM": Family("qwen3", has_qk_norm=True, head_dim=128),
  "Qwen3MoeForCausalLM": Family(
    "qwen3_moe", has_qk_norm=True, has_experts=True
  ),
  "Gemma3ForCausalLM": Family(
    "gemma3_text",
    has_qk_norm=True,
    head_dim=256,
    has_local_layers=True,
    fields={
      "has_post_norms": True,
      "has_zero_centred_norms": True,
      "has_scaled_embedding": True,
      "activation": "gelu_pytorch_tanh",
    },
    # The defaults of transformers: published files leave out some keys.
    defaults={
      "vocab_size": 262208,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "rms_norm_eps": 1e-6,
      "tie_word_embeddings": True,
      "query_pre_attn_scalar": 256,
      "rope_theta": 1e6,
      "rope_local_base_freq": 1e4,
      "sliding_window": 4096,
      "sliding_window_pattern": 6,  # every sixth layer is global
    },
  ),
}

# Architecture with images -> architecture of its text, which alone is read.
TEXT_TOWERS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}

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

_LABEL = "config.json: "
_LAYER_TYPES = "full_attention", "sliding_attention"

# Key of config.json -> type of its value. Numbers are above 0.
_KINDS = {
  "architectures": list[str],
  **dict.fromkeys((*KEYS.values(), *EXPERT_KEYS.values()), int),
  **dict.fromkeys(("sliding_window", "sliding_window_pattern"), int),
  **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob"), bool),
  **dict.fromkeys(("rms_norm_eps", "query_pre_attn_scalar"), float),
  **dict.fromkeys(("rope_theta", *ROPE_KEYS.values()), float),
}

# The same for values that may be absent.
_OPTIONAL_KINDS = {
  **dict.fromkeys(("architectures", "layer_types"), list[str] | None),
  **dict.fromkeys(("text_config", "rope_scaling"), dict | None),
  "rope_parameters": dict | None,
}

# Option -> its supported values, the default among them.
SUPPORTED = {
  "hidden_act": ("silu",),
  "hidden_activation": ("gelu_pytorch_tanh",),
  "attn_logit_softcapping": (),
  "final_logit_softcapping": (),
  "use_bidirectional_attention": (False,),
  "is_causal": (True,),
  "attention_dropout": (0.0,),
  "mlp_bias": (False,),
  "partial_rotary_factor": (1.0,),
  "use_sliding_window": (False,),
  "quantization_config": (),
  "decoder_sparse_step": (1,),  # every layer has experts
  "mlp_only_layers": ([],),
  "rope_type": ("default", "linear", "llama3"),
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
    ("attention_post_norm", "post_attention_layernorm.weight", "e", "e"),
    ("mlp_pre_norm", "pre_feedforward_layernorm.weight", "e", "e"),
    ("mlp_post_norm", "post_feedforward_layernorm.weight", "e", "e"),
    ("gate", "mlp.gate_proj.weight", "em", "m e"),
    ("up", "mlp.up_proj.weight", "em", "m e"),
    ("down", "mlp.down_proj.weight", "me", "e m"),
    ("router", "mlp.gate.weight", "ex", "x e"),
    ("experts_gate", "mlp.experts.{}.gate_proj.weight", "em", "m e"),
    ("experts_up", "mlp.experts.{}.up_proj.weight", "em", "m e"),
    ("experts_down", "mlp.experts.{}.down_proj.weight", "me", "e m"),
  )
}


for _name in lora.LINEAR:
  _file_name, _, _theirs = TENSORS[f"layers/{_name}"]
  _out, _in = _theirs.split()
  _stem = "base_model.model." + _file_name.removesuffix("weight")
  TENSORS[f"{lora.KEY}/{_name}/a"] = Tensor(
    _stem + "lora_A.weight", _in + "r", "r " + _in
  )
  TENSORS[f"{lora.KEY}/{_name}/b"] = Tensor(
    _stem + "lora_B.weight", "r" + _out, _out + " r"
  )


def tensors(name: str, shape: Shape) -> Iterator[tuple[Shape, str]]:
  """Yields the index in our weight `name` of each tensor, and its name."""
  pattern = TENSORS[name].name
  for index in np.ndindex(shape[: pattern.count("{}")]):
    yield index, pattern.format(*index)


def file_shape(name: str, shape: Shape) -> Shape:
  """Returns the shape in the file of each tensor of our weight `name`."""
  _, ours, theirs = TENSORS[name]
  size = dict(zip(ours, shape[-len(ours) :], strict=True))
  return tuple(math.prod(size[a] for a in word) for word in theirs.split())


def to_file(name: str, piece: np.ndarray) -> np.ndarray:
  """Returns one tensor of our weight `name` in the file's layout."""
  _, ours, theirs = TENSORS[name]
  order = [ours.index(a) for a in theirs.replace(" ", "")]
  return piece.transpose(order).reshape(file_shape(name, piece.shape))


def from_file(name: str, tensor: np.ndarray, shape: Shape) -> np.ndarray:
  """Inverts `to_file`; `shape` is the full weight's."""
  _, ours, theirs = TENSORS[name]
  axes = theirs.replace(" ", "")
  size = dict(zip(ours, shape[-len(ours) :], strict=True))
  split = tensor.reshape([size[a] for a in axes])
  return split.transpose([axes.index(a) for a in ours])


def from_settings(
  settings: Mapping[str, Any], dtype: str = "float32", remat: str = "layers"
) -> ModelConfig:
  """Returns the model that a config.json of transformers 4 or 5 describes."""
  settings = {k: v for k, v in text_settings(settings).items() if v is not None}
  name = next(iter(_get(settings, "architectures")), None)
  if name not in FAMILIES:
    known = ", ".join(FAMILIES)
    raise UserError(
      f"config.json has architecture {name!r}: use one of {known}"
    )
  family = FAMILIES[name]
  settings = {**family.defaults, **settings}
  rope = {k: v for k, v in settings.items() if k == "rope_theta"}
  new = settings.get("rope_parameters", {})  # as transformers 5 writes it
  by_type = {}
  if new and family.has_local_layers:  # others are ignored there
    kinds = {"full_attention": dict, "sliding_attention": dict | None}
    by_type = json_object.check(new, kinds, f"{_LABEL}rope_parameters.")
    new = by_type["full_attention"]
  rope |= settings.get("rope_scaling") or new
  rope.setdefault("rope_type", rope.get("type", "default"))
  local = _local_layers(settings, by_type) if family.has_local_layers else None
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
    if experts.per_token > experts.num:
      raise UserError(
        f"config.json sets num_experts_per_tok to {experts.per_token}, but a "
        f"layer has {experts.num} experts"
      )
  scaling = None
  if rope["rope_type"] == "llama3":
    scaling = RopeScaling(**{k: _get(rope, x) for k, x in ROPE_KEYS.items()})
  if rope["rope_type"] == "linear":
    scaling = RopeScaling(_get(rope, "factor"))
  fields = {k: _get({**defaults, **settings}, key) for k, key in KEYS.items()}
  defaults = {"query_pre_attn_scalar": fields["head_dim"]}
  query_size = _get(defaults | settings, "query_pre_attn_scalar")
  return ModelConfig(
    **fields,
    **family.fields,
    local=local,
    query_size=None if query_size == fields["head_dim"] else query_size,
    rope_theta=_get(rope, "rope_theta"),
    rope_scaling=scaling,
    has_qkv_bias=family.has_qkv_bias,
    has_qk_norm=family.has_qk_norm,
    experts=experts,
    family=name,
    dtype=dtype,
    remat=remat,
  )


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the settings of a model's text tower, in general all of them."""
  json_object.check(settings, _OPTIONAL_KINDS, _LABEL)
  name = next(iter(settings.get("architectures") or ()), None)
  if name not in TEXT_TOWERS:
    return settings
  text = settings.get("text_config") or {}
  text = json_object.check(text, _OPTIONAL_KINDS, _LABEL)
  # transformers ignores the inner key, and takes the outer one to be true.
  key = "tie_word_embeddings"
  text = text | {"architectures": [TEXT_TOWERS[name]], key: True}
  text |= {k: settings[k] for k in (key, "eos_token_id") if k in settings}
  return text


def _local_layers(
  settings: Mapping[str, Any], rope: Mapping[str, Any]
) -> LocalLayers | None:
  """Returns the local layers of a model; None if all layers are global.

  Args:
    rope: rotary settings by the type of a layer.
  """
  rope = {"rope_type": "default", **(rope.get("sliding_attention") or {})}
  if rope["rope_type"] != "default":
    raise UserError(
      f"config.json sets the rope_type of local layers to {rope['rope_type']!r}"
      ", which is not supported (use 'default')"
    )
  num_layers = _get(settings, "num_hidden_layers")
  every = _get(settings, "sliding_window_pattern")
  is_local = [bool((i + 1) % every) for i in range(num_layers)]
  if "layer_types" in settings:
    is_local = [x == "sliding_attention" for x in settings["layer_types"]]
  if len(is_local) != num_layers:
    raise UserError(
      f"config.json has {len(is_local)} layer_types for {num_layers} layers"
    )
  default = {"rope_theta": settings["rope_local_base_freq"]}
  theta = _get(default | rope, "rope_theta")
  window = _get(settings, "sliding_window")
  return LocalLayers(tuple(is_local), window, theta) if any(is_local) else None


def to_settings(config: ModelConfig) -> dict[str, Any]:
  """Returns the content of a config.json that describes this model.

  It has the style of transformers 4, which 5 reads as well. From the style of
  5, transformers 4 would silently take its default theta.
  """
  experts = config.experts._asdict() if config.experts else {}
  scaling, family = None, FAMILIES[config.family]
  if config.rope_scaling:
    fields = config.rope_scaling._asdict().items()
    scaling = {ROPE_KEYS[k]: x for k, x in fields if x}
    scaling["rope_type"] = "llama3" if len(scaling) > 1 else "linear"
  more: dict[str, Any] = {"hidden_act": config.activation}
  if family.has_local_layers:
    more = {
      "hidden_activation": config.activation,
      "query_pre_attn_scalar": config.query_size or config.head_dim,
      "layer_types": ["full_attention"] * config.layers,
    }
  if config.local:
    more |= {
      "layer_types": [_LAYER_TYPES[x] for x in config.local.is_local],
      "sliding_window": config.local.window,
      "rope_local_base_freq": config.local.rope_theta,
    }
  return {
    "architectures": [config.family],
    "model_type": family.model_type,
    **more,
    **{key: getattr(config, k) for k, key in KEYS.items()},
    **{EXPERT_KEYS[k]: x for k, x in experts.items()},
    "rope_theta": config.rope_theta,
    "rope_scaling": scaling,
  }


def _get(settings: Mapping[str, Any], key: str) -> Any:
  """Returns a value of config.json; raises UserError for another type."""
  kind = _KINDS[key]
  value = json_object.check(settings, {key: kind}, _LABEL)[key]
  end = 2**31 if kind is int else math.inf
  if kind in (int, float) and not 0 < value < end:
    raise UserError(f"{_LABEL}{key} is {value} but must be in (0, {end})")
  return value


def _check_supported(settings: Mapping[str, Any], family: Family) -> None:
  # transformers chooses the model by model_type and ignores the architecture.
  supported = SUPPORTED | {"model_type": (family.model_type,)}
  if not family.has_qkv_bias:  # Qwen2 has no such option, and ignores the key
    supported["attention_bias"] = (False,)
  known_types = _LAYER_TYPES[: 1 + family.has_local_layers]
  if set(settings.get("layer_types", ())).difference(known_types):
    supported["layer_types"] = ()
  for key, values in supported.items():
    if key in settings and settings[key] not in values:
      known = " or ".join(map(repr, values)) or "none"
      raise UserError(
        f"config.json sets {key} to {settings[key]!r}, which is not "
        f"supported (use {known})"
      )
