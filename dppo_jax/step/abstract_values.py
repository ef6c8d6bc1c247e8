"""Shapes, dtypes and shardings of the values that a step's stages exchange."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
import numpy as np

from dppo_jax import sharding
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.models import lora, parameters
from dppo_jax.models.parameters import Params
from dppo_jax.records import PromptBatch, TrainState
from dppo_jax.rng import Stage, StepRng, rng_at
from dppo_jax.step.spec import StepSpec

# Mesh axes of the results of stages; others are replicated.
_AXES = {
  "prompts": ("batch",),
  "kept": ("batch",),
  "rollout": ("batch",),
  "rewards": ("batch",),
  "buffer": ("batch",),
  "batch": (None, "batch", None),
}


def inputs(spec: StepSpec) -> dict[str, PyTree]:
  """Returns the abstract values that no stage produces, by name."""
  state = abstract_train_state(spec)
  prompts = abstract_prompts(spec, spec.num_prompts)
  shape = (spec.num_prompts, spec.group_size)
  rewards = with_sharding(
    spec, "rewards", jax.ShapeDtypeStruct(shape, jnp.float32)
  )
  integers = dict.fromkeys(("limit", "number", "part"), np.int32(0))
  scalars = {**integers, "denominator": np.float32(0)}
  return {
    **vars(state),
    **with_sharding(spec, "", scalars),
    "rng": abstract_rng(spec),
    "state": state,
    "reference": state.params if spec.has_reference else None,
    "inference_params": abstract_inference_params(spec),
    "prompts": prompts,
    "ids": prompts.ids,
    "rewards": rewards,
    "correct": rewards,
  }


def with_sharding(spec: StepSpec, name: str, tree: PyTree) -> PyTree:
  """Adds the sharding of a named value; its scalars are replicated."""
  of_arrays = sharding.sharding(spec.mesh, *_AXES.get(name, ()))
  replicated = sharding.sharding(spec.mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=of_arrays if x.ndim else replicated
    ),
    tree,
  )


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
  return jax.tree.map(lambda x, s: x.update(sharding=s), tree, shardings)


def abstract_rng(spec: StepSpec) -> StepRng:
  """Returns the shape of the randomness of a stage."""
  rng = jax.eval_shape(lambda: rng_at(spec.root_key, 0, Stage.ROLLOUT))
  return with_sharding(spec, "", rng)


def shardings_of(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x.sharding, tree)


def init_train_state(spec: StepSpec, params: Params) -> TrainState:
  """Returns the state before the first step."""
  budget = spec.method.budget
  return TrainState(
    step=jnp.int32(0),
    draws=jnp.int32(0),
    params=params,
    opt_state=spec.optimizer.init(lora.trainable(params)),
    history=spec.method.prompts.init(spec.num_problems),
    noise=budget and gradient_noise.init(),
    budget=budget and jnp.float32(1.0),
  )


def new_train_state(spec: StepSpec, params: Params) -> TrainState:
  """Returns `init_train_state`, placed on the mesh; donates `params`."""
  init = jax.jit(
    functools.partial(init_train_state, spec),
    out_shardings=shardings_of(abstract_train_state(spec)),
    donate_argnums=0,
  )
  return init(params)


def abstract_params(spec: StepSpec) -> PyTree:
  """Returns shapes, dtypes and shardings of the master weights."""
  init = functools.partial(parameters.init, spec.model)
  return _placed(
    jax.eval_shape(init, spec.root_key),
    parameters.shardings(spec.model, spec.mesh),
  )


def abstract_inference_params(spec: StepSpec) -> PyTree:
  """Returns shapes, dtypes and shardings of the weights that rollouts read."""
  cast = functools.partial(parameters.to_inference_params, config=spec.model)
  return _placed(
    jax.eval_shape(cast, abstract_params(spec)),
    parameters.inference_shardings(spec.model, spec.mesh),
  )


def abstract_train_state(spec: StepSpec) -> TrainState:
  """Returns shapes, dtypes and shardings of the train state."""
  params = abstract_params(spec)
  state = jax.eval_shape(functools.partial(init_train_state, spec), params)
  state = with_sharding(spec, "", state)
  trainable = lora.trainable(params)
  opt_state = _placed_as_weights(state.opt_state, trainable)
  return state.replace(params=params, opt_state=opt_state)


def _placed_as_weights(opt_state: PyTree, params: Params) -> PyTree:
  """Gives the shape of a weight, at its path, the weight's sharding too."""
  weights = dict(jax.tree.leaves_with_path(params))

  def place(path, x):
    ends = (path[i:] for i in range(len(path)))
    weight = next((weights[end] for end in ends if end in weights), None)
    is_like = weight is not None and weight.shape == x.shape
    return x.update(sharding=weight.sharding) if is_like else x

  return jax.tree.map_with_path(place, opt_state)


def abstract_prompts(spec: StepSpec, num: int, width: int = 0) -> PromptBatch:
  """Returns a batch of `num` prompts; `width` 0 is `spec.prompt_tokens`."""
  zeros = lambda *shape: jnp.zeros((num, *shape), jnp.int32)
  prompts = lambda: PromptBatch(
    zeros(), zeros(width or spec.prompt_tokens), zeros()
  )
  return with_sharding(spec, "prompts", jax.eval_shape(prompts))
