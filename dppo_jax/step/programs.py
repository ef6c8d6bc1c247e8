"""The compiled stages of a step: functions, abstract arguments, shardings.

Each stage is declared once, in `STAGES`: its arguments are the parameters of
its function, so that renaming one connects it to another value. Shapes and
shardings of arguments and results are looked up by name in one table.
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
from dppo_jax.step import (
  abstract_values,
  collect,
  optimizer,
  select,
  tokens,
  update,
)
from dppo_jax.step.spec import StepSpec


class Stage(NamedTuple):
  """A stage of a step, and the names of its results.

  Attributes:
    function: pure function of arrays and, if it has that argument, `spec`.
    out: names in the table of abstract values, separated by spaces.
    donate: names of the arguments whose memory may be reused.
    is_needed: `spec -> bool`, true if the step has this stage.
  """

  function: Callable[..., Any]
  out: str
  donate: str = ""
  is_needed: Callable[[StepSpec], Any] = lambda spec: True


_has_budget = lambda spec: spec.method.budget
_samples_again = lambda spec: spec.method.dynamic_sampling
# In the order of their data flow.
STAGES = {
  "choose_prompts": Stage(collect.choose_prompts, "kept"),
  "to_inference_params": Stage(collect.to_inference_params, "inference_params"),
  "roll_out": Stage(collect.roll_out, "rollout"),
  "update_history": Stage(collect.update_history, "history draws", "history"),
  "init_buffer": Stage(
    dynamic_sampling.init_buffer, "buffer", is_needed=_samples_again
  ),
  "add_groups": Stage(
    collect.add_groups, "buffer limit denominator", "buffer", _samples_again
  ),
  "select": Stage(select.select, "batch num_micro select_metrics summary"),
  "forecast": Stage(select.forecast, "forecast", is_needed=_has_budget),
  "score": Stage(
    tokens.score, "batch score_metrics", "batch", tokens.is_needed
  ),
  "momentum_square": Stage(
    optimizer.momentum_square, "sum", is_needed=_has_budget
  ),
  "signed_square": Stage(update.signed_square, "sum", is_needed=_has_budget),
  "update": Stage(update.update, "state update_metrics", "state"),
}

# Traces a jitted stage for the current mesh; its keywords are the arguments.
Program = functools.partial[jax.stages.Lowered]


def step_programs(spec: StepSpec) -> dict[str, Program]:
  """Returns a program for each stage of a step."""
  values: dict[str, Any] = abstract_values.inputs(spec)
  table: dict[str, Program] = {}
  for name, stage in STAGES.items():
    if not stage.is_needed(spec):
      continue
    function, out = stage.function, stage.out.split()
    names = list(inspect.signature(function).parameters)
    if "spec" in names:
      names.remove("spec")
      function = functools.partial(function, spec=spec)
    args, has_one = {x: values[x] for x in names}, len(out) == 1
    if not values.keys() >= set(out):
      results = jax.eval_shape(function, **args)
      for x, value in zip(out, [results] if has_one else results, strict=True):
        values.setdefault(x, abstract_values.with_sharding(spec, x, value))
    places = tuple(abstract_values.shardings_of(values[x]) for x in out)
    jitted = jax.jit(
      function,
      out_shardings=places[0] if has_one else places,
      donate_argnames=stage.donate.split(),
      compiler_options=compiler_options(spec.platform),
    )
    table[name] = functools.partial(jitted.lower, **args)
  return table


def evaluation_program(
  spec: StepSpec, num_prompts: int, width: int, samples: int
) -> Program:
  """Returns the program that rolls out evaluation problems.

  Args:
    num_prompts: problems in a batch, a multiple of the devices.
    width: tokens of a prompt with its padding.
    samples: completions of each problem; 0 decodes one greedily.
  """
  sampling = spec.sampling
  if not samples:
    sampling = sampling._replace(temperature=0.0)

  def evaluate(params, prompts, rng):
    return rollout.sample(
      params,
      spec.model,
      prompts,
      rng,
      group_size=samples or 1,
      # The mode evaluate knows no memory for training to choose slots by.
      num_slots=spec.num_slots or 64,
      **sampling._asdict(),
    )

  args = {
    "params": abstract_values.abstract_params(spec),
    "prompts": abstract_values.abstract_prompts(spec, num_prompts, width),
    "rng": abstract_values.abstract_rng(spec),
  }
  places = sharding.sharding(spec.mesh)
  options = compiler_options(spec.platform)
  jitted = jax.jit(evaluate, out_shardings=places, compiler_options=options)
  return functools.partial(jitted.lower, **args)


def compile_programs(
  programs: dict[str, Program], task: progress.Task | None = None
) -> dict[str, jax.stages.Compiled]:
  """Compiles programs, with one thread per core."""
  task = task or progress.Task("compiling")
  task.num_parts = len(programs) + 1
  with task.part("tracing"):
    lowered = {name: program() for name, program in programs.items()}

  def compile_one(name: str) -> jax.stages.Compiled:
    with task.part(name):
      return lowered[name].compile()

  # With more threads than cores, compiling takes longer.
  with futures.ThreadPoolExecutor(distributed.num_cores()) as pool:
    compiled = list(pool.map(compile_one, lowered))
  # A process with a warm compilation cache is far ahead of the others, and on
  # CPU the first message between two processes times out after 30 seconds.
  distributed.gather(None)
  return dict(zip(lowered, compiled, strict=True))


def compiler_options(platform: str) -> dict[str, Any]:
  """Returns XLA's options for `platform`: on a CPU, optimisation level 1.

  Level 1 compiles random weights in a third of the time of the default and
  other programs in an eighth less, which run no slower where measured. A level
  that XLA_FLAGS names is kept.
  """
  level = "xla_backend_optimization_level"
  is_ours = platform == "cpu" and level not in os.environ.get("XLA_FLAGS", "")
  return {level: 1} if is_ours else {}
