"""The language model, its passes, its cache and its checkpoints."""

from dppo_jax.models import hf, parameters, transformer
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.parameters import Params
from dppo_jax.models.transformer import forward, logits

__all__ = [
  "ModelConfig",
  "Params",
  "forward",
  "hf",
  "logits",
  "parameters",
  "transformer",
]
