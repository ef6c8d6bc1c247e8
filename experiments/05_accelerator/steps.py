"""Steps of GRPO, DPPO and neyman, and the phases of one, at a model's size."""

from collections.abc import Iterator
import functools
from typing import Any

import checks
import jax
import jax.numpy as jnp
import machine
import numpy as np
import phases
import work as works

from dppo_jax import methods
from dppo_jax.records import Selection
from dppo_jax.rng import Stage, rng_at

METHODS = ("grpo", "dppo", "neyman")


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
      **_peak_memory(),
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
  sample = phases.compile_function(
    works.sampler(work), params, prompts, works.everything(work)
  )
  learn = phases.compile_update(work, params)
  chosen, kept = {}, {name: _kept(name, work) for name in METHODS}
  for name in METHODS:
    rollout = sample(params, prompts, kept[name])
    select = jax.jit(
      functools.partial(phases.select_batch, work=work, method=name)
    )
    chosen[name] = (jax.jit(select), (prompts, rollout, _rewards(work)))
  for name in METHODS:
    select, arguments = chosen[name]
    timed = functools.partial(machine.timed, repeats=3)
    roll = timed(lambda k=kept[name]: sample(params, prompts, k))
    pick = timed(lambda f=select, a=arguments: f(*a))
    batch, num_micro, info = select(*arguments)
    step = timed(lambda b=batch, n=num_micro: learn.run(b, n))
    yield {
      "name": name,
      "model": model,
      "attention": work.model.attention,
      "prompts": int(kept[name].keep.sum()),
      "completions": int(info["completions/trained"]),
      "tokens_generated": int(arguments[1].lengths.sum()),
      "tokens_trained": int(info["tokens/trained"]),
      "slot_utilisation": float(
        arguments[1].lengths.sum() / arguments[1].slot_steps
      ),
      "rollout_seconds": roll.median,
      "select_seconds": pick.median,
      "update_seconds": step.median,
      "step_seconds": roll.median + pick.median + step.median,
      "step_seconds_least": roll.least + pick.least + step.least,
      "step_seconds_most": roll.most + pick.most + step.most,
      **_peak_memory(),
    }


def _work(model: str) -> works.Work:
  """As a run would compute it here: bfloat16 but on a CPU."""
  work = checks.for_platform(works.WORKS[model])
  is_cpu = jax.devices()[0].platform == "cpu"
  return works.with_model(
    work, dtype="float32" if is_cpu else "bfloat16", remat="layers"
  )


def _rewards(work: works.Work) -> jax.Array:
  rng = np.random.default_rng(3)
  chance = rng.random((work.prompts, 1))
  right = rng.random((work.prompts, work.group_size)) < chance
  return jnp.array(right, jnp.float32)


def _kept(name: str, work: works.Work) -> Selection:
  """The method's choice of prompts, having seen each of them once."""
  rule = methods.METHODS[name]().prompts
  ids = jnp.arange(work.prompts, dtype=jnp.int32)
  rewards = _rewards(work)
  lengths = works.make_rollout(work).lengths
  history = rule.observe(
    rule.init(work.prompts), jnp.int32(0), ids, rewards, rewards, lengths
  )
  rng = rng_at(jax.random.key(0), 1, Stage.PROMPTS)
  return rule.select(rng, history, ids)


def _peak_memory() -> dict[str, int]:
  """The most bytes that this process has had on the device, where told."""
  stats = jax.devices()[0].memory_stats() or {}
  return {"peak_bytes": stats.get("peak_bytes_in_use", 0)}
