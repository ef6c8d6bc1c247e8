"""The compiled stages of a step: functions, abstract arguments, shardings.

Each stage is declared once, in `declare`, by the names of its arguments and
results. A table of abstract values gives each name its shape and sharding.
"""

from collections.abc import Callable
from concurrent import futures
import functools
import os
from typing import Any, NamedTuple

import jax

from dppo_jax import distributed, rollout, sharding
from dppo_jax.methods import dynamic_sampling
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.rng import Stage, rng_at
from dppo_jax.rollout.drafts import AUTOMATIC
from dppo_jax.run.setup import Run
from dppo_jax.step import abstract_values, collect, select, tokens, update
from dppo_jax.step.abstract_values import (
  abstract_params,
  inference_model,
  optimizer,
)
from dppo_jax.step.optimizer import MOMENTUM


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
  """A jitted stage, and the abstract arguments to compile it for."""

  function: Any
  args: tuple

  def lower(self) -> jax.stages.Lowered:
    """Traces the stage for the current mesh."""
    return self.function.lower(*self.args)


def declare(run: Run) -> dict[str, Declaration]:
  """Declares the stages of the run's step, in the order of their data flow."""
  c, method, bind = run.config, run.method, functools.partial
  config = update_config(run)
  stages = {
    "choose_prompts": Declaration(
      bind(
        collect.choose_prompts, method=method, group_size=c.rollout.group_size
      ),
      args="rng history ids limit costs",
      out="kept sizes",
    ),
    "to_inference_params": Declaration(
      bind(parameters.to_inference_params, config=inference_model(run)),
      args="params",
      out="inference_params",
    ),
    "roll_out": Declaration(
      _roll_out(run, max(c.rollout.draft_tokens, 0)),
      args="inference_params prompts rng kept sizes",
      out="rollout",
    ),
    "update_history": Declaration(
      bind(
        collect.update_history, method=method, num_problems=len(run.train_set)
      ),
      args="history step draws rollout rewards correct",
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
    "update": Declaration(
      bind(update.update, config=config, optimizer=optimizer(run)),
      args="state reference batch num_micro denominator"
      + (" rng select_info" if method.noise_every else ""),
      out="state update_info",
      donate="state",
    ),
  }
  if c.rollout.draft_tokens < 0:
    stages["roll_out_drafts"] = stages["roll_out"]._replace(
      function=_roll_out(run, AUTOMATIC)
    )
  if not tokens.is_needed(method, config):
    del stages["score"]
  if method.dynamic_sampling:
    stages["init_buffer"] = Declaration(
      dynamic_sampling.init_buffer, "prompts rollout rewards", "buffer"
    )
    stages["add_groups"] = Declaration(
      bind(collect.add_groups, rule=method.dynamic_sampling),
      args="buffer prompts rollout rewards",
      out="buffer limit denominator",
      donate="buffer",
    )
  return stages


def _roll_out(run: Run, draft_tokens: int) -> Callable[..., Any]:
  r = run.config.rollout
  return functools.partial(
    rollout.roll_out,
    model_config=inference_model(run),
    sampling=_sampling(run),
    group_size=r.group_size,
    num_slots=r.num_slots,
    draft_tokens=draft_tokens,
    platform=run.platform,
  )


def programs(run: Run) -> dict[str, Program]:
  """Returns a program for each stage that the run needs."""
  values, table = abstract_values.inputs(run), {}
  for name, stage in declare(run).items():
    args, out = stage.args.split(), stage.out.split()
    inputs, has_one = tuple(values[x] for x in args), len(out) == 1
    if not values.keys() >= set(out):
      results = jax.eval_shape(stage.function, *inputs)
      for x, value in zip(out, [results] if has_one else results, strict=True):
        values.setdefault(x, abstract_values.place(run, x, value))
    places = tuple(abstract_values.shardings_of(values[x]) for x in out)
    jitted = jax.jit(
      stage.function,
      out_shardings=places[0] if has_one else places,
      donate_argnums=[args.index(x) for x in stage.donate.split()],
    )
    table[name] = Program(jitted, inputs)
  if run.eval_sets:
    samples = run.config.eval.samples
    table["evaluate"] = evaluation_program(run, samples)
    if samples:  # the first and the last evaluation are greedy too
      table["evaluate_greedy"] = evaluation_program(run, 0)
  return table


def update_config(run: Run) -> update.UpdateConfig:
  """Returns the constants of the run's update."""
  c = run.config
  return update.UpdateConfig(
    model=run.model,
    objective=run.objective,
    temperature=c.rollout.temperature,
    inner_updates=c.objective.inner_updates,
    mini_batches=c.objective.mini_batches,
    clip_norm=c.optimizer.clip_norm,
    noise_every=run.method.noise_every,
    momentum=0.0 if c.optimizer.function else MOMENTUM,
    samples_policy=(c.rollout.dtype or c.model.dtype) == c.model.dtype
    and not c.rollout.top_k
    and c.rollout.top_p == 1,
  )


def evaluation_program(run: Run, samples: int) -> Program:
  """Returns the program that rolls out evaluation problems.

  Args:
    samples: completions of each problem; 0 decodes one greedily.
  """
  c, sampling = run.config, _sampling(run)
  if not samples:
    sampling = sampling._replace(temperature=0.0)
  problems = next(iter(run.eval_sets.values()))  # all are of one width
  size = sharding.round_up(
    c.eval.prompts, sharding.num_shards(run.mesh, "batch")
  )
  rng = jax.eval_shape(lambda: rng_at(run.root_key, 0, Stage.EVALUATE))
  model = inference_model(run)

  def evaluate(params, prompts, rng):
    return rollout.sample(
      params,
      model,
      prompts,
      rng,
      group_size=samples or 1,
      # The mode evaluate knows no memory for training to choose slots by.
      num_slots=c.rollout.num_slots or 64,
      platform=run.platform,
      **sampling._asdict(),
    )

  args = (
    abstract_params(run),
    abstract_values.abstract_prompts(run, problems, size),
    abstract_values.place(run, "", rng),
  )
  places = sharding.sharding(run.mesh)
  return Program(jax.jit(evaluate, out_shardings=places), args)


def _sampling(run: Run) -> rollout.Sampling:
  r = run.config.rollout
  return rollout.Sampling(
    r.max_tokens, run.stop_ids, r.temperature, r.top_k, r.top_p
  )


def compile_programs(
  programs: dict[str, Program],
  mesh: jax.sharding.Mesh,
  task: progress.Task | None = None,
) -> dict[str, jax.stages.Compiled]:
  """Compiles programs for `mesh`, with one thread per core."""
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

  Level 1 compiles in an eighth less time and runs no slower where measured. A
  level that XLA_FLAGS names is kept.
  """
  level = "xla_backend_optimization_level"
  is_ours = platform == "cpu" and level not in os.environ.get("XLA_FLAGS", "")
  options: dict[str, Any] = {level: 1} if is_ours else {}
  return lowered.compile(options)
