"""The stages of a training step, from prompts to new weights."""

from dppo_jax.algo.packing import PackingSpec
from dppo_jax.sharding import make_mesh
from dppo_jax.step.abstract_values import new_train_state
from dppo_jax.step.optimizer import make_optimizer
from dppo_jax.step.pack import pack
from dppo_jax.step.spec import StepSpec
from dppo_jax.step.tokens import choose_tokens
from dppo_jax.step.train_step import TrainStep
from dppo_jax.step.update import (
  GradSums,
  add_gradient,
  apply_gradient,
  score,
  sum_gradients,
  zero_sums,
)
