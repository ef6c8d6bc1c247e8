"""Bytes that a device receives from others, by stage, in closed form.

`d` devices divide what is computed on (and, within a replica, the state), `m`
divide every layer. Gathering an array of `B` bytes brings a device `B (n-1)/n`
of them, a sum over devices that leaves each its share the same, and one that
leaves each everything twice that.
"""

from collections.abc import Callable
import math

import jax.numpy as jnp

from dppo_jax import sharding
from dppo_jax.models import transformer
from dppo_jax.planning import workload
from dppo_jax.planning.memory_estimate import Parts
from dppo_jax.rollout import prefill
from dppo_jax.run.setup import Run


def of_step(run: Run, work: workload.Work) -> dict[str, Parts]:
  """Bytes a device receives in a step: by stage, by what for."""
  passes = 1 + bool(run.objective.beta)  # the reference's forward pass
  turns = work.micro_batches * run.config.objective.inner_updates
  return {
    "to_inference_params": {"weights": weights_of_rollout(run)},
    "prefill": _prefill(run, work),
    "decode": _decode(run, work),
    "score": {
      name: size * work.micro_batches
      for name, size in micro_batch(run, forward=1, backward=False).items()
    },
    "update": {
      name: size * turns
      for name, size in micro_batch(run, passes, backward=True).items()
    },
  }


def weights_of_rollout(run: Run) -> float:
  """What the rollout's copy of the weights brings a device."""
  whole = elements(run) * _inference_item(run) * _share(run)
  return whole - _layers_in_turn(run)


def micro_batch(run: Run, forward: int = 1, backward: bool = True) -> Parts:
  """Bytes a device receives in one micro-batch of the update.

  Args:
    forward: passes over the model before the backward one.
  """
  model, shards = run.model, sharding.num_shards(run.mesh, "batch")
  tokens = run.config.pack.rows_per_micro * run.config.pack.row_length
  share = _share(run) * jnp.dtype(model.dtype).itemsize
  layers = elements(run, _is_layer)
  head = model.vocab * model.embed / run.mesh.shape["model"]
  # The backward pass gathers the layers again; the head stays.
  parts = {"weights": share * ((forward + backward) * layers + forward * head)}
  if backward:
    # Summed in the dtype of the computation; of the head every device gets all.
    parts["gradients"] = share * (layers + 2 * head) + _of_replicas(run)
  recomputed = backward and model.remat != "none"
  sums = forward + backward + recomputed
  return parts | _layer_sums(run, tokens * shards, sums)


def _share(run: Run) -> float:
  """What of an array does not come from the device itself."""
  return 1 - 1 / run.mesh.shape["data"]


def _of_replicas(run: Run) -> float:
  """Gradients, float32, added up over replicas."""
  replicas = run.mesh.shape["replica"]
  size = 4 * elements(run) / run.mesh.shape["data"]
  return 2 * size * (1 - 1 / replicas)


def _is_layer(name: str) -> bool:
  return name.startswith("layers/")


def _layers_in_turn(run: Run) -> float:
  """Bytes of the layers, gathered for each pass of a rollout that does so."""
  if not run.config.rollout.shard_weights:
    return 0.0
  return elements(run, _is_layer) * _inference_item(run) * _share(run)


def _inference_item(run: Run) -> int:
  return jnp.dtype(run.config.rollout.dtype or run.model.dtype).itemsize


def elements(run: Run, is_meant: Callable = lambda name: True) -> float:
  """Weights that one device computes with, all of its replica gathered.

  Args:
    is_meant: of which names; all.
  """
  shards = run.mesh.shape["model"]
  table = transformer.parameter_table(run.model)
  places = transformer.flatten(transformer.shardings(run.model, run.mesh))
  is_divided = {name: "model" in x.spec for name, x in places.items()}
  return sum(
    math.prod(p.shape) / (shards if is_divided[name] else 1)
    for name, p in table.items()
    if is_meant(name)
  )


def _layer_sums(run: Run, tokens: float, passes: int) -> Parts:
  """Sums over the model axis: after attention and after the feed-forward part.

  Args:
    tokens: over all devices.
  """
  shards = run.mesh.shape["model"]
  if shards == 1:
    return {}
  here = tokens / sharding.num_shards(run.mesh, "batch")
  item = jnp.dtype(run.model.dtype).itemsize
  size = here * run.model.embed * item
  return {
    "layer sums": passes
    * 2
    * run.model.layers
    * 2
    * size
    * (shards - 1)
    / shards
  }


def _prefill(run: Run, work: workload.Work) -> Parts:
  shards = sharding.num_shards(run.mesh, "batch")
  together = prefill.batch_size(run.train_set.tokens.shape[1])
  chunks = work.rolled_out / shards / together
  return {"weights": max(1.0, chunks) * _layers_in_turn(run)} | _layer_sums(
    run, work.rolled_out * work.prompt, 1
  )


def _decode(run: Run, work: workload.Work) -> Parts:
  slots = work.slots * sharding.num_shards(run.mesh, "batch")
  parts = {"weights": work.decode_steps * _layers_in_turn(run)}
  parts |= _layer_sums(run, slots * work.decode_steps, 1)
  shards = run.mesh.shape["model"]
  if shards > 1:  # logits are gathered before a token is sampled
    size = 4 * work.slots * run.model.vocab * work.decode_steps
    parts["logits"] = size * (shards - 1) / shards
  return parts
