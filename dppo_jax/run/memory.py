"""The least memory that a run takes, against what the machine has.

A few large arrays are added up, from shapes alone, so that a run that cannot
fit is refused before anything is made; what else a step needs comes on top.
`--mode=plan` has the full account.
"""

import os

import jax
import numpy as np

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.models import lm_head, transformer

GB = 1e9


def check(
  mesh: jax.sharding.Mesh,
  model: transformer.ModelConfig,
  config: configs.Config,
  trains: bool,
) -> None:
  """Refuses a run whose largest arrays do not fit.

  Raises:
    ValueError: in one line that names the options.
  """
  parts = least_bytes(mesh, model, config, trains)
  index = jax.process_index()
  here = [x for x in mesh.devices.flat if x.process_index == index]
  available, where = _available(here)
  if available is None or sum(parts.values()) <= available:
    return
  told = ", ".join(
    f"{name} {size / GB:,.1f} GB" for name, size in parts.items()
  )
  raise ValueError(
    f"this run takes at least {sum(parts.values()) / GB:,.1f} GB of each "
    f"device ({told}) but there are {available / GB:,.1f} GB {where}: take a "
    "smaller model, more devices (config.mesh.data, config.mesh.model), or "
    "lower config.rollout.num_slots, config.rollout.max_tokens, "
    "config.rollout.group_size, config.data.prompts_per_step "
    "or config.pack.rows_per_micro"
  )


def least_bytes(
  mesh: jax.sharding.Mesh,
  model: transformer.ModelConfig,
  config: configs.Config,
  trains: bool,
) -> dict[str, float]:
  """Bytes of one device, where they are the most, by what they are for."""
  r, p = config.rollout, config.pack
  model_shards = mesh.shape["model"]
  weights = 4 * transformer.num_parameters(model)
  weights /= model_shards * mesh.shape["data"]
  if not trains:
    return {"weights": weights}
  item = np.dtype(_numpy(model.dtype)).itemsize
  sampled = np.dtype(_numpy(r.dtype or model.dtype)).itemsize
  shards = sharding.num_shards(mesh, "batch")
  completions = -(-config.data.prompts_per_step // shards) * r.group_size
  slots = min(r.num_slots, completions)
  kv_heads = max(1, model.kv_heads // model_shards)
  token = 2 * model.layers * kv_heads * model.head_dim * sampled
  decoding = slots * r.max_tokens * token + 4 * slots * model.vocab
  decoding += 12 * completions * r.max_tokens  # tokens, probabilities, rows
  tokens = p.rows_per_micro * p.row_length
  chunk = min(max(lm_head.LOGIT_CHUNK // shards, p.rows_per_micro), tokens)
  update = weights + item * tokens * model.layers * model.embed
  update += 4 * chunk * model.vocab / model_shards
  state = {"weights and optimizer": 3 * weights}
  if update > decoding:
    return state | {"an update": update}
  return state | {"decoding": decoding}


def _numpy(dtype: str) -> str:
  return "float16" if dtype == "bfloat16" else dtype  # of the same size


def _available(devices: list[jax.Device]) -> tuple[float | None, str]:
  """Bytes that each device has, and where; None where nobody says."""
  if not devices:
    return None, ""
  if devices[0].platform != "cpu":
    stats = devices[0].memory_stats() or {}
    return stats.get("bytes_limit"), f"on a {devices[0].device_kind}"
  free = _free_memory()
  # Simulated devices share what there is.
  return free and free / len(devices), (
    f"free for each of {len(devices)} CPU devices"
    if len(devices) > 1
    else "of memory free"
  )


def _free_memory() -> float | None:
  """Bytes that this machine can still give, swap included."""
  try:
    with open("/proc/meminfo", encoding="ascii") as file:
      lines = dict(line.split(":") for line in file)
    free = sum(int(lines[x].split()[0]) for x in ("MemAvailable", "SwapFree"))
    return 1024 * free
  except (OSError, LookupError, ValueError):  # not Linux
    try:
      pages = os.sysconf("SC_PHYS_PAGES")
      return float(pages * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
      return None
