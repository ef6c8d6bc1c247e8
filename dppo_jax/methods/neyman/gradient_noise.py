"""How noisy a gradient is, from one more backward pass now and then.

Where each prompt's part of a gradient is multiplied by a random sign, the
squared length of the sum is, on average, the sum of the parts' squared lengths:
what is left of the gradient's own are the products of different prompts, that
is what they have in common. Parts of a batch that cut through groups, such as
micro-batches, cannot tell: the completions of one group have it in common too,
and half a group's advantages do not sum to zero.
"""

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.records import PackedBatch

DECAY = 0.7  # of earlier measurements, at each further one


@struct.dataclass
class Noise:
  """Smoothed over measurements; both are 0 before the first.

  Attributes:
    signal: estimate of `|E g|^2`, which may be below 0.
    noise: estimate of `E |g - E g|^2`, of the batch as it was trained.
  """

  signal: Float[Array, ""]
  noise: Float[Array, ""]


def init() -> Noise:
  """What a run starts from."""
  return Noise(jnp.float32(0), jnp.float32(0))


def signs(step: Int[Array, ""], num_prompts: int) -> Float[Array, "N"]:
  """1 or -1 for each prompt, at random."""
  # Prompts know nothing of their signs, whatever the run's seed is.
  key = jax.random.fold_in(jax.random.key(0), step)
  return jax.random.rademacher(key, (num_prompts,), jnp.float32)


def signed(rows: PackedBatch, signs: Float[Array, "N"]) -> PackedBatch:
  """The rows with each prompt's loss multiplied by its sign."""
  return rows.replace(weights=rows.weights * signs[rows.prompts])


def measured(
  old: Noise,
  total: Float[Array, ""],
  signed: Float[Array, ""],
  num_prompts: int,
) -> Noise:
  """`old` with one more measurement; one that is not finite changes nothing.

  Args:
    total: squared length of the gradient.
    signed: that of the gradient with signs.
    num_prompts: of which the gradient is a sum; with one there is nothing to
      compare, and all is noise.
  Source: the definitions of McCandlish et al. 2018, arXiv:1812.06162, section
    2.2 and appendix A; the signs are ours.
  """
  signal = (total - signed) / (1 - 1 / max(num_prompts, 2))
  signal = jnp.where(num_prompts > 1, signal, 0.0)
  mix = lambda x, y: jnp.where(jnp.isfinite(total + signed), DECAY * x + y, x)
  return Noise(mix(old.signal, signal), mix(old.noise, total - signal))


def share(noise: Noise) -> Float[Array, ""]:
  """The noise's part of the gradient's squared length; 1 where unknown.

  It is `r / (1 + r)`, where `r` is the gradient noise scale over the batch.
  """
  signal = jnp.maximum(noise.signal, 0.0)
  total = signal + jnp.maximum(noise.noise, 0.0)
  return jnp.where(
    total > 0, 1 - signal / jnp.where(total > 0, total, 1.0), 1.0
  )


def describe(noise: Noise, num_prompts: int) -> dict[str, Float[Array, ""]]:
  """Metrics: the share, and the noise scale in prompts, at most a million."""
  part = share(noise)
  scale = num_prompts * part / jnp.maximum(1 - part, 1e-9)
  return {"noise/share": part, "noise/scale": jnp.minimum(scale, 1e6)}
