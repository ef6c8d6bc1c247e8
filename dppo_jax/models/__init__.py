"""The language model, its passes, its cache and its checkpoints."""

from dppo_jax.models import attention, hf, kv_cache, lm_head, transformer
from dppo_jax.models.transformer import ModelConfig, Params, forward, logits

__all__ = [
  "ModelConfig",
  "Params",
  "attention",
  "forward",
  "hf",
  "kv_cache",
  "lm_head",
  "logits",
  "transformer",
]
