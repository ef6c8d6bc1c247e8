"""The architecture of a model, and the layouts that follow from it."""

import dataclasses
from typing import NamedTuple

from dppo_jax.models import moe
from dppo_jax.models.layers import RopeScaling
from dppo_jax.models.lora import Lora


class LocalLayers(NamedTuple):
  """Sliding-window layers.

  Their cache holds all positions nevertheless: simple, and in models with five
  local layers to one global one up to seven times as large as needed.

  Attributes:
    is_local: True for each layer with a window.
    window: positions that a token sees, its own included; None for all.
    rope_theta: base of their rotary frequencies, which are not scaled.
  """

  is_local: tuple[bool, ...]
  window: int | None
  rope_theta: float


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The architecture; hashable, so that it can be a static argument."""

  vocab: int
  embed: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  rope_theta: float = 1e6
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-6
  has_qkv_bias: bool = False
  has_qk_norm: bool = False
  has_post_norms: bool = False  # norms of the outputs of attention and mlp
  has_zero_centred_norms: bool = False  # multiply by 1 + weight, in float32
  has_scaled_embedding: bool = False  # by the square root of the width
  query_size: int | None = None  # in place of head_dim in 1 / sqrt(head_dim)
  activation: str = "silu"  # a key of layers.ACTIVATIONS
  local: LocalLayers | None = None  # None if all layers are global
  is_tied: bool = True  # the output head is the embedding
  experts: moe.Experts | None = None  # in place of one feed-forward part
  lora: Lora | None = None  # adapters, trained in place of the weights
  family: str = "Qwen3ForCausalLM"  # a key of hf.families.FAMILIES
  dtype: str = "float32"  # for the computation
  remat: str = "layers"  # a key of REMAT
  attention: str = "xla_by_row"  # a key of attention.BACKENDS

  @property
  def param_dtype(self) -> str:
    """Dtype of the weights in the train state, adapters excluded."""
    return self.dtype if self.lora else "float32"

  @property
  def shares_prompts(self) -> bool:
    """True with the decode kernel: slots share the cache of prompts."""
    return self.attention == "splash" and self.head_dim % 128 == 0

  @property
  def unrolls_layers(self) -> bool:
    """True if no loop of a rollout runs over layers, as on GPUs.

    There it would copy the weights of each layer. The cache then has one part.
    """
    return self.attention in ("tokamax", "xla_dense")


def drop_idle_window(config: ModelConfig, longest: int) -> ModelConfig:
  """Drops a window that no sequence of up to `longest` tokens exceeds.

  The result is the same, but the kernel for TPUs takes no windows.
  """
  if config.local is None or (config.local.window or 0) < longest:
    return config
  local = config.local._replace(window=None)
  return dataclasses.replace(config, local=local)
