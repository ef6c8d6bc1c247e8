"""Samples of a trained policy, and gradients of single completions.

Letters are those of `dppo_jax.records`.
"""

from collections.abc import Callable
import functools
import pathlib

import jax
from jax import flatten_util
import jax.numpy as jnp

from dppo_jax import algo, data, rollout
from dppo_jax.models import parameters
from dppo_jax.records import PromptBatch, Rollout
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import checkpoint
from dppo_jax.run.setup import Run
from dppo_jax.step import abstract_values, grade, pack, update


def restore(
  run: Run, workdir: pathlib.Path, step: int, num_prompts: int
) -> tuple[parameters.Params, PromptBatch]:
  """Returns the weights of a checkpoint, and the first prompts of the run."""
  with checkpoint.Checkpoints(workdir, keep=2) as checkpoints:
    params = checkpoints.restore_params(
      step, abstract_values.abstract_train_state(run.spec).params
    )
  prompts = data.draw(run.train_set, run.spec.root_key, 0, num_prompts)
  return params, jax.tree.map(jnp.asarray, prompts)


def sample(
  run: Run, params: parameters.Params, prompts: PromptBatch, draw: int
) -> tuple[Rollout, jax.Array]:
  """Samples completions of the prompts; returns them and rewards `[Q, G]`.

  Args:
    draw: number of the draw; each gives other completions.
  """
  r = run.config.rollout
  draw_all = functools.partial(
    rollout.sample,
    model_config=run.spec.model,
    group_size=r.group_size,
    max_tokens=r.max_tokens,
    temperature=r.temperature,
    num_slots=r.num_slots,
    stop_ids=run.spec.sampling.stop_ids,
    platform=run.spec.platform,
  )
  rng = rng_at(run.spec.root_key, draw, Stage.ROLLOUT)
  sampled = jax.jit(draw_all)(params, prompts=prompts, rng=rng)
  with run.make_grader() as grader:
    graded = grade.grade(sampled, run.train_set, run.tokenizer, grader)
  return sampled, jnp.asarray(graded.rewards)


def gradient_of(
  run: Run,
  params: parameters.Params,
  prompts: PromptBatch,
  sampled: Rollout,
  scale: jax.Array,
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
  """Returns a function `(u, start, end) -> gradient` of some tokens.

  The gradient is that of tokens `start` to `end` of completion `u`, counted
  through all groups, at advantage 1 and as one vector.

  Args:
    scale: `[Q, G]`, factor on each token's loss.
  """
  config = run.spec.update_config
  longest = prompts.tokens.shape[1] + sampled.tokens.shape[2] - 1
  spec = algo.PackingSpec(longest, rows_per_micro=1, window=1)

  def gradient(u, start, end):
    q, g = jnp.divmod(u, sampled.lengths.shape[1])
    one = lambda x: x[q, g][None, None]
    packed, num_micro, _ = pack(
      jax.tree.map(lambda x: x[q][None], prompts),
      sampled.replace(
        tokens=one(sampled.tokens),
        logprobs=one(sampled.logprobs),
        lengths=one(sampled.lengths),
      ),
      jnp.ones((1, 1)),
      one(scale),
      spec,
    )
    number = packed.is_trained.cumsum(axis=-1) - 1  # of the token
    is_in = (number >= start) & (number < end)
    packed = packed.replace(weights=jnp.where(is_in, packed.weights, 0.0))
    sums = update.sum_gradients(packed, num_micro, params, None, config)
    return flatten_util.ravel_pytree(sums.grad)[0]

  return gradient
