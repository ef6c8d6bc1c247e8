"""Runs compared: laws of the intervals, of the groups and of the verdict."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from dppo_jax.analysis import compare, comparison, groups, runs, statistics

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
  """A run that learns `top` in a curve; a step takes 1 / pace seconds."""
  path = folder / f"{method}-{seed}-{len([*folder.iterdir()])}"
  path.mkdir()
  config = CONFIG | {"method.name": method, "seed": seed} | config
  (path / "config.json").write_text(json.dumps(config))
  noise = np.random.default_rng(seed).normal(0, 0.01, 99)
  lines = []
  for step in range(config.get("done", config["steps"]) + 1):
    if step:
      line = {"step/seconds": (1 + noise[step]) / pace, "prompts/drawn": 8}
      line |= {"tokens/trained": 100, "reward/accuracy": step / 40}
      lines.append({"step": step, **line})
    if step % 2 == 0 and top:
      accuracy = 0.1 + (top - 0.1) * (1 - np.exp(-step / 4)) + noise[0]
      lines.append(
        {"step": step, "eval/accuracy": accuracy, "eval/stderr": 0.02}
      )
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (path / "metrics.jsonl").write_text(text)
  return path


def _compare(*paths, **kwargs):
  grouped, _ = groups.group([runs.load(path) for path in paths])
  return comparison.compare(grouped, **kwargs)


@pytest.mark.parametrize(
  ("freedom", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (1e6, 1.960)]
)
def test_quantiles_are_students(freedom, t):
  assert statistics.t_quantile(freedom) == pytest.approx(t, abs=2e-3)


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_intervals_of_differences_cover(shift):
  """Paired and not: 95% of them hold the truth, within three errors."""
  rng = np.random.default_rng(0)
  hits = {True: 0, False: 0}
  for _ in range(600):
    common, a, b = rng.normal(size=(3, 4))
    paired = dict(enumerate(shift + common + a)), dict(enumerate(common + b))
    apart = paired[0], {seed + 9: x for seed, x in paired[1].items()}
    for values in (paired, apart):
      found = statistics.difference(*values)
      hits[found.is_paired] += found.low <= shift <= found.high
  for count in hits.values():
    assert count / 600 >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 600)
  assert hits[True] / 600 <= 0.95 + 3 * np.sqrt(0.95 * 0.05 / 600)


def test_what_seeds_have_in_common_cancels_where_they_match():
  a = {0: 0.1, 1: 0.5, 2: 0.9}
  b = {seed: x - 0.01 - 0.001 * seed for seed, x in a.items()}
  assert statistics.difference(a, b).excludes(0)
  other = {seed + 7: x for seed, x in b.items()}
  assert not statistics.difference(a, other).excludes(0)


def test_one_seed_or_no_spread_excludes_nothing():
  assert not statistics.difference({0: 0.9}, {0: 0.1}).excludes(0)
  assert not statistics.difference({0: 0.9}, {1: 0.1}).excludes(0)
  same = statistics.difference({0: 0.9, 1: 0.9}, {0: 0.1, 1: 0.1})
  assert not same.excludes(0)


def test_a_ratio_does_not_depend_on_the_unit_and_turns_over():
  a, b = {0: 2.0, 1: 5.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 2.5}
  there = statistics.ratio(a, b)
  back = statistics.ratio(b, a)
  assert there.value == pytest.approx(1 / back.value)
  assert there.low == pytest.approx(1 / back.high)
  scale = lambda x: {seed: 60 * value for seed, value in x.items()}
  assert statistics.ratio(scale(a), scale(b)) == pytest.approx(there)


def test_a_band_ends_with_the_shortest_curve_and_holds_all():
  x = np.arange(4.0)
  band = statistics.band([(x, x), (x[:3], x[:3] + 1)])
  assert band.x[-1] == 2
  np.testing.assert_allclose(band.mean, band.x + 0.5)
  np.testing.assert_allclose(band.high - band.low, 1)


def test_costs_to_a_target_are_linear_between_evaluations():
  x, y = np.array([0.0, 10.0, 20.0]), np.array([0.2, 0.6, 0.5])
  assert runs.crossing(0.4, x, y) == pytest.approx(5)
  assert runs.crossing(0.1, x, y) == 0
  assert runs.crossing(0.7, x, y) is None


def test_groups_are_configs_without_their_seed(tmp_path):
  """Also where one starts from another's weights, and where it goes on."""
  first = _run(tmp_path)
  started = {"sft.from_run": str(first), "sft.steps": 0}
  paths = [
    first,
    _run(tmp_path, seed=1, steps=30, **{"log.writers": "wandb"}),
    _run(tmp_path, "dppo", **started),
    _run(tmp_path, "dppo", seed=1),
    _run(tmp_path, "dppo", **{"sft.steps": 11}),
  ]
  found, left_out = groups.group([runs.load(path) for path in paths])
  assert [group.seeds for group in found] == [[0, 1], [0, 1], [0]]
  assert [group.label for group in found] == [
    "grpo sft.steps=10",
    "dppo sft.steps=10",
    "dppo sft.steps=11",
  ]
  assert not left_out


def test_labels_name_what_differs_and_nothing_else(tmp_path):
  args = lambda share: {"method.args": {"share": share, "scope": "group"}}
  paths = [
    _run(tmp_path, "dppo", **args(0.5)),
    _run(tmp_path, "dppo", **args(0.7)),
    _run(tmp_path, "grpo"),
  ]
  found, _ = groups.group([runs.load(path) for path in paths])
  labels = [group.label for group in found]
  assert labels == ["dppo share=0.5", "dppo share=0.7", "grpo"]
  other = {"method.args": {"scope": "batch", "other": 1}}
  found, _ = groups.group(
    [runs.load(paths[0]), runs.load(_run(tmp_path, "cppo", **other))]
  )
  assert [group.label for group in found] == ["dppo", "cppo"]
  only, _ = groups.group([runs.load(paths[0])])
  assert only[0].label == "dppo"


def test_an_option_that_is_newer_than_a_run_sets_it_apart_from_none(tmp_path):
  old, new = _run(tmp_path), _run(tmp_path, seed=1, **{"eval.samples": 0})
  other = _run(tmp_path, seed=2, **{"eval.samples": 4})
  found, _ = groups.group([runs.load(path) for path in (old, new, other)])
  assert [group.seeds for group in found] == [[0, 1], [2]]


def test_a_copy_of_a_run_is_not_another_seed(tmp_path):
  paths = [_run(tmp_path), _run(tmp_path)]
  found, left_out = groups.group([runs.load(path) for path in paths])
  assert found[0].seeds == [0] and "left out" in left_out[0]


def test_the_verdict_claims_what_the_seeds_carry(tmp_path):
  seeds = range(3)
  base = [_run(tmp_path, seed=seed) for seed in seeds]
  fast = [_run(tmp_path, "dppo", seed=seed, pace=2) for seed in seeds]
  worse = [
    _run(tmp_path, "cppo", seed=seed, top=0.6 + seed / 1000) for seed in seeds
  ]
  quick, poor = _compare(*base, *fast, *worse).verdict
  assert re.match(
    r"dppo: .*end not disting.*reaches \d+% 2 times sooner", quick
  )
  assert re.match("cppo: accuracy at the end lower than grpo's", poor)
  one = _compare(base[0], fast[0]).verdict
  assert len(one) == 1 and "nothing is claimed" in one[0]


def test_a_target_that_not_all_reached_has_no_ratio(tmp_path):
  paths = [_run(tmp_path, seed=seed) for seed in (0, 1)]
  paths += [_run(tmp_path, "cppo", seed=0), _run(tmp_path, "cppo", 1, top=0.5)]
  result = _compare(*paths, targets=[0.8])
  assert result.rows[1].speedups["seconds"][0.8] is None
  assert len(result.rows[1].reached["seconds"][0.8]) == 1
  assert "1 of 2" in compare.text(result)


@pytest.mark.parametrize("top", [0.9, 0], ids=["evaluated", "not evaluated"])
def test_one_run_unfinished_is_shown(tmp_path, top):
  path = _run(tmp_path, top=top, done=7)
  result = _compare(path)
  text = compare.text(result)
  assert "7 of 20 steps so far" in " ".join(text.split())
  assert result.of == ("held-out" if top else "training")
  assert max(map(len, text.splitlines())) <= 80 + len(str(path))
  assert compare.write(result, tmp_path / "out").exists()


def test_files_of_a_comparison(tmp_path, capsys):
  """JSON without NaN, a picture, a page; a line for what is no run."""
  label = {"optimizer.learning_rate": 2e-4, "data.train": "/a/b/c|d.jsonl"}
  paths = [_run(tmp_path), _run(tmp_path, "dppo", steps=10, **label)]
  for name, text in (("broken", "{"), ("other", "[]"), ("cut", "")):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(text)
    paths.append(tmp_path / name)
  paths.append(tmp_path / "missing")
  folder = tmp_path / "to"
  argv = [*map(str, paths), f"--to={folder}", "--target=0.5"]
  assert compare.main(argv) == 1
  told = capsys.readouterr().err.splitlines()
  assert len(told) == 4 and all(str(tmp_path) in line for line in told)
  content = json.loads((folder / "compare.json").read_text())
  assert [x["seeds"] for x in content["groups"]] == [[0], [0]]
  assert content["groups"][0]["accuracy"]["low"] is None
  assert 0.5 in content["targets"]
  assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
  page = (folder / "compare.md").read_text()
  rows = [line for line in page.splitlines() if line.startswith("| dppo")]
  assert rows and all("c\\|d.jsonl" in row for row in rows[:3])


def test_a_damaged_line_is_told_with_its_number(tmp_path, capsys):
  path = _run(tmp_path)
  with (path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 21, "cut\n{"step": 22}\n')
  assert compare.main([str(path)]) == 1
  assert re.search(r"metrics.jsonl, line \d+", capsys.readouterr().err)


def test_older_names_are_read(tmp_path):
  path = _run(tmp_path)
  text = '{"step": 21, "step/seconds": 1.0, "remember/seconds": 2.0}\n'
  with (path / "metrics.jsonl").open("a") as file:
    file.write(text)
  assert runs.load(path).total("update_history/seconds") == 2


def test_only_reading_runs_needs_no_jax():
  code = (
    "import sys, dppo_jax.analysis.compare; "
    "from dppo_jax.metrics import overlay, report; "
    "sys.exit('jax' in sys.modules)"
  )
  command = [sys.executable, "-c", code]
  assert subprocess.run(command, check=False).returncode == 0


def test_long_labels_go_by_numbers_where_there_is_no_room(tmp_path):
  args = lambda share: {"method.args": {"share_of_completions": share}}
  paths = [_run(tmp_path, "dppo", **args(share)) for share in (0.5, 0.7)]
  result = _compare(*paths)
  assert result.tags == ["1", "2"]
  text = compare.text(result)
  assert "2  dppo share_of_completions=0.7" in text
  assert max(map(len, text.splitlines())) <= 80
  assert "| dppo share_of_completions=0.7 | 1 |" in compare.markdown(result)


def test_means_of_neighbours_are_over_as_many_each():
  x = np.arange(1.0, 8.0)
  at, mean = runs.smooth(x, x, 3)
  np.testing.assert_allclose(at, [3, 6, 7])
  np.testing.assert_allclose(mean, [2, 5, 7])
  assert runs.smooth(x[:0], x[:0], 3)[0].size == 0
