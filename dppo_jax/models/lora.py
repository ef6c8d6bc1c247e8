"""LoRA: low-rank adapters of linear layers, trained in place of the weights.

`W + alpha / rank * A B`, with `W` frozen, of https://arxiv.org/abs/2106.09685,
equation 3. A tree of weights with adapters holds them, stacked over layers,
under `adapters`; without that key it is a plain tree of weights, and all of it
is trained.

Deviation: the product is added to the weight of a layer, rounded to the dtype
of the computation, where the layer is computed. So rollouts, which read merged
weights, sample exactly the policy that is trained, and every kernel and mesh
works as without adapters.
"""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from dppo_jax.errors import UserError

KEY = "adapters"
# Linear layers by name, and the number of leading axes that they sum over.
LINEAR = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


class Lora(NamedTuple):
  """Adapters of a model.

  Attributes:
    rank: columns of `A` and rows of `B`.
    alpha: numerator of their product's factor, `alpha / rank`.
    targets: names of adapted weights, keys of LINEAR.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]


def choose(
  weights: Mapping[str, Any], rank: int, alpha: float, targets: str
) -> Lora | None:
  """Returns the adapters that `config.lora` describes; None for rank 0.

  Args:
    weights: declaration of each weight of the model.
    targets: `all` linear layers, experts excluded, or their names with commas;
      `q_proj` is `q`.
  Raises:
    UserError: for a name that the model lacks.
  """
  if not rank:
    return None
  known = [name for name in LINEAR if f"layers/{name}" in weights]
  names = [x.strip().removesuffix("_proj") for x in targets.split(",")]
  if targets == "all":
    names = known
  if unknown := set(names) - set(known):
    raise UserError(
      f"config.lora.targets has {min(unknown)!r}, which this model lacks: use "
      f"all, or some of {', '.join(known)}"
    )
  return Lora(rank, alpha, tuple(x for x in known if x in names))


def adapter_table(
  weights: Mapping[str, Any], lora: Lora | None
) -> dict[str, Any]:
  """Declares the adapters of stacked `layers/NAME` weights.

  `A`, `[layers, *in, rank]`, is random with the variance of PEFT's
  initialisation, `1 / (3 in)`. `B`, `[layers, rank, *out]`, is zero.

  Args:
    weights: declaration of each weight; see `parameters.Param`.
  """
  table: dict[str, Any] = {}
  if lora is None:
    return table
  for name in lora.targets:
    p, split = weights[f"layers/{name}"], 1 + LINEAR[name]
    scale = (3 * math.prod(p.shape[1:split])) ** -0.5
    table[f"{KEY}/{name}/a"] = p._replace(
      shape=(*p.shape[:split], lora.rank),
      axes=(*p.axes[:split], None),
      scale=scale,
    )
    table[f"{KEY}/{name}/b"] = p._replace(
      shape=(p.shape[0], lora.rank, *p.shape[split:]),
      axes=(p.axes[0], None, *p.axes[split:]),
      scale=0.0,
    )
  return table


def trainable(params: PyTree) -> PyTree:
  """Returns the weights that gradients update: adapters, or all without any."""
  return {KEY: params[KEY]} if KEY in params else params


def frozen(params: PyTree) -> PyTree:
  """Returns the weights that adapters belong to; empty without adapters."""
  return {k: x for k, x in params.items() if k != KEY} if KEY in params else {}


def merge(
  weights: Mapping[str, Any],
  adapters: Mapping[str, Mapping[str, Any]],
  lora: Lora | None,
) -> dict[str, Any]:
  """Returns weights with their adapters added, in the dtype of the weight.

  The sum is taken in float32.

  Args:
    weights: weights of one layer, or stacked over layers.
    adapters: adapters by the name of the weight; may be empty.
    lora: None for no adapters.
  """
  merged = dict(weights)
  if lora is None:
    return merged
  for name, adapter in adapters.items():
    weight = weights[name]
    delta = _product(adapter["a"], adapter["b"], LINEAR[name])
    total = weight.astype(jnp.float32) + lora.alpha / lora.rank * delta
    merged[name] = total.astype(weight.dtype)
  return merged


def merge_all(params: PyTree, lora: Lora | None) -> PyTree:
  """Returns a model's weights with its adapters, if any, merged into them."""
  layers = merge(params["layers"], params.get(KEY, {}), lora)
  return {k: x for k, x in params.items() if k != KEY} | {"layers": layers}


def _product(
  a: Float[Array, "*B R"], b: Float[Array, "*rest"], num_in: int
) -> Float[Array, "..."]:
  """Returns `a b`, summed over the rank; both may be stacked over layers."""
  if a.ndim > num_in + 1:
    return jax.vmap(lambda a, b: _product(a, b, num_in))(a, b)
  return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
