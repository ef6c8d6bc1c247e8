"""Hugging Face checkpoints: reading, checking and writing them."""

from dppo_jax.models.hf.reader import (
  check,
  fetch,
  has_images,
  load,
  max_positions,
  read_config,
  stored_dtype,
)
from dppo_jax.models.hf.saver import save
