"""Architectures of the models that configs name, so that no file is needed."""

from typing import Any

from dppo_jax import config as configs
from dppo_jax.models import hf
from dppo_jax.models.hf import families
from dppo_jax.models.transformer import ModelConfig


def _settings(
  family: str,
  layers: int,
  embed: int,
  mlp: int,
  heads: tuple[int, int],
  **more: Any,
) -> dict[str, Any]:
  """The content of a config.json; `heads` of queries, and of keys."""
  return {
    "architectures": [f"{family}ForCausalLM"],
    "num_hidden_layers": layers,
    "hidden_size": embed,
    "intermediate_size": mlp,
    "num_attention_heads": heads[0],
    "num_key_value_heads": heads[1],
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
  } | more


_UNTIED = {"tie_word_embeddings": False}
_EXPERTS = _UNTIED | {
  "head_dim": 128,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "norm_topk_prob": True,
}
_MATH = {"rope_theta": 1e4}

# Source: the config.json of each at huggingface.co/ID.
KNOWN = {
  "Qwen/Qwen3-0.6B": _settings("Qwen3", 28, 1024, 3072, (16, 8)),
  "Qwen/Qwen3-1.7B": _settings("Qwen3", 28, 2048, 6144, (16, 8)),
  "Qwen/Qwen3-4B": _settings("Qwen3", 36, 2560, 9728, (32, 8)),
  "Qwen/Qwen3-8B": _settings("Qwen3", 36, 4096, 12288, (32, 8), **_UNTIED),
  "Qwen/Qwen3-14B": _settings("Qwen3", 40, 5120, 17408, (40, 8), **_UNTIED),
  "Qwen/Qwen3-32B": _settings("Qwen3", 64, 5120, 25600, (64, 8), **_UNTIED),
  "Qwen/Qwen3-30B-A3B": _settings(
    "Qwen3Moe",
    *(48, 2048, 6144, (32, 4)),
    moe_intermediate_size=768,
    **_EXPERTS,
  ),
  "Qwen/Qwen3-235B-A22B": _settings(
    "Qwen3Moe",
    *(94, 4096, 12288, (64, 4)),
    moe_intermediate_size=1536,
    **_EXPERTS,
  ),
  "Qwen/Qwen2.5-Math-1.5B": _settings(
    "Qwen2", 28, 1536, 8960, (12, 2), **_MATH
  ),
  "Qwen/Qwen2.5-Math-7B": _settings(
    "Qwen2", 28, 3584, 18944, (28, 4), vocab_size=152064, **_MATH, **_UNTIED
  ),
  "meta-llama/Llama-3.2-1B-Instruct": _settings(
    "Llama",
    *(16, 2048, 8192, (32, 8)),
    vocab_size=128256,
    head_dim=64,
    rope_theta=5e5,
    rms_norm_eps=1e-5,
    rope_scaling={
      "rope_type": "llama3",
      "factor": 32.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
    },
  ),
}


def find(options: configs.ModelConfig) -> ModelConfig | None:
  """The model that a config starts from; None where it is made on the spot.

  Raises:
    ValueError: for a hub's model that is not known here.
  """
  if options.path:
    return hf.read_config(options.path, options.dtype, options.remat)
  if not options.hub_id:
    return None
  if options.hub_id not in KNOWN:
    raise ValueError(
      f"config.model.hub_id is {options.hub_id!r}, which planning does not "
      f"know ({', '.join(KNOWN)}): give --config.model.path=DIR with its "
      "config.json, weights are not needed"
    )
  settings = KNOWN[options.hub_id]
  return families.from_settings(settings, options.dtype, options.remat)
