"""The rooms of a step, compiled: one shape each, before the first step.

A compiled room refuses any other shape, so nothing is compiled during a run.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dppo_jax import batch as batches
from dppo_jax import checkpoint, keys, rollout, sharding, update
from dppo_jax.algo import refill as refills
from dppo_jax.data import ProblemSet
from dppo_jax.house import House
from dppo_jax.models import transformer
from dppo_jax.records import PromptBatch, Selection, TrainState
from dppo_jax.sampling import Sampling


class Rooms(NamedTuple):
  """Compiled functions; `N` prompts, `[M, R, L]` micro-batches.

  Attributes:
    choose: `(draw, history, ids, limit) -> Selection [N]`, of which at most
      `limit` are kept.
    unstack: `(params) -> weights`, the copy that rollouts read: in their dtype,
      layer by layer, whole on the data axis.
    roll_out: `(weights, prompts, draw, kept) -> (Rollout, decoding)`, of which
      the completions that took longest are still to come.
    finish: `(weights, decoding, prompts, kept) -> Rollout`, whole.
    select: `(draw, prompts, rollout, rewards) -> (batch, num_micro, info)`.
    score: `(params, draw, batch, num_micro) -> (batch, info)`; the batch is
      donated, or returned as it is where neither the objective nor the method
      asks for scores or chooses tokens.
    update: `(state, reference, batch, num_micro, denominator) ->
      (state, info)`, one step on; the state is donated.
    remember: `(history, step, draws, rollout, rewards) -> (history, draws)`,
      one draw on; the history is donated.
    begin: `() -> collected`, nothing yet, of a method that refills.
    add: `(collected, prompts, rollout, rewards) -> (collected, limit,
      denominator)`; what was collected is donated.
    evaluate: `(params, prompts, draw) -> Rollout` of held-out prompts, if any.
  """

  choose: Callable
  unstack: Callable
  roll_out: Callable
  finish: Callable
  select: Callable
  score: Callable
  update: Callable
  remember: Callable
  evaluate: Callable | None = None
  begin: Callable | None = None
  add: Callable | None = None


def fresh_state(house: House, params: transformer.Params) -> TrainState:
  """What a run starts from."""
  return TrainState(
    step=jnp.int32(0),
    draws=jnp.int32(0),
    params=params,
    opt_state=house.optimizer.init(params),
    history=house.method.prompts.init(len(house.train.problems)),
  )


def state_like(house: House) -> TrainState:
  """Shapes, dtypes and placements of the train state."""
  table = transformer.parameter_table(house.model)
  params = transformer.unflatten(
    {
      name: jax.ShapeDtypeStruct(p.shape, jnp.float32)
      for name, p in table.items()
    }
  )
  shape = jax.eval_shape(functools.partial(fresh_state, house), params)
  whole = sharding.sharding(house.mesh)
  where = transformer.shardings(house.model, house.mesh)
  opt_state = optax.tree_utils.tree_map_params(
    house.optimizer,
    lambda _, place: place,
    shape.opt_state,
    where,
    transform_non_params=lambda _: whole,
  )
  history = jax.tree.map(lambda _: whole, shape.history)
  return checkpoint.abstract(
    shape, TrainState(whole, whole, where, opt_state, history)
  )


def build(house: House) -> Rooms:
  """Compiles every room, on as many threads as there are cores."""
  c, model, method = house.config, house.model, house.method
  whole = sharding.sharding(house.mesh)
  by_prompt = sharding.sharding(house.mesh, "batch")
  by_micro = sharding.sharding(house.mesh, None, "batch", None)
  sampling_model = dataclasses.replace(
    model, dtype=c.rollout.dtype or model.dtype
  )
  settings = update.Settings(
    model=model,
    objective=house.objective,
    temperature=c.rollout.temperature,
    head_tokens=c.pack.head_tokens,
    inner_updates=c.objective.inner_updates,
  )

  r = c.rollout
  how = Sampling(r.max_tokens, house.stop_ids, r.temperature, r.top_k, r.top_p)

  def unstack(params):
    return transformer.unstack(params, sampling_model)

  def roll_out(weights, prompts, draw, kept):
    decoding = rollout.start(
      weights,
      sampling_model,
      prompts,
      draw,
      kept,
      how,
      group_size=r.group_size,
      num_slots=r.num_slots,
      prefill_prompts=r.prefill_prompts,
    )
    return rollout.so_far(decoding, prompts, kept), decoding

  def finish(weights, decoding, prompts, kept):
    decoding = rollout.finish(weights, sampling_model, decoding, how)
    return rollout.so_far(decoding, prompts, kept)

  def evaluate(params, prompts, draw):
    return rollout.sample(
      params,
      sampling_model,
      prompts,
      draw,
      group_size=c.eval.samples or 1,
      num_slots=r.num_slots,
      prefill_prompts=r.prefill_prompts,
      **how._replace(
        temperature=r.temperature if c.eval.samples else 0.0
      )._asdict(),
    )

  state = state_like(house)
  reference = state.params if house.objective.beta else None
  draw = jax.eval_shape(
    lambda: keys.draw_at(house.root_key, 0, keys.Room.ROLLOUT)
  )
  draw = _placed(draw, whole)
  prompts = _prompts_like(house.train, c.data.prompts_per_step, by_prompt)
  kept = Selection(
    keep=jax.ShapeDtypeStruct(prompts.ids.shape, bool, sharding=by_prompt),
    prob=jax.ShapeDtypeStruct(
      prompts.ids.shape, jnp.float32, sharding=by_prompt
    ),
  )
  weights = checkpoint.abstract(
    jax.eval_shape(unstack, state.params),
    transformer.unstacked_shardings(model, house.mesh),
  )
  completions, decoding = jax.eval_shape(roll_out, weights, prompts, draw, kept)
  completions = _placed(completions, by_prompt)
  by_slot = sharding.sharding(house.mesh, None, "batch", "kv_heads")
  cache = _placed(decoding.slots.cache, by_slot)
  decoding = _placed(decoding, by_prompt)
  decoding = decoding._replace(slots=decoding.slots._replace(cache=cache))
  rewards = jax.ShapeDtypeStruct(
    completions.lengths.shape, jnp.float32, sharding=by_prompt
  )
  select = functools.partial(
    batches.select,
    method=method,
    objective=house.objective,
    rows=house.rows,
    train_zero_advantage=c.objective.train_zero_advantage,
    overlong_tokens=c.reward.overlong_tokens,
  )
  rows, number, _ = jax.eval_shape(select, draw, prompts, completions, rewards)
  rows, number = _placed(rows, by_micro), _placed(number, whole)
  count = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
  limit = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)

  def choose(draw, history, ids, limit):
    return refills.limit(method.prompts.select(draw, history, ids), limit)

  needs_scores = not settings.is_on_policy or (
    method.tokens is not None and method.tokens.needs_scores
  )

  def score(params, draw, batch, num_micro):
    scores = None
    if needs_scores:
      scores = update.score(params, settings, batch, num_micro)
    return batches.choose_tokens(
      draw,
      batch,
      scores,
      method=method,
      objective=house.objective,
      is_on_policy=settings.is_on_policy,
    )

  def learn(state, *rest):
    state, info = update.update(
      state, *rest, settings=settings, optimizer=house.optimizer
    )
    return state.replace(step=state.step + 1), info

  def remember(history, step, draws, rollout, rewards):
    # A pruned prompt is named by an id that no problem has.
    ids = jnp.where(
      rollout.kept.keep, rollout.prompt_ids, len(house.train.problems)
    )
    observe = method.prompts.observe
    return observe(history, step, ids, rewards, rollout.lengths), draws + 1

  # What each room returns stays where the next one expects it.
  like = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
  plans = {
    "choose": (
      choose,
      (draw, state.history, prompts.ids, limit),
      like(kept),
    ),
    "unstack": (unstack, (state.params,), like(weights)),
    "roll_out": (
      roll_out,
      (weights, prompts, draw, kept),
      (like(completions), like(decoding)),
    ),
    "finish": (
      finish,
      (weights, decoding, prompts, kept),
      like(completions),
    ),
    "select": (
      select,
      (draw, prompts, completions, rewards),
      (like(rows), whole, whole),
    ),
    "update": (
      learn,
      (state, reference, rows, number, count),
      (like(state), whole),
    ),
    "remember": (
      remember,
      (state.history, state.step, state.draws, completions, rewards),
      (like(state.history), whole),
    ),
  }
  if house.held_out:
    held_out = _prompts_like(house.held_out, c.eval.prompts, by_prompt)
    plans["evaluate"] = (evaluate, (state.params, held_out, draw), whole)
  if needs_scores or method.tokens:
    plans["score"] = (
      score,
      (state.params, draw, rows, number),
      (like(rows), whole),
    )
  if method.refill:
    begin = lambda: refills.start(prompts, completions, rewards)

    def add(collected, prompts, rollout, rewards):
      collected = refills.add(collected, prompts, rollout, rewards)
      limit = refills.next_size(collected, rollout, rewards, method.refill)
      return collected, limit, refills.denominator(collected, method.refill)

    collected = _placed(jax.eval_shape(begin), by_prompt)
    plans["begin"] = (begin, (), like(collected))
    plans["add"] = (
      add,
      (collected, prompts, completions, rewards),
      (like(collected), whole, whole),
    )
  donated = {
    "update": (0,),
    "remember": (0,),
    "score": (2,),
    "add": (0,),
  }
  lowered = {
    name: jax.jit(
      function, out_shardings=out, donate_argnums=donated.get(name, ())
    ).lower(*args)
    for name, (function, args, out) in plans.items()
  }
  # More threads than cores would take longer: they push each other aside.
  can_tell = hasattr(os, "sched_getaffinity")  # which cores are ours
  cores = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count()
  platform = house.mesh.devices.flat[0].platform
  with futures.ThreadPoolExecutor(cores) as pool:
    waiting = {
      name: pool.submit(compile, x, platform) for name, x in lowered.items()
    }
    compiled = {name: x.result() for name, x in waiting.items()}
  as_it_is = lambda params, draw, batch, num_micro: (batch, {})
  return Rooms(**{"score": as_it_is, **compiled})


def compile(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
  """The program for `platform`; on a cpu at XLA's level 1 of optimisation.

  That is there sooner by an eighth, and no slower where it was measured.
  """
  is_cpu = platform == "cpu"
  return lowered.compile(
    {"xla_backend_optimization_level": 1} if is_cpu else {}
  )


def _prompts_like(
  problems: ProblemSet, num: int, place: jax.sharding.Sharding
) -> PromptBatch:
  array = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32, sharding=place)
  return PromptBatch(
    ids=array(num),
    tokens=array(num, problems.tokens.shape[1]),
    lengths=array(num),
  )


def _placed(tree: Any, place: jax.sharding.NamedSharding) -> Any:
  """`tree` as shapes laid out by `place`; its scalars are everywhere."""
  whole = sharding.sharding(place.mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=place if x.ndim else whole
    ),
    tree,
  )
