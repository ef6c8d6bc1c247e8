"""The work that is timed: models, prompts and completions of stated lengths."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import rollout
from dppo_jax.algo import PackingSpec
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import PromptBatch, Rollout, Selection
from dppo_jax.rng import Stage, rng_at


class Work(NamedTuple):
  """One step's work.

  Attributes:
    prompts, group_size: completions of a step are their product.
    prompt_tokens: least and most; each length is as likely.
    max_tokens: of a completion.
    mean_tokens: of a completion, if none were cut: lengths are geometric.
    slots: completions that decode side by side.
    logit_chunk: tokens whose logits exist at once.
  """

  model: ModelConfig
  rows: PackingSpec
  prompts: int
  group_size: int
  prompt_tokens: tuple[int, int]
  max_tokens: int
  mean_tokens: int
  slots: int
  logit_chunk: int = 2048


def _model(layers, embed, heads, kv_heads, head_dim, mlp, vocab, is_tied=True):
  return ModelConfig(
    vocab=vocab,
    embed=embed,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    mlp=mlp,
    has_qk_norm=True,
    is_tied=is_tied,
    remat="none",
  )


def _real(model: ModelConfig, prompts: int, rows: int = 4) -> Work:
  """Returns the work of a real model, for accelerators."""
  return Work(
    model,
    PackingSpec(4096, rows, 64),
    prompts=prompts,
    group_size=8,
    prompt_tokens=(64, 256),
    max_tokens=1024,
    mean_tokens=400,
    slots=256,
    logit_chunk=8192,
  )


_QWEN3 = 151_936  # tokens of its vocabulary

WORKS = {
  "small": Work(  # that of the comparison with other systems
    _model(4, 256, 8, 4, 32, 768, 4096),
    PackingSpec(512, 1, 64),  # so that no row of a micro-batch is empty
    prompts=8,
    group_size=8,
    prompt_tokens=(32, 96),
    max_tokens=128,
    mean_tokens=48,
    slots=64,
  ),
  "wide": Work(
    _model(4, 512, 8, 4, 64, 1536, 8192),
    PackingSpec(512, 1, 64),  # so that no row of a micro-batch is empty
    prompts=8,
    group_size=8,
    prompt_tokens=(32, 96),
    max_tokens=128,
    mean_tokens=48,
    slots=64,
  ),
  "qwen3-0.6b": _real(_model(28, 1024, 16, 8, 128, 3072, _QWEN3), 64, rows=8),
  "qwen3-1.7b": _real(_model(28, 2048, 16, 8, 128, 6144, _QWEN3), 64),
  "qwen3-4b": _real(_model(36, 2560, 32, 8, 128, 9728, _QWEN3), 32),
  "qwen3-8b": _real(_model(36, 4096, 32, 8, 128, 12288, _QWEN3, False), 32),
}


def with_model(work: Work, **changes) -> Work:
  """The same work by another model."""
  return work._replace(model=dataclasses.replace(work.model, **changes))


def stop_ids(work: Work) -> tuple[int, ...]:
  """Returns enough stop tokens for completions of the mean length.

  Its scores are close to standard normal, so a token's chance to be one of
  these is about their share of the vocabulary.
  """
  return tuple(range(max(1, round(work.model.vocab / work.mean_tokens))))


def make_prompts(work: Work, seed: int = 0) -> PromptBatch:
  rng = np.random.default_rng(seed)
  least, most = work.prompt_tokens
  shape = (work.prompts, most)
  return PromptBatch(
    ids=jnp.arange(work.prompts, dtype=jnp.int32),
    tokens=jnp.array(rng.integers(0, work.model.vocab, shape), jnp.int32),
    lengths=jnp.array(rng.integers(least, most + 1, work.prompts), jnp.int32),
  )


def make_rollout(work: Work, seed: int = 0) -> Rollout:
  """Random completions, for what comes after sampling."""
  rng = np.random.default_rng(seed)
  groups = (work.prompts, work.group_size)
  lengths = np.minimum(
    rng.geometric(1 / work.mean_tokens, groups), work.max_tokens
  )
  shape = (*groups, work.max_tokens)
  return Rollout(
    prompt_ids=jnp.arange(work.prompts, dtype=jnp.int32),
    tokens=jnp.array(rng.integers(0, work.model.vocab, shape), jnp.int32),
    logprobs=jnp.full(shape, -np.log(work.model.vocab), jnp.float32),
    lengths=jnp.array(lengths, jnp.int32),
    is_stopped=jnp.array(lengths < work.max_tokens),
    kept=everything(work),
    slot_steps=jnp.float32(lengths.sum()),
  )


def everything(work: Work) -> Selection:
  ones = jnp.ones((work.prompts,), jnp.float32)
  return Selection(ones > 0, ones)


def make_rewards(work: Work, seed: int = 0) -> jax.Array:
  """Right or wrong at even odds, so that hardly any group is all the same."""
  rng = np.random.default_rng(seed + 1)
  right = rng.random((work.prompts, work.group_size)) < 0.5
  return jnp.array(right, jnp.float32)


def sampler(work: Work):
  """`(params, prompts, kept) -> Rollout`, to be compiled."""

  def sample(params, prompts, kept):
    return rollout.sample(
      params,
      work.model,
      prompts,
      rng_at(jax.random.key(0), 0, Stage.ROLLOUT),
      kept=kept,
      group_size=work.group_size,
      max_tokens=work.max_tokens,
      num_slots=work.slots,
      stop_ids=stop_ids(work),
    )

  return sample


def pairs(prompts, completions) -> float:
  """Pairs of tokens that see each other: a prompt within, a completion both."""
  p = np.asarray(prompts.lengths, np.float64)[:, None]
  t = np.asarray(completions.lengths, np.float64)
  p = np.broadcast_to(p, t.shape)
  return float((t * p + t * (t + 1) / 2)[t > 0].sum() + (p * p / 2)[:, 0].sum())
