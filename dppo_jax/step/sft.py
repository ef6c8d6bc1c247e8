"""Supervised fine-tuning on worked solutions, for starting from nothing.

Maximum likelihood is the surrogate with every advantage 1 and the ratio at 1,
so a supervised step is an update on rows whose completions are solutions.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dppo_jax.algo import objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.data import problems as data
from dppo_jax.data.tokenizer import Tokenizer
from dppo_jax.metrics import progress
from dppo_jax.models import transformer
from dppo_jax.records import PromptBatch, Rollout, Selection, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import distributed, runtime_checks
from dppo_jax.step import update
from dppo_jax.step.optimizer import make_optimizer
from dppo_jax.step.pack import pack


def run(
  params: transformer.Params,
  problems: data.ProblemSet,
  tokenizer: Tokenizer,
  stop_id: int,
  root_key: jax.Array,
  *,
  model_config: transformer.ModelConfig,
  spec: PackingSpec,
  logit_chunk: int,
  steps: int,
  sequences_per_step: int,
  direct_share: float,
  learning_rate: float,
  say: Callable[[str], None],
  bar: progress.Progress,
) -> transformer.Params:
  """Weights that imitate the problems' solutions.

  Args:
    params: donated.
    stop_id: ends every solution.
    direct_share: share of sequences that state the boxed answer alone.
    say: receives a line now and then.
    bar: shows the steps as they go.
  Raises:
    ValueError: where a solution fits no row.
    FloatingPointError: where the gradient stays non-finite.
  """
  optimizer = make_optimizer(
    learning_rate, steps, "cosine", warmup_steps=min(50, steps // 4)
  )
  tokens, lengths = data.tokenize_solutions(
    problems, tokenizer, stop_id, spec.row_length
  )
  data_key = rng_at(root_key, 0, Stage.DATA).key

  def draw(i: int) -> tuple[PromptBatch, np.ndarray, np.ndarray]:
    rng = rng_at(root_key, i, Stage.SFT)
    prompts = data.draw(problems, data_key, i, sequences_per_step)
    is_direct = np.asarray(
      jax.random.uniform(rng.key, prompts.ids.shape) < direct_share, int
    )
    chosen = (is_direct, prompts.ids)
    return prompts, tokens[chosen], lengths[chosen]

  state, places = _first_state(params, optimizer)
  with bar.task("compiling the supervised step"):
    step = functools.partial(
      sft_step,
      spec=spec,
      config=update.UpdateConfig(
        model=model_config,
        objective=objectives.grpo(),
        logit_chunk=logit_chunk,
      ),
      optimizer=optimizer,
    )
    step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
    step = step.lower(state, *draw(0)).compile()
  distributed.gather(None)  # as compile_programs does
  with bar.steps("supervised step", steps) as shown:
    for done in range(1, steps + 1):
      state, info = step(state, *draw(done - 1))
      # Now and then: to read a metric is to wait for it.
      if done % max(1, steps // 100) == 0:
        note = f"{-float(info.logprob):.3f} nats per token"
        shown.advance(done, note)
      if done % max(1, steps // 5) == 0:
        if info.num_skipped_in_a_row >= runtime_checks.MAX_SKIPPED:
          raise FloatingPointError(
            f"the gradient of supervised step {done} and of those before it "
            "was not finite: lower config.sft.learning_rate"
          )
        say(f"supervised step {done} of {steps}: {note}")
  return state.params


def _first_state(
  params: transformer.Params, optimizer: optax.GradientTransformation
) -> tuple[TrainState, TrainState]:
  """What the first step starts from, and where each array of it lies.

  What the optimizer keeps of a weight lies where the weight does; None is any
  place.
  """
  places = jax.tree.map(lambda x: x.sharding, params)
  opt_places = optax.tree_utils.tree_map_params(
    optimizer,
    lambda _, place: place,
    jax.eval_shape(optimizer.init, params),
    places,
    transform_non_params=lambda _: None,
  )
  opt_state = jax.jit(optimizer.init, out_shardings=opt_places)(params)
  return (
    TrainState(jnp.int32(0), jnp.int32(0), params, opt_state, history=()),
    TrainState(None, None, places, opt_places, history=()),
  )


def sft_step(
  state: TrainState,
  prompts: PromptBatch,
  tokens: jax.Array,
  lengths: jax.Array,
  *,
  spec: PackingSpec,
  config: update.UpdateConfig,
  optimizer,
):
  """One supervised update on solutions `[N, T]` of `[N]` prompts."""
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
  batch, num_used, _ = pack(prompts, solutions, ones, ones, spec)
  return update.update(
    state,
    None,
    batch,
    num_used,
    lengths.sum().astype(jnp.float32),
    config=config,
    optimizer=optimizer,
  )
