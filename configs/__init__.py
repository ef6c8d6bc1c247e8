"""Configs to start from; installed as `dppo_jax.configs`."""
