"""--mode=check: one table of what is right on this machine before a run.

A small step of the config's model, with full slots and completions of at most
`_TOKENS` tokens, is compared with the trainer and with the plan's seconds.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import os
import pathlib
import platform
import textwrap
import time
from typing import Any, NamedTuple
import uuid

import jax
import numpy as np

from dppo_jax import config as configs
from dppo_jax import methods, sharding
from dppo_jax.algo import objectives
from dppo_jax.errors import UserError, first_line
from dppo_jax.eval import eval_sets
from dppo_jax.files import bucket
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.planning import memory, step_time, targets
from dppo_jax.records import TrainState
from dppo_jax.rng import rng_at
from dppo_jax.run import checkpoint, compile_cache, kernel_check
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import abstract_values, grade, update
from dppo_jax.step.train_step import TrainStep

_TOKENS = 64  # of a completion, at most
# Mean |log-ratio| in nats between sampler and trainer, by dtype.
_LOG_RATIO = {"float32": 1e-4, "bfloat16": 3e-2}
# A stage may take this many times the predicted seconds, and these seconds
# more, for launches that the prediction does not count.
_SLOWER, _LAUNCHES = 5, {"decode step": 0.03, "micro-batch": 0.5}
# Files of drivers, and the extra that brings the compiler for their devices.
_DRIVERS = {
  "/dev/nvidiactl": "cuda",
  "/dev/accel0": "tpu",
  "/dev/vfio/0": "tpu",
}
# Parts of a device's name that differ from the kind of `targets.CHIPS`.
_KINDS = {"v5 lite": "v5e", "v6 lite": "v6e", "v5": "v5p"}


class Row(NamedTuple):
  """A row of the table: what was checked, and figures or what to do."""

  name: str
  is_right: bool
  text: str


def run(config: configs.Config, workdir: pathlib.Path) -> list[Row]:
  """Checks devices, kernels, a step, a checkpoint and the grader.

  Args:
    workdir: directory in which a checkpoint is written, and deleted.
  """
  config, workdir = configs.absolute_paths(config), workdir.absolute()
  compile_cache.enable_compilation_cache()
  rows: list[Row] = []
  with progress.Progress() as bar, contextlib.ExitStack() as stack:

    def add(name: str, check: Callable[..., Any], *args) -> Any:
      """Adds a row; returns the second result of `check`, None if wrong."""
      result = None
      try:
        with bar.task(name, is_brief=True):
          text, result = check(*args)
        row = Row(name, True, text)
      except Exception as error:  # also of a compiler, device or file system
        row = Row(name, False, first_line(error))
      rows.append(row)
      bar.say(_line(row))
      return result

    add("devices", _devices)
    if planned := add("config", _setup, config):
      add("attention", _attention, planned)  # on one device
      stack.enter_context(jax.set_mesh(planned.spec.mesh))
      params = add("weights", _weights, planned)
      if params and (step := add("step", _step, planned, params)):
        state, timed, gap = step
        for name, figures in timed.items():
          add(name, _judge_seconds, name, *figures)
        add("sampler", _sampler, planned.spec.model.dtype, gap)
        add("checkpoint", _checkpoint, planned, state, workdir)
      add("grader", _grader, planned)
  return rows


def _line(row: Row) -> str:
  start = f"{row.name:12} {'right' if row.is_right else 'WRONG':6} "
  indent = " " * len(start)
  return textwrap.fill(
    row.text, 79, initial_indent=start, subsequent_indent=indent,
    break_on_hyphens=False, break_long_words=False,
  )  # fmt: skip


def _devices() -> tuple[str, None]:
  """Names devices, driver and versions."""
  devices = jax.devices()
  if devices[0].platform == "cpu" and "JAX_PLATFORMS" not in os.environ:
    for path, extra in _DRIVERS.items():
      if pathlib.Path(path).exists():
        raise UserError(
          f"JAX uses the CPU although {path} exists: "
          f"pip install -e '.[{extra}]'"
        )
  names = kernel_check.versions() | {"python": platform.python_version()}
  facts = [f"{len(devices)} x {devices[0].device_kind}"]
  with contextlib.suppress(OSError):
    text = pathlib.Path("/proc/driver/nvidia/version").read_text("utf-8")
    facts.append(text.partition("\n")[0])
  facts += [f"{name} {version}" for name, version in names.items()]
  return ", ".join(facts), None


def _setup(config: configs.Config) -> tuple[str, Run]:
  """Reads the config, the model's description and the problems."""
  run = memory.choose_slots(setup_run(config))
  memory.check(run)
  eval_sets.check_metric(run, config.checkpoint.best)
  model = run.spec.model
  text = (
    f"{model.family}, {parameters.num_parameters(model):,} parameters, "
    f"{model.dtype}, mesh {sharding.describe(run.spec.mesh)}, "
    f"{len(run.train_set)} problems; the memory is enough"
  )
  return text, run


def _attention(run: Run) -> tuple[str, None]:
  """Compares attention with plain XLA; see `run/kernel_check.py`."""
  if run.kernel_fault:
    raise UserError(f"{run.kernel_fault}; auto uses plain XLA")
  try:
    return kernel_check.judge(run.spec), None
  except UserError as error:
    raise UserError(f"{error}: set config.model.attention=xla") from error


def _weights(run: Run) -> tuple[str, parameters.Params]:
  start = time.monotonic()
  params = jax.block_until_ready(run.initial_params())
  return f"{run.origin}, {time.monotonic() - start:.1f} s", params


def _step(run: Run, params: parameters.Params) -> tuple[str, tuple]:
  """Takes two steps with full slots and short completions; times the second.

  Half of the rewards are 1, so that every completion has an advantage.

  Returns:
    A text; the train state, the arguments of `_judge_seconds` by the name of a
    row, and |log-ratio| in nats of sampler to trainer by token.
  """
  start, spec = time.monotonic(), run.spec
  slots, limit = memory.num_slots(spec), min(spec.sampling.max_tokens, _TOKENS)
  groups = -(-slots // spec.group_size)
  sampling = spec.sampling._replace(
    max_tokens=limit,
    stop_ids=(spec.model.vocab,),  # no token: all slots stay busy
    top_k=0,  # so that the sampler's distribution is the trainer's
    top_p=1.0,
  )
  spec = dataclasses.replace(
    spec,
    num_prompts=sharding.num_shards(spec.mesh, "batch") * groups,
    method=methods.grpo(),
    objective=objectives.grpo(),
    sampling=sampling,
    stop_strings=(),
    overlong_tokens=0,
    mask_truncated=False,
    inner_updates=1,
    mini_batches=1,
  )
  step = TrainStep(spec, run.train_set, run.tokenizer, grade.Ungraded())
  state = abstract_values.new_train_state(spec, params)
  score = jax.jit(functools.partial(update.score, spec=spec))
  for _ in range(2):
    state, experience = step.collect(state)
    rewards = np.indices(experience.rewards.shape).sum(0) % 2
    experience = experience._replace(rewards=rewards.astype(np.float32))
    rng = rng_at(spec.root_key, 0)
    batches = step.select(rng, experience, state)
    rows, num = batches[0].rows, int(batches[0].num_micro)
    stats, rows = jax.device_get((score(state.params, rows, num), rows))
    state, _ = step.update(state, None, batches)
  gap = np.abs(stats.logprobs - rows.old_logprobs)[rows.is_trained]
  seconds = step.clock.seconds
  predicted = _predict(run._replace(spec=spec))
  timed = lambda stage: (seconds[stage], predicted.get(stage, 0.0))
  figures = {
    "decode step": (*timed("rollout"), limit, f"{slots} slots a device"),
    "micro-batch": (*timed("update"), num, f"{num} in the update"),
  }
  text = f"compiled and taken twice, {time.monotonic() - start:.1f} s"
  return text, (state, figures, gap)


def _predict(run: Run) -> dict[str, float]:
  """Returns the plan's seconds by stage; none for unknown devices."""
  devices = run.spec.mesh.devices
  if not (kind := _kind(devices.flat[0])):
    return {}
  changes = f"completion={run.spec.sampling.max_tokens},trained=1"
  here = targets.Hardware(kind, kind, devices.size)
  assumed = step_time.assume(run, here, changes)
  return step_time.estimate(run, memory.estimate(run), assumed)


def _kind(device: jax.Device) -> str:
  """Returns the key of `targets.CHIPS` of a device; empty if unknown."""
  name = device.device_kind.lower()
  kinds = {x: x for x in targets.CHIPS} | _KINDS
  return next((kind for part, kind in kinds.items() if part in name), "")


def _judge_seconds(
  name: str, seconds: float, predicted: float, parts: int, facts: str
) -> tuple[str, None]:
  """Compares measured and predicted seconds of each part of a stage."""
  seconds, predicted = seconds / parts, predicted / parts
  text = f"{1e3 * seconds:.3g} ms"
  if not predicted:
    return f"{text}; --mode=plan does not know this device, {facts}", None
  text += f", predicted {1e3 * predicted:.3g} ms, {facts}"
  if seconds > _SLOWER * predicted + _LAUNCHES[name]:
    raise UserError(
      f"{text}: look for other processes on the device, then report it"
    )
  return text, None


def _sampler(dtype: str, gap: np.ndarray) -> tuple[str, None]:
  """Compares the sampler's log-probabilities with the trainer's."""
  limit, mean = _LOG_RATIO[dtype], gap.mean()
  text = f"|log-ratio| to the trainer: mean {mean:.1e}, largest {gap.max():.1e}"
  if not mean <= limit:
    raise UserError(
      f"{text}; the mean is above {limit:g}: try config.model.attention=xla, "
      "then config.model.dtype=float32, to find the cause"
    )
  return f"{text} (limit of the mean {limit:g})", None


def _checkpoint(
  run: Run, state: TrainState, workdir: pathlib.Path
) -> tuple[str, None]:
  """Saves a state in the workdir, compares the restored weights, deletes it."""
  # A name that no run has.
  folder, start = workdir / f".check-{uuid.uuid4().hex}", time.monotonic()
  try:
    with checkpoint.Checkpoints(folder) as checkpoints:
      checkpoints.save(0, state)
      checkpoints.wait()
      like = abstract_values.abstract_params(run.spec)
      restored = checkpoints.restore_params(0, like)
    equal = jax.jit(
      lambda x, y: jax.tree.map(lambda a, b: (a == b).all(), x, y)
    )(state.params, restored)
  finally:
    bucket.place(folder).rmtree(missing_ok=True)
    with contextlib.suppress(OSError):
      workdir.rmdir()  # unless it holds a run
  if not all(jax.tree.leaves(equal)):
    raise UserError(
      f"weights restored from {bucket.shown(workdir)} differ from those that "
      "were saved: use another file system"
    )
  seconds = time.monotonic() - start
  return f"saved and restored in {bucket.shown(workdir)}, {seconds:.1f} s", None


def _grader(run: Run) -> tuple[str, None]:
  start = time.monotonic()
  with run.make_grader() as grader:
    grader.self_check(run.train_set.columns)
  names = ", ".join(x.reference for x in run.reward_specs)
  return f"{names}, {time.monotonic() - start:.1f} s", None
