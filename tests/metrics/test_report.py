"""The report of a run, at any moment of it."""

import json
import re

import numpy as np
import pytest

from dppo_jax.analysis import runs
from dppo_jax.errors import UserError
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.metrics import report

CONFIG = {
  "seed": 3,
  "steps": 9,
  "method.name": "dppo",
  "method.args": {"a": 1},
  "objective.name": "grpo",
  "objective.args": {},
  "data.train": "arithmetic",
}
STEP = {
  **{"step/seconds": 0.5, "rollout/seconds": 0.3, "update/seconds": 0.1},
  **{"prompts/drawn": 8, "prompts/kept": 6, "groups/zero_std": 2},
  **{"completions/drawn": 24, "completions/kept": 12},
  **{"completions/trained": 6, "tokens/generated": 300, "tokens/trained": 60},
  "warnings/no_reward": 1.0,
}
SAMPLE = {"problem": "1+1=", "answer": "2", "reward": 1.0, "correct": 1.0}


def _workdir(folder, lines=(), samples=()):
  (folder / "config.json").write_text(json.dumps(CONFIG))
  for name, content in (("metrics", lines), ("samples", samples)):
    text = "".join(json.dumps(line) + "\n" for line in content)
    (folder / f"{name}.jsonl").write_text(text)
  return folder


def _lines(steps):
  """A run after so many steps, evaluated before each."""
  lines = [{"step": 0, **_accuracy("eval/accuracy", 0)}]
  for step in range(1, steps + 1):
    accuracy = _accuracy("eval/accuracy", step / 100)
    lines += [{"step": step, **STEP}, {"step": step, **accuracy}]
  return lines


def _accuracy(name, value):
  interval = {f"{name}_low": value / 2, f"{name}_high": value + 0.1}
  counts = {"eval/samples": 2, name.replace("accuracy", "problems"): 30}
  return {name: value, **interval, **counts}


@pytest.mark.parametrize(
  "lines",
  [[], _lines(0), [{"step": 1, **STEP}], _lines(50)],
  ids=["nothing", "start", "not evaluated", "many steps"],
)
def test_report_can_be_written_at_any_moment(tmp_path, lines):
  with pytest.raises(UserError, match="is not a run"):
    report.write(tmp_path)
  report.write(_workdir(tmp_path, lines))
  assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
  page = (tmp_path / "report.md").read_text()
  assert page.startswith("# dppo on arithmetic, seed 3") and "of 9" in page
  assert not [*tmp_path.glob("*.tmp")]
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 99, "eval/accuracy": null}\n')
  with pytest.raises(UserError, match="eval/accuracy of step 99 is None"):
    report.write(tmp_path)


@pytest.mark.parametrize(
  "name",
  ["data.train", "method.name", "method.args", "objective.name", "steps"],
)
def test_option_that_a_report_needs_is_named(tmp_path, name):
  workdir = _workdir(tmp_path)
  config = {key: x for key, x in CONFIG.items() if key != name}
  (workdir / "config.json").write_text(json.dumps(config))
  with pytest.raises(UserError, match=f"{name} is missing but must be"):
    report.write(workdir)


@pytest.mark.parametrize("name", ["split", "problem", "completion", "answer"])
def test_sample_without_what_a_report_shows_is_named(tmp_path, name):
  whole = {"step": 0, "split": "eval", **SAMPLE, "completion": "2"}
  cut = {key: x for key, x in whole.items() if key != name}
  workdir = _workdir(tmp_path, _lines(1), [whole, cut])
  message = f"samples.jsonl, line 2, is damaged .{name} is missing"
  with pytest.raises(UserError, match=message):
    report.write(workdir)


def test_report_has_accuracies_fractions_and_times(tmp_path):
  lines = _lines(5)
  lines[0] |= _accuracy("eval/aime_eval/accuracy", 0.3)
  greedy = _accuracy("eval/greedy_accuracy", 0.4)
  lines[0] |= {name: x for name, x in greedy.items() if "greedy" in name}
  page = report.write(_workdir(tmp_path, lines)).read_text()
  for row in (
    "| method | dppo(a=1) |",
    "| sampled accuracy (30 held-out problems x 2) | 0.000 (0.000 to 0.100) "
    "→ 0.050 (0.025 to 0.150) |\n"
    "| greedy accuracy (30 held-out problems x 1) | 0.400 (0.200 to 0.500) "
    "→ 0.400 (0.200 to 0.500) |\n"
    "| sampled accuracy (30 aime_eval problems x 2) | 0.300 (0.150 to 0.400) "
    "→ 0.300 (0.150 to 0.400) |",
    "| prompts kept | 75.0% |",
    "| completions trained | 25.0% |",
    "| tokens/trained | 300 |",
    "| rollout | 1.5 | 60% |",
    "| other | 0.5 | 20% |",
    "| steps with the warning no_reward | 5 |",
  ):
    assert row in page
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 3, "cut')
  assert report.write(tmp_path).read_text() == page


def test_intervals_are_named_once_and_drawn(tmp_path):
  workdir = _workdir(tmp_path, _lines(5))
  assert report.write(workdir).read_text().count("95% interval") == 1
  (bars,) = report._draw(runs.load(workdir)).axes[0].containers
  assert bars.get_label() == "sampled, held-out"
  segment = bars.lines[2][0].get_segments()[-1]
  np.testing.assert_allclose(segment[:, 1], [0.025, 0.15])


def test_no_legend_covers_its_axes_and_each_panel_has_data(tmp_path):
  budget = {"budget/predicted_speedup": 1.5}
  norms = {"update/entropy": 0.4, "update/kl": 0.1, "update/grad_norm": 1.0}
  rewards = {"reward/mean": 0.5, "reward/std": 0.4, "reward/accuracy": 0.5}
  names = (f"tokens/completion_{x}" for x in ("min", "mean", "max"))
  more = budget | norms | rewards | dict(zip(names, (1, 4, 9), strict=True))
  workdir = _workdir(tmp_path, [x | more for x in _lines(5)])
  figure = report._draw(runs.load(workdir))
  figure.draw_without_rendering()
  assert [axis.get_title() for axis in figure.axes] == [
    *("accuracy", "reward", "tokens of a completion"),
    *("entropy and any KL penalty, nats", "gradient norm", "pruning"),
    *("tokens per step", "time by stage", "predicted speed-up"),
  ]
  for axis in figure.axes:
    assert np.isfinite(axis.dataLim.get_points()).all(), axis.get_title()
    if legend := axis.get_legend():
      assert not legend.get_window_extent().overlaps(axis.get_window_extent())


def test_headline_names_both_accuracies_and_the_predicted_speedup(tmp_path):
  lines = _lines(5)
  budget = {"budget/predicted_speedup": 1.5}
  lines = [x | budget if "step/seconds" in x else x for x in lines]
  for line in (lines[0], lines[-1]):
    line |= {"eval/greedy_accuracy": line["eval/accuracy"] + 0.1}
  run = runs.load(_workdir(tmp_path, lines))
  assert report.headline(run) == (
    "result: sampled accuracy (30 held-out problems x 2) 0.000 to 0.050; "
    "greedy accuracy (30 held-out problems x 1) 0.100 to 0.150; "
    "trained on 25% of completions, 20% of tokens; "
    "predicted speed-up 1.50"
  )
  row = "| budget/predicted_speedup, mean over steps | 1.50 |"
  assert row in report.write(run.path).read_text()


def test_greedy_accuracy_comes_after_the_sampled_one_of_training(tmp_path):
  lines = [x | {"eval/samples": 0, "reward/accuracy": 0.25} for x in _lines(20)]
  assert report.headline(runs.load(_workdir(tmp_path, lines))).startswith(
    "result: sampled accuracy (training, mean of 2 steps) 0.250 to 0.250; "
    "greedy accuracy (30 held-out problems x 1) 0.000 to 0.200; "
  )


@pytest.mark.parametrize("num_prompts", [1, 16])
def test_noise_scale_before_a_measurement_is_unknown(tmp_path, num_prompts):
  unmeasured = gradient_noise.describe(gradient_noise.init(), num_prompts)
  scales = {"unknown": unmeasured, "84 prompts": {"noise/scale": 84.4}, "": {}}
  for text, metrics in scales.items():
    run = runs.load(_workdir(tmp_path, [{"step": 1, **STEP, **metrics}]))
    rows = dict(report._summary(run))
    assert rows.get("gradient noise scale", "") == text


def test_changed_and_wrong_answers_are_shown_first(tmp_path):
  """The fifth of five problems has changed, and the fourth stays wrong."""
  correct = {0: [1, 1, 1, 0, 0], 3: [1, 1, 1, 0, 1]}
  samples = [
    {**SAMPLE, **dict(step=step, split="eval", problem=f"p{i}", correct=x)}
    | {"completion": "text"}
    for step, values in correct.items()
    for i, x in enumerate(values)
  ]
  page = report.write(_workdir(tmp_path, _lines(1), samples)).read_text()
  assert re.findall(r"Step (\d), (\w+),[^p]*(p\d)", page)[:4] == [
    ("0", "wrong", "p4"),
    ("3", "right", "p4"),
    ("0", "wrong", "p3"),
    ("3", "wrong", "p3"),
  ]


def test_held_out_samples_of_first_and_last_step_are_shown(tmp_path):
  samples = [
    {"step": step, "split": split, **SAMPLE, "completion": f"{split} {step}"}
    for step in (0, 1, 2)
    for split in ("train", "eval")
  ]
  samples[-1] |= {"completion": "````\ncode", "reward": 0.5, "correct": 0.0}
  page = report.write(_workdir(tmp_path, _lines(1), samples)).read_text()
  assert "eval 0" in page and "eval 1" not in page and "train 0" not in page
  assert "Step 0, right, answer 2:" in page and "Step 2, wrong" in page
  assert "\n\n    1+1=\n    ````\n    code\n" in page
