"""Seconds of a step from operations, bytes and efficiencies.

A stage takes the time of its matrix products at a fraction of the peak rate,
and then the time of its memory traffic at a fraction of the bandwidth. Not
counted: messages between devices, launches, the pruning and
dynamic sampling of a method, and rewards other than `math`.
"""

from collections.abc import Callable
import dataclasses
import math
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dppo_jax import rewards, sharding
from dppo_jax.errors import UserError
from dppo_jax.eval import eval_sets
from dppo_jax.models import gpu_library, kv_cache, lora, moe
from dppo_jax.models.config import ModelConfig
from dppo_jax.planning import flops, memory, targets
from dppo_jax.run.setup import Run
from dppo_jax.step import abstract_values
from dppo_jax.step import tokens as scoring
from dppo_jax.step.spec import StepSpec

# Fractions of the peak rate and of the bandwidth that stages reach.
# Accelerators: published fractions of training, without recomputation, are 0.21
# (marin, Qwen3-32B on v5p), 0.24 (Megatron, Qwen3-30B-A3B on H100) and 0.40
# (MaxText on v6e); their mean and a recomputed forward pass make 0.4. 0.8 is
# assumed. CPU: the update of wide models in experiments/04_speed, without its
# padding; XLA copies a weight before the product, which reads, writes and reads
# it.
EFFICIENCY = {"cpu": (0.75, 0.33), "gpu": (0.4, 0.8), "tpu": (0.4, 0.8)}
# Width at which products on a CPU are half as fast as in wide models, the
# fraction of a packed row in use, and seconds of selecting and packing a
# completion, all from experiments/04_speed; seconds of grading by `math`, from
# experiments/07_grading.
_NARROW, _FILL, _SELECT, _GRADE = 70, 0.94, 3e-5, 1e-2
# Passes of an update: forward, backward for inputs and for weights, and
# recomputed.
_PASSES = {"layers": 4, "dots": 3, "none": 3}

Stages = dict[str, memory.Parts]  # bytes by stage and purpose


class Assumptions(NamedTuple):
  """Assumptions of an estimate that no config knows.

  Attributes:
    prompt, completion: mean tokens.
    trained: fraction of the completions that an update trains on.
    groups: fraction of the groups that those completions are of.
    products: fraction of `flops` that matrix products reach.
    memory: fraction of `bandwidth` that memory traffic reaches.
    flops, bandwidth: peak operations and bytes a second of a device.
    experts: experts that a token is multiplied with, except by `moe` for few
      tokens on a GPU, which are multiplied with all.
  """

  prompt: float
  completion: float
  trained: float
  groups: float
  products: float
  memory: float
  flops: float
  bandwidth: float
  experts: float

  def seconds(self, operations: float, size: float) -> float:
    """Seconds of operations in products and of bytes read or written."""
    traffic = size / (self.bandwidth * self.memory)
    return operations / (self.flops * self.products) + traffic


def assume(
  run: Run, hardware: targets.Hardware, changes: str = ""
) -> Assumptions:
  """Returns assumptions; a CPU is measured, which takes a second.

  Prompts have their own lengths and completions half of the limit. An update
  trains on the groups with a gradient: if prompts are solved with chances that
  are uniform in (0, 1), the G rewards of a group are equal with probability
  2 / (G + 1).

  Args:
    changes: other values, such as `completion=800,products=0.5`.
  """
  spec, peaks = run.spec, hardware.peaks
  products, traffic = EFFICIENCY[hardware.platform]
  if hardware.platform == "cpu":
    operations, size = ceilings(spec.model.dtype)
    peaks = operations / hardware.num, size / hardware.num
    products *= spec.model.embed / (spec.model.embed + _NARROW)
  trained = (spec.group_size - 1) / (spec.group_size + 1)
  if spec.objective.has_kl or spec.method.trains_zero_advantage:
    trained = 1.0
  assert run.train_set is not None  # None only in runs without training
  prompt = float(run.train_set.lengths.mean())
  limit = spec.sampling.max_tokens
  fractions = trained, trained, products, traffic
  experts = _num_experts(spec.model, hardware)
  usual = Assumptions(prompt, limit / 2, *fractions, *peaks, experts)
  try:
    pairs = (x.partition("=") for x in changes.split(",") if x)
    changed = usual._replace(**{name: float(x) for name, _, x in pairs})
    if not all(0 < x < math.inf for x in changed) or max(changed[2:6]) > 1:
      raise ValueError
  except (TypeError, ValueError):
    raise UserError(
      f"--assume is {changes!r} but must be NAME=NUMBER,... above 0, with NAME "
      f"one of {', '.join(usual._fields)}; fractions are at most 1"
    ) from None
  for mean, most, option in (
    (changed.prompt, spec.prompt_tokens, "data.max_prompt_tokens"),
    (changed.completion, limit, "rollout.max_tokens"),
  ):
    if mean > most:
      raise UserError(
        f"--assume has means of {mean:,.0f} tokens, but config.{option} allows "
        f"{most:,}"
      )
  # No group has more completions than were drawn.
  return changed._replace(groups=max(changed.groups, changed.trained))


def _num_experts(model: ModelConfig, hardware: targets.Hardware) -> float:
  """Experts that a token is multiplied with; 1 of a model without experts.

  Without a kernel, a GPU multiplies each pair of a token and an expert that it
  chose with every expert.
  """
  if not (x := model.experts):
    return 1
  is_dense = hardware.platform == "gpu" and gpu_library.obstacle(
    model.dtype, hardware.capability
  )
  return x.per_token * (x.num if is_dense else 1)


def ceilings(
  dtype: str, clock: Callable[[], float] = time.perf_counter, repeats: int = 5
) -> tuple[float, float]:
  """Measures the operations and bytes a second of plain JAX, as medians.

  Operations are of a square product; bytes of 256 MiB are read and written.
  """

  def timed(step, x):
    spent = []
    for _ in range(repeats + 1):  # the first one compiles
      start = clock()
      x = jax.block_until_ready(step(x))
      spent.append(clock() - start)
    return statistics.median(spent[1:])

  size = 2048 if jax.default_backend() == "cpu" else 8192
  square = jax.random.normal(jax.random.key(0), (size, size)) / size**0.5
  rate = 2 * size**3 / timed(jax.jit(lambda x: x @ x), square.astype(dtype))
  held = jnp.ones(1 << 26, jnp.float32)  # past every cache
  # In place: pages that were never touched would be timed too.
  sweep = jax.jit(lambda x: x + 1, donate_argnums=0)
  return rate, 2 * 4 * held.size / timed(sweep, held)


def estimate(run: Run, held: Stages, assumed: Assumptions) -> dict[str, float]:
  """Seconds of a step by stage.

  The rows of an update hold the prompt of each trained group once. Padding
  costs as much as tokens, and the last micro-batch is half empty.

  Args:
    held: result of `memory.estimate`.
  """
  spec, model, p = run.spec, run.spec.model, run.spec.packing
  prompt, mean = assumed.prompt, assumed.completion
  prompts = spec.num_prompts / spec.mini_batches
  tokens = assumed.trained * prompts * spec.group_size * mean
  prefixes = assumed.groups * prompts * prompt
  capacity = p.row_length * p.rows_per_micro
  micros = max((tokens + prefixes) / (_FILL * capacity) + 0.5, 1)
  pairs = tokens * (prompt + mean / 2) + prefixes * prompt / 2
  forward = flops.forward(
    model, micros * capacity, tokens, pairs, assumed.experts
  )
  forward *= spec.num_updates / spec.mesh.size
  # With adapters too: their gradients are made of the whole weights'.
  passes = _PASSES[model.remat] + spec.objective.has_kl
  # Gradients of all micro-batches and of one; state is read and written.
  moved = held["update"]["gradients"] * (2 * micros + 1.5)
  moved += 2 * held["update"]["optimizer"]
  is_local = spec.platform == "cpu"
  workers = rewards.default_workers() if is_local else rewards.MAX_WORKERS
  grading = (run.reward_specs[0].reference == "math") * _GRADE / workers
  has_score = scoring.reads_tokens(spec)
  return {
    "rollout": _rollout(spec, held, assumed),
    "score": has_score * assumed.seconds(forward, 0),
    "update": assumed.seconds(passes * forward, spec.num_updates * moved),
    "rest": spec.num_prompts * spec.group_size * (_SELECT + grading),
  }


def _rollout(spec: StepSpec, held: Stages, assumed: Assumptions) -> float:
  """Seconds to copy the weights, read all prompts and decode completions."""
  model, mean, width = spec.model, assumed.completion, spec.prompt_tokens
  prompts = spec.num_prompts / sharding.num_shards(spec.mesh, "batch")
  slots, limit = memory.num_slots(spec), spec.sampling.max_tokens
  # Completions take turns in the slots. The last ones leave slots idle, by
  # experiments/08_plan a quarter of a turn.
  turns = prompts * spec.group_size / slots
  tokens = slots * mean * (turns + 0.25)
  steps = turns * mean + limit - mean
  seen = assumed.prompt + mean / 2
  if not model.shares_prompts:  # attention reads unused positions too
    seen = sum(kv_cache.slot_and_prompt_sizes(model, width, limit)[0])
  copy = held["roll_out"]["inference copy"]
  moved = held["roll_out"]["weights"] + (1 + steps) * copy
  moved += tokens * seen * memory.token_bytes(spec)
  experts = assumed.experts
  forward = flops.forward(model, prompts * width, experts=experts)
  if model.experts and spec.platform == "gpu" and slots <= moe.FEW_TOKENS:
    experts = model.experts.num
  forward += flops.forward(model, tokens, tokens, tokens * seen, experts)
  return assumed.seconds(forward / spec.mesh.shape["model"], moved)


def evaluation_seconds(
  run: Run, num: int, held: Stages, assumed: Assumptions
) -> float:
  """Seconds of `num` evaluations; the first and last decode greedily too."""
  size = eval_sets.batch_size(run)
  spec = dataclasses.replace(run.spec, num_prompts=size, optimizer=None)
  seconds = lambda size: _rollout(
    dataclasses.replace(spec, group_size=size), held, assumed
  )
  samples = run.eval_samples
  each = num * seconds(max(samples, 1)) + 2 * bool(samples) * seconds(1)
  return each * sum(-(-len(x) // size) for x in run.eval_sets.values())


def checkpoint_sizes(spec: StepSpec, num: int) -> list[float]:
  """Bytes of `num` checkpoints and the one of step 0, uncompressed.

  The one of step 0 has all weights and no moments yet.
  """
  with jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh):
    state = abstract_values.abstract_train_state(spec)
  size = lambda x: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(x))
  later = size((lora.trainable(state.params), state.opt_state))
  return [size(state.params), *[later] * num]
