"""The mathematics runs under strict dtype promotion."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes():
  with jax.numpy_dtype_promotion("strict"):
    yield
