"""Comparison of runs: laws of intervals and groups, the table and its files."""

import json
import re

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
  "data.train": "arithmetic",
  "sft.steps": 10,
  "sft.from_run": "",
  "log.writers": "tensorboard",
}


def _run(folder, method="grpo", seed=0, pace=1, top=0.9, done=20, **config):
  """A run that learns to `top` accuracy; a step takes 1 / pace seconds."""
  path = folder / f"{method}-{seed}-{len([*folder.iterdir()])}"
  path.mkdir()
  config = CONFIG | {"method.name": method, "seed": seed} | config
  (path / "config.json").write_text(json.dumps(config))
  noise = np.random.default_rng(seed).normal(0, 0.01, 99)
  lines = []
  for step in range(done + 1):
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
  value, low, _ = statistics.difference(a, b)
  assert value == pytest.approx(0.011) and low > 0
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
  np.testing.assert_allclose(band.high - band.value, 12.706 / 2, rtol=1e-3)


@pytest.mark.parametrize(("target", "cost"), [(0.4, 5), (0.1, 0), (0.7, None)])
def test_cost_to_a_target_is_linear_between_evaluations(tmp_path, target, cost):
  steps = [{"step": i, "step/seconds": 10.0} for i in (1, 2)]
  evals = [
    {"step": step, "eval/accuracy": y} for step, y in enumerate([0.2, 0.6, 0.5])
  ]
  run = runs.Run(tmp_path, CONFIG, steps, evals)
  assert run.cost_to(target) == (cost and pytest.approx(cost))


def test_groups_are_configs_without_their_seed(tmp_path):
  """Even if one starts from another's weights, or continues for longer."""
  first = _run(tmp_path)
  started = {"sft.from_run": str(first), "sft.steps": 0}
  groups = _groups(
    first,
    _run(tmp_path, seed=1, steps=30, **{"log.writers": "wandb"}),
    *(_run(tmp_path, "dppo", seed=seed, **started) for seed in (0, 1)),
    _run(tmp_path, "cppo", **{"sft.steps": 11}),
  )
  assert [(x.label, len(x.runs)) for x in groups] == [
    ("grpo sft.steps=10", 2),
    ("dppo", 2),
    ("cppo sft.steps=11", 1),
  ]
  # The step that it starts from counts, and a length that a schedule reads.
  later = {"sft.from_run": f"{first}@300"}
  other, ends = {"sft.from_run": "x@0"}, {"optimizer.schedule": "cosine"}
  groups = _groups(
    *(_run(tmp_path, seed=i, **x) for i, x in enumerate((other, later))),
    *(_run(tmp_path, seed=i, steps=10 * i, **ends) for i in (1, 2)),
  )
  assert [len(x.runs) for x in groups] == [1, 1, 1, 1]
  with pytest.raises(
    UserError, match=r"the run in config\.sft.from_run does not"
  ):
    _groups(*(_run(tmp_path, **{"sft.from_run": x}) for x in "xy"))


def test_labels_name_the_options_that_differ(tmp_path):
  args = lambda rate: {"method.args": {"rate": rate, "scope": "group"}}
  dppo = [_run(tmp_path, "dppo", **args(rate)) for rate in (0.5, 0.7)]
  labels = lambda *paths: [group.label for group in _groups(*paths)]
  expected = ["dppo rate=0.5", "dppo rate=0.7", "grpo"]
  assert labels(*dppo, _run(tmp_path)) == expected
  assert labels(dppo[0]) == ["dppo"]


def test_options_are_sorted_as_numbers(tmp_path):
  """Even where a command line left them as text; methods as the runs are."""
  paths = [
    _run(tmp_path, method, **{"data.prompts_per_step": num})
    for method in ("pods", "grpo")
    for num in (10, 100, "2")
  ]
  groups = _groups(*paths)
  head, rows = compare.table(groups, 0.8)
  assert head[:2] == ["method", "data.prompts_per_step"]
  numbers = ("2", "10", "100")
  expected = [[method, num] for method in ("pods", "grpo") for num in numbers]
  assert [row[:2] for row in rows] == expected
  assert [row[head.index("difference")] for row in rows][:2] == [
    "+0.000",
    "baseline",  # of the first run
  ]


def test_sweep_marks_the_best_learning_rate_of_each_method(tmp_path):
  name, tops = "optimizer.learning_rate", {1e-5: 0.5, 2e-6: 0.9, 1e-6: 0.7}
  paths = [
    _run(tmp_path, method, top=top, seed=seed, **{name: rate})
    for method in ("grpo", "neyman")
    for rate, top in tops.items()
    for seed in (0, 1)
  ]
  paths.append(_run(tmp_path, "dppo", **{name: 1e-6}))
  groups = _groups(*paths)
  head, rows = compare.table(groups, 0.8)
  assert head[1] == "learning_rate"
  rates = ["1e-06 ", "2e-06*", "1e-05 "]
  assert [row[1] for row in rows] == [*rates, *rates, "1e-06 "]
  lines = compare.plot(groups, 0.8).axes[0].get_lines()[:-1]
  assert [x.get_label() for x in lines][1] == "grpo learning_rate=2e-06*"
  solid = [x.get_label() for x in lines if x.get_linestyle() == "-"]
  assert len(solid) == 3 and len({x.get_color() for x in lines}) == 3
  looks = [(x.get_color(), x.get_linestyle()) for x in lines[:3]]
  assert len({*map(str, looks)}) == 3


def test_learning_rates_of_equal_accuracy_have_no_mark(tmp_path):
  name = "optimizer.learning_rate"
  groups = _groups(*(_run(tmp_path, **{name: x}) for x in (1e-6, 2e-6)))
  assert not any(group.is_best for group in groups)


@pytest.mark.parametrize(
  ("scales", "shown"),
  [((40.0, 60.0), "50 prompts"), ((40.0, 1e6), "unknown"), ((), None)],
)
def test_saturated_noise_scale_is_unknown(tmp_path, scales, shown):
  paths = [_run(tmp_path), _run(tmp_path, "neyman", 0)]
  paths.append(_run(tmp_path, "neyman", 1))
  for path, scale in zip(paths[1:], scales, strict=False):
    with (path / "metrics.jsonl").open("a") as file:
      line = {"step": 21, "step/seconds": 1.0, "tokens/trained": 100}
      file.write(json.dumps(line | {"noise/scale": scale}) + "\n")
  head, rows = compare.table(_groups(*paths), 0.8)
  assert head[-1] == ("noise scale" if shown else "tokens/step")
  assert [row[-1] for row in rows] == (["", shown] if shown else ["100"] * 2)


def test_accuracies_are_named_by_how_completions_were_decoded(tmp_path):
  sampled = _run(tmp_path, **{"eval.samples": 2})
  head, _ = compare.table(_groups(sampled), 0.8)
  assert "accuracy (sampled x 2)" in head
  both = _groups(sampled, _run(tmp_path, **{"eval.samples": 0}))
  head, _ = compare.table(both, 0.8)
  assert "accuracy (sampled x 2 or greedy)" in head
  label = compare.plot(both, 0.8).axes[0].get_ylabel()
  assert label == "held-out accuracy (sampled x 2 or greedy)"


def test_copy_of_a_run_and_a_run_without_evaluation_are_rejected(tmp_path):
  with pytest.raises(UserError, match="the seed of another run"):
    _groups(_run(tmp_path), _run(tmp_path))
  with pytest.raises(UserError, match="has no evaluation yet"):
    _groups(_run(tmp_path, top=0))


def test_table_has_means_and_intervals(tmp_path):
  paths = [_run(tmp_path, seed=seed) for seed in range(3)]
  paths += [_run(tmp_path, "dppo", seed=seed, pace=2) for seed in range(3)]
  paths += [_run(tmp_path, "cppo", seed=0), _run(tmp_path, "cppo", 1, top=0.5)]
  head, rows = compare.table(_groups(*paths), 0.8)
  grpo, dppo, cppo = (dict(zip(head, row, strict=True)) for row in rows)
  assert grpo["seeds"] == "3" and grpo["speed-up"] == ""
  assert grpo["difference"] == "baseline"
  assert re.fullmatch(r"0.89\d ± 0.0\d\d", grpo["accuracy (greedy)"])
  assert dppo["difference"] == "+0.000 ± 0.000"
  assert dppo["speed-up"] == "2.00 (2.00-2.00)"
  assert dppo["tokens/step"] == "100"
  # One seed never reached the target: there is no ratio.
  assert cppo["s to 80%"].endswith("(1 runs)") and cppo["speed-up"] == ""


@pytest.mark.filterwarnings("error")
def test_run_without_a_step_has_no_times(tmp_path):
  head, ((*row,),) = compare.table(_groups(_run(tmp_path, done=0)), 0.8)
  shown = dict(zip(head, row, strict=True))
  assert shown["accuracy (greedy)"].startswith("0.10")
  assert shown["s/step"] == shown["tokens/step"] == "-"


def test_files_of_a_comparison_of_unfinished_runs(tmp_path, capsys):
  label = {"data.train": "/a/b/c|d.jsonl"}
  paths = [_run(tmp_path, done=7), _run(tmp_path, "dppo", done=9, **label)]
  folder = tmp_path / "to"
  compare.main([*map(str, paths), f"--to={folder}", "--target=0.5"])
  shown = capsys.readouterr().out
  assert str(folder / "compare.md") in shown
  assert shown.splitlines()[1].startswith("grpo")
  assert shown.count("95% interval") == 1
  assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
  page = (folder / "compare.md").read_text()
  assert r"c\|d.jsonl | 1 |" in page and "s to 50%" in page


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--target=90", "--target is 90 but must be in"),
    ("--target=0", "--target is 0 but must be in"),
    (f"--to={__file__}", "is a file: name a directory"),
    ("--to=/proc/none", "/proc/none cannot be written"),
  ],
)
def test_flags_that_suit_no_comparison_are_rejected(tmp_path, flag, message):
  with pytest.raises(SystemExit, match=message):
    compare.main([str(_run(tmp_path)), flag])


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_directory_in_place_of_a_file_is_named(tmp_path, name):
  path = _run(tmp_path)
  (path / name).unlink()
  (path / name).mkdir()
  with pytest.raises(SystemExit, match=f"cannot read {path / name}"):
    compare.main([str(path)])


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", ""])
def test_broken_or_missing_run_is_named(tmp_path, name):
  path = _run(tmp_path) if name else tmp_path / "missing"
  if name:
    (path / name).write_text('{"step": 2\n')
  with pytest.raises(SystemExit, match=str(path)):
    compare.main([str(path)])


def test_runs_that_have_not_moved_have_no_time_to_a_target(tmp_path, capsys):
  flat = [_run(tmp_path, method, top=0.1) for method in ("grpo", "dppo")]
  compare.main([*map(str, flat), f"--to={tmp_path / 'to'}"])
  shown = capsys.readouterr().out
  assert "No run has moved" in shown and "s to" not in shown
  groups = _groups(*flat, _run(tmp_path, "cppo"))
  assert compare.default_target(groups) > 0.5  # of the run that has moved
  column = compare.table(groups, 0.05)[0].index("s to 5%")
  assert compare.table(groups, 0.05)[1][0][column] == "at the start"


def test_options_may_be_any_text(tmp_path, capsys):
  """Neither TeX nor a new line in a template breaks a picture or a row."""
  template = "{problem}\nPut it in $\\boxed{}$."
  paths = [_run(tmp_path), _run(tmp_path, **{"data.template": template})]
  compare.main([*map(str, paths), f"--to={tmp_path / 'out'}"])
  rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
  assert len(rows) == 3 and "$\\boxed{}$." in rows[2]
  assert (tmp_path / "out" / "compare.png").stat().st_size


def test_an_option_that_one_run_lacks_separates_them(tmp_path):
  thinks = {"data.template_args": {"enable_thinking": False}}
  one, two = _groups(_run(tmp_path), _run(tmp_path, **thinks))
  assert one.label != two.label
  dppo = _run(tmp_path, "dppo", **{"method.args": {"prompt_rate": 0.5}})
  assert [x.label for x in _groups(_run(tmp_path), dppo)] == ["grpo", "dppo"]


@pytest.mark.parametrize(
  "seeds, expected", [((0, 1, 2, 3), 1.0), ((0, 1), 1.0), ((2, 3, 4), -1.0)]
)
def test_seeds_are_paired_if_one_group_has_those_of_the_other(seeds, expected):
  """One of three pairs would stand for all runs."""
  values = {seed: float(seed) for seed in range(3)}
  other = {seed: seed - 1.0 for seed in seeds}
  value, low, _ = statistics.difference(values, other)
  assert value == expected and np.isnan(low) == (seeds == (2, 3, 4))


def test_a_target_is_reached_by_runs_that_start_below_others(tmp_path):
  above = _run(tmp_path, top=0.9)
  lines = (
    (above / "metrics.jsonl")
    .read_text()
    .replace('"eval/accuracy": 0', '"eval/accuracy": 1')
  )
  (above / "metrics.jsonl").write_text(lines)
  groups = _groups(above, _run(tmp_path, "dppo", top=0.5))
  target = compare.default_target(groups)
  reached = [[*x.seconds_to(target)] for x in groups]
  assert reached == [[0], [0]]


def test_long_times_are_whole_seconds(tmp_path):
  head, rows = compare.table(_groups(_run(tmp_path, pace=0.001)), 0.8)
  assert re.fullmatch(r"\d+,\d{3}", rows[0][head.index("s to 80%")])


def test_runs_of_several_lengths_in_a_group_are_named(tmp_path, capsys):
  paths = [_run(tmp_path), _run(tmp_path, seed=1, done=8)]
  compare.main([*map(str, paths)])
  assert "runs of different numbers of steps" in capsys.readouterr().out


def test_accuracy_that_is_no_number_is_named(tmp_path):
  path = _run(tmp_path)
  with (path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 21, "eval/accuracy": NaN}\n')
  with pytest.raises(SystemExit, match="eval/accuracy of step 21 is nan but"):
    compare.main([str(path)])


def test_every_run_reached_the_target(tmp_path):
  group = _groups(_run(tmp_path, top=0.118), _run(tmp_path, "dppo", top=0.118))
  target = compare.default_target(group)
  assert round(target, 2) == 0.12 > target
  head, rows = compare.table(group, target)
  assert "-" not in [row[head.index(f"s to {target:.1%}")] for row in rows]


def test_accuracies_of_another_decoding_or_set_are_apart(tmp_path, capsys):
  paths = [
    _run(tmp_path, name, **{"fingerprints.eval": name})
    for name in ("grpo", "dppo")
  ]
  with (paths[0] / "metrics.jsonl").open("a") as file:
    for step, accuracy in ((21, 0.3), (22, 0.4)):
      line = {"step": step, "eval/accuracy": accuracy, "eval/samples": 2}
      file.write(json.dumps(line) + "\n")
  assert len(compare._of_one_decoding(runs.load(paths[0])).evals) == 2
  compare.main([str(x) for x in paths])
  assert "evaluated on other problems" in capsys.readouterr().out
