"""AdamW or a user's optimizer, clipping, and each update's learning rate."""

from collections.abc import Callable
import inspect
from typing import Any, NamedTuple

import jax
import optax

from dppo_jax.errors import UserError
from dppo_jax.files import user_code

MOMENTUM = 0.9  # decay of the first moment, the default of optax.adamw


class Optimizer(NamedTuple):
  """A gradient transformation of optax, and what is known about it.

  Attributes:
    init, update: functions of `optax.GradientTransformation`.
    learning_rate: rate as a function of the number of earlier updates.
    clip_norm: largest gradient norm that it lets through.
    momentum: decay of its first moment, `mu`; 0 if it has none or is unknown.
  """

  init: optax.TransformInitFn
  update: optax.TransformUpdateFn
  learning_rate: optax.Schedule
  clip_norm: float
  momentum: float


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
    warmup_steps: updates of a linear warm-up from 0 to `learning_rate`.
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
  """Returns an optimizer with global-norm clipping, by default AdamW.

  Non-finite gradients are skipped. The first four arguments are described
  in `make_schedule`, `factory` in `call_factory`.
  """
  rate = make_schedule(learning_rate, total_steps, schedule, warmup_steps)
  factory = factory or optax.adamw
  inner, rate = call_factory(factory, rate, weight_decay, total_steps)
  guarded = optax.apply_if_finite(
    optax.chain(optax.clip_by_global_norm(clip_norm), inner),
    # The run stops long before optax would let such a gradient through.
    max_consecutive_errors=2**30,
  )
  return Optimizer(
    init=guarded.init,
    update=guarded.update,
    learning_rate=rate,
    clip_norm=clip_norm,
    momentum=MOMENTUM if factory is optax.adamw else 0.0,
  )


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
