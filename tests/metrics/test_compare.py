"""Runs compared: laws of intervals and groups, the table and its files."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from dppo_jax.analysis import compare, runs, statistics
from dppo_jax.errors import UserError

CONFIG = {
  "seed": 0,
  "steps": 20,
  "method.name": "grpo",
  "method.args": {},
  "objective.name": "grpo",
  "objective.args": {},
  "optimizer.learning_rate": 1e-4,
  "data.train": "arithmetic",
  "sft.steps": 10,
  "sft.from_run": "",
  "log.writers": "tensorboard",
}


def _run(folder, method="grpo", seed=0, pace=1.0, top=0.9, **config):
  """A run that learns to `top` accuracy; a step takes 1 / pace seconds."""
  path = folder / f"{method}-{seed}-{len([*folder.iterdir()])}"
  path.mkdir()
  config = CONFIG | {"method.name": method, "seed": seed} | config
  (path / "config.json").write_text(json.dumps(config))
  noise = np.random.default_rng(seed).normal(0, 0.01, 99)
  lines = []
  for step in range(config.get("done", config["steps"]) + 1):
    if step:
      line = {"step/seconds": (1 + noise[step]) / pace, "tokens/trained": 100}
      lines.append({"step": step, **line})
    if step % 2 == 0 and top:
      accuracy = 0.1 + (top - 0.1) * (1 - np.exp(-step / 4)) + noise[0]
      lines.append({"step": step, "eval/accuracy": accuracy})
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (path / "metrics.jsonl").write_text(text)
  return path


def _groups(*paths):
  return compare.group([runs.load(path) for path in paths])


def _table(*paths, target=0.8):
  """The rows of the table, by label; cells by head."""
  head, rows = compare.table(_groups(*paths), target)
  return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


@pytest.mark.parametrize(
  ("freedom", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (1e6, 1.960)]
)
def test_quantiles_are_students(freedom, t):
  assert statistics.t_quantile(freedom) == pytest.approx(t, abs=2e-3)


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_intervals_of_differences_cover(shift):
  """95% of them contain the truth, within three standard errors."""
  rng, hits = np.random.default_rng(0), 0
  for _ in range(600):
    common, a, b = rng.normal(size=(3, 4))
    a, b = dict(enumerate(shift + common + a)), dict(enumerate(common + b))
    _, low, high = statistics.difference(a, b)
    hits += low <= shift <= high
  assert abs(hits / 600 - 0.95) <= 3 * np.sqrt(0.95 * 0.05 / 600)


def test_common_variation_of_seeds_cancels():
  a = {0: 0.1, 1: 0.5, 2: 0.9}
  b = {seed: x - 0.01 - 0.001 * seed for seed, x in a.items()}
  value, low, high = statistics.difference(a, b)
  assert value == pytest.approx(0.011) and 0 < low < high
  for few in ({0: 0.0}, {7: 0.0}):  # one pair, or none
    assert np.isnan(statistics.difference(a, few).low)


def test_ratio_does_not_depend_on_the_unit_and_inverts():
  a, b = {0: 2.0, 1: 5.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 2.5}
  there, back = statistics.ratio(a, b), statistics.ratio(b, a)
  assert there.value == pytest.approx(1 / back.value)
  assert there.low == pytest.approx(1 / back.high)
  scale = lambda x: {seed: 60 * value for seed, value in x.items()}
  assert statistics.ratio(scale(a), scale(b)) == pytest.approx(there)


def test_band_ends_with_the_shortest_curve():
  x = np.arange(4.0)
  at, band = statistics.band([(x, x), (x[:3], x[:3] + 1)])
  assert at[-1] == 2
  np.testing.assert_allclose(band.value, at + 0.5)
  half = statistics.t_quantile(1) * 0.5
  np.testing.assert_allclose(band.high - band.value, half, rtol=1e-6)


def test_cost_to_a_target_is_linear_between_evaluations(tmp_path):
  steps = [{"step": i, "step/seconds": 10.0} for i in (1, 2)]
  evals = [
    {"step": step, "eval/accuracy": y} for step, y in enumerate([0.2, 0.6, 0.5])
  ]
  run = runs.Run(tmp_path, CONFIG, steps, evals)
  assert run.cost_to(0.4) == pytest.approx(5)
  assert run.cost_to(0.1) == 0
  assert run.cost_to(0.7) is None


def test_groups_are_configs_without_their_seed(tmp_path):
  """Even if one starts from another's weights, or continues for longer."""
  first = _run(tmp_path)
  started = {"sft.from_run": str(first), "sft.steps": 0}
  groups = _groups(
    first,
    _run(tmp_path, seed=1, steps=30, **{"log.writers": "wandb"}),
    _run(tmp_path, "dppo", **started),
    _run(tmp_path, "dppo", seed=1, **started),
    _run(tmp_path, "cppo", **{"sft.steps": 11}),
  )
  assert [[run.seed for run in group.runs] for group in groups] == [
    [0, 1],
    [0, 1],
    [0],
  ]
  labels = [group.label for group in groups]
  assert labels == ["grpo sft.steps=10", "dppo", "cppo sft.steps=11"]


def test_labels_name_the_options_that_differ(tmp_path):
  args = lambda rate: {"method.args": {"rate": rate, "scope": "group"}}
  dppo = [_run(tmp_path, "dppo", **args(rate)) for rate in (0.5, 0.7)]
  labels = lambda *paths: [group.label for group in _groups(*paths)]
  expected = ["dppo rate=0.5", "dppo rate=0.7", "grpo"]
  assert labels(*dppo, _run(tmp_path)) == expected
  other = _run(tmp_path, "cppo", **{"method.args": {"scope": "batch"}})
  assert labels(dppo[0], other) == ["dppo", "cppo"]
  assert labels(dppo[0]) == ["dppo"]


def test_copy_of_a_run_and_a_run_without_evaluation_are_rejected(tmp_path):
  with pytest.raises(UserError, match="the seed of another run"):
    _groups(_run(tmp_path), _run(tmp_path))
  with pytest.raises(UserError, match="has no evaluation yet"):
    _groups(_run(tmp_path, top=0))


def test_table_has_means_and_intervals(tmp_path):
  paths = [_run(tmp_path, seed=seed) for seed in range(3)]
  paths += [_run(tmp_path, "dppo", seed=seed, pace=2) for seed in range(3)]
  paths += [_run(tmp_path, "cppo", seed=0), _run(tmp_path, "cppo", 1, top=0.5)]
  rows = _table(*paths)
  assert rows["grpo"]["seeds"] == "3" and rows["grpo"]["speed-up"] == ""
  assert re.fullmatch(r"0.89\d ± 0.0\d\d", rows["grpo"]["accuracy"])
  assert rows["dppo"]["difference"] == "+0.000 ± 0.000"
  assert rows["dppo"]["speed-up"] == "2.00 (2.00-2.00)"
  assert rows["dppo"]["tokens/step"] == "100"
  # One seed never reached the target: there is no ratio.
  assert rows["cppo"]["s to 80%"].endswith("(1 runs)")
  assert rows["cppo"]["speed-up"] == ""


def test_single_unfinished_run_is_shown(tmp_path, capsys):
  assert compare.main([str(_run(tmp_path, done=7))]) == 0
  line = capsys.readouterr().out.splitlines()[1]
  assert line.startswith("grpo") and "±" not in line


def test_files_of_a_comparison(tmp_path, capsys):
  label = {"data.train": "/a/b/c|d.jsonl"}
  paths = [_run(tmp_path), _run(tmp_path, "dppo", steps=10, **label)]
  folder = tmp_path / "to"
  assert compare.main([*map(str, paths), f"--to={folder}", "--target=0.5"]) == 0
  assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
  page = (folder / "compare.md").read_text()
  assert r"c\|d.jsonl | 1 |" in page and "s to 50%" in page
  assert str(folder / "compare.md") in capsys.readouterr().out


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("config.json", "{"),
    ("config.json", "[]"),
    ("metrics.jsonl", '{"step": 21, "cut\n'),
    ("", ""),
  ],
)
def test_broken_run_is_named(tmp_path, capsys, name, text):
  path = _run(tmp_path)
  if name:
    (path / name).write_text(text)
  else:
    (path / "config.json").unlink()
  assert compare.main([str(path)]) == 1
  assert str(path) in capsys.readouterr().err


def test_reading_runs_needs_neither_jax_nor_matplotlib():
  code = (
    "import sys, dppo_jax.analysis.compare; "
    "sys.exit(bool({'jax', 'matplotlib'} & {*sys.modules}))"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
