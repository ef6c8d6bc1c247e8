"""Bias and variance of random estimates."""

import numpy as np


def squared_norm(x: np.ndarray, products: np.ndarray | None = None):
  """`[...]` of vectors `[..., n]`.

  Args:
    products: `[n, n]`, inner products of what the entries of `x` multiply;
      None where `x` are the vectors themselves.
  """
  return np.einsum("...n,...n->...", _times(x, products), x)


def describe(
  draws: np.ndarray,
  exact: np.ndarray,
  unit: float,
  products: np.ndarray | None = None,
) -> dict[str, float]:
  """Squared bias and variance of draws `[D, n]` of an estimate of `exact`.

  Both are unbiased themselves, but that a bias below 0 is reported as 0.

  Args:
    exact: `[n]`.
    unit: what to count both in.
    products: as in `squared_norm`.
  Returns:
    `variance`, `bias`, and of the mean draw its `cosine` to `exact` and its
    `scale`, the length in units of that of `exact`.
  """
  mean = draws.mean(axis=0)
  variance = squared_norm(draws - mean, products).sum() / (len(draws) - 1)
  bias = squared_norm(mean - exact, products) - variance / len(draws)
  squares = squared_norm(mean, products), squared_norm(exact, products)
  return {
    "variance": variance / unit,
    "bias": max(bias, 0.0) / unit,
    "cosine": _times(mean, products) @ exact / np.sqrt(np.prod(squares)),
    "scale": np.sqrt(squares[0] / squares[1]),
  }


def _times(x: np.ndarray, products: np.ndarray | None) -> np.ndarray:
  return x if products is None else x @ products
