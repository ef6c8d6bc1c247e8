"""The report of a run, at any moment of it."""

import json
import re

import numpy as np
import pytest

from dppo_jax.analysis import runs
from dppo_jax.metrics import jsonl, plots, report, samples, style

CONFIG = {"seed": 3, "steps": 9, "method.name": "dppo", "method.args": {}}
STEP = {
  "step/seconds": 0.5,
  "rollout/seconds": 0.3,
  "update/seconds": 0.1,
  "prompts/drawn": 8.0,
  "prompts/kept": 6.0,
  "completions/drawn": 24.0,
  "completions/kept": 12.0,
  "completions/trained": 6.0,
  "tokens/generated": 300.0,
  "tokens/trained": 60.0,
  "groups/zero_std": 2.0,
  "update/skipped": 0.0,
}
SAMPLE = {
  "split": "train",
  "problem": "1+1=",
  "answer": "2",
  "reward": 1.0,
  "correct": 1.0,
  "advantage": 0.5,
  "kept": True,
  "weight": 2.0,
}


def _workdir(folder, lines=(), shown=()):
  (folder / "config.json").write_text(json.dumps(CONFIG))
  for name, found in (("metrics", lines), ("samples", shown)):
    text = "".join(json.dumps(line) + "\n" for line in found)
    (folder / f"{name}.jsonl").write_text(text)
  return folder


def _lines(steps):
  """A run after so many steps, evaluated before each."""
  accuracy = lambda step: {"eval/accuracy": step / 10, "eval/stderr": 0.02}
  lines = [{"step": 0, **accuracy(0)}]
  for step in range(1, steps + 1):
    lines += [{"step": step, **STEP}, {"step": step, **accuracy(step)}]
  return lines


@pytest.mark.parametrize(
  "lines",
  [[], _lines(0), _lines(1), [{"step": 1, **STEP}], _lines(5)],
  ids=["nothing", "start", "a step", "not evaluated", "five steps"],
)
def test_there_is_a_report_at_any_moment(tmp_path, lines):
  report.write(_workdir(tmp_path, lines))
  assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
  page = (tmp_path / "report.md").read_text()
  assert page.startswith("# dppo on ") and "of 9" in page
  assert not [*tmp_path.glob("*.tmp")]


def test_a_run_of_before_these_metrics_is_drawn(tmp_path):
  """An older run names few of the metrics."""
  lines = [{"step": i, "step/seconds": 1.0} for i in (1, 2)]
  assert report.write(_workdir(tmp_path, lines)).exists()


def test_a_report_says_what_was_pruned(tmp_path):
  page = report.write(_workdir(tmp_path, _lines(5))).read_text()
  assert "| prompts kept | 75.0% |" in page
  assert "| completions trained | 25.0% |" in page
  assert "| tokens trained | 20.0% |" in page
  assert "| rollout | 1.5 s | 60.0% |" in page
  assert "| held-out accuracy | 0.000 ± 0.020 → 0.500 ± 0.020 |" in page


def test_a_report_says_what_shares_set_themselves_to(tmp_path):
  lines = _lines(3)
  steps = [x for x in lines if "step/seconds" in x]
  for line, share in zip(steps, (1.0, 0.2, 0.5), strict=False):
    line |= {"shares/completions": share, "shares/completions_speedup": 1.5}
  steps[-1] |= {"noise/share": 0.75, "noise/scale": 96.0}
  page = report.write(_workdir(tmp_path, lines)).read_text()
  assert "| share of completions that set itself, median | 50.0% |" in page
  assert "from 20.0% to 100.0%, predicted 1.50 times as fast" in page
  assert "| 75.0% | the gradient's squared length" in page
  assert "a noise scale of 96 prompts" in page and "of prompts that" not in page


def test_every_evaluation_set_has_its_accuracy(tmp_path):
  lines = [{"step": 0, "eval/accuracy": 0.1, "eval/aime/accuracy": 0.3}]
  page = report.write(_workdir(tmp_path, lines)).read_text()
  assert "| held-out accuracy, aime | 0.300 " in page


def test_what_is_no_run_and_a_damaged_line_are_named(tmp_path):
  with pytest.raises(ValueError, match="it has no config"):
    report.write(tmp_path)
  _workdir(tmp_path, [*_lines(1), {"step": 2}])
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 3, "cut')  # by a kill
  assert report.write(tmp_path).exists()
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write("\n")
  with pytest.raises(ValueError, match=r"metrics.jsonl, line 5"):
    report.write(tmp_path)


def test_completions_are_seen_with_what_became_of_them(tmp_path):
  lines = [
    {"step": 1, **SAMPLE, "completion": "2"},
    {"step": 1, **SAMPLE, "completion": "3", "kept": False, "weight": 0.0},
    {"step": 1, **SAMPLE, "completion": "x" * 500 + r"\boxed{2}"},
    {"step": 1, **SAMPLE, "completion": "a|b\n`c`"},
  ]
  page = report.write(_workdir(tmp_path, _lines(1), lines)).read_text()
  assert "| 1 | `1+1=` | `2` | 1 | +0.50 | kept | 2.00 |" in page
  assert "| 1 | `1+1=` | `3` | 1 | +0.50 | pruned |  |" in page
  assert re.search(r"`x+ … x+\\boxed\{2\}`", page)
  assert r"| `` a\|b `c` `` |" in page  # one cell, one line


def test_completions_of_older_runs_are_left_out_of_the_table():
  old = {k: SAMPLE[k] for k in ("problem", "answer", "reward")}
  assert samples.table([old | {"step": 1, "completion": "2"}]) == ""


def test_of_a_long_file_the_ends_are_read(tmp_path):
  path = tmp_path / "samples.jsonl"
  path.write_text("".join(f'{{"step": {i}, "é": "é"}}\n' for i in range(99)))
  found = [line["step"] for line in jsonl.read_ends(path, size=110)]
  assert found == [0, 1, 2, 3, 95, 96, 97, 98]
  assert len(jsonl.read_ends(path)) == 99


def test_labels_beside_lines_do_not_touch_and_stay_inside():
  heights = [2.0, 1.0, 2.0, 1.0]
  for y in ([5, 5, 5, 5], [0, 0, 9, 10], [9.9, 10, 10, 10], [1, 4, 6, 9]):
    places = style.apart(y, heights, 0, 10)
    gaps = np.diff(places) - (np.add(heights[1:], heights[:-1]) / 2)
    assert (gaps >= -1e-9).all()
    assert places[0] >= 1 - 1e-9 and places[-1] <= 9.5 + 1e-9


def test_the_picture_of_a_run_states_what_it_shows(tmp_path):
  figure = plots.draw(runs.load(_workdir(tmp_path, _lines(5))))
  titles = [axis.get_title(loc="left") for axis in figure.axes]
  assert titles == [
    "Held-out accuracy 0% → 50% in 2.5 s",
    "25% of completions trained",
    "20% of generated tokens trained",
    "Rollout takes 60% of the time",
  ]
