"""A mixture of experts in place of a layer's feed-forward part."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding

__all__ = ["Experts", "mixture", "route"]


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


def mixture(
  x: Float[Array, "B *L E"],
  router: Float[Array, "E X"],
  gate: Float[Array, "X E F"],
  up: Float[Array, "X E F"],
  down: Float[Array, "X F E"],
  experts: Experts,
) -> Float[Array, "B *L E"]:
  """Each token's experts, weighted by the router's probabilities.

  No expert has a limit: every token goes through all of its own, whatever the
  others of its batch choose. On a mesh each shard of the batch routes its own
  tokens and each device of the model axis computes its own experts, of which
  the sum is taken; tokens never travel.

  The products are `jax.lax.ragged_dot`, which TPUs have as an instruction. On a
  CPU XLA makes a dense product of every pair with every expert of it, `X` times
  the work and the memory (jax 0.10.2 and 0.12.0, by XLA's own count); what it
  does on a GPU is not known here.
  """
  run = functools.partial(_mixture, experts=experts, axis=None)
  mesh = jax.sharding.get_abstract_mesh()
  if axis_names := set(mesh.axis_names) - set(mesh.manual_axes):
    by_token = sharding.unclaimed_spec("batch", *(None,) * (x.ndim - 1))
    by_expert = sharding.unclaimed_spec("expert", None, None)
    axis = by_expert[0]
    run = jax.shard_map(
      functools.partial(_mixture, experts=experts, axis=axis),
      in_specs=(by_token, jax.P(), by_expert, by_expert, by_expert),
      out_specs=by_token,
      axis_names=axis_names,
      check_vma=False,
    )
  return run(x, router, gate, up, down)


def route(
  tokens: Float[Array, "N E"], router: Float[Array, "E X"], experts: Experts
) -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
  """The probabilities and the numbers of each token's experts.

  Source: Qwen3 technical report, arXiv:2505.09388, section 2, as transformers
    computes it: softmax over all experts in float32, then the largest.
  """
  logits = (tokens @ router).astype(jnp.float32)
  prob, chosen = jax.lax.top_k(jax.nn.softmax(logits), experts.per_token)
  if experts.is_normalized:
    prob = prob / prob.sum(axis=-1, keepdims=True)
  return prob.astype(tokens.dtype), chosen


def _mixture(x, router, gate, up, down, *, experts: Experts, axis: str | None):
  """`mixture` of the experts that this device holds, which `axis` divides."""
  tokens = x.reshape(-1, x.shape[-1])
  prob, chosen = route(tokens, router, experts)

  # Pairs of a token and one of its experts, those of an expert side by side
  # and those of other devices' experts last.
  num = gate.shape[0]
  first = jax.lax.axis_index(axis) * num if axis else 0
  number = chosen.reshape(-1) - first
  is_ours = (number >= 0) & (number < num)
  number = jnp.where(is_ours, number, num)
  order = jnp.argsort(number, stable=True)
  sizes = jnp.zeros(num + 1, jnp.int32).at[number].add(1)[:num]

  # What a product says of rows outside all groups is up to the platform: it
  # must reach neither the sum nor a gradient.
  is_in_group = (number[order] < num)[:, None]
  masked = lambda rows: jnp.where(is_in_group, rows, 0)
  pairs = masked(tokens[order // experts.per_token])
  product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
  h = jax.nn.silu(product(pairs, gate)) * product(pairs, up)
  out = masked(product(masked(h), down))

  # Back in the order of the tokens: a sum of fixed order, unlike a scatter.
  place = jnp.argsort(order)
  out = out[place].reshape(*chosen.shape, -1)
  out = (out * prob[..., None]).sum(axis=1)
  if axis:
    out = jax.lax.psum(out, axis)
  return out.reshape(x.shape)
