"""Loss of precision through a choice of completions."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dppo_jax.algo import weights
from dppo_jax.records import Scalar, Selection


def diagnose(
  chosen: Selection,
  weight: Float[Array, "Q G"],
  advantages: Float[Array, "Q G"],
  size: Float[Array, "Q G"],
  is_needed: Bool[Array, "Q G"],
) -> dict[str, Scalar]:
  """Returns metrics of the noise that pruning adds; see metrics/README.md.

  weights/added_variance is sum w (w - 1) a^2 / sum w a^2 over the kept
  completions, with the expectations sum (1/prob - 1) a^2 and sum a^2: if draws
  and gradients are independent, the variance that pruning adds over the
  variance of the full batch. Stratified designs add less; unweighted
  rules are biased too.

  Args:
    chosen: `[Q, G]`, the choice of completions.
    weight: weights from `horvitz_thompson`.
    size: gradient norm of each completion before weighting, or a proxy, up to
      a common factor.
    is_needed: False where a completion adds nothing to the gradient.
  """
  kept = (weight > 0) & is_needed
  squares = jnp.where(kept, weight * size * size, 0.0)
  count = lambda x: x.sum(dtype=jnp.float32)
  share = lambda x, of: count(x & of) / jnp.maximum(count(of), 1.0)
  return {
    "weights/max": weight.max(),
    "weights/mean": weight.mean(),
    "completions/prob_min": jnp.where(is_needed, chosen.prob, 1.0).min(),
    "completions/prob_mean": jnp.where(is_needed, chosen.prob, 0.0).sum()
    / jnp.maximum(count(is_needed), 1.0),
    "weights/ess": weights.effective_sample_size(
      jnp.where(kept, weight, 0.0), size
    ),
    "weights/added_variance": weights.ratio(
      (squares * (weight - 1)).sum(), squares.sum()
    ),
    "completions/positive": share(advantages > 0, is_needed),
    "completions/positive_kept": share(advantages > 0, kept),
  }
