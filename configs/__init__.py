"""Runs worth starting from, a file each; `dppo_jax.configs` once installed."""
