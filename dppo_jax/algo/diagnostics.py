"""What a choice of completions costs in precision, from the choice itself."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dppo_jax.algo import weights
from dppo_jax.records import Selection


def diagnose(
  chosen: Selection,
  weight: Float[Array, "Q G"],
  advantages: Float[Array, "Q G"],
  size: Float[Array, "Q G"],
  is_needed: Bool[Array, "Q G"],
) -> dict[str, Float[Array, ""]]:
  """Metrics that tell whether pruning is still worth its noise.

  Args:
    chosen: `[Q, G]`, the choice of completions.
    weight: 1 / probability, of prompt and completion, where kept; else 0.
    size: norm of each completion's gradient before weighting, or a proxy of
      it, up to a common factor.
    is_needed: False where a completion adds nothing to the gradient.
  Returns:
    weights/max, weights/mean: before tokens are chosen. The mean is 1 in
      expectation where every completion could be kept.
    completions/prob_min, completions/prob_mean: of the needed completions.
    weights/ess: contributions' effective sample size.
    weights/added_variance: variance that pruning adds, as a share of that of
      the full batch, where completions are independent and point nowhere in
      particular: sum w (w - 1) a^2 / sum w a^2 over the kept ones, whose two
      expectations are sum (1/prob - 1) a^2 and sum a^2. A design that keeps
      alike completions apart adds less; unweighted rules add bias on top.
    completions/positive, completions/positive_kept: share of positive
      advantages among the needed completions, and among those of them kept.
  """
  kept = (weight > 0) & is_needed
  squares = jnp.where(kept, weight * size * size, 0.0)
  share = lambda x, of: (
    (x & of).sum(dtype=jnp.float32)
    / jnp.maximum(of.sum(dtype=jnp.float32), 1.0)
  )
  num_needed = jnp.maximum(is_needed.sum(dtype=jnp.float32), 1.0)
  total = squares.sum()
  return {
    "weights/max": weight.max(),
    "weights/mean": weight.mean(),
    "completions/prob_min": jnp.where(is_needed, chosen.prob, 1.0).min(),
    "completions/prob_mean": jnp.where(is_needed, chosen.prob, 0.0).sum()
    / num_needed,
    "weights/ess": weights.effective_sample_size(
      jnp.where(kept, weight, 0.0), size
    ),
    "weights/added_variance": (squares * (weight - 1)).sum()
    / jnp.where(total > 0, total, 1.0),
    "completions/positive": share(advantages > 0, is_needed),
    "completions/positive_kept": share(advantages > 0, kept),
  }
