"""A model and a batch small enough to enumerate what can happen to them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.algo import objectives
from dppo_jax.algo.packing import PackingSpec
from dppo_jax.models import parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import PromptBatch, Rollout, Selection
from dppo_jax.rollout import Sampling
from dppo_jax.step.spec import StepSpec

MODEL = ModelConfig(
  vocab=16,
  embed=16,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp=32,
  has_qk_norm=True,
  remat="none",
)
STOP = 1
PACKING = PackingSpec(row_length=24, rows_per_micro=2, window=4)


def spec(**fields) -> StepSpec:
  """A step of grpo on `prompts` and `rollout`, for stages that read no mesh."""
  usual = {
    "mesh": None,
    "platform": "cpu",
    "root_key": None,
    "model": MODEL,
    "method": methods.grpo(),
    "objective": objectives.grpo(),
    "packing": PACKING,
    "sampling": Sampling(5, (STOP,)),
    "optimizer": None,
    "num_problems": 20,
    "prompt_tokens": 6,
    "num_prompts": 3,
    "group_size": 3,
    "logit_chunk": 16,
  }
  return StepSpec(**(usual | fields))


@functools.cache
def params(seed=0, config=MODEL):
  make = jax.jit(parameters.init, static_argnums=0)
  return make(config, jax.random.key(seed))


def prompts(num=3, width=6, seed=0) -> PromptBatch:
  rng = np.random.default_rng(seed)
  return PromptBatch(
    ids=jnp.arange(10, 10 + num, dtype=jnp.int32),
    tokens=jnp.array(rng.integers(2, 16, (num, width)), jnp.int32),
    lengths=jnp.array(rng.integers(2, width + 1, num), jnp.int32),
  )


def rollout(prompts: PromptBatch, group=3, tokens=5, seed=1) -> Rollout:
  """Completions of random tokens, lengths and sampling log-probabilities."""
  rng = np.random.default_rng(seed)
  shape = (prompts.ids.shape[0], group, tokens)
  return Rollout(
    prompt_ids=prompts.ids,
    tokens=jnp.array(rng.integers(1, 16, shape), jnp.int32),
    logprobs=jnp.array(rng.normal(-2.8, 0.4, shape), jnp.float32),
    lengths=jnp.array(rng.integers(1, tokens + 1, shape[:2]), jnp.int32),
    is_stopped=jnp.ones(shape[:2], bool),
    kept=everything(shape[0]),
    slot_steps=jnp.float32(0),
  )


def everything(*shape) -> Selection:
  return Selection(jnp.ones(shape, bool), jnp.ones(shape, jnp.float32))
