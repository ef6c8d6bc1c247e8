"""Weights of the tokens of completions that an older policy sampled.

Each rule maps the log ratios of the trained policy to the sampling one to a
factor of every token's term, `factor x advantage x gradient of log p`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dppo_jax.algo import policy_loss

CLIP = 0.2  # PPO
CAP = 2.0  # of truncated ratios
TOKEN_BOUNDS = 0.5, 5.0  # IcePop
SEQUENCE_BOUNDS = 0.5, 2.0
GEOMETRIC_BOUNDS = 1 / 1.1, 1.1


class Sampled(NamedTuple):
  """Ratios and advantages of enumerated completions.

  Attributes:
    log_ratio: `[Q, S, L]`, of the trained policy to the sampling one; 0 beyond
      the end.
    advantage: `[Q, S, L]`, or `[Q, S, 1]` if it is that of the completion.
    lengths: `[S]`.
  """

  log_ratio: np.ndarray
  advantage: np.ndarray
  lengths: np.ndarray


class Rule(NamedTuple):
  """Correction: a name, its factors, and the advantages that it multiplies."""

  name: str
  factor: Callable[[Sampled], np.ndarray]
  has_critic: bool = False  # exact token advantages instead of rewards


def token(x: Sampled) -> np.ndarray:
  """Ratio of each token, as in the surrogate of PPO and GRPO."""
  return np.exp(x.log_ratio)


def clipped(x: Sampled) -> np.ndarray:
  """Ratio of each token; 0 where PPO's clip has no gradient."""
  ratio, is_good = token(x), x.advantage > 0
  is_beyond = np.where(is_good, ratio > 1 + CLIP, ratio < 1 - CLIP)
  return np.where(is_beyond & (x.advantage != 0), 0.0, ratio)


def token_tis(x: Sampled) -> np.ndarray:
  """Ratio of each token, at most `CAP`, computed by the package."""
  log_ratio = jnp.asarray(x.log_ratio)
  return np.asarray(
    policy_loss.sampler_correction(log_ratio, 0 * log_ratio, CAP), float
  )


def ice_pop(x: Sampled) -> np.ndarray:
  """Ratio of each token within `TOKEN_BOUNDS`, 0 outside."""
  return _masked(token(x), token(x), TOKEN_BOUNDS)


def prefix(x: Sampled) -> np.ndarray:
  """Product of the ratios up to and including each token."""
  return np.exp(np.cumsum(x.log_ratio, axis=-1))


def sequence(x: Sampled) -> np.ndarray:
  """Product of the ratios of the full completion."""
  total = x.log_ratio.sum(axis=-1, keepdims=True)
  return np.broadcast_to(np.exp(total), x.log_ratio.shape)


def geometric(x: Sampled) -> np.ndarray:
  """Geometric mean of the completion's ratios, GSPO's, without its clip."""
  mean = x.log_ratio.sum(axis=-1) / x.lengths
  return np.broadcast_to(np.exp(mean)[..., None], x.log_ratio.shape)


def sequence_tis(x: Sampled) -> np.ndarray:
  """Product of the ratios, at most `CAP`."""
  return np.minimum(sequence(x), CAP)


def sequence_mis(x: Sampled) -> np.ndarray:
  """Product of the ratios within `SEQUENCE_BOUNDS`, 0 outside."""
  return _masked(sequence(x), sequence(x), SEQUENCE_BOUNDS)


def geometric_mis(x: Sampled) -> np.ndarray:
  """Product of the ratios; 0 if their mean is outside `GEOMETRIC_BOUNDS`."""
  return _masked(sequence(x), geometric(x), GEOMETRIC_BOUNDS)


def geometric_only(x: Sampled) -> np.ndarray:
  """1; 0 if the mean ratio is outside `GEOMETRIC_BOUNDS`."""
  one = np.ones(x.log_ratio.shape)
  return _masked(one, geometric(x), GEOMETRIC_BOUNDS)


def _masked(value, ratio, bounds) -> np.ndarray:
  low, high = bounds
  return np.where((ratio >= low) & (ratio <= high), value, 0.0)


RULES = (
  Rule("none", lambda x: np.ones(x.log_ratio.shape)),
  Rule("token ratio", token),
  Rule("token ratio, PPO clip", clipped),
  Rule("token TIS", token_tis),
  Rule("IcePop", ice_pop),
  Rule("geometric mean as the ratio", geometric),
  Rule("geometric mask, no ratio", geometric_only),
  Rule("prefix ratio, rewards", prefix),
  Rule("prefix ratio, exact critic", prefix, has_critic=True),
  Rule("sequence ratio", sequence),
  Rule("sequence ratio, at most 2", sequence_tis),
  Rule("sequence mask", sequence_mis),
  Rule("geometric mask", geometric_mis),
)
MASKS = {
  "IcePop": ice_pop,
  "sequence mask": sequence_mis,
  "geometric mask": geometric_mis,
}
