"""A mixture of experts in place of a layer's feed-forward part."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import sharding
from dppo_jax.models import grouped

__all__ = [
  "Experts",
  "Load",
  "Routing",
  "describe",
  "load",
  "mixture",
  "route",
  "zero_load",
]


class Experts(NamedTuple):
  """How many feed-forward parts a layer has, and which a token goes through.

  Attributes:
    num: experts of a layer.
    per_token: how many of them each token goes through.
    mlp: width of one.
    is_normalized: the probabilities of those chosen are scaled to sum to 1.
  """

  num: int
  per_token: int
  mlp: int
  is_normalized: bool

  @property
  def dtype(self) -> str:
    """The smallest that holds the number of every expert."""
    return "uint8" if self.num <= 256 else "uint16"


class Routing(NamedTuple):
  """Where the tokens of a layer go.

  Attributes:
    chosen: `[B, *L, K]`, the numbers of each token's experts.
    entropy: `[B, *L]`, nats, of the router's probabilities of all experts.
    is_moved: `[B, *L]`, True where these are not the experts that the router
      chooses itself; None where none were given.
  """

  chosen: Int[Array, "B *L K"]
  entropy: Float[Array, "B *L"]
  is_moved: Bool[Array, "B *L"] | None


class Load(NamedTuple):
  """Sums over the tokens of a batch, of one layer or, stacked, of several.

  Attributes:
    tokens: `[X]`, how many went to each expert.
    entropy: nats, of the router's probabilities.
    moved: how many went to other experts than the router chooses; None where
      none were given.
  """

  tokens: Float[Array, "*layers X"]
  entropy: Float[Array, "*layers"]
  moved: Float[Array, "*layers"] | None


# Of the weights: router, gate, up and down.
_AXES = (
  ("embed", None),
  ("expert", "embed", None),
  ("expert", "embed", None),
  ("expert", None, "embed"),
)


def mixture(
  x: Float[Array, "B *L E"],
  router: Float[Array, "E X"],
  gate: Float[Array, "X E F"],
  up: Float[Array, "X E F"],
  down: Float[Array, "X F E"],
  experts: Experts,
  chosen: Int[Array, "B *L K"] | None = None,
) -> tuple[Float[Array, "B *L E"], Routing]:
  """Each token's experts, weighted by the router's probabilities.

  No expert has a limit: every token goes through all of its own, whatever the
  others of its batch choose. On a mesh each shard of the batch routes its own
  tokens and each device of the model axis computes its own experts, of which
  the sum is taken; tokens never travel. The width of the weights is gathered
  there, so that of their gradient each device gets its own part.

  Args:
    chosen: each token's experts, in place of those that the router chooses.
  """
  run = functools.partial(_mixture, experts=experts, axis=None)
  numbers = jnp.arange(experts.num, dtype=jnp.int32)
  mesh = jax.sharding.get_abstract_mesh()
  if axis_names := set(mesh.axis_names) - set(mesh.manual_axes):
    by_token = sharding.unclaimed_spec("batch")
    by_expert = sharding.unclaimed_spec("expert")
    # A rollout's shards have been given weights that are whole in width.
    is_whole = not set(sharding.RULES["embed"]) <= axis_names

    def on_device(x, *weights_and_rest):
      weights, rest = weights_and_rest[:4], weights_and_rest[4:]
      if not is_whole:
        weights = [
          sharding.gather_width(w, *axes)
          for w, axes in zip(weights, _AXES, strict=True)
        ]
      return _mixture(x, *weights, *rest, experts=experts, axis=by_expert[0])

    run = jax.shard_map(
      on_device,
      in_specs=(
        by_token,
        *(sharding.unclaimed_spec(*axes) for axes in _AXES),
        by_expert,
        by_token,
      ),
      out_specs=(by_token, by_token),
      axis_names=axis_names,
      check_vma=False,
    )
  return run(x, router, gate, up, down, numbers, chosen)


def route(
  tokens: Float[Array, "N E"],
  router: Float[Array, "E X"],
  experts: Experts,
  chosen: Int[Array, "N K"] | None = None,
) -> tuple[Float[Array, "N K"], Routing]:
  """The probabilities of each token's experts, and which they are.

  Args:
    chosen: experts to take in place of the likeliest.
  Source: Qwen3 technical report, arXiv:2505.09388, section 2, as transformers
    computes it: softmax over all experts in float32, then the largest. Given
    experts: rollout routing replay, arXiv:2510.11370, section 4, which takes
    the softmax of the router's present logits over the given experts; that is
    the same where the probabilities are normalised.
  Deviates:
    1. Where a model does not normalise, given experts have their probabilities
       among all, as chosen ones do.
  """
  logits = (tokens @ router).astype(jnp.float32)
  probs = jax.nn.softmax(logits)
  prob, own = jax.lax.top_k(probs, experts.per_token)
  is_moved = None
  if chosen is None:
    chosen = own
  else:
    chosen = chosen.astype(own.dtype)
    prob = jnp.take_along_axis(probs, chosen, axis=-1)
    is_moved = (own[:, :, None] != chosen[:, None]).all(axis=2).any(axis=1)
  if experts.is_normalized:
    prob = prob / prob.sum(axis=-1, keepdims=True)
  entropy = -(probs * jax.nn.log_softmax(logits)).sum(axis=-1)
  routing = Routing(chosen, jax.lax.stop_gradient(entropy), is_moved)
  return prob.astype(tokens.dtype), routing


def load(
  routing: Routing, is_real: Bool[Array, "B *L"], experts: Experts
) -> Load:
  """How the tokens of one layer are spread over its experts.

  Args:
    is_real: False for padding, which does not count.
  """
  total = lambda x: jnp.where(is_real, x, 0).sum(dtype=jnp.float32)
  number = jnp.where(is_real[..., None], routing.chosen, experts.num)
  every = jnp.arange(experts.num, dtype=number.dtype)
  counts = (number.reshape(-1, 1) == every).sum(0, dtype=jnp.float32)
  return jax.tree.map(total, Load(None, *routing[1:]))._replace(tokens=counts)


def zero_load(experts: Experts, num_layers: int, is_given: bool) -> Load:
  """What sums over batches start from; `is_given` as in `Load.moved`."""
  zeros = jnp.zeros(num_layers, jnp.float32)
  counts = jnp.zeros((num_layers, experts.num), jnp.float32)
  return Load(counts, zeros, zeros if is_given else None)


def describe(
  load: Load, num_tokens: Float[Array, ""]
) -> dict[str, Float[Array, ""]]:
  """Metrics of how evenly tokens are spread over experts.

  Args:
    load: of all layers.
    num_tokens: that it is of.
  """
  every = jnp.maximum(num_tokens, 1.0)
  mean = load.tokens.mean(axis=1, keepdims=True)
  ratio = load.tokens / jnp.maximum(mean, 1.0)  # 1 everywhere is an even load
  metrics = {
    "moe/load_max": ratio.max(),
    "moe/load_max_mean": ratio.max(axis=1).mean(),
    "moe/load_cv": ratio.std(axis=1).mean(),
    "moe/unused": (load.tokens == 0).mean(dtype=jnp.float32),
    "moe/router_entropy": load.entropy.mean() / every,
  }
  if load.moved is not None:
    metrics["moe/moved"] = load.moved.mean() / every
  return metrics


def _mixture(
  x,
  router,
  gate,
  up,
  down,
  numbers,
  given,
  *,
  experts: Experts,
  axis: str | None,
):
  """`mixture` of the experts that this device holds, which `axis` divides.

  Their numbers come as an argument: inside the rollout's division a TPU's
  program cannot ask which device it is on.
  """
  tokens = x.reshape(-1, x.shape[-1])
  if given is not None:
    given = given.reshape(len(tokens), experts.per_token)
  prob, routing = route(tokens, router, experts, given)
  chosen = routing.chosen

  # Pairs of a token and one of its experts, those of an expert side by side
  # and those of other devices' experts last.
  num = gate.shape[0]
  number = chosen.reshape(-1) - numbers[0]
  is_ours = (number >= 0) & (number < num)
  number = jnp.where(is_ours, number, num)
  order = jnp.argsort(number, stable=True)
  sizes = jnp.zeros(num + 1, jnp.int32).at[number].add(1)[:num]

  # What a product says of rows outside all groups is up to the platform: it
  # must reach neither the sum nor a gradient.
  is_in_group = (number[order] < num)[:, None]
  masked = lambda rows: jnp.where(is_in_group, rows, 0)
  pairs = masked(tokens[order // experts.per_token])
  product = lambda rows, weights: grouped.product(rows, weights, sizes)
  h = jax.nn.silu(product(pairs, gate)) * product(pairs, up)
  out = masked(product(masked(h), down))

  # Back in the order of the tokens: a sum of fixed order, unlike a scatter.
  place = jnp.argsort(order)
  out = out[place].reshape(*chosen.shape, -1)
  out = (out * prob[..., None]).sum(axis=1)
  if axis:
    out = jax.lax.psum(out, axis)
  routing = jax.tree.map(
    lambda y: y.reshape(*x.shape[:-1], *y.shape[1:]), routing
  )
  return out.reshape(x.shape), routing
