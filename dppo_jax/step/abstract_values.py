"""Shapes, dtypes and shardings of the values that a step's stages exchange."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
import optax

from dppo_jax import config as configs
from dppo_jax import sharding
from dppo_jax.data import ProblemSet
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.models import lora, parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.parameters import Params
from dppo_jax.records import PromptBatch, StepCosts, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run.setup import Run
from dppo_jax.step.optimizer import call_factory, make_optimizer, make_schedule

# Mesh axes of the results of stages; others are replicated.
_PLACES = {
  "prompts": ("batch",),
  "kept": ("batch",),
  "sizes": ("batch",),
  "rollout": ("batch",),
  "rewards": ("batch",),
  "buffer": ("batch",),
  "batch": (None, "batch", None),
}


def inputs(run: Run) -> dict[str, PyTree]:
  """Returns the abstract values that no stage produces."""
  state = abstract_train_state(run)
  num_prompts = run.config.data.prompts_per_step
  prompts = abstract_prompts(run, run.train_set, num_prompts)
  shape = (num_prompts, run.config.rollout.group_size)
  rewards = place(run, "rewards", jax.ShapeDtypeStruct(shape, jnp.float32))
  costs = lambda: StepCosts(*jnp.zeros(7, jnp.float32))
  replicated = {
    "rng": jax.eval_shape(lambda: rng_at(run.root_key, 0, Stage.ROLLOUT)),
    "limit": jax.ShapeDtypeStruct((), jnp.int32),
    "denominator": jax.ShapeDtypeStruct((), jnp.float32),
    "costs": jax.eval_shape(costs) if run.method.reads_costs else None,
  }
  return {
    **vars(state),
    **place(run, "", replicated),
    "state": state,
    "reference": state.params if has_reference(run) else None,
    "inference_params": abstract_inference_params(run),
    "prompts": prompts,
    "ids": prompts.ids,
    "rewards": rewards,
    "correct": rewards,
  }


def place(run: Run, name: str, tree: PyTree) -> PyTree:
  """Adds the sharding of a named value; its scalars are replicated."""
  place = sharding.sharding(run.mesh, *_PLACES.get(name, ()))
  replicated = sharding.sharding(run.mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=place if x.ndim else replicated
    ),
    tree,
  )


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
  return jax.tree.map(lambda x, s: x.update(sharding=s), tree, shardings)


def shardings_of(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x.sharding, tree)


def optimizer(run: Run) -> optax.GradientTransformation:
  """Returns the optimizer that the config describes."""
  o = run.config.optimizer
  return make_optimizer(
    o.learning_rate,
    run.num_updates,
    o.schedule,
    o.warmup_steps,
    o.weight_decay,
    o.clip_norm,
    configs.load_optimizer(run.config),
  )


def learning_rate(run: Run) -> optax.Schedule:
  """Returns the optimizer's rate as a function of the number of updates."""
  o, num = run.config.optimizer, run.num_updates
  rate = make_schedule(o.learning_rate, num, o.schedule, o.warmup_steps)
  factory = configs.load_optimizer(run.config)
  return call_factory(factory, rate, o.weight_decay, num)[1]


def has_reference(run: Run) -> bool:
  """True if a KL penalty needs a copy of the first weights.

  With adapters, the frozen weights are those of the reference policy.
  """
  return bool(run.objective.beta) and not run.model.lora


def init_train_state(run: Run, params: Params) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(
    step=jnp.int32(0),
    draws=jnp.int32(0),
    params=params,
    opt_state=optimizer(run).init(lora.trainable(params)),
    history=run.method.prompts.init(len(run.train_set)),
    noise=gradient_noise.init() if run.method.noise_every else None,
  )


def new_train_state(run: Run, params: Params) -> TrainState:
  """Returns `init_train_state`, placed on the mesh; donates `params`."""
  init = jax.jit(
    functools.partial(init_train_state, run),
    out_shardings=shardings_of(abstract_train_state(run)),
    donate_argnums=0,
  )
  return init(params)


def abstract_params(run: Run) -> Params:
  """Returns shapes, dtypes and shardings of the master weights."""
  init = functools.partial(parameters.init, run.model)
  return _placed(
    jax.eval_shape(init, run.root_key),
    parameters.shardings(run.model, run.mesh),
  )


def abstract_inference_params(run: Run) -> Params:
  """Returns shapes, dtypes and shardings of the weights that rollouts read."""
  model = inference_model(run)
  cast = functools.partial(parameters.to_inference_params, config=model)
  return _placed(
    jax.eval_shape(cast, abstract_params(run)),
    parameters.inference_shardings(model, run.mesh),
  )


def abstract_train_state(run: Run) -> TrainState:
  """Returns shapes, dtypes and shardings of the train state."""
  params = abstract_params(run)
  state = jax.eval_shape(functools.partial(init_train_state, run), params)
  state = place(run, "", state)
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


def inference_model(run: Run) -> ModelConfig:
  """Returns the architecture with the sampler's dtype and sharding."""
  options = run.config.rollout
  return dataclasses.replace(
    run.model,
    dtype=options.dtype or run.model.dtype,
    gathers_layers=options.shard_weights,
  )


def abstract_prompts(run: Run, problems: ProblemSet, num: int) -> PromptBatch:
  zeros = lambda *shape: jnp.zeros((num, *shape), jnp.int32)
  prompts = lambda tokens: PromptBatch(zeros(), zeros(tokens), zeros())
  shapes = jax.eval_shape(lambda: prompts(problems.tokens.shape[1]))
  return place(run, "prompts", shapes)
