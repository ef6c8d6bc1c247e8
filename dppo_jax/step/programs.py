"""The stages of a step, compiled before the first one.

Each is a pure function, compiled ahead of time for one shape; any other
raises. `programs` is the table of them.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree
import optax

from dppo_jax import rollout, shapes, sharding
from dppo_jax.data import ProblemSet
from dppo_jax.methods import dynamic_sampling
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.metrics import progress
from dppo_jax.models import transformer
from dppo_jax.records import (
  Measured,
  Outcome,
  PackedBatch,
  PromptBatch,
  Rollout,
  Selection,
  TrainState,
)
from dppo_jax.rng import Stage, StepRng, rng_at
from dppo_jax.run import checkpoint
from dppo_jax.run.setup import Run
from dppo_jax.step import select, stages, update
from dppo_jax.step.compiler import Program, compile_programs

Metrics = dict[str, jax.Array]
Params = transformer.Params


class CompiledStep(NamedTuple):
  """The stages of a step; `N` prompts, `[M, R, L]` micro-batches.

  Attributes:
    choose_prompts: `(rng, history, ids, limit)` to a selection `[N]` of which
      at most `limit` are kept, and metrics.
    to_inference_params: the copy of the weights that rollouts read.
    roll_out: `(params, prompts, rng, kept)` to a rollout; the parameters are
      of `to_inference_params`.
    select: `(rng, prompts, rollout, rewards)` to micro-batches, how many are
      in use, metrics, and what became of each completion.
    score: `(params, rng, batch, num_micro)` to the batch with the tokens that
      the method chooses, and metrics; the batch is donated. Where there is
      nothing to do it returns the batch as it is.
    update: `(state, reference, batch, num_micro, denominator)` to the state
      one step on, which is donated, and metrics.
    update_history: `(history, step, draws, rollout, rewards, correct)` to
      history and draws one draw on; the history is donated.
    evaluate: `(params, prompts, rng)` to a rollout of the evaluation set.
    init_buffer: `()` to an empty buffer, for dynamic sampling.
    add_groups: `(buffer, prompts, rollout, rewards)` to the buffer, which is
      donated, how many prompts to roll out next, and the loss denominator.
  """

  choose_prompts: Callable[
    [StepRng, PyTree, Array, Array], tuple[Selection, Metrics]
  ]
  to_inference_params: Callable[[Params], Params]
  roll_out: Callable[[Params, PromptBatch, StepRng, Selection], Rollout]
  select: Callable[
    [StepRng, PromptBatch, Rollout, Array],
    tuple[PackedBatch, Array, Metrics, Outcome],
  ]
  score: Callable[
    [Params, StepRng, PackedBatch, Array], tuple[PackedBatch, Metrics]
  ]
  update: Callable[
    [TrainState, Params | None, PackedBatch, Array, Array],
    tuple[TrainState, Metrics],
  ]
  update_history: Callable[
    [PyTree, Array, Array, Rollout, Array, Array], tuple[PyTree, Array]
  ]
  evaluate: Callable[[Params, PromptBatch, StepRng], Rollout] | None = None
  init_buffer: Callable[[], dynamic_sampling.GroupBuffer] | None = None
  add_groups: (
    Callable[
      [dynamic_sampling.GroupBuffer, PromptBatch, Rollout, Array],
      tuple[dynamic_sampling.GroupBuffer, Array, Array],
    ]
    | None
  ) = None


def init_train_state(run: Run, params: Params) -> TrainState:
  """What a run starts from."""
  return TrainState(
    step=jnp.int32(0),
    draws=jnp.int32(0),
    params=params,
    opt_state=run.optimizer.init(params),
    history=run.method.prompts.init(len(run.train_set)),
    noise=gradient_noise.init() if run.config.objective.noise_every else None,
  )


def abstract_params(run: Run) -> Params:
  """Shapes, dtypes and shardings of the master weights."""
  table = transformer.parameter_table(run.model)
  params = transformer.unflatten(
    {
      name: jax.ShapeDtypeStruct(p.shape, jnp.float32)
      for name, p in table.items()
    }
  )
  shardings = transformer.shardings(run.model, run.mesh)
  return checkpoint.abstract(params, shardings)


def abstract_inference_params(run: Run) -> Params:
  """Likewise of the copy of the weights that rollouts read."""
  cast = functools.partial(
    transformer.to_inference_params, config=_inference_model(run)
  )
  return checkpoint.abstract(
    jax.eval_shape(cast, abstract_params(run)),
    transformer.inference_shardings(_inference_model(run), run.mesh),
  )


def abstract_train_state(run: Run) -> TrainState:
  """Shapes, dtypes and shardings of the train state."""
  params = abstract_params(run)
  state = jax.eval_shape(functools.partial(init_train_state, run), params)
  replicated = sharding.sharding(run.mesh)
  shardings = transformer.shardings(run.model, run.mesh)
  opt_state = optax.tree_utils.tree_map_params(
    run.optimizer,
    lambda _, place: place,
    state.opt_state,
    shardings,
    transform_non_params=lambda _: replicated,
  )
  alike = lambda tree: jax.tree.map(lambda _: replicated, tree)
  return checkpoint.abstract(
    state,
    TrainState(
      *(replicated, replicated, shardings, opt_state),
      *(alike(state.history), alike(state.noise)),
    ),
  )


def _functions(run: Run) -> dict[str, Callable[..., Any]]:
  """The stages, each bound to what it is specialised to."""
  c, method, bind = run.config, run.method, functools.partial
  inference_model = _inference_model(run)
  update_config = update.UpdateConfig(
    model=run.model,
    objective=run.objective,
    temperature=c.rollout.temperature,
    inner_updates=c.objective.inner_updates,
    mini_batches=c.objective.mini_batches,
    noise_every=c.objective.noise_every,
    num_prompts=c.data.prompts_per_step,
  )
  found = {
    "choose_prompts": bind(stages.choose_prompts, method=method),
    "to_inference_params": bind(
      transformer.to_inference_params, config=inference_model
    ),
    "roll_out": bind(
      rollout.roll_out,
      model_config=inference_model,
      sampling=_sampling(run),
      group_size=c.rollout.group_size,
      num_slots=c.rollout.num_slots,
      platform=run.platform,
      record_experts=c.rollout.replay_experts,
    ),
    "select": bind(
      select.select,
      method=method,
      objective=run.objective,
      spec=run.packing,
      train_zero_advantage=c.objective.train_zero_advantage,
      overlong_tokens=c.reward.overlong_tokens,
      mini_batches=c.objective.mini_batches,
    ),
    "update": bind(
      stages.train_step, config=update_config, optimizer=run.optimizer
    ),
    "update_history": bind(
      stages.update_history,
      method=method,
      num_problems=len(run.train_set),
    ),
  }
  if stages.needs_stats(method, update_config) or method.tokens:
    found["score"] = bind(stages.score, method=method, config=update_config)
  if method.dynamic_sampling:
    found["add_groups"] = bind(stages.add_groups, rule=method.dynamic_sampling)
  return found


def programs(run: Run) -> dict[str, Program]:
  """A program for each field of `CompiledStep` that the run needs."""
  c, mesh, functions = run.config, run.mesh, _functions(run)
  replicated = sharding.sharding(mesh)
  by_prompt = sharding.sharding(mesh, "batch")
  by_row = sharding.sharding(mesh, None, "batch", None)
  shape = jax.eval_shape
  places = lambda tree: jax.tree.map(lambda x: x.sharding, tree)

  # What travels between the stages.
  state = abstract_train_state(run)
  history = state.history
  reference = state.params if run.objective.beta else None
  rng = shape(lambda: rng_at(run.root_key, 0, Stage.ROLLOUT))
  rng = _abstract(rng, replicated)
  choosing = rng
  if run.method.reads_measured:
    numbers = [_array((), jnp.float32, replicated)] * 6
    choosing = rng._replace(measured=Measured(*numbers))
  num_prompts = c.data.prompts_per_step
  prompts = _abstract_prompts(run.train_set, num_prompts, by_prompt)
  kept = Selection(
    keep=_array((num_prompts,), bool, by_prompt),
    prob=_array((num_prompts,), jnp.float32, by_prompt),
  )
  params = abstract_inference_params(run)
  completions = shape(functions["roll_out"], params, prompts, rng, kept)
  completions = _abstract(completions, by_prompt)
  rewards = _array(completions.lengths.shape, jnp.float32, by_prompt)
  batch, num_micro, *_ = shape(
    functions["select"], choosing, prompts, completions, rewards
  )
  batch = _abstract(batch, by_row)
  num_micro = _abstract(num_micro, replicated)
  denominator = _array((), jnp.float32, replicated)
  limit = _array((), jnp.int32, replicated)

  # Arguments, shardings of what is returned, donated arguments.
  table = {
    "choose_prompts": (
      (choosing, history, prompts.ids, limit),
      (places(kept), replicated),
      (),
    ),
    "to_inference_params": ((state.params,), places(params), ()),
    "roll_out": ((params, prompts, rng, kept), places(completions), ()),
    "select": (
      (choosing, prompts, completions, rewards),
      (places(batch), replicated, replicated, replicated),
      (),
    ),
    "score": (
      (state.params, rng, batch, num_micro),
      (places(batch), replicated),
      (2,),
    ),
    "update": (
      (state, reference, batch, num_micro, denominator),
      (places(state), replicated),
      (0,),
    ),
    "update_history": (
      # Rewards twice: what is correct has their shape.
      (history, state.step, state.draws, completions, rewards, rewards),
      (places(history), replicated),
      (0,),
    ),
  }
  if run.method.dynamic_sampling:
    groups = (prompts, completions, rewards)
    functions["init_buffer"] = functools.partial(
      dynamic_sampling.init_buffer, *groups
    )
    buffer = _abstract(shape(functions["init_buffer"]), by_prompt)
    table["init_buffer"] = ((), places(buffer), ())
    table["add_groups"] = (
      (buffer, *groups),
      (places(buffer), replicated, replicated),
      (0,),
    )
  found = {
    name: Program(function, *table[name])
    for name, function in functions.items()
  }
  if run.eval_sets:
    found["evaluate"] = evaluation_program(run, c.eval.samples)
  return found


def evaluation_program(run: Run, samples: int) -> Program:
  """`CompiledStep.evaluate`, which needs nothing that only training has.

  Args:
    samples: of each problem; 0 is one, decoded greedily.
  """
  c = run.config
  by_prompt = sharding.sharding(run.mesh, "batch")
  replicated = sharding.sharding(run.mesh)
  sampling = _sampling(run)
  sampling = sampling._replace(
    temperature=(c.eval.temperature or sampling.temperature)
    if samples
    else 0.0,
    top_p=c.eval.top_p or sampling.top_p,
  )
  rng = jax.eval_shape(lambda: rng_at(run.root_key, 0, Stage.EVALUATE))
  problems = next(iter(run.eval_sets.values()))  # all are of one width
  size = shapes.round_up(c.eval.prompts, sharding.num_shards(run.mesh, "batch"))
  return Program(
    functools.partial(
      stages.evaluate,
      model=_inference_model(run),
      group_size=samples or 1,
      num_slots=c.rollout.num_slots,
      platform=run.platform,
      **sampling._asdict(),
    ),
    (
      abstract_params(run),
      _abstract_prompts(problems, size, by_prompt),
      _abstract(rng, replicated),
    ),
    replicated,
  )


def _sampling(run: Run) -> rollout.Sampling:
  """How the rollouts of training sample."""
  r = run.config.rollout
  return rollout.Sampling(
    r.max_tokens, run.stop_ids, r.temperature, r.top_k, r.top_p
  )


def _inference_model(run: Run) -> transformer.ModelConfig:
  options = run.config.rollout
  return dataclasses.replace(
    run.model,
    dtype=options.dtype or run.model.dtype,
    gathers_layers=options.shard_weights,
  )


def compile_step(run: Run, task: progress.Task | None = None) -> CompiledStep:
  """Compiles every stage; `task` is told what is under way."""
  task = task or progress.Task("compiling")
  with task.part("tracing"):
    table = programs(run)
  found = compile_programs(table, run.mesh, task)
  unscored = lambda params, rng, batch, num_micro: (batch, {})
  return CompiledStep(**{"score": unscored, **found})


def _array(
  shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _abstract_prompts(
  problems: ProblemSet, num: int, sharding: jax.sharding.Sharding
) -> PromptBatch:
  array = lambda *shape: _array(shape, jnp.int32, sharding)
  return PromptBatch(
    ids=array(num),
    tokens=array(num, problems.tokens.shape[1]),
    lengths=array(num),
  )


def _abstract(tree: PyTree, place: jax.sharding.NamedSharding) -> PyTree:
  """Shapes and dtypes of `tree` in `place`; its scalars are replicated."""
  replicated = sharding.sharding(place.mesh)
  return jax.tree.map(
    lambda x: _array(x.shape, x.dtype, place if x.ndim else replicated), tree
  )
