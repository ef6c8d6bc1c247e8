"""TensorBoard opens on what matters; trackers get the same numbers."""

import pathlib
import resource
import sys
import types

import events
from matplotlib import figure
import pytest

from dppo_jax.metrics import jsonl, live_report, progress, report, trackers
from dppo_jax.metrics import writer as metrics

CONFIG = {"seed": 3, "method.args": {"a": "x|y"}}
SAMPLE = {"problem": "1+1=", "completion": "2", "answer": "2", "reward": 1.0}


def _writer(workdir, names, first_step=None):
  return metrics.Writer(
    workdir,
    first_step,
    progress.Progress(),
    openers=trackers.openers(workdir, CONFIG, writers=names, project="ours"),
  )


def _events(workdir) -> dict[str, list]:
  """What TensorBoard reads: `(step, value)` by tag."""
  found = {}
  for event in events.read(workdir / "events"):
    for value in event.summary.value:
      found.setdefault(value.tag, []).append((event.step, value))
  return found


def _draw(workdir):
  path = workdir / "report.png"
  figure.Figure(figsize=(2, 1)).savefig(path, dpi=50)
  return path


def test_tensorboard_opens_on_what_matters(tmp_path):
  with _writer(tmp_path, "tensorboard") as writer:
    writer.write(0, {"eval/accuracy": 0.25})
    writer.write_samples(0, "eval", [SAMPLE])
    writer.write_samples(1, "train", [SAMPLE])
    step = {"completions/drawn": 8, "completions/trained": 2}
    writer.write(1, step | {"reward/mean": 0.5, "update/loss": float("nan")})
    writer.image(1, "report", _draw(tmp_path))
  found = _events(tmp_path)
  scalars = {tag: x[0][1].simple_value for tag, x in found.items()}
  assert scalars["Main/accuracy_held_out"] == scalars["eval/accuracy"] == 0.25
  assert scalars["Main/reward"] == 0.5
  assert scalars["Main/completions_trained"] == 0.25
  assert "update/loss" not in found  # no number
  groups = sorted(tag for tag in found if "/" in tag)
  assert groups[0].startswith("Main/")
  text = lambda tag: found[tag][0][1].tensor.string_val[0].decode()
  assert "| seed | 3 |" in text("config/text_summary")
  assert r"x\|y" in text("config/text_summary")
  assert "    1+1=" in text("samples/eval/text_summary")
  image = found["report"][0][1].image
  assert (image.width, image.height) == (100, 50)
  assert image.encoded_image_string == (tmp_path / "report.png").read_bytes()


def test_tensorboard_has_what_was_written_before_a_kill(tmp_path):
  """All that there was, at once: nothing waits in a queue."""
  writer = _writer(tmp_path, "tensorboard")
  writer.write(3, {"reward/mean": 0.5})
  writer.sync()
  assert _events(tmp_path)["reward/mean"][0][0] == 3
  writer.__exit__()


def test_a_resumed_run_tells_tensorboard_from_where_on(tmp_path):
  for number, first_step in enumerate((None, 1, 2)):  # within a second
    with _writer(tmp_path, "tensorboard", first_step) as writer:
      for step in (1, 2, 3):
        if step > (first_step or 0):
          writer.write(step, {"reward/mean": float(number)})
  found = [(x, y.simple_value) for x, y in _events(tmp_path)["reward/mean"]]
  assert found == [(1, 0.0), (2, 1.0), (3, 2.0)]


def test_tensorboard_on_a_full_disk_is_left_out_and_the_run_goes_on(
  tmp_path, capsys
):
  """It used to wait for ever, once its queue was full."""
  with _writer(tmp_path, "tensorboard") as writer:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
      for step in range(15):
        writer.write(step, {"reward/mean": 0.5})
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
  said = " ".join(capsys.readouterr().out.split())
  assert said.count("tensorboard gets nothing more: OSError: ") == 1
  assert "cannot be written" in said and f"{tmp_path}/events/" in said
  assert len(jsonl.read(tmp_path / "metrics.jsonl")) == 15


class _Library(types.ModuleType):
  """What `wandb` and `trackio` have in common."""

  def __init__(self, name, known):
    super().__init__(name)
    self.runs, self.lines, self._known = [], [], known
    self.is_over = False

  def init(self, **options):
    assert options.keys() <= self._known
    self.runs.append(options)

  def log(self, values, step):
    self.lines.append((step, values))

  def Image(self, path):
    assert pathlib.Path(path).exists()
    return f"image {path}"

  def finish(self):
    self.is_over = True


# Of the arguments of their `init`, those that we may use.
_BOTH = {"project", "name", "config", "resume"}
TRACKERS = {"wandb": _BOTH | {"id"}, "trackio": _BOTH}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_the_numbers_and_a_resumed_run_is_the_same_one(
  name, tmp_path, monkeypatch
):
  library = _Library(name, TRACKERS[name])
  monkeypatch.setitem(sys.modules, name, library)
  trackers.check(name)
  with _writer(tmp_path, f"tensorboard, {name}") as writer:
    writer.write(1, {"reward/mean": 0.5})
    writer.image(1, "report", _draw(tmp_path))
  assert library.lines[0] == (1, {"reward/mean": 0.5})
  assert library.lines[1][1]["report"].endswith("report.png")
  assert library.is_over
  with _writer(tmp_path, name, first_step=1):
    pass
  with _writer(tmp_path, name):  # from the start: another run
    pass
  first, same, other = library.runs
  assert first == same and first["name"].startswith(tmp_path.name)
  assert first["project"] == "ours" and first["config"] == CONFIG
  assert first["resume"] == "allow"
  assert other["name"] != first["name"]
  if name == "wandb":
    assert first["id"] == first["name"]


@pytest.mark.parametrize("what", ["init", "log", "finish"])
def test_a_tracker_that_fails_ends_no_run(what, tmp_path, monkeypatch, capsys):
  library = _Library("wandb", TRACKERS["wandb"])
  monkeypatch.setitem(sys.modules, "wandb", library)
  monkeypatch.setattr(library, what, lambda *unused, **more: 1 / 0)
  with _writer(tmp_path, "wandb") as writer:
    for step in (1, 2):
      writer.write(step, {"reward/mean": 0.5})
  said = capsys.readouterr().out
  assert said.count("wandb gets nothing more: ZeroDivisionError") == 1
  assert len(jsonl.read(tmp_path / "metrics.jsonl")) == 2


def test_a_library_that_is_missing_says_how_to_get_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "trackio", None)
  with pytest.raises(ValueError, match="pip install trackio"):
    trackers.check("tensorboard,trackio")
  with pytest.raises(ValueError, match="'mlflow' but may name tensorboard"):
    trackers.parse("mlflow")
  assert trackers.parse("") == []


def test_a_report_is_drawn_during_a_run_while_it_costs_little(
  tmp_path, monkeypatch
):
  """At most a fiftieth of the time, and no failure of it ends the run."""
  now, written = [0.0], []

  def write(workdir):
    now[0] += 3
    written.append(now[0])
    if len(written) == 2:
      raise OSError("no space left")
    return _draw(workdir).with_suffix(".md")

  monkeypatch.setattr(live_report.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(report, "write", write)
  with _writer(tmp_path, "tensorboard") as writer:
    page = live_report.LiveReport(tmp_path, writer)
    for step in range(100):
      now[0] += 10
      page.refresh(step)
  assert len(written) > 2
  for number, end in enumerate(written, 1):
    assert number == 1 or 3 * number <= 0.02 * end
  assert "no space left" in (tmp_path / "log.txt").read_text()
