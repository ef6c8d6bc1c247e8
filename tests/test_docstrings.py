"""Examples in docstrings run, and the functions outsiders use have one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

from dppo_jax import algo, methods, rollout

MODULES = [
  name
  for part in (algo, methods, rollout)
  for _, name, _ in pkgutil.iter_modules(part.__path__, part.__name__ + ".")
]
SHOWN = {
  algo: (
    "bernoulli count_tokens effective_sample_size group_centred "
    "group_normalized horvitz_thompson is_zero_variance leave_one_out "
    "overlong_penalty plan row_bound segment_sum surrogate systematic "
    "water_filling"
  ),
  methods: "drop_small_advantage neyman_completions top_abs_advantage",
  rollout: "sample_token",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
  module = importlib.import_module(name)
  failed, attempted = doctest.testmod(module, report=True)
  assert not failed
  assert attempted == inspect.getsource(module).count(">>> ")


@pytest.mark.parametrize("part", SHOWN, ids=lambda part: part.__name__)
def test_public_functions_have_an_example(part):
  for name in SHOWN[part].split():
    assert ">>> " in getattr(part, name).__doc__, f"{part.__name__}.{name}"
