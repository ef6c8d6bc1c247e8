"""Tiny random checkpoints, written by transformers; needs torch."""

import torch
import transformers

# Threads would wait for each other, longer than such models compute.
torch.set_num_threads(1)

SHAPE = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
}

# What each architecture has of its own: a head_dim unlike embed / heads, and
# rotary frequencies that are kept, blended and stretched.
EXTRAS = {
  "Qwen2ForCausalLM": {"rope_parameters": {"rope_theta": 1e6}},
  "Qwen3ForCausalLM": {"rope_parameters": {"rope_theta": 1e6}, "head_dim": 16},
  "Qwen3MoeForCausalLM": {
    "rope_parameters": {"rope_theta": 1e6},
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
  },
  "LlamaForCausalLM": {
    "rope_parameters": {
      "rope_type": "llama3",
      "rope_theta": 100.0,
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 32,
    }
  },
  "Gemma3ForCausalLM": {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "rope_parameters": {
      "full_attention": {
        "rope_type": "linear",
        "rope_theta": 1e3,
        "factor": 8.0,
      },
      "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
  },
}
EXTRAS["Gemma3ForConditionalGeneration"] = EXTRAS["Gemma3ForCausalLM"]

VISION = {
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "image_size": 28,
  "patch_size": 14,
}


def write(
  path,
  family: str = "Qwen3ForCausalLM",
  *,
  is_tied: bool = True,
  dtype: str = "float32",
  seed: int = 0,
  max_shard_size: str = "1GB",
  **settings,
) -> torch.nn.Module:
  """Writes a checkpoint into directory `path`; returns its float32 model.

  Args:
    path: the directory.
    family: the architecture.
    is_tied: the output head is the embedding.
    dtype: of the file.
    seed: of the weights.
    max_shard_size: of one file, e.g. "20KB".
    **settings: of config.json, before those of SHAPE and EXTRAS.
  """
  model_class = getattr(transformers, family)
  settings = SHAPE | EXTRAS[family] | settings
  if family == "Gemma3ForConditionalGeneration":
    settings = {"text_config": settings, "vision_config": VISION}
  config = model_class.config_class(tie_word_embeddings=is_tied, **settings)
  model = model_class(config)
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    # Fresh biases are 0 and fresh norms 1: a weight that import misses would
    # not show.
    for weight in model.parameters():
      is_norm = weight.ndim == 1 and bool((weight == 1).all())
      weight.copy_(
        0.3 * torch.randn(weight.shape, generator=generator) + float(is_norm)
      )
    if family.startswith("Gemma3"):  # else a tied head repeats its input
      model.get_input_embeddings().weight.mul_(0.2)
  model.to(getattr(torch, dtype)).save_pretrained(
    path, max_shard_size=max_shard_size
  )
  # Read again, as `to` rounds the rotary frequencies too.
  return model_class.from_pretrained(
    path, dtype=torch.float32, attn_implementation="eager"
  ).eval()
