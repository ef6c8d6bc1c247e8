"""Before the first step, right kernels pass and wrong ones are caught."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import sharding
from dppo_jax.errors import UserError
from dppo_jax.models import attention
from dppo_jax.models.attention import decode_kernel
from dppo_jax.run import kernel_check, setup
from dppo_jax.run.description import warnings
from tests.helpers import commands

pytestmark = pytest.mark.usefixtures("tpu_kernels", "no_memory")

SETTINGS = {
  "model__shape__head_dim": 128,  # which the decode kernel needs
  "model__shape__heads": 2,
  "model__shape__kv_heads": 1,
  "model__shape__layers": 1,
  "data__train": "arithmetic:64:1",
  "data__eval": "",
  "pack__row_length": 256,
  "rollout__group_size": 4,
}


@pytest.fixture
def no_memory():
  """Kernels that have passed are not remembered."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  yield
  jax.config.update("jax_compilation_cache_dir", before)


def _run(**options) -> setup.Run:
  """A run for TPUs with emulated kernels."""
  config = commands.config("arithmetic", **{**SETTINGS, **options})
  tokenizer = setup.read_model(config)[1]
  model = setup.describe_model(config.model, "", tokenizer.vocab_size)
  problems = setup.read_problems(config, tokenizer, config.data.eval)
  mesh = sharding.make_mesh()
  return setup.make_run(config, mesh, "tpu", "", tokenizer, model, *problems)


def _plant(monkeypatch, change):
  """Replaces the kernel by `change(kernel, q, k, v, ids...)`."""
  right = attention.BACKENDS["splash"]
  wrong = functools.partial(change, right)
  monkeypatch.setitem(attention.BACKENDS, "splash", wrong)


def _skip_a_block(right, q, k, v, end, window=None):
  """Queries after the first block do not see the keys in it."""
  if end is not None:
    is_first = jnp.arange(q.shape[1]) < 128
    end = jnp.where(is_first, jnp.minimum(end, 128), end)
  return right(q, k, v, end, window)


@jax.custom_vjp
def _halved(x):
  return x


_halved.defvjp(lambda x: (x, None), lambda _, grad: (grad / 2,))


def _halve_a_gradient(right, q, k, v, *ids):
  return right(q, _halved(k), v, *ids)


def _no_number(right, q, *more):
  return right(q, *more).at[0, 3, 0, 0].set(jnp.nan)


def _no_program(right, q, *more):
  raise ValueError("Mosaic failed to compile TPU kernel\nand more lines")


WRONG = {
  _skip_a_block: r"differs .* in the output of a packed row, above 0\.02",
  _halve_a_gradient: r"by 0\.\d+ in the gradient of the keys of a packed row",
  _no_number: "by nan in the output of a packed row",
  _no_program: "cannot compute a packed row: Mosaic failed to compile TPU ker",
}


@pytest.mark.parametrize(
  "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_kernels_for_tpus_pass(dtype):
  run = _run(model__dtype=dtype)
  assert run.spec.model.shares_prompts
  assert "differs from plain XLA by at most" in kernel_check.judge(run.spec)
  assert kernel_check.checked(run.spec, "splash") == (run.spec, "")


@pytest.mark.parametrize("change", WRONG, ids=lambda x: x.__name__)
def test_wrong_kernel_is_replaced_by_plain_xla(monkeypatch, change):
  run = _run()
  _plant(monkeypatch, change)
  spec, fault = kernel_check.checked(run.spec, "auto")
  assert spec.model.attention == "xla"
  assert not spec.model.shares_prompts
  assert "\n" not in fault and fault.startswith("splash ")
  replaced = run._replace(spec=spec, kernel_fault=fault)
  lines = warnings(replaced, commands.config("arithmetic"))
  assert lines == [f"attention: xla, plain XLA: {fault}"]
  with pytest.raises(UserError, match=WRONG[change]) as error:
    kernel_check.checked(run.spec, "splash")
  assert str(error.value).startswith("config.model.attention=splash is wrong")


def _skip_the_end_of_prompts(monkeypatch):
  right = decode_kernel._call
  skip = lambda *x: right(*x[:6], jnp.maximum(x[6] - 64, 0), x[7])
  monkeypatch.setattr(decode_kernel, "_call", skip)


def _write_to_the_next_place(monkeypatch):
  right = decode_kernel._with_token
  wrong = lambda window, new, at: right(window, new, at + 1)
  monkeypatch.setattr(decode_kernel, "_with_token", wrong)


@pytest.mark.parametrize(
  ("plant", "result"),
  [
    (_skip_the_end_of_prompts, "output"),
    (_write_to_the_next_place, "written keys"),
  ],
)
def test_wrong_decode_kernel_is_caught(monkeypatch, plant, result):
  plant(monkeypatch)
  monkeypatch.setitem(kernel_check._PARTS, "a packed row", lambda spec: [])
  run = _run(data__max_prompt_tokens=512, rollout__max_tokens=128)
  spec = dataclasses.replace(run.spec, prompt_tokens=128)
  fault = kernel_check.checked(spec, "auto")[1]
  assert f"in the {result} of a decode step" in fault


def test_kernel_that_has_passed_is_remembered(monkeypatch, tmp_path):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
  compared = []
  one = jnp.ones((1, 1))
  compare = lambda spec: compared.append(spec) or [("output", one, one)]
  monkeypatch.setattr(kernel_check, "_PARTS", {"a packed row": compare})
  run = _run()
  for _ in range(2):
    assert kernel_check.checked(run.spec, "auto") == (run.spec, "")
  assert compared == [run.spec]
  other = dataclasses.replace(run.spec, group_size=8)
  kernel_check.checked(other, "auto")
  assert compared == [run.spec, other]
  monkeypatch.setattr(kernel_check, "versions", lambda: {"jax": "0.99"})
  kernel_check.checked(run.spec, "auto")
  assert len(compared) == 3


def test_kernel_that_has_failed_is_compared_again(monkeypatch, tmp_path):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
  one = jnp.ones((1, 1))
  values = iter([3 * one, one])
  compare = lambda spec: [("output", next(values), one)]
  monkeypatch.setattr(kernel_check, "_PARTS", {"a packed row": compare})
  run = _run()
  assert (
    "differs from plain XLA by 1" in kernel_check.checked(run.spec, "auto")[1]
  )
  assert kernel_check.checked(run.spec, "auto") == (run.spec, "")


@pytest.mark.parametrize("row_length, group_size", [(24, 16), (128, 64)])
def test_example_row_has_two_groups_and_padding(row_length, group_size):
  layout = kernel_check.example_row(row_length, group_size)
  assert set(np.unique(layout.prompt[layout.is_real])) == {0, 1}
  num = int(layout.is_real.sum())
  assert row_length // 2 < num < row_length
  prefix = int((layout.segment_ids == 1).sum())
  members = min(group_size, num // 2 - prefix)
  assert layout.segment_ids.max() == 2 * (1 + members)
