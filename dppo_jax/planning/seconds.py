"""Operations, bytes and expected seconds of a step, phase by phase."""

from typing import NamedTuple

import jax.numpy as jnp

from dppo_jax import sharding
from dppo_jax.models.transformer import ModelConfig
from dppo_jax.planning import flops, memory_estimate, traffic, workload
from dppo_jax.planning.hardware import Chip
from dppo_jax.rollout import prefill
from dppo_jax.run.setup import Run
from dppo_jax.step import stages, update


class Phase(NamedTuple):
  """What one device does in a phase of a step.

  Attributes:
    flops: operations.
    read: bytes to and from memory.
    received: bytes from other devices.
    seconds: the longest of the three, at the share of the stated figures that
      is assumed: each is taken to hide behind the longest.
    bound: which that is: compute, memory or network.
  """

  flops: float
  read: float
  received: float
  seconds: float
  bound: str


def phases(
  run: Run, work: workload.Work, chip: Chip, given: workload.Assumptions
) -> dict[str, Phase]:
  """The phases of a step that take time on the devices."""
  operations = _flops(run, work)
  moved, received = _read(run, work), traffic.of_step(run, work)
  found = {}
  for name in operations:
    here = operations[name], moved[name], sum(received[name].values())
    seconds = {
      "compute": here[0] / (chip.flops * given.compute),
      "memory": here[1] / (chip.bandwidth * given.bandwidth),
      "network": here[2] / (chip.network * given.network),
    }
    bound = max(seconds, key=seconds.get)
    found[name] = Phase(*here, seconds[bound], bound)
  return found


def total(found: dict[str, Phase]) -> float:
  """Seconds of all phases, one after the other."""
  return sum(phase.seconds for phase in found.values())


def needs_score(run: Run) -> bool:
  """Whether the step takes another forward pass before its update."""
  c = run.config
  config = update.UpdateConfig(
    run.model,
    run.objective,
    inner_updates=c.objective.inner_updates,
    mini_batches=c.objective.mini_batches,
  )
  return stages.needs_stats(run.method, config)


def _flops(run: Run, work: workload.Work) -> dict[str, float]:
  """Operations of one device."""
  model, num = run.model, run.mesh.size
  prompts = work.rolled_out * work.prompt
  past = work.generated * (work.prompt + work.completion / 2)
  # One forward pass over the rows; padding is multiplied too.
  rows = flops.linear(model, work.computed) + flops.attention(model, work.pairs)
  logits = flops.head(model, work.trained)
  recomputed = {"layers": 1, "dots": 0, "none": 0}[model.remat]
  passes = 3 + recomputed + bool(run.objective.beta)
  # Logits are computed again in the backward pass, where they are in chunks.
  heads = 4 + bool(run.objective.beta)
  found = {
    "to_inference_params": 0.0,
    "prefill": flops.linear(model, prompts)
    + flops.attention(model, prompts * work.prompt / 2),
    "decode": flops.linear(model, work.generated)
    + flops.attention(model, past)
    + flops.head(model, work.generated),
    "score": rows + logits,
    "update": (passes * rows + heads * logits)
    * run.config.objective.inner_updates,
  }
  if not needs_score(run):
    del found["score"]
  return {name: x / num for name, x in found.items()}


def _read(run: Run, work: workload.Work) -> dict[str, float]:
  """Bytes of weights, caches and state that one device reads and writes."""
  c = run.config
  held = memory_estimate.resident(run)
  parts = memory_estimate.moments(run)["roll_out"]
  copy = parts["rollout copy"]
  # A step reads all parts of the cache that any slot has reached: nearly all.
  # Slots that are no longer needed are given up, and their caches with them.
  shards = sharding.num_shards(run.mesh, "batch")
  slot_steps = work.generated / shards / workload.BUSY
  decode = _touched(run.model, work.slots) * copy * work.decode_steps
  # On a TPU the cache is written anew at every token: see kv_cache.
  passes = 3 if run.platform == "tpu" else 1
  decode += slot_steps * passes * parts["cache"] / work.slots
  item = jnp.dtype(run.model.dtype).itemsize
  gathered = traffic.elements(run) * item
  turns = work.micro_batches * c.objective.inner_updates
  state = 2 * (held["weights"] + held["optimizer"]) + held["weights"]
  together = prefill.batch_size(run.train_set.tokens.shape[1])
  chunks = work.rolled_out / shards / together
  return {
    "to_inference_params": held["weights"] + copy,
    "prefill": copy * max(1.0, chunks),
    "decode": decode,
    "score": gathered * work.micro_batches,
    # Weights forward and backward; gradients written, read and added up.
    "update": turns * (3 * gathered + 3 * held["weights"])
    + c.objective.num_updates * state,
  }


def _touched(model: ModelConfig, tokens: int) -> float:
  """Share of the weights that a pass over so few tokens reads."""
  if not model.experts:
    return 1.0
  x = model.experts
  # Each token takes some experts, as good as at random.
  return 1 - (1 - x.per_token / x.num) ** tokens
