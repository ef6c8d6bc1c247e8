"""The stages of a training step, from prompts to new weights."""

from dppo_jax.algo.packing import PackingSpec
from dppo_jax.step.optimizer import make_optimizer
from dppo_jax.step.pack import pack
from dppo_jax.step.tokens import choose_tokens
from dppo_jax.step.update import (
  GradSums,
  UpdateConfig,
  add_gradient,
  apply_gradient,
  score,
  sum_gradients,
  zero_sums,
)
