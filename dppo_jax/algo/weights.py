"""Horvitz-Thompson weights, which keep weighted sums unbiased."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from dppo_jax.records import Selection


def horvitz_thompson(*choices: Selection) -> Float[Array, "..."]:
  """1 / (probability of prompt x completion) where kept, 0 elsewhere.

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
    choices: one choice of any shape; or that of prompts, `[Q]`, made before
      the rollout, and that of completions, `[Q, G]`, made after it, whose
      probabilities may depend on the rewards.
  Source: Horvitz and Thompson 1952; two-phase sampling as in Sarndal et al.
    1992, chapter 9.
  """
  *prompts, completions = choices
  keep, prob = completions.keep, completions.prob
  if prompts:
    shapes = [x.keep.shape for x in choices]
    if len(shapes) > 2 or len(shapes[1]) != 2 or shapes[0] != shapes[1][:1]:
      raise ValueError(
        f"choices of the shapes {shapes} must be those of prompts, [Q], and "
        "completions, [Q, G]"
      )
    keep = prompts[0].keep[:, None] & keep
    prob = prompts[0].prob[:, None] * prob
  return jnp.where(keep, 1.0 / jnp.where(keep, prob, 1.0), 0.0)


def invalid_probs(selection: Selection) -> Float[Array, ""]:
  """Number of kept items whose probability is not in (0, 1]."""
  is_valid = (selection.prob > 0) & (selection.prob <= 1)
  return (selection.keep & ~is_valid).sum(dtype=jnp.float32)


def effective_sample_size(
  weights: Float[Array, "*shape"], contributions: Float[Array, "*shape"]
) -> Float[Array, ""]:
  """Effective number of kept terms, `(sum w a)^2 / sum (w a)^2`.

  It is that of contributions, not of weights: probabilities proportional to `a`
  make `w a` constant, the best case, however uneven `w` itself is.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> weights, size = jnp.array([1.0, 2.0, 4.0]), jnp.array([4.0, 2.0, 1.0])
  >>> print(algo.effective_sample_size(weights, size))
  3.0
  """
  terms = weights * contributions
  square = (terms * terms).sum()
  return jnp.where(
    square > 0, terms.sum() ** 2 / jnp.where(square > 0, square, 1.0), 0.0
  )
