"""Hugging Face checkpoints: reading, checking and writing them."""

from dppo_jax.models.hf.checkpoint import check, fetch, load, read_config, save

__all__ = ["check", "fetch", "load", "read_config", "save"]
