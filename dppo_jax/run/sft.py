"""Supervised fine-tuning on worked solutions, before the first rollout.

Maximum likelihood is the surrogate with every advantage 1 and the ratio at 1,
so a supervised step is an update on rows whose completions are solutions.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dppo_jax import data, distributed
from dppo_jax.algo import objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.records import PromptBatch, Rollout, Selection, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run.setup import Run
from dppo_jax.step import abstract_values, runtime_checks, update
from dppo_jax.step.optimizer import make_optimizer
from dppo_jax.step.pack import pack

SEQUENCES_PER_STEP = 64
LEARNING_RATE = 3e-3
# Fraction of arithmetic solutions that state only the answer, so that the
# initial policy mostly guesses.
ARITHMETIC_DIRECT_SHARE = 0.55


def run(
  run: Run,
  params: parameters.Params,
  steps: int,
  say: Callable[[str], None],
  bar: progress.Progress,
) -> parameters.Params:
  """Fine-tunes weights on the solutions of the training problems.

  Args:
    params: initial weights, donated.
  Raises:
    UserError: if a solution fits no row, or the gradient stays non-finite.
  """
  optimizer = make_optimizer(
    LEARNING_RATE, steps, "cosine", warmup_steps=min(50, steps // 4)
  )
  config = update.UpdateConfig(run.spec.model, objectives.grpo())
  spec = dataclasses.replace(run.spec, optimizer=optimizer)
  state = abstract_values.new_train_state(spec, params)
  draw = _sampler(run)
  with bar.task("compiling the supervised step"):
    jitted = jax.jit(
      functools.partial(
        sft_step, spec=spec.packing, config=config, optimizer=optimizer
      ),
      donate_argnums=0,
      out_shardings=(abstract_values.shardings_of(state), None),
    )
    step = jitted.lower(state, *draw(0)).compile()
  distributed.gather(None)  # see compile_programs
  with bar.steps("supervised step", steps) as shown:
    for done in range(1, steps + 1):
      state, info = step(state, *draw(done - 1))
      # Reading a metric waits for it.
      if done % max(1, steps // 100) == 0:
        note = f"{-float(info.logprob):.3f} nats per token"
        shown.advance(done, note)
      if done % max(1, steps // 5) == 0:
        runtime_checks.check_update(
          done,
          info.nonfinite_params,
          info.skipped_in_a_row,
          "supervised fine-tuning",
        )
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
  data_key = rng_at(spec.root_key, 0, Stage.DATA).key
  num = min(SEQUENCES_PER_STEP, len(problems))
  is_arithmetic = data.arithmetic.is_source(run.config.data.train)
  direct_share = ARITHMETIC_DIRECT_SHARE if is_arithmetic else 0.0

  def draw(step: int) -> tuple[PromptBatch, np.ndarray, np.ndarray]:
    prompts = data.draw(problems, data_key, step, num)
    rng = rng_at(spec.root_key, step, Stage.SFT)
    uniform = np.asarray(jax.random.uniform(rng.key, prompts.ids.shape))
    chosen = ((uniform < direct_share).astype(int), prompts.ids)
    return prompts, tokens[chosen], lengths[chosen]

  return draw


def sft_step(
  state: TrainState,
  prompts: PromptBatch,
  tokens: jax.Array,
  lengths: jax.Array,
  *,
  spec: PackingSpec,
  config: update.UpdateConfig,
  optimizer: optax.GradientTransformation,
) -> tuple[TrainState, update.UpdateInfo]:
  """Takes one supervised step on solutions `[N, T]` of `[N]` prompts."""
  tokens, lengths = tokens[:, None], lengths[:, None]
  solutions = Rollout(
    prompt_ids=prompts.ids,
    tokens=tokens,
    logprobs=jnp.zeros(tokens.shape, jnp.float32),
    lengths=lengths,
    is_stopped=lengths > 0,
    kept=Selection(lengths[:, 0] > 0, jnp.ones(lengths.shape[:1])),
    slot_steps=jnp.int32(0),
  )
  ones = jnp.ones(lengths.shape, jnp.float32)
  batch, num_micro, _ = pack(prompts, solutions, ones, ones, spec)
  num_tokens = lengths.sum().astype(jnp.float32)
  return update.update(
    state,
    None,
    batch,
    num_micro,
    num_tokens,
    config=config,
    optimizer=optimizer,
  )
