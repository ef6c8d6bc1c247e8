"""FLOPs of a transformer; a product and its sum count as two."""

from dppo_jax.models.config import ModelConfig


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
  c = model
  # Weights of one layer that a token is multiplied with, over the width.
  mlp: float = 3 * c.mlp
  if c.experts:
    mlp = c.experts.num + 3 * experts * c.experts.mlp
  weights = 2 * c.head_dim * (c.heads + c.kv_heads) + mlp
  by_layer = read * c.embed * weights + 2 * pairs * c.heads * c.head_dim
  return 2 * (c.layers * by_layer + predicted * c.embed * c.vocab)
