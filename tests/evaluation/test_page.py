"""The tables of the results."""

from dppo_jax.analysis import tables
from dppo_jax.eval import page


def test_tables_show_every_estimate():
  estimates = {"greedy": {"value": 0.5, "low": 0.15, "high": 0.85}}
  sets = {"aime": {"problems": 4, "estimates": estimates}}
  row = "| aime | 4 | greedy accuracy | 0.500 | 0.150 to 0.850 |"
  assert row in page.table(sets)
  lines = page.table(sets, tables.aligned).splitlines()
  words = ["aime", "4", "greedy", "accuracy", "0.500"]
  assert lines[1].split()[:5] == words
