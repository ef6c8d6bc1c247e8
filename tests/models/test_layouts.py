"""Golden pages of shardings, so that a change is a diff."""

import layouts
import pytest


@pytest.mark.parametrize("name", layouts.PAGES)
def test_every_weight_lives_where_the_page_says(name):
  written = (layouts.GOLDEN / f"{name}.txt").read_text("utf-8")
  assert layouts.page(name) == written, (
    "if that is what you want: python tests/models/layouts.py"
  )
