"""Scaling on paper: a step, its traffic and what fits on ever larger pods.

  python experiments/08_plan/scaling.py

Writes scaling.md, by sums alone: seconds on any machine, no compiler.
"""

from collections.abc import Iterator
import copy
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import run as cases

from dppo_jax import config as configs
from dppo_jax.analysis import tables
from dppo_jax.planning import (
  advice,
  assumed,
  memory_estimate,
  seconds,
  workload,
)
from dppo_jax.planning.hardware import GIB, Hardware

HERE = pathlib.Path(__file__).parent
PODS = [("v5e", n) for n in (16, 64, 256)]
PODS += [("v5p", n) for n in (16, 64, 256, 1024)]
GIVEN = workload.Assumptions(prompt=150, completion=800)
# By size, the largest first.
MODELS = (
  "Qwen/Qwen3-235B-A22B",
  "Qwen/Qwen3-32B",
  "Qwen/Qwen3-30B-A3B",
  "Qwen/Qwen3-14B",
  "Qwen/Qwen3-8B",
  "Qwen/Qwen3-4B",
)


def main() -> None:
  blocks = [
    "# Scaling on paper",
    "By sums, of `configs/qwen_math.py` with completions of 800 tokens on "
    "average; none of it was measured. GiB are of one device in one step.",
    "## The same step on more devices",
    tables.markdown(*same_step("Qwen/Qwen2.5-Math-1.5B", 1)),
    "## Twice the prompts on twice the devices",
    tables.markdown(*growing_step("Qwen/Qwen3-8B", 4)),
    "## The largest model, and its largest step",
    tables.markdown(*largest()),
  ]
  text = "\n\n".join(blocks) + "\n"
  (HERE / "scaling.md").write_text(text)
  print(text)


def same_step(hub_id: str, model: int) -> tuple[list[str], list[list[str]]]:
  """128 prompts on as many devices as can divide them."""
  rows = []
  for kind, num in PODS:
    config = _config(hub_id, model)
    if 128 % (num // model) == 0:
      rows.append(_row(config, Hardware(kind, num)))
  return _HEAD, rows


def growing_step(hub_id: str, model: int) -> tuple[list[str], list[list[str]]]:
  """Eight prompts for each shard of the batch."""
  rows = []
  for kind, num in PODS:
    config = _config(hub_id, model)
    config.data.prompts_per_step = 8 * (num // model)
    config.data.train_limit = 2**16
    rows.append(_row(config, Hardware(kind, num)))
  return _HEAD, rows


_HEAD = [
  "devices",
  "mesh",
  "prompts",
  "GiB, largest moment",
  "decode, s",
  "update, s",
  "step, s",
  "received in the update",
  "all that is received",
  "micro-batches",
]


def _row(config: configs.Config, place: Hardware) -> list[str]:
  mesh = assumed.abstract_mesh(config.mesh, place.num)
  run = assumed.assumed_run(config, mesh, "tpu")
  work = workload.of_step(run, GIVEN)
  phases = seconds.phases(run, work, place.chip, GIVEN)
  moments = {
    k: sum(v.values()) for k, v in memory_estimate.moments(run).items()
  }
  worst = max(moments, key=moments.get)
  fits = "" if moments[worst] <= place.memory else ", does not fit"
  decode, update = phases["decode"], phases["update"]
  received = sum(x.received for x in phases.values())
  return [
    f"{place.num} {place.kind}",
    f"{mesh.shape['data']} x {mesh.shape['model']}",
    str(config.data.prompts_per_step),
    f"{moments[worst] / GIB:.1f}, {worst}{fits}",
    f"{decode.seconds:.1f} ({decode.bound})",
    f"{update.seconds:.1f} ({update.bound})",
    f"{seconds.total(phases):.1f}",
    f"{update.received / GIB:,.1f}",
    f"{received / GIB:,.1f}",
    str(work.micro_batches),
  ]


def largest() -> tuple[list[str], list[list[str]]]:
  """The first model that fits with some settings, and its most prompts."""
  rows = []
  for kind, num in PODS:
    place = Hardware(kind, num)
    for hub_id in MODELS:
      config = next(_fitting(hub_id, place), None)
      if config is None:
        continue
      prompts = _most_prompts(config, place)
      mesh = assumed.abstract_mesh(config.mesh, num)
      r = config.rollout
      count = prompts * r.group_size
      rows.append(
        [
          f"{num} {kind}",
          hub_id.split("/")[1],
          f"{mesh.shape['data']} x {mesh.shape['model']}",
          f"{r.num_slots}" + (", weights divided" if r.shard_weights else ""),
          f"{prompts:,} x {r.group_size} = {count:,}",
        ]
      )
      break
  head = ["devices", "model", "mesh", "slots of a device", "prompts in a step"]
  return head, rows


def _fitting(hub_id: str, place: Hardware) -> Iterator[configs.Config]:
  """Configs that fit: weights of the rollout whole first, more slots first."""
  for divided in (False, True):
    for slots in (64, 32, 16, 8):
      for model in (1, 2, 4, 8):
        config = _config(hub_id, model)
        config.rollout.num_slots = slots
        config.rollout.shard_weights = divided
        # As many as keep 64 slots of each shard busy.
        config.data.prompts_per_step = 8 * (place.num // model)
        config.data.train_limit = 2**16
        try:
          found = advice.sums(config, place)
        except ValueError:
          continue
        if max(found.values()) <= place.memory:
          yield config


def _most_prompts(config: configs.Config, place: Hardware) -> int:
  config = copy.deepcopy(config)
  config.data.train_limit = 2**22
  while max(advice.sums(config, place).values()) <= place.memory:
    config.data.prompts_per_step *= 2
    if config.data.prompts_per_step > 2**20:
      break
  return config.data.prompts_per_step // 2


def _config(hub_id: str, model: int) -> configs.Config:
  config = cases.load("qwen_math")
  config.model.hub_id = hub_id
  config.mesh.model = model
  return config


if __name__ == "__main__":
  main()
