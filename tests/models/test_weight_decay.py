"""Weight decay acts on the weights that transformers' trainer decays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dppo_jax.models import hf
from dppo_jax.step.optimizer import adamw

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FAMILIES = (
  "Qwen2ForCausalLM",  # with biases
  "Qwen3ForCausalLM",
  "Qwen3MoeForCausalLM",
  "LlamaForCausalLM",
  "Gemma3ForCausalLM",
)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_decays_as_many_numbers(tmp_path, family, is_tied):
  from tests.helpers import checkpoints

  theirs = checkpoints.write(tmp_path, family, is_tied=is_tied)
  names = transformers.Trainer.get_decay_parameter_names(None, theirs)
  sizes = {x: y.numel() for x, y in theirs.named_parameters()}
  params, _ = hf.load(str(tmp_path))
  ones = jax.tree.map(jnp.ones_like, params)
  zeros = jax.tree.map(jnp.zeros_like, params)
  optimizer = adamw(optax.constant_schedule(0.1), 0.5)
  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    state = jax.jit(optimizer.init)(ones)
    updates, _ = jax.jit(optimizer.update)(zeros, state, ones)
  moved = sum(np.count_nonzero(x) for x in jax.tree.leaves(updates))
  assert moved == sum(size for name, size in sizes.items() if name in names)
  in_all = sum(x.size for x in jax.tree.leaves(params))
  assert moved < in_all == sum(sizes.values())
