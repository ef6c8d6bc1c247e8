"""AdamW with norm clipping, and the learning rate of each update."""

import optax


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
  b1: float = 0.9,
  b2: float = 0.999,
  clip_norm: float = 1.0,
) -> optax.GradientTransformation:
  """Returns AdamW with global-norm clipping; skips non-finite gradients.

  The first four arguments are those of `make_schedule`.
  """
  rate = make_schedule(learning_rate, total_steps, schedule, warmup_steps)
  return optax.apply_if_finite(
    optax.chain(
      optax.clip_by_global_norm(clip_norm),
      optax.adamw(rate, b1=b1, b2=b2, weight_decay=weight_decay),
    ),
    # The run stops long before optax would let such a gradient through.
    max_consecutive_errors=2**30,
  )
