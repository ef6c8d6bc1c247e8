"""Figures that papers print for models that may be evaluated here.

They are the papers' own, under conditions of theirs: other prompts, graders,
numbers of tokens and checkpoints chosen in other ways. They stand beside ours
for orientation.
"""

from collections.abc import Iterable
import re
from typing import NamedTuple


class Figure(NamedTuple):
  """A figure somebody published.

  Attributes:
    model: what was trained, as its publisher calls it.
    dataset: what it was evaluated on.
    training: by which method, on what.
    metric: how completions were counted.
    percent: as printed.
    source: where it is printed.
  """

  model: str
  dataset: str
  training: str
  metric: str
  percent: float
  source: str


_CPPO = "CPPO, arXiv 2503.22342, project page; best checkpoint on the test set"
_GRESO = "GRESO, arXiv 2506.02177, project page"
_D3S = "D3S, arXiv 2509.22115, as two public notes on it quote its table"
_VCPO = "VCPO, arXiv 2602.17616, project page"
_VERL = "verl's documentation of DAPO"

_GRESO_SETS = ("MATH500", "AIME24", "AMC", "Gaokao", "Minerva", "OlympiadBench")
_GRESO_TABLE = {
  ("Qwen2.5-Math-1.5B", "DAPO+MATH"): (
    (77.3, 16.7, 61.7, 64.2, 31.8, 38.7),
    (76.6, 15.0, 61.4, 66.2, 33.3, 38.5),
  ),
  ("Qwen2.5-Math-1.5B", "Open-R1 subset"): (
    (77.1, 16.7, 50.3, 65.5, 30.9, 39.7),
    (76.1, 20.0, 50.6, 65.1, 30.0, 39.2),
  ),
  ("DeepSeek-R1-Distill-Qwen-1.5B", "DAPO+MATH"): (
    (87.9, 36.7, 71.7, 78.7, 35.3, 55.9),
    (87.7, 36.7, 71.1, 78.4, 33.9, 55.1),
  ),
  ("DeepSeek-R1-Distill-Qwen-1.5B", "Open-R1 subset"): (
    (84.8, 25.0, 68.4, 74.0, 34.1, 54.2),
    (85.9, 26.7, 66.9, 75.2, 33.6, 55.5),
  ),
  ("Qwen2.5-Math-7B", "DAPO+MATH"): (
    (82.9, 34.2, 79.2, 71.7, 35.4, 43.6),
    (82.2, 32.5, 80.7, 70.2, 35.4, 44.1),
  ),
  ("Qwen2.5-Math-7B", "Open-R1 subset"): (
    (82.9, 34.2, 63.1, 67.3, 34.9, 46.3),
    (82.3, 35.0, 64.5, 66.8, 36.5, 45.7),
  ),
}
_D3S_SETS = (
  *("AIME24", "AIME25", "AMC23", "GSM8K", "MATH", "Minerva", "OlympiadBench"),
)
# pass@1 and pass@8 of each set, from 32 samples; Qwen2.5-Math-7B.
_D3S_TABLE = {
  "none": (
    (8.9, 2.3, 22.8, 30.1, 27.9, 8.4, 4.1),
    (33.2, 13.4, 70.4, 83.2, 64.6, 33.7, 14.6),
  ),
  "GRPO": (
    (13.2, 5.5, 47.0, 64.9, 48.5, 19.8, 9.7),
    (37.6, 21.6, 83.5, 94.3, 70.2, 45.0, 19.8),
  ),
  "GRPO with PODS": (
    (16.1, 7.8, 52.8, 73.3, 53.0, 24.6, 11.0),
    (40.5, 24.5, 81.5, 95.0, 71.1, 47.5, 20.7),
  ),
  "GRPO with D3S": (
    (20.3, 7.9, 54.4, 73.4, 52.2, 25.0, 10.7),
    (48.2, 25.8, 87.1, 95.7, 71.5, 48.2, 20.8),
  ),
  "GSPO with D3S": (
    (18.3, 8.3, 53.2, 76.0, 54.9, 28.4, 11.5),
    (43.3, 26.9, 83.8, 96.1, 71.4, 51.1, 21.1),
  ),
}
# Completions kept of 16, and accuracy.
_CPPO_TABLE = {
  ("Qwen2.5-1.5B-Instruct", "GSM8K"): (55.72, 77.05, 77.67, 78.81, 80.41, 78.2),
  ("Qwen2.5-7B-Instruct", "MATH"): (55.2, 75.2, 75.2, 77.2, 75.2, 72.8),
  ("Qwen2.5-7B-Instruct", "AMC23"): (25.62, 46.88, 53.12, 49.38, 46.25, 45.0),
  ("Qwen2.5-7B-Instruct", "AIME24"): (5.0, 5.83, 10.0, 6.67, 8.33, 5.83),
}
_CPPO_TRAINING = (
  *("none", "GRPO", "CPPO, 8 of 16 kept", "CPPO, 4 of 16 kept"),
  *("CPPO, 2 of 16 kept", "CPPO, 1 of 16 kept"),
)


def _figures() -> Iterable[Figure]:
  for (model, dataset), row in _CPPO_TABLE.items():
    for training, percent in zip(_CPPO_TRAINING, row, strict=True):
      yield Figure(model, dataset, training, "accuracy", percent, _CPPO)
  for (model, trained_on), rows in _GRESO_TABLE.items():
    for method, row in zip(("dynamic sampling", "GRESO"), rows, strict=True):
      training = f"{method} on {trained_on}"
      for dataset, percent in zip(_GRESO_SETS, row, strict=True):
        metric = "avg@4, temperature 1, top-p 0.7"
        yield Figure(model, dataset, training, metric, percent, _GRESO)
  for training, rows in _D3S_TABLE.items():
    for metric, row in zip(("pass@1", "pass@8"), rows, strict=True):
      for dataset, percent in zip(_D3S_SETS, row, strict=True):
        metric_of = f"{metric} from 32"
        yield Figure(
          "Qwen2.5-Math-7B", dataset, training, metric_of, percent, _D3S
        )
  for training, percent in (("synchronous", 72.0), ("VCPO", 71.6)):
    yield Figure("Qwen2.5-7B", "MATH500", training, "accuracy", percent, _VCPO)
  for training, percent in (
    ("DAPO", 52.0),
    ("DAPO without dynamic sampling", 50.0),
    ("DAPO without token loss and dynamic sampling", 44.0),
  ):
    yield Figure("Qwen2.5-32B", "AIME24", training, "accuracy", percent, _VERL)


FIGURES = tuple(_figures())

# What else data sets are called in file names.
_ALIASES = {
  "aime2024": "aime24",
  "aime2025": "aime25",
  "mathtest": "math",
  "gsm8ktest": "gsm8k",
  "minervamath": "minerva",
  "olympiad": "olympiadbench",
}


def find(path: str, datasets: Iterable[str]) -> list[Figure]:
  """What is published of a model on some data sets.

  Args:
    path: its hub id or the directory of its checkpoint: any part of it may be
      the model's name, `models--Qwen--NAME` included.
    datasets: names of evaluation sets, in whatever spelling.
  """
  parts = {
    part.rpartition("--")[2].lower() for part in re.split(r"[/\\]", path)
  }
  wanted = {_plain(name) for name in datasets}
  found = [
    figure
    for figure in FIGURES
    if figure.model.lower() in parts and _plain(figure.dataset) in wanted
  ]
  return sorted(found, key=lambda figure: figure.dataset)


def _plain(dataset: str) -> str:
  name = re.sub(r"[^a-z0-9]", "", dataset.lower())
  return _ALIASES.get(name, name)
