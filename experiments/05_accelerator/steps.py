"""Steps of GRPO, DPPO and neyman, and the phases of one, at a model's size."""

from collections.abc import Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.planning import assumed, memory
from dppo_jax.records import Selection
from dppo_jax.rng import Stage, rng_at

from ..common import machine, phases
from ..common import work as works
from . import checks


def phase_rows(model: str) -> Iterator[dict[str, Any]]:
  """Every phase in bfloat16, with the update's share of matrix products."""
  work = _work(model)
  yard = machine.yardstick(5)
  for row in phases.phases(work, repeats=3):
    yield {
      **row,
      "model": model,
      "attention": work.model.attention,
      "mfu": row["flops_per_second"] / yard["bfloat16_flops"],
      "peak_flops": yard["bfloat16_flops"],
    }


def step_rows(model: str) -> Iterator[dict[str, Any]]:
  """Seconds of each stage of a step, by method, in turns.

  Every prompt has a chance of being solved that is uniform in (0, 1), was
  visited once before, and is answered with geometric lengths: what a method's
  prompt rule makes of that visit decides what is rolled out.
  """
  work = _work(model)
  params = phases.random_params(work)
  prompts = works.make_prompts(work)
  timed = functools.partial(machine.timed, repeats=3)
  sample = phases.compile_function(
    works.sampler(work), params, prompts, works.everything(work)
  )
  measured = {}
  for name in phases.METHODS:
    kept = _kept(name, work)
    roll = timed(lambda k=kept, p=params: sample(p, prompts, k))
    rollout = sample(params, prompts, kept)
    select = functools.partial(phases.select_batch, work=work, method=name)
    args = (prompts, rollout, _rewards(work))
    select = phases.compile_function(select, *args)
    pick = timed(lambda f=select, a=args: f(*a))
    measured[name] = (kept, rollout, roll, pick, select(*args))
  learn = phases.compile_update(work, params)
  del params  # the update's, from here on
  for name, (kept, rollout, roll, pick, selected) in measured.items():
    batch, num_micro, info = selected
    step = timed(lambda b=batch, n=num_micro: learn.run(b, n))
    parts = (roll, pick, step)
    yield {
      "name": name,
      "model": model,
      "attention": work.model.attention,
      "prompts": int(kept.keep.sum()),
      "completions": int(info["completions/trained"]),
      "tokens_generated": int(rollout.lengths.sum()),
      "tokens_trained": int(info["tokens/trained"]),
      "slot_utilisation": float(rollout.lengths.sum() / rollout.slot_steps),
      "rollout_seconds": roll.median,
      "select_seconds": pick.median,
      "update_seconds": step.median,
      "step_seconds": sum(x.median for x in parts),
      "step_seconds_least": sum(x.least for x in parts),
      "step_seconds_most": sum(x.most for x in parts),
    }


def memory_rows(model: str) -> Iterator[dict[str, Any]]:
  """The update's memory: measured, the compiler's word, and --mode=plan's."""
  work = _work(model)
  rows = (
    works.make_prompts(work),
    works.make_rollout(work),
    works.make_rewards(work),
  )
  select = functools.partial(phases.select_batch, work=work)
  batch, num_micro, _ = jax.jit(select)(*rows)
  learn = phases.compile_update(work, phases.random_params(work))
  jax.block_until_ready(learn.run(batch, num_micro))
  stats = jax.devices()[0].memory_stats() or {}
  yield {
    "name": "update",
    "model": model,
    "peak_bytes": stats.get("peak_bytes_in_use", 0),
    "temporary_bytes": learn.temporary_bytes,
    "planned": _planned(model, work),
  }


def _planned(model: str, work: works.Work) -> dict[str, float]:
  """Returns the memory of an update by part, as --mode=plan estimates it.

  Empty for a model that is not on the hub.
  """
  hub = [x for x in assumed.known_models() if x.lower().endswith(model)]
  if not hub:
    return {}
  config = configs.Config()
  configs.use_method(config, "grpo")
  config.model.hub_id = hub[0]
  config.model.dtype = work.model.dtype
  config.model.remat = work.model.remat
  config.data.prompts_per_step = work.prompts
  config.data.max_prompt_tokens = work.prompt_tokens[1]
  config.rollout.group_size = work.group_size
  config.rollout.max_tokens = work.max_tokens
  config.rollout.num_slots = work.slots
  config.pack.row_length = work.rows.row_length
  config.pack.rows_per_micro = work.rows.rows_per_micro
  platform = jax.devices()[0].platform
  run = assumed.assumed_run(config, sharding.make_mesh(), platform)
  return memory.estimate(run)["update"]


def _work(model: str) -> works.Work:
  """Returns the work with the dtype that a run would use here."""
  is_cpu = jax.devices()[0].platform == "cpu"
  dtype = "float32" if is_cpu else "bfloat16"
  work = works.with_model(works.WORKS[model], dtype=dtype, remat="layers")
  return checks.for_platform(work)


def _rewards(work: works.Work) -> jax.Array:
  rng = np.random.default_rng(3)
  chance = rng.random((work.prompts, 1))
  right = rng.random((work.prompts, work.group_size)) < chance
  return jnp.array(right, jnp.float32)


def _kept(name: str, work: works.Work) -> Selection:
  """The method's choice of prompts, having seen each of them once."""
  rule = phases.METHODS[name].prompts
  ids = jnp.arange(work.prompts, dtype=jnp.int32)
  rewards = _rewards(work)
  lengths = works.make_rollout(work).lengths
  history = rule.observe(
    rule.init(work.prompts), jnp.int32(0), ids, rewards, rewards, lengths
  )
  rng = rng_at(jax.random.key(0), 1, Stage.PROMPTS)
  return rule.select(rng, history, ids)
