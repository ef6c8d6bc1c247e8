"""Supervised steps on worked solutions, for starting from nothing.

Maximum likelihood is the surrogate with every advantage 1 and the ratio at 1,
so a warm-up step is an update on rows whose completions are solutions.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import batch as batches
from dppo_jax import buckets, keys, update
from dppo_jax.algo import objectives
from dppo_jax.data import ProblemSet, draw
from dppo_jax.models import transformer
from dppo_jax.records import Rollout, Selection, TrainState
from dppo_jax.tokenizer import Tokenizer


def run(
  params: transformer.Params,
  problems: ProblemSet,
  tokenizer: Tokenizer,
  stop_id: int,
  root_key: jax.Array,
  *,
  model_config: transformer.ModelConfig,
  rows: batches.Rows,
  head_tokens: int,
  steps: int,
  sequences_per_step: int,
  direct_share: float,
  learning_rate: float,
  say: Callable[[str], None],
) -> transformer.Params:
  """Weights that imitate the problems' solutions.

  Args:
    params: donated.
    stop_id: ends every solution.
    direct_share: share of sequences that state the boxed answer alone.
    say: receives a line now and then.
  Raises:
    ValueError: where a solution fits no row.
    FloatingPointError: where the gradient stays non-finite.
  """
  optimizer = update.make_optimizer(
    learning_rate, steps, "cosine", ramp_steps=min(50, steps // 4)
  )
  tokens, lengths = solutions(problems, tokenizer, stop_id)
  longest = problems.tokens.shape[1] + tokens.shape[-1] - 1
  if longest > rows.length:
    raise ValueError(
      f"a prompt and its solution may take {longest} cells but a row holds "
      f"{rows.length}: raise config.pack.row_length"
    )

  @functools.partial(jax.jit, donate_argnums=(0,))
  def step(state, prompts, tokens, lengths):
    tokens, lengths = tokens[:, None], lengths[:, None]
    likelihood = Rollout(
      prompt_ids=prompts.ids,
      tokens=tokens,
      logprobs=jnp.zeros(tokens.shape, jnp.float32),
      lengths=lengths,
      is_stopped=lengths > 0,
      kept=Selection(lengths[:, 0] > 0, jnp.ones(lengths.shape[:1])),
      slot_steps=jnp.int32(0),
    )
    ones = jnp.ones(lengths.shape, jnp.float32)
    micro, num_used, _ = batches.pack(prompts, likelihood, ones, ones, rows)
    return update.update(
      state,
      None,
      micro,
      num_used,
      lengths.sum().astype(jnp.float32),
      settings=update.Settings(
        model=model_config,
        objective=objectives.grpo(),
        head_tokens=head_tokens,
      ),
      optimizer=optimizer,
    )

  opt_state = jax.jit(optimizer.init)(params)
  state = TrainState(jnp.int32(0), jnp.int32(0), params, opt_state, history=())
  order = keys.draw_at(root_key, 0, keys.Room.DATA).key
  for i in range(steps):
    at = keys.draw_at(root_key, i, keys.Room.WARMUP)
    prompts = draw(problems, order, i, sequences_per_step)
    is_direct = np.asarray(
      jax.random.uniform(at.key, prompts.ids.shape) < direct_share, int
    )
    at_ids = (is_direct, prompts.ids)
    state, info = step(state, prompts, tokens[at_ids], lengths[at_ids])
    if (i + 1) % max(1, steps // 5) == 0:
      if info["update/skipped_in_a_row"] >= update.MAX_SKIPPED:
        raise FloatingPointError(
          f"the gradient of warm-up step {i + 1} and of those before it was "
          "not finite: lower config.warmup.learning_rate"
        )
      say(
        f"warm-up step {i + 1} of {steps}: "
        f"{-float(info['update/logprob']):.3f} nats per token"
      )
  return state.params


def solutions(
  problems: ProblemSet, tokenizer: Tokenizer, stop_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens `[2, M, T]` and lengths `[2, M]` of worked and direct solutions.

  A direct solution is the boxed answer. It stands in for a worked one that a
  problem lacks.
  """
  worked = [
    solution or answer
    for solution, answer in zip(
      problems.solutions, problems.direct_solutions, strict=True
    )
  ]
  ids = [
    [[*tokenizer.encode(text), stop_id] for text in texts]
    for texts in (worked, problems.direct_solutions)
  ]
  lengths = np.array([[len(row) for row in rows] for rows in ids], np.int32)
  width = buckets.round_up(int(lengths.max()), 8)
  tokens = np.zeros((*lengths.shape, width), np.int32)
  for kind, rows in enumerate(ids):
    for i, row in enumerate(rows):
      tokens[kind, i, : len(row)] = row
  return tokens, lengths
