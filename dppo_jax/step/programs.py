"""The compiled stages of a step: functions, abstract arguments, shardings.

Each stage is declared once, in `declare`: its arguments are the positional
parameters of its function. Shapes and shardings of arguments and results are
looked up by name in one table.
"""

from collections.abc import Callable
from concurrent import futures
import functools
import inspect
import os
from typing import Any, NamedTuple

import jax

from dppo_jax import distributed, rollout, sharding
from dppo_jax.methods import dynamic_sampling
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.rng import Stage, rng_at
from dppo_jax.rollout.drafts import AUTOMATIC
from dppo_jax.step import abstract_values, collect, select, tokens, update
from dppo_jax.step.spec import StepSpec


class Declaration(NamedTuple):
  """A stage, and the names of its results.

  Attributes:
    function: pure function of arrays.
    out: names in the table of abstract values, separated by spaces.
    donate: names of the arguments whose memory may be reused.
  """

  function: Callable[..., Any]
  out: str
  donate: str = ""

  @property
  def args(self) -> list[str]:
    """The parameters of the function, without those that are bound."""
    return [
      name
      for name, x in inspect.signature(self.function).parameters.items()
      if x.kind is x.POSITIONAL_OR_KEYWORD
    ]


class Program(NamedTuple):
  """A jitted stage, and the abstract arguments to compile it for, by name."""

  function: Any
  args: dict[str, Any]

  def lower(self) -> jax.stages.Lowered:
    """Traces the stage for the current mesh."""
    return self.function.lower(**self.args)


def declare(spec: StepSpec) -> dict[str, Declaration]:
  """Declares the stages of a step, in the order of their data flow."""
  method, config, bind = spec.method, spec.update_config, functools.partial
  stages = {
    "choose_prompts": Declaration(
      bind(collect.choose_prompts, method=method), out="kept"
    ),
    "to_inference_params": Declaration(
      bind(parameters.to_inference_params, config=spec.sampler),
      out="inference_params",
    ),
    "roll_out": Declaration(
      _roll_out(spec, max(spec.draft_tokens, 0)), out="rollout"
    ),
    "update_history": Declaration(
      bind(
        collect.update_history, method=method, num_problems=spec.num_problems
      ),
      out="history draws",
      donate="history",
    ),
    "select": Declaration(
      bind(
        select.select,
        method=method,
        objective=spec.objective,
        spec=spec.packing,
        overlong_tokens=spec.overlong_tokens,
        mask_truncated=spec.mask_truncated,
        num_parts=spec.mini_batches,
      ),
      out="batch num_micro select_info summary",
    ),
    "score": Declaration(
      bind(tokens.score, method=method, config=config),
      out="batch score_info",
      donate="batch",
    ),
    "update": Declaration(
      bind(update.update, config=config, optimizer=spec.optimizer),
      out="state update_info",
      donate="state",
    ),
  }
  if spec.draft_tokens < 0:
    stages["roll_out_drafts"] = Declaration(
      _roll_out(spec, AUTOMATIC), out="rollout"
    )
  if not tokens.is_needed(method, config):
    del stages["score"]
  if method.dynamic_sampling:
    stages["init_buffer"] = Declaration(
      dynamic_sampling.init_buffer, out="buffer"
    )
    stages["add_groups"] = Declaration(
      bind(collect.add_groups, rule=method.dynamic_sampling),
      out="buffer limit denominator",
      donate="buffer",
    )
  return stages


def step_programs(spec: StepSpec) -> dict[str, Program]:
  """Returns a program for each stage of a step."""
  values, table = abstract_values.inputs(spec), {}
  for name, stage in declare(spec).items():
    args, out = {x: values[x] for x in stage.args}, stage.out.split()
    has_one = len(out) == 1
    if not values.keys() >= set(out):
      results = jax.eval_shape(stage.function, **args)
      for x, value in zip(out, [results] if has_one else results, strict=True):
        values.setdefault(x, abstract_values.with_sharding(spec, x, value))
    places = tuple(abstract_values.shardings_of(values[x]) for x in out)
    jitted = jax.jit(
      stage.function,
      out_shardings=places[0] if has_one else places,
      donate_argnames=stage.donate.split(),
    )
    table[name] = Program(jitted, args)
  return table


def evaluation_program(
  spec: StepSpec, num_prompts: int, width: int, samples: int
) -> Program:
  """Returns the program that rolls out evaluation problems.

  Args:
    num_prompts: problems in a batch, rounded up to a multiple of the devices.
    width: tokens of a prompt with its padding.
    samples: completions of each problem; 0 decodes one greedily.
  """
  sampling = spec.sampling
  if not samples:
    sampling = sampling._replace(temperature=0.0)
  num = sharding.round_up(num_prompts, sharding.num_shards(spec.mesh, "batch"))
  rng = jax.eval_shape(lambda: rng_at(spec.root_key, 0, Stage.EVALUATE))

  def evaluate(params, prompts, rng):
    return rollout.sample(
      params,
      spec.sampler,
      prompts,
      rng,
      group_size=samples or 1,
      # The mode evaluate knows no memory for training to choose slots by.
      num_slots=spec.num_slots or 64,
      platform=spec.platform,
      **sampling._asdict(),
    )

  args = {
    "params": abstract_values.abstract_params(spec),
    "prompts": abstract_values.abstract_prompts(spec, num, width),
    "rng": abstract_values.with_sharding(spec, "", rng),
  }
  places = sharding.sharding(spec.mesh)
  return Program(jax.jit(evaluate, out_shardings=places), args)


def _roll_out(spec: StepSpec, draft_tokens: int) -> Callable[..., Any]:
  return functools.partial(
    rollout.roll_out,
    model_config=spec.sampler,
    sampling=spec.sampling,
    group_size=spec.group_size,
    num_slots=spec.num_slots,
    draft_tokens=draft_tokens,
    platform=spec.platform,
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
