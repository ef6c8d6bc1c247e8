"""The compiled stages of a step: functions, abstract arguments, shardings.

Each stage is declared once, in `declare`, by the names of its arguments and
results. A table of abstract values gives each name its shape and sharding.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
import optax

from dppo_jax import rollout, sharding
from dppo_jax.data import ProblemSet
from dppo_jax.methods import dynamic_sampling
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.metrics import progress
from dppo_jax.models import transformer
from dppo_jax.records import PromptBatch, StepCosts, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import checkpoint, distributed
from dppo_jax.run.setup import Run
from dppo_jax.step import collect, select, tokens, update
from dppo_jax.step.measure_noise import measure_noise
from dppo_jax.step.optimizer import make_optimizer

Params = transformer.Params
# Mesh axes of the results of stages; others are replicated.
_PLACES = {
  "kept": ("batch",),
  "rollout": ("batch",),
  "buffer": ("batch",),
  "batch": (None, "batch", None),
}


class Declaration(NamedTuple):
  """A stage by the names of its arguments and results.

  Attributes:
    function: pure function of arrays.
    args, out: names in the table of abstract values, separated by spaces.
    donate: names of the arguments whose memory may be reused.
  """

  function: Callable[..., Any]
  args: str
  out: str
  donate: str = ""


class Program(NamedTuple):
  """A stage with abstract arguments, ready to be compiled.

  Attributes:
    args: shapes, dtypes and shardings of the arguments.
    out_shardings: shardings of the results.
    donated: numbers of the donated arguments.
  """

  function: Callable[..., Any]
  args: tuple
  out_shardings: Any
  donated: tuple[int, ...] = ()

  def lower(self) -> jax.stages.Lowered:
    """Traces the stage for the current mesh."""
    return jax.jit(
      self.function,
      out_shardings=self.out_shardings,
      donate_argnums=self.donated,
    ).lower(*self.args)


def declare(run: Run) -> dict[str, Declaration]:
  """Declares the stages of the run's step, in the order of their data flow."""
  c, method, bind = run.config, run.method, functools.partial
  config = update_config(run)
  stages = {
    "choose_prompts": Declaration(
      bind(collect.choose_prompts, method=method),
      args="rng history ids limit",
      out="kept",
    ),
    "to_inference_params": Declaration(
      bind(transformer.to_inference_params, config=inference_model(run)),
      args="params",
      out="inference_params",
    ),
    "roll_out": Declaration(
      bind(
        rollout.roll_out,
        model_config=inference_model(run),
        sampling=_sampling(run),
        group_size=c.rollout.group_size,
        num_slots=c.rollout.num_slots,
        platform=run.platform,
      ),
      args="inference_params prompts rng kept",
      out="rollout",
    ),
    "update_history": Declaration(
      bind(
        collect.update_history, method=method, num_problems=len(run.train_set)
      ),
      # Rewards twice: grades have their shape.
      args="history step draws rollout rewards rewards",
      out="history draws",
      donate="history",
    ),
    "select": Declaration(
      bind(
        select.select,
        method=method,
        objective=run.objective,
        spec=run.packing,
        overlong_tokens=c.reward.overlong_tokens,
        mini_batches=c.objective.mini_batches,
      ),
      args="rng prompts rollout rewards costs",
      out="batch num_micro select_info summary",
    ),
    "score": Declaration(
      bind(tokens.score, method=method, config=config),
      args="rng params batch num_micro",
      out="batch score_info",
      donate="batch",
    ),
    "measure_noise": Declaration(
      bind(measure_noise, config=config, spec=run.packing),
      args="rng noise params reference batch num_micro prompts rollout summary",
      out="noise",
    ),
    "update": Declaration(
      bind(update.update, config=config, optimizer=optimizer(run)),
      args="state reference batch num_micro denominator",
      out="state update_info",
      donate="state",
    ),
  }
  if not tokens.is_needed(method, config):
    del stages["score"]
  if not method.noise_every:
    del stages["measure_noise"]
  if method.dynamic_sampling:
    stages["add_groups"] = Declaration(
      bind(collect.add_groups, rule=method.dynamic_sampling),
      args="buffer prompts rollout rewards",
      out="buffer limit denominator",
      donate="buffer",
    )
  return stages


def programs(run: Run) -> dict[str, Program]:
  """Returns a program for each stage that the run needs."""
  stages, values = declare(run), _abstract_inputs(run)
  table = {}
  for name, stage in stages.items():
    if name == "add_groups":
      groups = [values[x] for x in ("prompts", "rollout", "rewards")]
      init = functools.partial(dynamic_sampling.init_buffer, *groups)
      values["buffer"] = _place(run, "buffer", jax.eval_shape(init))
      places = _shardings(values["buffer"])
      table["init_buffer"] = Program(init, (), places)
    args, out = stage.args.split(), stage.out.split()
    if not all(x in values for x in out):
      found = jax.eval_shape(stage.function, *(values[x] for x in args))
      results = found if len(out) > 1 else (found,)
      for x, value in zip(out, results, strict=True):
        values.setdefault(x, _place(run, x, value))
      if name == "roll_out":
        values["rewards"] = jax.ShapeDtypeStruct(
          values["rollout"].lengths.shape,
          jnp.float32,
          sharding=sharding.sharding(run.mesh, "batch"),
        )
    places = tuple(_shardings(values[x]) for x in out)
    table[name] = Program(
      stage.function,
      tuple(values[x] for x in args),
      places if len(out) > 1 else places[0],
      tuple(args.index(x) for x in stage.donate.split()),
    )
  if run.eval_sets:
    table["evaluate"] = evaluation_program(run, run.config.eval.samples)
  return table


def _abstract_inputs(run: Run) -> dict[str, PyTree]:
  """Abstract values that stages take and none of them makes."""
  c, state = run.config, abstract_train_state(run)
  replicated = functools.partial(_place, run, "")
  prompts = _abstract_prompts(run, run.train_set, c.data.prompts_per_step)
  scalar = lambda dtype: replicated(jax.ShapeDtypeStruct((), dtype))
  number = scalar(jnp.float32)
  return {
    "state": state,
    "params": state.params,
    "history": state.history,
    "step": state.step,
    "draws": state.draws,
    "noise": state.noise,
    "reference": state.params if run.objective.beta else None,
    "inference_params": abstract_inference_params(run),
    "rng": replicated(
      jax.eval_shape(lambda: rng_at(run.root_key, 0, Stage.ROLLOUT))
    ),
    "prompts": prompts,
    "ids": prompts.ids,
    "limit": scalar(jnp.int32),
    "denominator": number,
    "costs": StepCosts(*[number] * 4) if run.method.reads_costs else None,
  }


def _place(run: Run, name: str, tree: PyTree) -> PyTree:
  """Adds the sharding of a named value; its scalars are replicated."""
  place = sharding.sharding(run.mesh, *_PLACES.get(name, ()))
  replicated = sharding.sharding(run.mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=place if x.ndim else replicated
    ),
    tree,
  )


def _shardings(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x.sharding, tree)


def optimizer(run: Run) -> optax.GradientTransformation:
  """Returns the optimizer that the config describes."""
  options = dataclasses.asdict(run.config.optimizer)
  return make_optimizer(total_steps=run.num_updates, **options)


def update_config(run: Run) -> update.UpdateConfig:
  """Returns the constants of the run's update."""
  c = run.config
  return update.UpdateConfig(
    model=run.model,
    objective=run.objective,
    temperature=c.rollout.temperature,
    inner_updates=c.objective.inner_updates,
    mini_batches=c.objective.mini_batches,
  )


def init_train_state(run: Run, params: Params) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(
    step=jnp.int32(0),
    draws=jnp.int32(0),
    params=params,
    opt_state=optimizer(run).init(params),
    history=run.method.prompts.init(len(run.train_set)),
    noise=gradient_noise.init() if run.method.noise_every else None,
  )


def abstract_params(run: Run) -> Params:
  """Returns shapes, dtypes and shardings of the master weights."""
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
  """Returns shapes, dtypes and shardings of the weights that rollouts read."""
  model = inference_model(run)
  cast = functools.partial(transformer.to_inference_params, config=model)
  return checkpoint.abstract(
    jax.eval_shape(cast, abstract_params(run)),
    transformer.inference_shardings(model, run.mesh),
  )


def abstract_train_state(run: Run) -> TrainState:
  """Returns shapes, dtypes and shardings of the train state."""
  params = abstract_params(run)
  state = jax.eval_shape(functools.partial(init_train_state, run), params)
  replicated = sharding.sharding(run.mesh)
  shardings = transformer.shardings(run.model, run.mesh)
  opt_state = optax.tree_utils.tree_map_params(
    optimizer(run),
    lambda _, place: place,
    state.opt_state,
    shardings,
    transform_non_params=lambda _: replicated,
  )
  alike = lambda tree: jax.tree.map(lambda _: replicated, tree)
  return checkpoint.abstract(
    state,
    TrainState(
      replicated,
      replicated,
      shardings,
      opt_state,
      alike(state.history),
      alike(state.noise),
    ),
  )


def evaluation_program(run: Run, samples: int) -> Program:
  """Returns the program that rolls out evaluation problems.

  Args:
    samples: completions of each problem; 0 is one, decoded greedily.
  """
  c, sampling = run.config, _sampling(run)
  sampling = sampling._replace(
    temperature=sampling.temperature if samples else 0.0,
    top_p=c.eval.top_p or sampling.top_p,
  )
  problems = next(iter(run.eval_sets.values()))  # all are of one width
  size = sharding.round_up(
    c.eval.prompts, sharding.num_shards(run.mesh, "batch")
  )
  rng = jax.eval_shape(lambda: rng_at(run.root_key, 0, Stage.EVALUATE))
  function = functools.partial(
    rollout.sample,
    group_size=samples or 1,
    num_slots=c.rollout.num_slots,
    platform=run.platform,
    **sampling._asdict(),
  )
  model = inference_model(run)
  return Program(
    lambda params, prompts, rng: function(params, model, prompts, rng),
    (
      abstract_params(run),
      _abstract_prompts(run, problems, size),
      _place(run, "", rng),
    ),
    sharding.sharding(run.mesh),
  )


def _sampling(run: Run) -> rollout.Sampling:
  r = run.config.rollout
  return rollout.Sampling(
    r.max_tokens, run.stop_ids, r.temperature, r.top_k, r.top_p
  )


def inference_model(run: Run) -> transformer.ModelConfig:
  """Returns the architecture with the sampler's dtype and sharding."""
  options = run.config.rollout
  return dataclasses.replace(
    run.model,
    dtype=options.dtype or run.model.dtype,
    gathers_layers=options.shard_weights,
  )


def _abstract_prompts(run: Run, problems: ProblemSet, num: int) -> PromptBatch:
  array = lambda *shape: jax.ShapeDtypeStruct(
    shape, jnp.int32, sharding=sharding.sharding(run.mesh, "batch")
  )
  return PromptBatch(
    ids=array(num),
    tokens=array(num, problems.tokens.shape[1]),
    lengths=array(num),
  )


def compile_programs(
  programs: dict[str, Program],
  mesh: jax.sharding.Mesh,
  task: progress.Task | None = None,
) -> dict[str, jax.stages.Compiled]:
  """Compiles programs for `mesh`, with one thread per core.

  Args:
    task: shows the part that is under way.
  """
  task = task or progress.Task("compiling")
  task.num_parts = len(programs) + 1
  with task.part("tracing"):
    lowered = {name: program.lower() for name, program in programs.items()}
  platform = mesh.devices.flat[0].platform

  def compile_one(name: str) -> jax.stages.Compiled:
    with task.part(name):
      return compile_program(lowered[name], platform)

  # With more threads than cores, compiling takes longer.
  has_affinity = hasattr(os, "sched_getaffinity")
  num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
  with futures.ThreadPoolExecutor(num_cores) as pool:
    compiled = list(pool.map(compile_one, lowered))
  # A process with a warm compilation cache is far ahead of the others, and on
  # CPU the first message between two processes times out after 30 seconds.
  distributed.gather(None)
  return dict(zip(lowered, compiled, strict=True))


def compile_program(
  lowered: jax.stages.Lowered, platform: str
) -> jax.stages.Compiled:
  """Compiles for `platform`; on a CPU at XLA's optimisation level 1.

  Level 1 compiles in an eighth less time and runs no slower where measured.
  """
  is_cpu = platform == "cpu"
  return lowered.compile(
    {"xla_backend_optimization_level": 1} if is_cpu else {}
  )
