"""AdamW or a user's optimizer, clipping, learning rate and momentum."""

from collections.abc import Callable
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
import optax

from dppo_jax.errors import UserError
from dppo_jax.files import user_code
from dppo_jax.records import Scalar


class Optimizer(NamedTuple):
  """A gradient transformation of optax, and what is known about it.

  Attributes:
    init, update: functions of `optax.GradientTransformation`.
    learning_rate: rate as a function of the number of earlier updates.
    clip_norm: largest gradient norm that it lets through.
  """

  init: optax.TransformInitFn
  update: optax.TransformUpdateFn
  learning_rate: optax.Schedule
  clip_norm: float


def make_schedule(
  learning_rate: float,
  total_steps: int,
  schedule: str = "constant",
  warmup_steps: int = 0,
) -> optax.Schedule:
  """Returns the learning rate as a function of the number of earlier updates.

  Args:
    total_steps: length of the schedule, in updates.
    schedule: constant, linear or cosine, after the warm-up.
    warmup_steps: updates of a linear warm-up, from `learning_rate` over their
      number.
  """
  decay_steps = max(1, total_steps - warmup_steps)
  rate = {
    "constant": optax.constant_schedule(learning_rate),
    "linear": optax.linear_schedule(learning_rate, 0.0, decay_steps),
    "cosine": optax.cosine_decay_schedule(learning_rate, decay_steps),
  }[schedule]
  if warmup_steps:
    warmup = optax.linear_schedule(
      learning_rate / warmup_steps, learning_rate, warmup_steps - 1
    )
    rate = optax.join_schedules([warmup, rate], [warmup_steps])
  return rate


def last_learning_rate(
  schedule: optax.Schedule, num_updates: int, num_skipped: float
) -> float:
  """Returns the rate of the last of `num_updates`, skipped ones not counted."""
  return float(schedule(max(num_updates - int(num_skipped) - 1, 0)))


def make_optimizer(
  learning_rate: float,
  total_steps: int,
  schedule: str = "constant",
  warmup_steps: int = 0,
  weight_decay: float = 0.0,
  clip_norm: float = 1.0,
  factory: Callable[..., Any] | None = None,
) -> Optimizer:
  """Returns an optimizer with global-norm clipping, by default `adamw`.

  Non-finite gradients are skipped. The first four arguments are described
  in `make_schedule`, `factory` in `call_factory`.
  """
  rate = make_schedule(learning_rate, total_steps, schedule, warmup_steps)
  factory = factory or adamw
  inner, rate = call_factory(factory, rate, weight_decay, total_steps)
  guarded = optax.apply_if_finite(
    optax.chain(optax.clip_by_global_norm(clip_norm), inner),
    # The run stops long before optax would let such a gradient through.
    max_consecutive_errors=2**30,
  )
  return Optimizer(guarded.init, guarded.update, rate, clip_norm)


def adamw(
  learning_rate: optax.Schedule, weight_decay: float = 0.0
) -> optax.GradientTransformation:
  """AdamW that decays every weight but norms and biases.

  Embeddings and adapters decay too, as in the trainer of transformers. The
  state is as in `optax.adamw`.
  """
  inner = optax.adamw(learning_rate, weight_decay=weight_decay)

  def without_norms(path, weight):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    is_kept = name.endswith(("norm", "bias"))
    return jnp.zeros_like(weight) if is_kept else weight

  def update(gradient, state, params):
    # It reads weights for their decay alone.
    decayed = params and jax.tree.map_with_path(without_norms, params)
    return inner.update(gradient, state, decayed)

  return optax.GradientTransformation(inner.init, update)


def call_factory(
  factory: Callable[..., Any],
  rate: optax.Schedule,
  weight_decay: float,
  total_steps: int,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Returns a factory's optimizer, and its rate by the number of updates.

  Args:
    factory: function such as `optax.lion`. Its first argument is `rate`; it
      also gets `weight_decay` and `total_steps`, the updates of the run, if it
      has arguments of these names. It returns an optimizer or, if it does not
      follow `rate`, `(optimizer, schedule)`.
  Raises:
    UserError: if it fails, now or when it is used, or returns anything else.
  """
  name = f"config.optimizer.function: {factory.__name__}()"
  options = {"weight_decay": weight_decay, "total_steps": total_steps}
  known = options.keys() & inspect.signature(factory).parameters
  if weight_decay and "weight_decay" not in known:
    raise UserError(
      f"config.optimizer.weight_decay is {weight_decay} but {name} has no "
      "argument weight_decay: set it to 0"
    )
  explained = user_code.explained(name)
  result = explained(factory)(rate, **{x: options[x] for x in known})
  is_pair = type(result) is tuple and len(result) == 2
  optimizer, rate = result if is_pair else (result, rate)
  if not isinstance(optimizer, optax.GradientTransformation):
    raise UserError(
      f"{name} returned {type(optimizer).__name__} but must return an "
      "optax.GradientTransformation, alone or with its schedule"
    )
  label = (
    f"{name} returned {type(rate).__name__} as the schedule but must return "
    "a function from the number of updates to the learning rate"
  )
  with user_code.explained(label), jax.ensure_compile_time_eval():
    float(rate(0))
  optimizer = optax.GradientTransformation(*map(explained, optimizer))
  return optimizer, explained(rate)


def momentum_square(opt_state: PyTree) -> Scalar:
  """Returns the squared norm of the optimizer's first moment, NaN without."""
  unknown = jnp.float32(jnp.nan)
  try:
    momentum = optax.tree.get(opt_state, "mu", unknown)
  except KeyError:  # there are several
    momentum = unknown
  return optax.tree.norm(momentum, squared=True)


def momentum_decay(optimizer: Optimizer) -> float:
  """Returns the decay of the optimizer's first moment, found by two steps.

  Returns 0 if it has no `mu`, or if `mu` is no average of the gradients.
  """

  @jax.jit
  def two_steps(gradient):
    state, norms = optimizer.init(gradient), []
    for _ in range(2):
      _, state = optimizer.update(gradient, state, gradient)
      norms.append(jnp.sqrt(momentum_square(state)))
    return norms

  scale = 1e-4  # below every clip norm
  try:
    norms = two_steps({"weight": jnp.full((1, 1), scale)})
  except UserError:  # an optimizer for the user's weights alone
    return 0.0
  first, second = (float(x) / scale for x in norms)
  decay = round(1 - first, 4)
  is_average = abs(second - first * (1 + decay)) < 1e-3
  return decay if is_average and 0 < decay < 1 else 0.0
