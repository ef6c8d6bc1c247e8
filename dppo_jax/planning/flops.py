"""FLOPs of a transformer; a product and its sum count as two."""

from dppo_jax.models.config import ModelConfig


def layer_weights(model: ModelConfig, experts: float) -> float:
  """Weights of one layer that a token is multiplied with."""
  c = model
  total = 2 * c.embed * c.head_dim * (c.heads + c.kv_heads)
  if c.experts:
    return total + c.embed * (c.experts.num + 3 * experts * c.experts.mlp)
  return total + 3 * c.embed * c.mlp


def forward(
  model: ModelConfig,
  read: float,
  predicted: float = 0,
  pairs: float = 0,
  experts: float = 0,
) -> float:
  """Returns FLOPs of one forward pass.

  Args:
    read: tokens that the layers read.
    predicted: tokens with logits.
    pairs: pairs of tokens that attend.
    experts: experts of a layer that a token is multiplied with, if it has some.
  """
  by_layer = read * layer_weights(model, experts)
  by_layer += 2 * pairs * model.heads * model.head_dim
  return 2 * (model.layers * by_layer + predicted * model.embed * model.vocab)
