"""When pruning pays: seconds to the same point, against cost and noise."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# What a choice of completions adds, over what `added_variance` says: a batch
# varies twice as much as the sum of its completions, which have much in common
# within a group, and a systematic draw adds 0.4 to 0.7 of what independent ones
# would. Measured in experiments/02_design_variance.
DESIGN_EFFECT = 0.3
# Share of the least time that may be spent on keeping more. Times are flat
# about their least, where a few percent more halve the variance added.
SLACK = 0.03


def relative_seconds(
  seconds: Float[Array, "*shape"],
  added_variance: Float[Array, "*shape"],
  noise_share: Float[Array, ""] | float,
  exponent: float = 1.0,
) -> Float[Array, "*shape"]:
  """Seconds to the same point, up to a factor that all choices share.

  With a gradient noise scale over the batch of `r`, steps to a point go as
  `1 + r`; a choice that adds `v` of the batch's own variance makes that
  `1 + (1 + v) r`. Their ratio is `1 + v r / (1 + r)`.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import methods
  >>> seconds, added = jnp.array([1.0, 0.5]), jnp.array([0.0, 1.0])
  >>> print(methods.relative_seconds(seconds, added, noise_share=0.5))
  [1.   0.75]

  Args:
    seconds: of a step, in any unit.
    added_variance: as a share of that of the unpruned batch.
    noise_share: `r / (1 + r)`; 1 where noise is all there is.
    exponent: 1 where the learning rate suits the noise; 0.5 is what AdamW's
      division by a root mean square makes of it at a fixed learning rate.
  Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.7, for steps
    against noise; the rest is ours.
  """
  return seconds * (1 + added_variance * noise_share) ** exponent


def proportional(
  size: Float[Array, "M"], budgets: Float[Array, "K"]
) -> Float[Array, "K M"]:
  """Probabilities in proportion to size that sum to each of some budgets.

  As `designs.water_filling`, without a least probability and a grid: what
  budgets would do, at the cost of one sort for all of them.

  Args:
    size: at least 0 and finite.
    budgets: each at least 0; one above the number of sizes above 0 makes all
      of these certain.
  """
  falling = -jnp.sort(-size)
  # With the `f` largest certain, the rest share what is left of the budget.
  rest = jnp.cumsum(falling[::-1])[::-1]
  certain = jnp.arange(len(size), dtype=jnp.float32)
  left = budgets[:, None] - certain[None]
  f = jnp.argmax(left * falling[None] <= rest[None], axis=1)
  scale = (budgets - certain[f]) / jnp.where(rest > 0, rest, 1.0)[f]
  prob = jnp.clip(scale[:, None] * size[None], 0.0, 1.0)
  is_all = budgets >= (size > 0).sum(dtype=jnp.float32)
  all_above_0 = (size > 0).astype(jnp.float32)[None]
  return jnp.where(is_all[:, None], all_above_0, prob)


def added_variance(
  prob: Float[Array, "K M"], squares: Float[Array, "M"]
) -> Float[Array, "K"]:
  """`sum (1 / prob - 1) a^2 / sum a^2`, that of independent draws.

  Args:
    squares: `a^2`, squared lengths of the terms, up to a common factor; 0 for
      what is not needed.
  """
  is_lost = (squares[None] > 0) & (prob <= 0)
  added = (1 / jnp.where(prob > 0, prob, 1.0) - 1) * squares[None]
  total = squares.sum()
  share = added.sum(axis=1) / jnp.where(total > 0, total, 1.0)
  return jnp.where(is_lost.any(axis=1), jnp.inf, share)


def quickest(times: Float[Array, "K"], promise: float = 0.0) -> Int[Array, ""]:
  """The last index whose time is the least, or up to a `SLACK` more.

  Args:
    times: in rising order of what is kept; the last is that of the whole.
    promise: share of the whole's time by which the least must be below it for
      less than the whole.
  """
  times = jnp.where(jnp.isfinite(times), times, jnp.inf)
  least, last = times.min(), len(times) - 1
  last_near = last - jnp.argmax(times[::-1] <= (1 + SLACK) * least)
  return jnp.where(least > (1 - promise) * times[-1], last, last_near)
