"""Memory that a run takes on each device, estimated from shapes alone.

Weights, optimizer state, inference copy and caches are exact. What a stage
needs while it runs is the sum of its largest arrays. The TPU compiler's figures
for the shipped configs are 0.78 to 1.23 times as large (experiments/08_plan).
"""

import copy
import dataclasses
import math
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.errors import UserError
from dppo_jax.models import kv_cache, lm_head, transformer
from dppo_jax.rollout import decode
from dppo_jax.rollout.generate import prefill_batch_size

# The check before a run leaves room for an estimate that is too high.
_MARGIN = 1.3

_HALVED = (
  "rollout.num_slots",
  "rollout.max_tokens",
  "data.prompts_per_step",
  "pack.rows_per_micro",
)

Parts = dict[str, float]  # bytes by purpose


class Workload(NamedTuple):
  """The facts that memory depends on, such as the longest prompt in tokens."""

  config: configs.Config
  model: transformer.ModelConfig
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
  platform: str
  prompt_length: int

  @property
  def rollout_dtype(self) -> str:
    return self.config.rollout.dtype or self.model.dtype


def estimate(workload: Workload) -> dict[str, Parts]:
  """Bytes on one device by stage and purpose, for the two largest stages."""
  weights = _weights(workload)
  state = {"weights": weights, "optimizer": 2 * weights}  # Adam's moments
  if configs.make_objective(workload.config).beta:
    state["reference"] = weights
  return {
    "roll_out": state | _roll_out(workload),
    "update": state | _update(workload, weights),
  }


def _weights(workload: Workload, is_copy: bool = False) -> float:
  """Bytes of the float32 master weights, or of the rollout's copy of them."""
  is_sharded = workload.config.rollout.shard_weights
  total = 0.0
  for name, param in transformer.parameter_table(workload.model).items():
    number = 1.0
    for size, axis in zip(param.shape, param.axes, strict=True):
      shards = sharding.num_shards(workload.mesh, axis)
      if is_copy and axis == "embed" and not (is_sharded and "layers/" in name):
        shards = 1
      if size % shards:  # few key-value heads: repeated, or not divided
        number *= math.lcm(size, shards) / shards if is_copy else size
      else:
        number *= size / shards
    total += number
  return total * (_item(workload.rollout_dtype) if is_copy else 4)


def _roll_out(workload: Workload) -> Parts:
  r, model = workload.config.rollout, workload.model
  num_shards = sharding.num_shards(workload.mesh, "batch")
  num_prompts = -(-workload.config.data.prompts_per_step // num_shards)
  width = workload.prompt_length
  slots = min(r.num_slots, num_prompts * r.group_size)
  # Two stages of the decode loop overlap, each with its own slots.
  schedule = [*decode.slot_schedule(slots, workload.platform), 0]
  # The TPU compiler keeps half of the cache in a second layout.
  num_caches = slots * (1.5 if workload.platform == "tpu" else 1) + schedule[1]
  shards = workload.mesh.shape["model"]
  kv_heads = math.lcm(model.kv_heads, shards) // shards  # repeated if too few
  item = _item(workload.rollout_dtype)
  token = 2 * item * model.layers * kv_heads * model.head_dim
  positions = sharding.round_up(width + r.max_tokens - 1, 32)
  prompt_parts = kv_cache.prompt_part_sizes(
    kv_cache.part_sizes(positions), width
  )
  prefill = min(prefill_batch_size(width), num_prompts) * width
  cached = positions * num_caches + sum(prompt_parts) * num_prompts
  return {
    "inference copy": _weights(workload, is_copy=True),
    "gathered weights": r.shard_weights * _gathered_layers(workload, item),
    "kv cache": token * cached,
    "logits": 3 * 4 * slots * model.vocab,
    "activations of a layer": item * prefill * _layer_width(workload),
  }


def _update(workload: Workload, weights: float) -> Parts:
  p, model = workload.config.pack, workload.model
  item, shards = _item(model.dtype), workload.mesh.shape["model"]
  tokens = p.rows_per_micro * p.row_length
  num_shards = sharding.num_shards(workload.mesh, "batch")
  chunk = min(max(lm_head.LOGIT_CHUNK // num_shards, p.rows_per_micro), tokens)
  width = _layer_width(workload)
  saved = {  # numbers that a layer keeps of each token
    "layers": model.embed,
    "dots": model.embed + width,
    "none": 3 * (model.embed + width),
  }[model.remat]
  return {
    "gradients": 2 * weights,  # of all micro-batches, and of one
    "gathered weights": _gathered_layers(workload, item),
    # Gathered, its gradient, and the float32 sum of that over devices.
    "output head": (2 * item + 4) * model.vocab * model.embed / shards,
    "activations": item * tokens * model.layers * saved,
    "activations of a layer": item * tokens * 4 * width,
    "logits": 3 * 4 * chunk * model.vocab / shards,
  }


def _gathered_layers(workload: Workload, item: int) -> float:
  """Weights of the layers that are gathered at once, one of each group."""
  shape, model = workload.mesh.shape, workload.model
  table = transformer.parameter_table(model).items()
  layers = sum(math.prod(p.shape) for name, p in table if "layers/" in name)
  num_gathered = kv_cache.num_groups(model.layers) / model.layers
  return item * layers * num_gathered / shape["model"] * (shape["data"] > 1)


def _layer_width(workload: Workload) -> float:
  """Numbers that a layer computes for each token."""
  model, shards = workload.model, workload.mesh.shape["model"]
  inner = 2 * model.mlp / shards
  if x := model.experts:
    inner = x.per_token * (2 * x.mlp / shards + model.embed)
  heads = (model.heads + 2 * model.kv_heads) / shards
  return 2 * model.embed + heads * model.head_dim + inner


def _item(dtype: str) -> int:
  return jnp.dtype(dtype).itemsize


def shortage(workload: Workload, sums: dict[str, float], limit: float) -> str:
  """A line for each stage whose sum exceeds the limit, with what would help."""
  return "\n".join(
    f"{stage} needs {gib(size)} GiB on each device, which has {gib(limit)}: "
    + _advice(workload, stage)
    for stage, size in sums.items()
    if size > limit
  )


def _advice(workload: Workload, stage: str) -> str:
  """Options that lower the memory of a stage; only those that still can."""
  c = workload.config
  smaller = {"rollout.shard_weights": True, "model.remat": "layers"}
  for name in _HALVED:
    section, _, field = name.partition(".")
    smaller[name] = max(1, getattr(getattr(c, section), field) // 2)
  size = lambda x: sum(estimate(x).get(stage, {}).values())
  advice = "use more devices (config.mesh.data, config.mesh.model)"
  for name, value in smaller.items():
    config = copy.deepcopy(c)
    configs.assign(config, name, value)
    model = dataclasses.replace(workload.model, remat=config.model.remat)
    changed = workload._replace(config=config, model=model)
    if size(changed) < 0.99 * size(workload):
      advice = f"config.{name}={value}, {advice}"
  return f"try {advice}"


def check(
  mesh: jax.sharding.Mesh,
  model: transformer.ModelConfig,
  config: configs.Config,
) -> None:
  """Raises UserError if training needs far more memory than there is."""
  devices = mesh.local_devices
  if devices[0].platform == "cpu":
    available = free_memory() / len(devices)  # which they share
  else:
    stats = devices[0].memory_stats() or {}
    available = stats.get("bytes_limit", math.inf)
  # Prompts have not been read yet: the longest that the options allow.
  longest = config.pack.row_length - config.rollout.max_tokens + 1
  longest = max(1, min(config.data.max_prompt_tokens, longest))
  workload = Workload(config, model, mesh, devices[0].platform, longest)
  stages = estimate(workload)
  sums = {name: sum(parts.values()) for name, parts in stages.items()}
  if max(sums.values()) > _MARGIN * available:
    message = shortage(workload, sums, available).replace("\n", "; ")
    raise UserError(f"not enough memory: {message}")


def gib(size: float) -> str:
  return f"{size / 2**30:,.2f}"


def free_memory(root: pathlib.Path = pathlib.Path("/")) -> float:
  """Bytes that this process can still allocate; infinite if not on Linux.

  Args:
    root: directory that holds proc and sys.
  """
  try:
    text = (root / "proc/meminfo").read_text()
    lines = (root / "proc/self/cgroup").read_text().splitlines()
  except OSError:
    return math.inf
  sizes = re.findall(r"^(?:MemAvailable|SwapFree): +(\d+)", text, re.M)
  left = [1024.0 * sum(map(int, sizes))]
  for line in lines:  # limits of containers, in control groups v1 and v2
    _, controllers, path = line.split(":", 2)
    top, names = root / "sys/fs/cgroup", ("max", "current")
    if "memory" in controllers.split(","):
      top, names = top / "memory", ("limit_in_bytes", "usage_in_bytes")
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
      try:
        limit, used = ((folder / f"memory.{x}").read_text() for x in names)
        left.append(int(limit) - int(used))
      except (OSError, ValueError):  # not here, or without a limit
        continue
  return min(left)
