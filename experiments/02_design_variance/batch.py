"""Samples and gradients of a fine-tuned model.

Letters are those of `dppo_jax.records`; `U` = Q * G counts the completions.
"""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import train
from dppo_jax.records import Groups, PromptBatch, Rollout
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import select

from ..common import policy
from . import errors


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
    return self.run.spec.objective.advantage(self.rewards)

  @property
  def factors(self) -> np.ndarray:
    """`[U]`, what the full batch's gradient multiplies the scores by."""
    return np.asarray(self.advantages, np.float64).reshape(-1)

  @property
  def groups(self) -> Groups:
    objective = self.run.spec.objective
    scale = objective.token_share(self.rollout)
    return select.make_groups(
      self.rollout, self.rewards, self.advantages, scale, objective
    )

  @property
  def live_tokens(self) -> np.ndarray:
    """`[U]`, the tokens that a full update trains on."""
    is_live = np.asarray(self.advantages != 0)
    return np.where(is_live, self.rollout.lengths, 0).reshape(-1)

  @property
  def variance(self) -> float:
    """Variance of the full batch's gradient.

    That is the sum over prompts of the squared distance of a prompt's gradient
    from the mean over prompts.
    """
    num, group = self.rewards.shape
    apart = np.zeros((num, num, group))
    apart[np.arange(num), np.arange(num)] = self.factors.reshape(num, group)
    apart = apart.reshape(num, -1)
    return errors.squared_norm(apart - apart.mean(axis=0), self.products).sum()


def prepare(config, workdir: pathlib.Path, num_prompts: int) -> Batch:
  """Fine-tunes the model and samples 16 completions of each prompt."""
  config.steps = 0
  config.rollout.group_size = 16
  train.run(config, workdir)
  run = setup_run(config)
  params, prompts = policy.restore(run, workdir, 0, num_prompts)
  sampled, rewards = policy.sample(run, params, prompts, draw=0)
  scores = score_gradients(run, params, prompts, sampled)
  exact = scores.astype(np.float64)
  return Batch(run, params, prompts, sampled, rewards, scores, exact @ exact.T)


def score_gradients(
  run: Run, params: dict, prompts: PromptBatch, sampled: Rollout
) -> np.ndarray:
  """Returns gradients at advantage 1, `[U, parameters]`."""
  scale = run.spec.objective.token_share(sampled)
  of = policy.gradient_of(run, params, prompts, sampled, scale)
  end = sampled.tokens.shape[2]
  all_completions = jnp.arange(sampled.lengths.size)
  every = jax.jit(
    lambda: jax.lax.map(lambda u: of(u, 0, end), all_completions, batch_size=32)
  )
  return np.asarray(every())


def describe(sampled: Batch) -> dict[str, float]:
  """Returns the fraction of groups with a signal, and a fit of norms."""
  live = np.asarray(sampled.advantages != 0).any(axis=1).mean()
  square = errors.squared_norm(sampled.factors, sampled.products)
  return {
    "live": live,
    "squared_length": square / sampled.variance,  # of the full gradient
    **_fit_length(sampled),
  }


def _fit_length(sampled: Batch) -> dict[str, float]:
  """Fits squared gradient norms by L^2 and L, per token share.

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
