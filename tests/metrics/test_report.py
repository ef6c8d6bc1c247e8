"""The report of a run, at any moment of it."""

import json

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
  accuracy = lambda step: {"eval/accuracy": step / 10, "eval/stderr": 0.02}
  lines = [{"step": 0, **accuracy(0)}]
  for step in range(1, steps + 1):
    lines += [{"step": step, **STEP}, {"step": step, **accuracy(step)}]
  return lines


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


def test_report_has_accuracies_fractions_and_times(tmp_path):
  lines = _lines(5)
  lines[0] |= {"eval/aime/accuracy": 0.3, "eval/aime/stderr": 0.1}
  page = report.write(_workdir(tmp_path, lines)).read_text()
  for row in (
    "| method | dppo(a=1) |",
    "| held-out: eval/accuracy | 0.000 ± 0.039 → 0.500 ± 0.039 |",
    "| held-out: eval/aime/accuracy | 0.300 ± 0.196 → 0.300 ± 0.196 |",
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
  segment = bars.lines[2][0].get_segments()[-1]
  np.testing.assert_allclose(segment[:, 1], [0.5 - 0.0392, 0.5 + 0.0392])


@pytest.mark.parametrize("num_prompts", [1, 16])
def test_noise_scale_before_a_measurement_is_unknown(tmp_path, num_prompts):
  row = "| gradient noise scale |"
  lines = [{"step": 1, **STEP}]
  assert row not in report.write(_workdir(tmp_path, lines)).read_text()
  unmeasured = gradient_noise.describe(gradient_noise.init(), num_prompts)
  for metrics, text in ((unmeasured, "unknown"), ({"noise/scale": 84.4}, "84")):
    page = report.write(_workdir(tmp_path, [lines[0] | metrics])).read_text()
    assert f"{row} {text}" in page


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
