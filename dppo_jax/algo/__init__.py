"""Pure functions of arrays, independent of model, config and files."""

from dppo_jax.algo.advantages import (
  group_centred,
  group_normalized,
  is_zero_variance,
  leave_one_out,
  overlong_penalty,
)
from dppo_jax.algo.designs import (
  bernoulli,
  drawn_probability,
  systematic,
  water_filling,
)
from dppo_jax.algo.diagnostics import diagnose
from dppo_jax.algo.filling import fill, pack_chosen
from dppo_jax.algo.objectives import (
  OBJECTIVES,
  cispo,
  dapo,
  dr_grpo,
  grpo,
  gspo,
  rloo,
)
from dppo_jax.algo.packing import PackingSpec, count_tokens, plan, row_bound
from dppo_jax.algo.policy_loss import Objective, surrogate
from dppo_jax.algo.segments import segment_sum
from dppo_jax.algo.weights import (
  effective_sample_size,
  horvitz_thompson,
  invalid_probs,
)
