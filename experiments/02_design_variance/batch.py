"""The batch that is measured: a fine-tuned model's samples and gradients.

Letters are those of `dppo_jax.records`; `U` = Q * G counts the completions.
"""

import functools
import pathlib
from typing import NamedTuple

import errors
import jax
from jax import flatten_util
import jax.numpy as jnp
import numpy as np

from dppo_jax import data, rollout, train
from dppo_jax.records import Groups, PromptBatch, Rollout
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import checkpoint
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import grade, programs, select, update


class Batch(NamedTuple):
  """A large batch and the gradient of each of its completions.

  Attributes:
    rewards: `[Q, G]`.
    scores: `[U, parameters]`, each completion's gradient at advantage 1.
    products: `[U, U]`, their inner products.
  """

  run: Run
  params: dict
  prompts: PromptBatch
  rollout: Rollout
  rewards: jax.Array
  scores: np.ndarray
  products: np.ndarray

  @property
  def advantages(self) -> jax.Array:
    return self.run.objective.advantage(self.rewards)

  @property
  def factors(self) -> np.ndarray:
    """`[U]`, what the full batch's gradient multiplies the scores by."""
    return np.asarray(self.advantages, np.float64).reshape(-1)

  @property
  def groups(self) -> Groups:
    advantages = self.advantages
    return Groups(
      self.rewards,
      advantages,
      self.rollout.lengths,
      advantages != 0,
      self.run.objective.token_share(self.rollout),
      select.sum_sq_residual(self.rollout),
    )

  @property
  def live_tokens(self) -> np.ndarray:
    """`[U]`, the tokens that a full update trains on."""
    is_live = np.asarray(self.advantages != 0)
    return np.where(is_live, self.rollout.lengths, 0).reshape(-1)

  @property
  def variance(self) -> float:
    """What the choice of these prompts and completions already has.

    The sum over prompts of the squared distance of a prompt's gradient from
    the mean over prompts.
    """
    num, group = self.rewards.shape
    apart = np.zeros((num, num, group))
    apart[np.arange(num), np.arange(num)] = self.factors.reshape(num, group)
    apart = apart.reshape(num, -1)
    return errors.squared_norm(apart - apart.mean(axis=0), self.products).sum()


def prepare(config, workdir: pathlib.Path, num_prompts: int) -> Batch:
  """The model after its fine-tuning, and a batch of 16 completions a prompt."""
  config.steps = 0
  config.rollout.group_size = 16
  train.run(config, workdir)
  run = setup_run(config)
  with checkpoint.Checkpoints(workdir, keep=1) as checkpoints:
    params = checkpoints.restore_params(
      0, programs.abstract_train_state(run).params
    )
  prompts = data.draw(run.train_set, run.root_key, 0, num_prompts)
  prompts = jax.tree.map(jnp.asarray, prompts)
  sampled, rewards = sample(run, params, prompts, draw=0)
  scores = score_gradients(run, params, prompts, sampled)
  exact = scores.astype(np.float64)
  return Batch(run, params, prompts, sampled, rewards, scores, exact @ exact.T)


def sample(
  run: Run, params: dict, prompts: PromptBatch, draw: int
) -> tuple[Rollout, jax.Array]:
  """Completions of the prompts and their rewards, `[Q, G]`.

  Args:
    draw: tells one set of completions from another.
  """
  r = run.config.rollout
  make = functools.partial(
    rollout.sample,
    model_config=run.model,
    group_size=r.group_size,
    max_tokens=r.max_tokens,
    temperature=r.temperature,
    num_slots=r.num_slots,
    stop_ids=run.stop_ids,
  )
  rng = rng_at(run.root_key, draw, Stage.ROLLOUT)
  sampled = jax.jit(make)(params, prompts=prompts, rng=rng)
  with run.make_grader() as grader:
    graded = grade.grade(sampled, run.train_set, run.tokenizer, grader)
  return sampled, jnp.asarray(graded.rewards)


def score_gradients(
  run: Run, params: dict, prompts: PromptBatch, sampled: Rollout
) -> np.ndarray:
  """`[U, parameters]`: gradients at advantage 1, one row each."""
  config, share = update_config(run), run.objective.token_share(sampled)
  longest = prompts.tokens.shape[1] + sampled.tokens.shape[2] - 1
  spec = select.PackingSpec(longest, rows_per_micro=1, window=1)

  def gradient(u):
    q, g = jnp.divmod(u, sampled.lengths.shape[1])
    one = lambda x: x[q, g][None, None]
    packed, used, _ = select.pack(
      jax.tree.map(lambda x: x[q][None], prompts),
      sampled.replace(
        tokens=one(sampled.tokens),
        logprobs=one(sampled.logprobs),
        lengths=one(sampled.lengths),
      ),
      jnp.ones((1, 1)),
      one(share),
      spec,
    )
    sums = update.sum_gradients(packed, used, params, None, config)
    return flatten_util.ravel_pytree(sums.grad)[0]

  everyone = jnp.arange(sampled.lengths.size)
  every = jax.jit(lambda: jax.lax.map(gradient, everyone, batch_size=32))
  return np.asarray(every())


def update_config(run: Run) -> update.UpdateConfig:
  """Of an update on the policy that sampled."""
  return update.UpdateConfig(
    run.model, run.objective, run.config.rollout.temperature
  )


def describe(sampled: Batch) -> dict[str, float]:
  """The share of groups that have a signal, and what lengths tell of norms."""
  live = np.asarray(sampled.advantages != 0).any(axis=1).mean()
  square = errors.squared_norm(sampled.factors, sampled.products)
  return {
    "live": live,
    "squared_length": square / sampled.variance,  # of the full gradient
    **_fit_length(sampled),
  }


def _fit_length(sampled: Batch) -> dict[str, float]:
  """Least squares of squared gradient norms on L^2 and L, per token share.

  A completion's gradient is its token share times a sum over L tokens, of
  which a part adds up, `c0 L`, and a part does not, `c1 sqrt(L)`.
  """
  lengths = np.asarray(sampled.rollout.lengths, np.float64).reshape(-1)
  share = np.asarray(sampled.groups.scale, np.float64).reshape(-1)
  squares = np.diag(sampled.products) / share**2
  columns = np.stack([lengths**2, lengths], axis=1)
  # Every completion counts alike.
  target, columns = np.ones(len(squares)), columns / squares[:, None]
  (c0, c1), *_ = np.linalg.lstsq(columns, target, rcond=None)
  return {"c0^2": c0, "c1^2": c1, "coherence": max(c0, 0.0) / c1}
