"""Memory that a run takes on each device, estimated from shapes alone.

Weights, optimizer state, inference copy and caches are exact. What a stage
needs while it runs is the sum of its largest arrays. The compilers' figures for
the shipped configs are 0.75 to 1.23 times as large (experiments/08_plan).
"""

import contextlib
import dataclasses
import math
import pathlib
import re

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from dppo_jax import distributed, sharding
from dppo_jax.errors import UserError
from dppo_jax.models import kv_cache, lm_head, lora, parameters, transformer
from dppo_jax.rollout import decode
from dppo_jax.rollout.generate import prefill_batch_size
from dppo_jax.run.setup import Run
from dppo_jax.step import abstract_values
from dppo_jax.step.spec import StepSpec

# The check before a run leaves room for an estimate that is too high.
_MARGIN = 1.3
_FEWEST_CHOSEN_SLOTS = 8

_SMALLER = {  # options that lower the memory of a stage
  "roll_out": "rollout.num_slots or rollout.max_tokens",
  "update": "pack.rows_per_micro or pack.row_length",
}

# Limit, usage and its parts, by controller: version 2 has a single hierarchy.
_CGROUP_FILES = {
  "": ("memory.max", "memory.current", "memory.stat"),
  "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}

Parts = dict[str, float]  # bytes by purpose


def estimate(run: Run) -> dict[str, Parts]:
  """Bytes on one device by stage and purpose, for the largest stages."""
  spec = run.spec
  with jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh):
    train_state = abstract_values.abstract_train_state(spec)
    copy = _held(abstract_values.abstract_inference_params(spec))
  weights = _held(train_state.params)
  state = {"weights": weights, "optimizer": _held(train_state.opt_state)}
  if spec.has_reference:
    state["reference"] = weights
  # Of all micro-batches, and of one. XLA holds a third set for experts.
  gradients = _held(lora.trainable(train_state.params))
  third = bool(spec.model.experts) * gradients
  sets = {"gradients": 2 * gradients, "gradients of experts": third}
  stages = {
    "roll_out": state | {"inference copy": copy} | _roll_out(spec),
    "update": state | sets | _update(spec),
  }
  if spec.model.lora and run.is_tuned:
    stages["sft"] = estimate(run.without_adapters())["update"]
  return stages


def _held(tree: PyTree) -> float:
  """Bytes that a device holds of abstract arrays."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _roll_out(spec: StepSpec) -> Parts:
  model = spec.model
  num_shards = sharding.num_shards(spec.mesh, "batch")
  num_prompts = -(-spec.num_prompts // num_shards)
  width = spec.prompt_tokens
  slots = num_slots(spec)
  num_caches: float = slots
  if not model.shares_prompts:
    # The TPU compiler keeps half of the cache in a second layout, and two
    # phases of the decode loop overlap.
    num_caches *= 1.5 if spec.platform == "tpu" else 1
    num_caches += [*decode.slot_schedule(slots), 0][1]
  item = jnp.dtype(model.dtype).itemsize
  sizes = kv_cache.slot_and_prompt_sizes(model, width, spec.sampling.max_tokens)
  positions, prompt_positions = map(sum, sizes)
  prefill = min(prefill_batch_size(width), num_prompts) * width
  cached = positions * num_caches + prompt_positions * num_prompts
  return {
    "kv cache": token_bytes(spec) * cached,
    "logits": 3 * 4 * slots * model.vocab,
    "activations of a layer": item * prefill * _layer_width(spec),
  }


def token_bytes(spec: StepSpec) -> float:
  """Bytes of the keys and values of a token on one device."""
  model, shards = spec.model, spec.mesh.shape["model"]
  kv_heads = math.lcm(model.kv_heads, shards) // shards  # repeated if too few
  item = jnp.dtype(model.dtype).itemsize
  return 2 * item * model.layers * kv_heads * model.head_dim


def num_slots(spec: StepSpec) -> int:
  """Decode slots of one device, at most one for each completion."""
  num_shards = sharding.num_shards(spec.mesh, "batch")
  most = -(-spec.num_prompts // num_shards) * spec.group_size
  return min(spec.num_slots or most, most)


def choose_slots(run: Run, available: float | None = None) -> Run:
  """Replaces `rollout.num_slots=0` by the most slots that fit, by halving.

  All processes have to call it, and get the same number.

  Args:
    available: bytes of one device; None for the memory of this machine.
  """
  if run.spec.num_slots:
    return run
  available = _available(run.spec) if available is None else available
  with_slots = lambda num: run._replace(
    spec=dataclasses.replace(run.spec, num_slots=num)
  )
  num = num_slots(run.spec)
  while num > _FEWEST_CHOSEN_SLOTS and (
    _MARGIN * sum(estimate(with_slots(num))["roll_out"].values()) > available
  ):
    num = sharding.round_up(num // 2, 8)
  return with_slots(min(distributed.gather(num)))


def _update(spec: StepSpec) -> Parts:
  p, model = spec.packing, spec.model
  num_shards = sharding.num_shards(spec.mesh, "batch")
  rows = p.rows_per_micro // num_shards
  item, shards = jnp.dtype(model.dtype).itemsize, spec.mesh.shape["model"]
  tokens = rows * p.row_length
  chunk = min(max(lm_head.LOGIT_CHUNK // num_shards, rows), tokens)
  width = _layer_width(spec)
  # Bytes for each pair of tokens: logits and gradients of all heads, or a mask.
  per_pair = {"xla_dense": 3 * 4 * model.heads / shards, "tokamax": 1}
  pairs = tokens * p.row_length * per_pair.get(model.attention, 0)
  saved = {  # numbers that a layer keeps of each token
    "layers": model.embed,
    "dots": model.embed + width,
    "none": 3 * (model.embed + width),
  }[model.remat]
  return {
    # Layers that are gathered at once.
    "gathered weights": item
    * sharding.largest_divisor(model.layers, transformer.UNROLL)
    * _layer_weights(spec)
    / shards
    * (spec.mesh.shape["data"] > 1),
    # Gathered, and unless it is frozen its gradient, and the gradient's
    # float32 sum over devices.
    "output head": (item if model.lora else 2 * item + 4)
    * model.vocab
    * model.embed
    / shards,
    # Product of its adapters, sum and gradient, in float32.
    "merged layer": 12 * bool(model.lora) * _layer_weights(spec) / shards,
    "activations": item * tokens * model.layers * saved,
    "activations of a layer": item * tokens * 4 * width + pairs,
    "logits": 3 * 4 * chunk * model.vocab / shards,
  }


def _layer_weights(spec: StepSpec) -> float:
  """Weights of one layer."""
  table = parameters.parameter_table(spec.model).items()
  layers = sum(math.prod(p.shape) for name, p in table if "layers/" in name)
  return layers / spec.model.layers


def _layer_width(spec: StepSpec) -> float:
  """Numbers that a layer computes for each token."""
  model, shards = spec.model, spec.mesh.shape["model"]
  inner = 2 * model.mlp / shards
  if x := model.experts:
    inner = x.per_token * (2 * x.mlp / shards + model.embed)
  heads = (model.heads + 2 * model.kv_heads) / shards
  return 2 * model.embed + heads * model.head_dim + inner


def shortage(sums: dict[str, float], limit: float) -> str:
  """Names the stages whose sum exceeds the limit, and what would help."""
  return "; ".join(
    f"{stage} needs {gib(size)} GiB on each device, which has {gib(limit)}: "
    "use more devices (config.mesh.data, config.mesh.model) or lower "
    f"config.{_SMALLER.get(stage, _SMALLER['update'])}"
    for stage, size in sums.items()
    if size > limit
  )


def check(run: Run) -> None:
  """Raises UserError if training needs far more memory than there is."""
  available = _available(run.spec)
  sums = {name: sum(parts.values()) for name, parts in estimate(run).items()}
  if max(sums.values()) > _MARGIN * available:
    raise UserError(f"not enough memory: {shortage(sums, available)}")


def _available(spec: StepSpec) -> float:
  """Bytes that one device of this machine has left."""
  devices = spec.mesh.local_devices
  if spec.platform == "cpu":
    return free_memory() / len(devices)  # which they share
  stats = devices[0].memory_stats() or {}
  # A batched reward may hold a model.
  return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)


def gib(size: float) -> str:
  return f"{size / 2**30:,.2f}"


def free_memory(root: pathlib.Path = pathlib.Path("/")) -> float:
  """Bytes that this process can still allocate; infinite if not on Linux.

  Args:
    root: directory that holds proc and sys.
  """
  try:
    text = (root / "proc/meminfo").read_text()
    groups = (root / "proc/self/cgroup").read_text()
  except OSError:
    return math.inf
  sizes = re.findall(r"^(?:MemAvailable|SwapFree): +(\d+)", text, re.M)
  left = [1024.0 * sum(map(int, sizes))]
  for controller, path in re.findall(r"^\d+:(|memory):/(.*)$", groups, re.M):
    files = _CGROUP_FILES[controller]
    group = root / "sys/fs/cgroup" / controller / path  # of a container
    for folder in (group, *group.parents):
      with contextlib.suppress(OSError, ValueError):  # not here, or no limit
        limit, used, stat = ((folder / x).read_text() for x in files)
        # Version 1 has the group's own figure first and the total last.
        cache = re.findall(r"^(?:total_)?inactive_file (\d+)", stat, re.M)
        left.append(int(limit) - int(used) + int([0, *cache][-1]))
  return min(left)
