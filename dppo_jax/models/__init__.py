"""The language model, its passes, its cache and its checkpoints."""

from dppo_jax.models import hf, transformer
from dppo_jax.models.transformer import ModelConfig, Params, forward, logits

__all__ = ["ModelConfig", "Params", "forward", "hf", "logits", "transformer"]
