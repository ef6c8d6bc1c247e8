"""First weights of a run, and supervised fine-tuning on worked solutions.

Maximum likelihood is the surrogate with every advantage 1 and the ratio at 1,
so a supervised step is an update on rows whose completions are solutions.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import config as configs
from dppo_jax import data, distributed
from dppo_jax.algo import objectives
from dppo_jax.errors import UserError
from dppo_jax.files import bucket
from dppo_jax.metrics import progress
from dppo_jax.metrics.writer import Silent, Writer
from dppo_jax.models import parameters
from dppo_jax.records import PromptBatch, Rollout, Scalar, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import checkpoint, checkpoint_steps
from dppo_jax.run.setup import Run
from dppo_jax.step import abstract_values, programs, runtime_checks, update
from dppo_jax.step.optimizer import make_optimizer
from dppo_jax.step.pack import pack
from dppo_jax.step.spec import StepSpec

SEQUENCES_PER_STEP = 64
RATE_OF_CHECKPOINTS, RATE_OF_RANDOM_WEIGHTS = 1e-5, 3e-3


def first_state(
  run: Run, options: configs.SftConfig, writer: Writer | Silent
) -> TrainState:
  """Returns the state of a new run, after supervised fine-tuning if any.

  Raises:
    UserError: for weights that are not finite.
  """
  params = _first_params(run, options, writer)
  state = abstract_values.new_train_state(run.spec, params)
  runtime_checks.check_params(
    state.params,
    "lower config.sft.learning_rate"
    if options.needs_solutions
    else "check the checkpoint that config.model or config.sft.from_run names",
  )
  return state


def _first_params(
  run: Run, options: configs.SftConfig, writer: Writer | Silent
) -> parameters.Params:
  """Loads or initialises the weights, and fine-tunes them if asked to.

  All weights are fine-tuned, before there are adapters.
  """
  from_run, steps = options.from_run, options.steps
  if run.spec.model.lora and (from_run or steps):
    params = _first_params(run.without_adapters(), options, writer)
    return run.add_adapters(params)
  if from_run:
    workdir, step = checkpoint_steps.split_step(from_run)
    source = bucket.shown(workdir)
    writer.say(f"starting from the weights of {source} after step {step}")
    with checkpoint.Checkpoints(workdir, read_only=True) as other:
      like = abstract_values.abstract_params(run.spec)
      return other.restore_params(step, like)
  with writer.bar.task(f"{'reading' if run.path else 'initialising'} weights"):
    params = jax.block_until_ready(run.initial_params())
  if not steps:
    return params
  rate = options.learning_rate
  return tune(run, params, steps, writer.say, writer.bar, rate)


def tune(
  run: Run,
  params: parameters.Params,
  steps: int,
  say: Callable[[str], None],
  bar: progress.Progress,
  rate: float = 0.0,
) -> parameters.Params:
  """Fine-tunes weights on the solutions of the training problems.

  Args:
    params: initial weights, donated.
    rate: peak learning rate; 0 for the usual rate of such weights.
  Raises:
    UserError: if a solution fits no row or has tokens that the model lacks, or
      if a gradient or a weight is not finite.
  """
  rate = rate or (RATE_OF_CHECKPOINTS if run.path else RATE_OF_RANDOM_WEIGHTS)
  optimizer = make_optimizer(
    rate, steps, "cosine", warmup_steps=min(50, steps // 4)
  )
  spec = dataclasses.replace(
    run.spec,
    objective=objectives.grpo(),
    sampling=run.spec.sampling._replace(temperature=1.0),
    optimizer=optimizer,
    inner_updates=1,
    mini_batches=1,
  )
  state = abstract_values.new_train_state(spec, params)
  draw = _sampler(run)
  with bar.task("compiling the supervised step"):
    jitted = jax.jit(
      functools.partial(sft_step, spec=spec),
      donate_argnums=0,
      out_shardings=(abstract_values.shardings_of(state), None),
      compiler_options=programs.compiler_options(spec.platform),
    )
    step = jitted.lower(state, *draw(0)).compile()
  distributed.gather(None)  # see compile_programs
  with bar.steps("supervised step", steps) as shown:
    for done in range(1, steps + 1):
      state, metrics = step(state, *draw(done - 1))
      is_shown = done % max(1, steps // 5) == 0
      # Reading a metric waits for it.
      if is_shown or done % max(1, steps // 100) == 0 or done == steps:
        note = f"{-float(metrics['update/logprob']):.3f} nats per token"
        shown.advance(done, note)
        skipped = int(metrics["update/skipped"])
        num_nonfinite = int(metrics["update/nonfinite_params"])
        if skipped or num_nonfinite:
          raise UserError(
            f"{skipped} of {done} supervised gradients and {num_nonfinite} "
            f"weights are infinite or NaN: the rate of {rate:g} may be too "
            "high, see config.sft.learning_rate; or compute in float32 with "
            "config.model.dtype"
          )
      if is_shown:
        say(f"supervised step {done} of {steps}: {note}")
  return state.params


def _sampler(
  run: Run,
) -> Callable[[int], tuple[PromptBatch, np.ndarray, np.ndarray]]:
  """Returns a function from a step to its prompts, solutions and lengths."""
  problems, spec = run.train_set, run.spec
  tokens, lengths = data.problems.tokenize_solutions(
    problems, run.tokenizer, spec.sampling.stop_ids[0], spec.packing.row_length
  )
  if (largest := int(tokens.max())) >= spec.model.vocab:
    at = np.argwhere(tokens == largest)[0][1]
    raise UserError(
      f"the solution of {problems.names[at]} has the token {largest} but the "
      f"model has {spec.model.vocab}: choose the checkpoint's own tokenizer in "
      "config.model.path, or set config.sft.steps to 0"
    )
  data_key = rng_at(spec.root_key, 0, Stage.DATA).key
  num = min(SEQUENCES_PER_STEP, len(problems))

  def draw(step: int) -> tuple[PromptBatch, np.ndarray, np.ndarray]:
    prompts = data.draw(problems, data_key, step, num)
    rng = rng_at(spec.root_key, step, Stage.SFT)
    uniform = np.asarray(jax.random.uniform(rng.key, prompts.ids.shape))
    chosen = ((uniform < problems.direct_share).astype(int), prompts.ids)
    return prompts, tokens[chosen], lengths[chosen]

  return draw


def sft_step(
  state: TrainState,
  prompts: PromptBatch,
  tokens: jax.Array,
  lengths: jax.Array,
  *,
  spec: StepSpec,
) -> tuple[TrainState, dict[str, Scalar]]:
  """Takes one supervised step on solutions `[N, T]` of `[N]` prompts."""
  tokens, lengths = tokens[:, None], lengths[:, None]
  solutions = Rollout(
    prompt_ids=prompts.ids,
    tokens=tokens,
    logprobs=jnp.zeros(tokens.shape, jnp.float32),
    lengths=lengths,
  )
  ones = jnp.ones(lengths.shape, jnp.float32)
  batch, num_micro, _ = pack(prompts, solutions, ones, ones, spec.packing)
  num_tokens = lengths.sum().astype(jnp.float32)
  return update.update(state, None, batch, num_micro, num_tokens, spec=spec)
