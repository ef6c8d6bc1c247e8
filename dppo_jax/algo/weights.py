"""Horvitz-Thompson weights, which keep weighted sums unbiased."""

import chex
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from dppo_jax.records import Scalar, Selection


def horvitz_thompson(
  chosen: Selection,
  completions: Selection | None = None,
  values: ArrayLike = 1.0,
) -> Float[Array, "..."]:
  """Returns values / (probability of prompt x completion); 0 if not kept.

  With these weights and the denominators of the unpruned batch, the expected
  sum over the kept items is the sum of the full batch.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo, records
  >>> keep = jnp.array([[True, False], [True, True]])
  >>> prob = jnp.array([[0.5, 0.5], [0.25, 1.0]])
  >>> print(algo.horvitz_thompson(records.Selection(keep, prob)))
  [[2. 0.]
   [4. 1.]]

  Args:
    chosen: the only choice, of any shape; or the choice of prompts, `[Q]`,
      made before the rollout.
    completions: choice of completions, `[Q, G]`, made after the rollout, whose
      probabilities may depend on the rewards.
    values: numbers of the items; 1 by default, for weights.
  Source: Horvitz and Thompson 1952; two-phase sampling as in Sarndal et al.
    1992, chapter 9.
  """
  keep, prob = chosen.keep, chosen.prob
  if completions is not None:
    chex.assert_shape(completions.keep, (*keep.shape, None))
    keep = keep[:, None] & completions.keep
    prob = prob[:, None] * completions.prob
  return jnp.where(keep, values / jnp.where(keep, prob, 1.0), 0.0)


def invalid_probs(selection: Selection) -> Scalar:
  """Number of kept items whose probability is not in (0, 1]."""
  is_valid = (selection.prob > 0) & (selection.prob <= 1)
  return (selection.keep & ~is_valid).sum(dtype=jnp.float32)


def effective_sample_size(
  weights: Float[Array, "*shape"], contributions: Float[Array, "*shape"]
) -> Scalar:
  """Effective number of kept terms, `(sum w a)^2 / sum (w a)^2`.

  Contributions count, not weights: probabilities proportional to `a`
  make `w a` constant, the best case, however uneven `w` itself is.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> weights, size = jnp.array([1.0, 2.0, 4.0]), jnp.array([4.0, 2.0, 1.0])
  >>> print(algo.effective_sample_size(weights, size))
  3.0
  """
  terms = weights * contributions
  return ratio(terms.sum() ** 2, (terms * terms).sum())


def ratio(x: ArrayLike, y: ArrayLike, otherwise: float = 0.0) -> Array:
  """`x / y` where `y` is above 0, else `otherwise`; arrays broadcast."""
  is_valid = jnp.greater(y, 0)
  return jnp.where(is_valid, x / jnp.where(is_valid, y, 1.0), otherwise)
