"""The train state that a run begins or resumes with."""

import jax

from dppo_jax.metrics.writer import Writer
from dppo_jax.models import parameters
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint, checkpoint_steps, sft
from dppo_jax.run.setup import Run
from dppo_jax.step import abstract_values, runtime_checks


def first_state(run: Run, writer: Writer) -> TrainState:
  """Returns the state of a new run, after supervised fine-tuning if any.

  Raises:
    UserError: for weights that are not finite.
  """
  params = _first_params(run, writer)
  state = abstract_values.new_train_state(run.spec, params)
  runtime_checks.check_params(
    state.params,
    "lower config.sft.steps"
    if run.config.sft.needs_solutions
    else "check the checkpoint that config.model or config.sft.from_run names",
  )
  return state


def resumed_state(
  run: Run, checkpoints: checkpoint.Checkpoints, step: int
) -> TrainState:
  """Returns the state of a checkpoint.

  Raises:
    UserError: for weights that are not finite.
  """
  like = abstract_values.abstract_train_state(run.spec)
  state = checkpoints.restore(step, like)
  runtime_checks.check_params(
    state.params,
    f"delete the checkpoint of step {step} to resume from the one before",
  )
  return state


def reference_params(
  run: Run, checkpoints: checkpoint.Checkpoints
) -> parameters.Params | None:
  """Returns the weights of step 0 if a KL penalty needs a copy of them."""
  if not run.spec.has_reference:
    return None
  checkpoints.wait()
  like = abstract_values.abstract_params(run.spec)
  return checkpoints.restore_params(0, like)


def _first_params(run: Run, writer: Writer) -> parameters.Params:
  """Loads or initialises the weights, and fine-tunes them if asked to.

  All weights are fine-tuned, before there are adapters.
  """
  from_run, steps = run.config.sft.from_run, run.config.sft.steps
  if run.spec.model.lora and (from_run or steps):
    params = _first_params(run.without_adapters(), writer)
    return run.add_adapters(params)
  if from_run:
    workdir, step = checkpoint_steps.split_step(from_run)
    writer.say(f"starting from the weights of {workdir} after step {step}")
    with checkpoint.Checkpoints(workdir, read_only=True) as other:
      like = abstract_values.abstract_params(run.spec)
      return other.restore_params(step, like)
  model = run.config.model
  is_stored = model.path or model.hub_id
  with writer.bar.task(f"{'reading' if is_stored else 'initialising'} weights"):
    params = jax.block_until_ready(run.initial_params())
  return (
    sft.run(run, params, steps, writer.say, writer.bar) if steps else params
  )
