"""FLOPs of a transformer's parts; a product and its sum count as two."""

from dppo_jax.models.config import ModelConfig


def layer_weights(model: ModelConfig) -> int:
  """Weights of one layer that a token is multiplied with."""
  c = model
  total = 2 * c.embed * c.head_dim * (c.heads + c.kv_heads)
  if c.experts:
    x = c.experts
    return total + c.embed * (x.num + 3 * x.per_token * x.mlp)
  return total + 3 * c.embed * c.mlp


def linear(model: ModelConfig, tokens: float) -> float:
  """Returns FLOPs of products with the layers' weights, one forward pass."""
  return 2 * tokens * model.layers * layer_weights(model)


def head(model: ModelConfig, tokens: float) -> float:
  """Returns FLOPs of the logits."""
  return 2 * tokens * model.embed * model.vocab


def attention(model: ModelConfig, pairs: float) -> float:
  """Returns FLOPs of attention between `pairs` of tokens."""
  return 4 * pairs * model.layers * model.heads * model.head_dim
