"""Comparison of finished runs; imports no jax."""
