"""The tables of the results."""

from unittest import mock

import pytest

from dppo_jax.analysis import tables
from dppo_jax.errors import UserError
from dppo_jax.eval import page
from dppo_jax.files import jsonl


def test_tables_show_every_estimate():
  estimates = {"greedy": {"value": 0.5, "low": 0.15, "high": 0.85}}
  sets = {"aime": {"problems": 4, "estimates": estimates}}
  row = "| aime | 4 | greedy accuracy | 0.500 | 0.150 to 0.850 |"
  assert row in page.table(sets)
  lines = page.table(sets, tables.aligned).splitlines()
  words = ["aime", "4", "greedy", "accuracy", "0.500"]
  assert lines[1].split()[:5] == words


def test_results_are_complete_or_as_before(tmp_path, monkeypatch):
  """A cut file would prevent exports of its step."""
  path = tmp_path / "results.json"
  path.write_text("{}")
  monkeypatch.setattr(jsonl.os, "fsync", mock.Mock(side_effect=OSError(28, "")))
  results = dict.fromkeys(("title", "weights", "sampling"), "")
  with pytest.raises(UserError, match=r"results.* cannot be written"):
    page.write(tmp_path, results | {"seconds": 0, "sets": {}})
  assert path.read_text() == "{}"
