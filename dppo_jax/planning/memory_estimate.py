"""Bytes of one device, at the moments when they are the most.

State, gradients, the rollout's copy of the weights and the caches are exact:
shapes divided by their shardings. What a stage needs while it runs is a sum of
the largest arrays that it cannot do without; a compiler may need more.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from dppo_jax import sharding
from dppo_jax.models import kv_cache, lm_head, transformer
from dppo_jax.models.transformer import ModelConfig
from dppo_jax.planning import workload
from dppo_jax.rollout import decode, prefill
from dppo_jax.run.setup import Run
from dppo_jax.step import programs

Parts = dict[str, float]  # bytes by what they are for


def of_tree(tree: PyTree[jax.ShapeDtypeStruct]) -> int:
  """Bytes that one device holds of arrays with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def resident(run: Run) -> Parts:
  """What stays in memory from step to step."""
  state = programs.abstract_train_state(run)
  parts = {
    "weights": of_tree(state.params),
    "optimizer": of_tree(state.opt_state),
    "history": of_tree(state.history),
  }
  if run.objective.beta:
    parts["reference"] = parts["weights"]
  return parts


def rollout_copy(run: Run) -> int:
  """The weights as rollouts read them."""
  with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
    return of_tree(programs.abstract_inference_params(run))


def moments(run: Run) -> dict[str, Parts]:
  """The parts of the largest sums: copying weights, rollout and update."""
  held, copy = resident(run), rollout_copy(run)
  gathered = 2 * _gathered(run, _dtype(run))  # on the way, and laid out anew
  return {
    "to_inference_params": held
    | {"rollout copy": copy, "gathered weights": gathered},
    "roll_out": held | {"rollout copy": copy} | _rollout(run),
    "update": held | _update(run),
  }


def cache_of_token(run: Run) -> float:
  """Bytes of a token's keys and values on one device."""
  c = run.model
  shards = run.mesh.shape["model"]
  heads = math.lcm(c.kv_heads, shards) // shards  # some perhaps repeated
  return 2 * c.layers * heads * c.head_dim * jnp.dtype(_dtype(run)).itemsize


def _rollout(run: Run) -> Parts:
  c, model = run.config, run.model
  token = cache_of_token(run)
  positions, slots = workload.capacity(run), workload.num_slots(run)
  width = run.train_set.tokens.shape[1]
  prompts = c.data.prompts_per_step // sharding.num_shards(run.mesh, "batch")
  sizes = kv_cache.prompt_part_sizes(kv_cache.part_sizes(positions), width)
  items = prompts * c.rollout.group_size
  # The cache of a stage of the decode loop beside that of the stage before.
  later = [*decode.slot_schedule(slots, run.platform), 0][1]
  batch = min(prefill.batch_size(width), prompts)
  item = jnp.dtype(_dtype(run)).itemsize
  gathered = _gathered(run, _dtype(run)) if c.rollout.shard_weights else 0.0
  return {
    "gathered weights": gathered,
    "cache": token * positions * slots,
    "cache, next stage": token * positions * later,
    # Seen in what the TPU compiler makes of Qwen3-4B on 16 v5e.
    "cache, laid out anew": (run.platform == "tpu")
    * token
    * positions
    * slots
    / 2,
    "prompts' cache": token * sum(sizes) * prompts,
    "completions": 12 * items * c.rollout.max_tokens,
    "logits": 3 * 4 * slots * model.vocab,
    "prefill": item * batch * width * _widths(run, model),
  }


def _update(run: Run) -> Parts:
  c, model = run.config, run.model
  item = jnp.dtype(model.dtype).itemsize
  shards = run.mesh.shape["model"]
  params = of_tree(programs.abstract_params(run))
  tokens = c.pack.rows_per_micro * c.pack.row_length
  per_layer = {
    "layers": model.embed,
    "dots": model.embed + _widths(run, model),
    "none": 3 * (model.embed + _widths(run, model)),
  }[model.remat]
  num_shards = sharding.num_shards(run.mesh, "batch")
  chunk = max(lm_head.LOGIT_CHUNK // num_shards, c.pack.rows_per_micro)
  head = model.vocab * model.embed / shards
  return {
    "gradients": params,
    "gradients of a micro-batch": params,
    "gathered weights": _gathered(run, model.dtype),
    # The sum in float32, and what is sent to the others.
    "head and its gradient": (2 * item + 4) * head,
    "activations": item * tokens * model.layers * per_layer,
    "a layer's activations": item * tokens * 4 * _widths(run, model),
    "logits": 3 * 4 * min(chunk, tokens) * model.vocab / shards,
  }


def _gathered(run: Run, dtype: str) -> float:
  """Weights of the few layers that are gathered at once."""
  if run.mesh.shape["data"] == 1:
    return 0.0
  table = transformer.parameter_table(run.model)
  names = [name for name in table if name.startswith("layers/")]
  layer = sum(math.prod(table[name].shape[1:]) for name in names)
  several = kv_cache.num_groups(run.model.layers) * layer
  return several * jnp.dtype(dtype).itemsize / run.mesh.shape["model"]


def _widths(run: Run, model: ModelConfig) -> float:
  """Numbers of a token inside a layer that exist side by side."""
  shards = run.mesh.shape["model"]
  heads = (model.heads + 2 * model.kv_heads) * model.head_dim
  if model.experts:
    x = model.experts
    wide = x.per_token * (2 * x.mlp / shards + model.embed)
  else:
    wide = 2 * model.mlp / shards
  return 2 * model.embed + heads / shards + wide


def _dtype(run: Run) -> str:
  return run.config.rollout.dtype or run.model.dtype
