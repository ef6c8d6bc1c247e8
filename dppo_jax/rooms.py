"""The rooms of a step, compiled: one shape each, before the first step.

A compiled room refuses any other shape, so nothing is compiled during a run.
"""

from collections.abc import Callable
from concurrent import futures
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dppo_jax import batch as batches
from dppo_jax import checkpoint, keys, rollout, sharding, update
from dppo_jax.data import ProblemSet
from dppo_jax.house import House
from dppo_jax.models import transformer
from dppo_jax.records import PromptBatch, Selection, TrainState


class Rooms(NamedTuple):
  """Compiled functions; `N` prompts, `[M, R, L]` micro-batches.

  Attributes:
    choose: `(draw, history, ids) -> Selection [N]`.
    roll_out: `(params, prompts, draw, kept) -> Rollout`.
    select: `(draw, prompts, rollout, rewards) -> (batch, num_micro, info)`.
    score: `(params, batch, num_micro) -> batch`; the batch is donated, or
      returned as it is where its old log-probabilities are not needed.
    update: `(state, reference, batch, num_micro, denominator) ->
      (state, info)`; the state is donated.
    remember: `(state, rollout, rewards) -> state`, one step on; the state is
      donated.
    evaluate: `(params, prompts, draw) -> Rollout` of held-out prompts.
  """

  choose: Callable
  roll_out: Callable
  select: Callable
  score: Callable
  update: Callable
  remember: Callable
  evaluate: Callable


def fresh_state(house: House, params: transformer.Params) -> TrainState:
  """What a run starts from."""
  return TrainState(
    step=jnp.int32(0),
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
    shape, TrainState(whole, where, opt_state, history)
  )


def build(house: House) -> Rooms:
  """Compiles every room, on as many threads as there are rooms."""
  c, model, method = house.config, house.model, house.method
  whole = sharding.sharding(house.mesh)
  by_prompt = sharding.sharding(house.mesh, "batch")
  by_micro = sharding.sharding(house.mesh, None, "batch", None)
  settings = update.Settings(
    model=model,
    objective=house.objective,
    temperature=c.rollout.temperature,
    head_tokens=c.pack.head_tokens,
    inner_updates=c.objective.inner_updates,
  )

  def sampler(group_size: int, temperature: float) -> Callable:
    def roll_out(params, prompts, draw, kept=None):
      return rollout.sample(
        params,
        model,
        prompts,
        draw,
        kept=kept,
        group_size=group_size,
        max_tokens=c.rollout.max_tokens,
        num_slots=c.rollout.num_slots,
        stop_ids=house.stop_ids,
        temperature=temperature,
        top_k=c.rollout.top_k,
        top_p=c.rollout.top_p,
        prefill_prompts=c.rollout.prefill_prompts,
      )

    return roll_out

  state = state_like(house)
  reference = state.params if house.objective.beta else None
  draw = jax.eval_shape(
    lambda: keys.draw_at(house.root_key, 0, keys.Room.ROLLOUT)
  )
  draw = _placed(draw, whole)
  prompts = _prompts_like(house.train, c.data.prompts_per_step, by_prompt)
  held_out = _prompts_like(house.held_out, c.eval.prompts, by_prompt)
  kept = Selection(
    keep=jax.ShapeDtypeStruct(prompts.ids.shape, bool, sharding=by_prompt),
    prob=jax.ShapeDtypeStruct(
      prompts.ids.shape, jnp.float32, sharding=by_prompt
    ),
  )
  sample = sampler(c.rollout.group_size, c.rollout.temperature)
  completions = _placed(
    jax.eval_shape(sample, state.params, prompts, draw, kept), by_prompt
  )
  rewards = jax.ShapeDtypeStruct(
    completions.lengths.shape, jnp.float32, sharding=by_prompt
  )
  select = functools.partial(
    batches.select,
    method=method,
    objective=house.objective,
    rows=house.rows,
    train_zero_advantage=c.objective.train_zero_advantage,
  )
  rows, number, _ = jax.eval_shape(select, draw, prompts, completions, rewards)
  rows, number = _placed(rows, by_micro), _placed(number, whole)
  count = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)

  def remember(state, rollout, rewards):
    # A pruned prompt is named by an id that no problem has.
    ids = jnp.where(
      rollout.kept.keep, rollout.prompt_ids, len(house.train.problems)
    )
    history = method.prompts.observe(state.history, state.step, ids, rewards)
    return state.replace(step=state.step + 1, history=history)

  # What each room returns stays where the next one expects it.
  like = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
  plans = {
    "choose": (
      method.prompts.select,
      (draw, state.history, prompts.ids),
      like(kept),
    ),
    "roll_out": (
      sample,
      (state.params, prompts, draw, kept),
      like(completions),
    ),
    "select": (
      select,
      (draw, prompts, completions, rewards),
      (like(rows), whole, whole),
    ),
    "update": (
      functools.partial(
        update.update, settings=settings, optimizer=house.optimizer
      ),
      (state, reference, rows, number, count),
      (like(state), whole),
    ),
    "remember": (
      remember,
      (state, completions, rewards),
      like(state),
    ),
    "evaluate": (
      sampler(c.eval.samples, c.rollout.temperature)
      if c.eval.samples
      else sampler(1, 0.0),
      (state.params, held_out, draw),
      whole,
    ),
  }
  if not settings.is_on_policy:
    plans["score"] = (
      lambda params, rows, number: update.score(params, settings, rows, number),
      (state.params, rows, number),
      like(rows),
    )
  donated = {"update": (0,), "remember": (0,), "score": (1,)}
  lowered = {
    name: jax.jit(
      function, out_shardings=out, donate_argnums=donated.get(name, ())
    ).lower(*args)
    for name, (function, args, out) in plans.items()
  }
  with futures.ThreadPoolExecutor(len(lowered)) as pool:
    waiting = {name: pool.submit(x.compile) for name, x in lowered.items()}
    compiled = {name: x.result() for name, x in waiting.items()}
  as_it_is = lambda params, batch, num_micro: batch
  return Rooms(**{"score": as_it_is, **compiled})


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
