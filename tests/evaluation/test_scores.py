"""Numbers of an evaluation from completions whose verdicts are known."""

import json

import numpy as np
import pytest

from dppo_jax.eval import estimators, page, published, scores


def _scored(correct, votes=None):
  correct = np.array(correct, np.float32)
  votes = np.zeros(correct.shape, int) if votes is None else np.array(votes)
  lengths = np.full(correct.shape, 5)
  return scores.Scored(correct, votes, lengths, lengths > 0, 2.0)


GREEDY = _scored([[1], [0], [1], [0]])
SAMPLED = _scored(
  [[1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]],
  [[0, 0, 1, -1], [1, 1, 2, 0], [0, 0, 0, 0], [1, 2, 3, 4]],
)


def test_every_estimate_is_what_its_name_says():
  found = scores.summarize(GREEDY, SAMPLED, {})
  values = {name: x["value"] for name, x in found["estimates"].items()}
  assert list(values) == [
    *("greedy", "avg@4", "maj@2", "maj@4", "pass@2", "pass@4"),
  ]
  assert values["greedy"] == 0.5
  assert values["avg@4"] == pytest.approx(7 / 16)
  assert values["maj@4"] == 0.5
  assert values["pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 1) / 4)
  assert values["pass@4"] == 0.75
  for x in found["estimates"].values():
    assert 0 <= x["low"] <= x["value"] <= x["high"] <= 1
  assert found["completions"]["sampled"] == {
    "completions": 16,
    "tokens_mean": 5.0,
    "truncated": 0.0,
    "unboxed": 1 / 16,
    "seconds": 2.0,
    "tokens_per_second": 40.0,
  }


def test_without_samples_or_boxes_there_is_no_vote():
  found = scores.summarize(GREEDY, None, {})
  assert list(found["estimates"]) == ["greedy"] and found["samples"] == 0
  silent = SAMPLED._replace(votes=np.full((4, 4), -1))
  found = scores.summarize(GREEDY, silent, {})
  assert not [x for x in found["estimates"] if x.startswith("maj")]


def test_results_are_broken_down_by_what_has_a_few_values():
  columns = {
    "level": [10, 9, None, 10],
    "subject": ["b", "a", "b", "a"],
    "same": ["x"] * 4,
    "id": ["1", "2", "3", "4"],
    "unit": ["m²", "²", "2", "²"],
  }
  found = scores.summarize(GREEDY, SAMPLED, columns)["by"]
  assert list(found) == ["level", "subject", "id", "unit"]
  assert list(found["level"]) == ["9", "10"]  # in order, as numbers
  assert [x["problems"] for x in found["level"].values()] == [1, 2]
  assert list(found["subject"]["a"]["estimates"]) == [
    *("greedy", "avg@4", "maj@4", "pass@4"),
  ]
  assert found["subject"]["b"]["estimates"]["greedy"]["value"] == 1
  correct = SAMPLED.correct[[1, 3]].mean(1)
  expected = estimators.interval(correct, 4)._asdict()
  assert found["subject"]["a"]["estimates"]["avg@4"] == expected
  many = {"id": range(4 * scores.MAX_GROUPS)}
  more = _scored([[1]] * 4 * scores.MAX_GROUPS)
  assert scores.summarize(more, None, many)["by"] == {}


@pytest.fixture(scope="module")
def results():
  columns = {"level": [1, 1, 2, 3]}
  return {
    "title": "a run",
    "step": 3,
    "weights": "step 3 of a run",
    "sampling": "4",
    "seconds": 3.0,
    "config": {"model.path": "x/Qwen2.5-Math-7B", "model.hub_id": ""},
    "sets": {
      "AIME-2024": scores.summarize(GREEDY, SAMPLED, columns),
      "a set of a name that is very long": scores.summarize(GREEDY, None, {}),
    },
  }


def test_a_page_shows_all_of_it_and_marks_what_others_publish(
  tmp_path, results
):
  text = page.write(tmp_path, results).read_text()
  assert "| AIME-2024 | 4 | 0.500 (" in text
  assert "## AIME-2024 by level" in text
  assert "What others publish of Qwen2.5-Math-7B" in text
  assert "Not ours" in text and "2509.22115" in text and "GSM8K" not in text
  assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
  assert json.loads((tmp_path / "results.json").read_text()) == results


def test_without_samples_a_page_is_shorter(tmp_path, results):
  only = {"b": results["sets"]["a set of a name that is very long"]}
  config = {"model.path": "", "model.hub_id": ""}
  few = results | {"sets": only, "config": config}
  text = page.write(tmp_path, few).read_text()
  assert "More samples" not in text and "publish" not in text


def test_the_terminal_gets_lines_of_eighty_columns(results):
  lines = page.lines(results["sets"])
  assert len(lines) == 1 + 4 + 1
  assert max(map(len, lines)) <= 80
  assert lines[1].split()[:4] == ["AIME-2024", "4", "greedy", "0.500"]
  assert "…" in lines[-1]


@pytest.mark.parametrize(
  "path",
  [
    "Qwen/Qwen2.5-Math-1.5B",
    "/models/qwen2.5-math-1.5b/",
    "hub/models--Qwen--Qwen2.5-Math-1.5B/snapshots/4a83ca6e",
  ],
)
def test_published_figures_are_found_by_model_and_set(path):
  found = published.find(path, ["math-500", "gsm8k"])
  assert {(x.model, x.dataset) for x in found} == {
    ("Qwen2.5-Math-1.5B", "MATH500")
  }
  assert {x.percent for x in found} == {77.3, 76.6, 77.1, 76.1}
  assert not published.find(path, ["mine"])
  assert not published.find("Qwen2.5-Math-1.5B-Instruct", ["math500"])


def test_published_figures_are_percentages_with_a_source():
  assert len(set(published.FIGURES)) == len(published.FIGURES) > 100
  for figure in published.FIGURES:
    assert 0 < figure.percent < 100 and len(figure.source) > 10
