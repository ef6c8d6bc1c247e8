"""Limits of the machine, and checks of the results on it."""

from collections.abc import Iterator
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from dppo_jax import methods, rollout, sharding
from dppo_jax.algo import objectives
from dppo_jax.errors import UserError
from dppo_jax.models import attention, parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import PackedBatch
from dppo_jax.run import kernel_check
from dppo_jax.step import update
from dppo_jax.step.spec import StepSpec

from ..common import machine, phases
from ..common import work as works

Row = dict[str, Any]


def machine_rows() -> Iterator[Row]:
  """The ceilings that all other rows are shares of."""
  yield {"name": "yardstick", **machine.yardstick(9)}
  if jax.device_count() > 1:
    yield {"name": "all-reduce", "bytes_per_second": _all_reduce()}


def kernel_rows(model: str) -> Iterator[Row]:
  """The check of a run before its first step, by dtype, and its seconds."""
  for dtype in ("float32", "bfloat16"):
    work = for_platform(works.with_model(works.WORKS[model], dtype=dtype))
    spec = StepSpec(
      mesh=sharding.make_mesh(),
      platform=jax.devices()[0].platform,
      root_key=jax.random.key(0),
      model=work.model,
      method=methods.grpo(),
      objective=objectives.grpo(),
      packing=work.rows,
      sampling=rollout.Sampling(work.max_tokens, works.stop_ids(work)),
      optimizer=None,
      num_problems=work.prompts,
      prompt_tokens=work.prompt_tokens[1],
      num_prompts=work.prompts,
      group_size=work.group_size,
      num_slots=work.slots,
    )
    start = time.monotonic()
    is_right = True
    try:
      text = kernel_check.judge(spec)
    except UserError as error:
      text, is_right = str(error), False
    yield {
      "name": work.model.attention,
      "model": model,
      "dtype": dtype,
      "seconds": time.monotonic() - start,
      "text": text,
      "is_right": is_right,
    }


def _all_reduce() -> float:
  """Bytes of a float32 array on each device over the seconds of its sum."""
  mesh = sharding.make_mesh(data=-1)
  size = 1 << 26
  place = sharding.sharding(mesh, "batch", None)
  x = jax.device_put(jnp.ones((jax.device_count(), size)), place)
  add = jax.jit(
    lambda x: x.sum(axis=0), out_shardings=sharding.sharding(mesh, None)
  )
  return 4 * size / machine.timed(lambda: add(x), 5).median


def attention_rows(model: str) -> Iterator[Row]:
  """Each kernel's forward and backward pass on the rows of a real batch.

  The reference is plain XLA in float32 with exact products. Errors are
  |found - reference| / |reference| over positions in use.
  """
  work = for_platform(works.WORKS[model])
  ids = _packed(work)
  q, k, v = _random_heads(work)
  exact = functools.partial(_forward_and_gradient, backend="xla")
  with jax.default_matmul_precision("highest"):
    wanted = jax.jit(exact)(q, k, v, ids)
  is_used = (ids.segment_ids > 0)[:, :, None, None]
  for backend in _backends(work):
    for dtype in ("float32", "bfloat16"):
      cast = [x.astype(dtype) for x in (q, k, v)]
      run = jax.jit(functools.partial(_forward_and_gradient, backend=backend))
      try:
        actual = run(*cast, ids)
        seconds = machine.timed(lambda r=run, c=cast: r(*c, ids), 5)
      except Exception as error:  # a kernel that this device does not take
        message = str(error).strip().splitlines()[0]
        yield {
          "name": backend,
          "model": model,
          "dtype": dtype,
          "error": message,
        }
        continue
      errors = [
        _error(x, y, is_used) for x, y in zip(actual, wanted, strict=True)
      ]
      yield {
        "name": backend,
        "dtype": dtype,
        "model": model,
        "row_length": work.rows.row_length,
        "seconds": seconds.median,
        "errors": dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)),
        "is_right": max(errors) < {"float32": 5e-3, "bfloat16": 2e-2}[dtype],
      }


def rollout_rows() -> Iterator[Row]:
  """The sampler against a CPU's, and against the trainer, in both dtypes."""
  work = _small_work()
  with jax.default_matmul_precision("highest"):
    here = _sampled(work, jax.devices()[0])
    there = _sampled(work, jax.devices("cpu")[0])
  same = (here.tokens == there.tokens) | ~_is_token(here)
  yield {
    "name": "float32 tokens as on a CPU",
    "completions": int(here.lengths.size),
    "share_equal": float(same.all(axis=2).mean()),
    "is_right": float(same.all(axis=2).mean()) > 0.9,
  }
  for dtype in ("float32", "bfloat16"):
    with jax.default_matmul_precision(
      "highest" if dtype == "float32" else "default"
    ):
      in_dtype = for_platform(works.with_model(work, dtype=dtype))
      yield _policy_gap(in_dtype, dtype)


def _policy_gap(work: works.Work, dtype: str) -> Row:
  """Compares the trainer's log-probabilities with the sampler's."""
  params, prompts = phases.random_params(work), works.make_prompts(work)
  sampled = jax.jit(works.sampler(work))(
    params, prompts, works.everything(work)
  )
  batch, num_micro, _ = jax.jit(
    functools.partial(phases.select_batch, work=work, share=1.0)
  )(prompts, sampled, works.make_rewards(work))
  spec = phases.step_spec(work)
  stats = jax.jit(
    lambda params, batch, num: update.score(params, batch, num, spec=spec)
  )(params, batch, num_micro)
  gap = jnp.abs(stats.logprobs - batch.old_logprobs)
  gap = jnp.where(batch.is_trained, gap, 0.0)
  mean = float(gap.sum() / batch.is_trained.sum())
  return {
    "name": f"{dtype} trainer against sampler",
    "logprob_gap_mean": mean,
    "logprob_gap_max": float(gap.max()),
    "is_right": mean < {"float32": 1e-4, "bfloat16": 3e-2}[dtype],
  }


def _small_work() -> works.Work:
  return for_platform(
    works.WORKS["small"]._replace(prompts=16, max_tokens=64, slots=32)
  )


def for_platform(work: works.Work) -> works.Work:
  """The attention that a run would take here."""
  rows, group_size = work.rows.row_length, work.group_size
  return works.with_model(
    work, attention=choose_backend(work.model, rows, group_size)
  )


def choose_backend(model: ModelConfig, row_length: int, group_size: int) -> str:
  """The attention that a run of this model would take here."""
  device = jax.devices()[0]
  capability = float(getattr(device, "compute_capability", 0))
  shapes = attention.Shapes(
    device.platform,
    row_length,
    group_size,
    model.head_dim,
    dtype=model.dtype,
    capability=capability,
  )
  return attention.choose_backend("auto", shapes)


def _backends(work: works.Work) -> list[str]:
  """Returns the kernels of this platform, the default of `auto` first."""
  platform = jax.devices()[0].platform
  kernels = [x for x, where in attention.KERNELS.items() if where == platform]
  return list(dict.fromkeys([work.model.attention, *kernels, "xla"]))


def _packed(work: works.Work) -> PackedBatch:
  """One micro-batch, packed as a step would."""
  prompts, sampled = works.make_prompts(work), works.make_rollout(work)
  batch, _, _ = jax.jit(
    functools.partial(phases.select_batch, work=work, share=1.0)
  )(prompts, sampled, works.make_rewards(work))
  return jax.tree.map(lambda x: x[0], batch)


def _random_heads(work: works.Work) -> list[jax.Array]:
  model, rows = work.model, work.rows
  lead = (rows.rows_per_micro, rows.row_length)
  return [
    jax.random.normal(jax.random.key(i), (*lead, heads, model.head_dim))
    for i, heads in enumerate((model.heads, model.kv_heads, model.kv_heads))
  ]


def _forward_and_gradient(q, k, v, ids: PackedBatch, *, backend: str):
  """The output, and the gradient of its product with fixed noise."""
  noise = jax.random.normal(jax.random.key(9), q.shape)
  noise = jnp.where((ids.segment_ids > 0)[:, :, None, None], noise, 0)
  end = attention.seen_by_itself(ids.end)

  def loss(q, k, v):
    out = attention.attention(q, k, v, end, backend)
    return (out.astype(jnp.float32) * noise).sum(), out

  (_, out), gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
    q, k, v
  )
  return out, *gradient


def _error(actual, wanted, is_used) -> float:
  actual, wanted = (jnp.where(is_used, x, 0) for x in (actual, wanted))
  norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32))
  return float(norm(actual.astype(jnp.float32) - wanted) / norm(wanted))


def _sampled(work: works.Work, device: jax.Device):
  """A rollout of the same weights and prompts on `device`."""
  backend = "xla_by_row" if device.platform == "cpu" else work.model.attention
  model = dataclasses.replace(work.model, attention=backend)
  with jax.default_device(device):
    params = parameters.init(model, jax.random.key(0))
    sample = jax.jit(works.sampler(work._replace(model=model)))
    actual = sample(params, works.make_prompts(work), works.everything(work))
    return jax.device_get(actual)


def _is_token(completions):
  length = completions.tokens.shape[2]
  return jnp.arange(length) < completions.lengths[..., None]
