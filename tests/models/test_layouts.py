"""Golden pages of shardings, so that a change is a diff."""

import jax
import layouts
import pytest


@pytest.mark.parametrize("name", layouts.PAGES)
def test_shardings_match_the_golden_page(name):
  written = (layouts.GOLDEN / f"{name}.txt").read_text("utf-8")
  with jax.numpy_dtype_promotion("standard"):  # optax promotes
    page = layouts.page(name)
  assert page == written, (
    "if that is what you want: python tests/models/layouts.py"
  )
