"""Files of a run, TensorBoard, Weights & Biases, and counted compilations."""

import html
import os
import re
import resource
import shutil
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from dppo_jax.errors import UserError
from dppo_jax.files import jsonl
from dppo_jax.metrics import health, progress, trackers, writer
from dppo_jax.run import compile_cache
from tests.helpers import commands, events

CONFIG = {"seed": 3, "method.args": {"a": "x"}}


def _writer(workdir, names="completions", first_step=None):
  bar, watch = progress.Progress(), health.Health(1)
  return writer.Writer(workdir, first_step, bar, watch, names, CONFIG)


def _events(workdir) -> dict[str, list]:
  """`(step, value)` by tag, as TensorBoard reads them."""
  by_tag = {}
  for event in events.read(workdir / "events"):
    for value in event.summary.value:
      by_tag.setdefault(value.tag, []).append((event.step, value))
  return by_tag


@pytest.fixture
def limit():
  """Limits the size of files, as a full disk does."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  yield lambda size: resource.setrlimit(
    resource.RLIMIT_FSIZE, (size, before[1])
  )
  resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_compilations_are_counted_while_the_context_lasts():
  fresh = lambda n: jax.jit(lambda x: x * n + 0.5)(jnp.ones(n))
  with compile_cache.compilations() as compilations:
    fresh(3).block_until_ready()
    assert len(compilations) >= 1
    compilations.clear()
    jnp.ones(3).block_until_ready()
  fresh(5).block_until_ready()
  assert not compilations


def test_programs_compile_without_a_home_directory(monkeypatch):
  """In a container, for a user without a name."""
  before = jax.config.jax_compilation_cache_dir
  no_home = mock.Mock(side_effect=RuntimeError("no home directory"))
  monkeypatch.setattr(compile_cache.pathlib.Path, "home", no_home)
  jax.config.update("jax_compilation_cache_dir", None)
  try:
    compile_cache.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
  finally:
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_that_compile_at_once_are_cached(tmp_path):
  """In a new process, since JAX opens a cache once."""
  code = (
    "import jax\n"
    "from dppo_jax.run import compile_cache\n"
    "compile_cache.enable_compilation_cache()\n"
    "jax.jit(lambda x: x + 1)(1)"
  )
  names = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
  )
  environment = {k: x for k, x in os.environ.items() if k not in names}
  environment["HOME"] = str(tmp_path)
  command = [sys.executable, "-c", code]
  subprocess.run(command, env=environment, cwd=commands.ROOT, check=True)
  assert any((tmp_path / ".cache/dppo_jax").iterdir())


def test_every_completion_is_written_once_after_a_crash(tmp_path):
  """Stops in step 4, with a checkpoint of step `latest`."""
  write = lambda out, step, run: out.write_completions(
    step, [{"n": i, "run": run} for i in "ab"]
  )
  for latest in (3, 2, 1, None):
    with _writer(tmp_path) as out:
      for step in (1, 2, 3, 4):
        write(out, step, "first")
    first = latest or 0
    with _writer(tmp_path, first_step=latest) as out:
      assert len([*(tmp_path / "completions").iterdir()]) == first
      for step in range(first + 1, 4):
        write(out, step, "second")
    files = sorted((tmp_path / "completions").iterdir())
    assert [x.name for x in files] == [
      f"step-00000{i}.jsonl" for i in (1, 2, 3)
    ]
    lines = [
      [(x["step"], x["run"]) for x in jsonl.read(path)] for path in files
    ]
    assert lines == [
      [(i, "first" if i <= first else "second")] * 2 for i in (1, 2, 3)
    ]


@pytest.mark.parametrize("name", ["all", "20260101", "7", "step-all"])
def test_other_files_next_to_the_completions_stay(tmp_path, name):
  path = tmp_path / f"completions/{name}.jsonl"
  path.parent.mkdir()
  path.write_text('{"step": 9}\n')
  with _writer(tmp_path, first_step=3) as out:
    out.write_completions(4, [{}])
  assert path.read_text() == '{"step": 9}\n'


def test_writer_keeps_metrics_and_messages(tmp_path, capsys):
  path = "/a/path/" + "long/" * 20
  message = f"a reward failed in {path}, {'and so on ' * 9}to the end"
  with _writer(tmp_path) as out:
    for step in (1, 2, 3):
      out.write(step, {"reward/mean": step / 2})
    out.log("Traceback: one\ntwo")
    out.say(message)
    out.say("half a character: \ud800")  # as a reward may raise
  with _writer(tmp_path, first_step=1) as out:
    out.write(2, {"reward/mean": 7.0})
  lines = jsonl.read(tmp_path / "metrics.jsonl")
  assert [x["reward/mean"] for x in lines] == [0.5, 7.0]
  log = (tmp_path / "log.txt").read_text()
  assert message in log and "Traceback: one\ntwo" in log
  shown = capsys.readouterr().out
  assert message in " ".join(shown.split())
  assert max(len(x) for x in shown.splitlines() if path not in x) <= 79


def test_full_disk_ends_the_run_with_a_message_and_it_resumes(tmp_path, limit):
  path = tmp_path / "metrics.jsonl"
  message = rf"{path} cannot be written: File too large"
  with pytest.raises(UserError, match=message), _writer(tmp_path) as out:
    out.write(0, {"eval/accuracy": 0.5})
    limit(100)
    out.write(1, {"reward/mean": 0.123456789, "reward/std": 0.123456789})
  limit(resource.RLIM_INFINITY)
  with _writer(tmp_path, first_step=0) as out:
    out.write(1, {"reward/mean": 0.5})
  assert [x["step"] for x in jsonl.read(path)] == [0, 1]


def test_deleted_working_directory_ends_the_run_at_the_next_write(tmp_path):
  workdir = tmp_path / "run"
  workdir.mkdir()
  with _writer(workdir, "tensorboard") as out:
    out.write(1, {"reward/mean": 0.5})
    shutil.rmtree(workdir)
    with pytest.raises(UserError, match=r"metrics.* was deleted"):
      out.write(2, {"reward/mean": 0.5})
    with pytest.raises(UserError, match=r"samples.* was deleted"):
      out.write_samples(2, "train", [])
    out.say("still reported")
  assert not workdir.exists()


def test_tensorboard_has_every_step_at_once(tmp_path):
  with _writer(tmp_path, "tensorboard") as out:
    out.write(1, {"reward/mean": 0.5, "update/loss": float("nan")})
    by_tag = _events(tmp_path)
  assert by_tag["reward/mean"][0][1].simple_value == 0.5
  assert "update/loss" not in by_tag


def test_resumed_run_replaces_later_steps_in_tensorboard(tmp_path):
  for number, first_step in enumerate((None, 1, 2)):  # within a second
    with _writer(tmp_path, "tensorboard", first_step) as out:
      for step in range((first_step or 0) + 1, 4):
        out.write(step, {"reward/mean": float(number)})
  values = [(x, y.simple_value) for x, y in _events(tmp_path)["reward/mean"]]
  assert values == [(1, 0.0), (2, 1.0), (3, 2.0)]


SAMPLES = [
  {
    "id": "a",
    "problem": "2*3|4*5?",
    "completion": "*a*\n[b](c) <d>",
    "reward": 0.5,
  },
  {"id": "b", "problem": "_1_", "completion": "", "reward": 1.0},
]


def test_tensorboard_has_completions_as_text_without_markup(tmp_path):
  with _writer(tmp_path, "tensorboard") as out:
    out.write_samples(3, "eval/math", SAMPLES)
    out.write_samples(4, "train", [])
  by_tag = _events(tmp_path)
  ((step, value),) = by_tag["samples/eval/math/text_summary"]
  assert value.metadata.plugin_data.plugin_name == "text" and step == 3
  text = value.tensor.string_val[0].decode()
  head, _, *rows = text.splitlines()
  assert head == "| problem | completion | reward |"
  assert not set(text.replace("<br>", "")) & set("*_[]`<>\\")
  cells = [[html.unescape(x) for x in row[2:-2].split(" | ")] for row in rows]
  assert cells == [["2*3|4*5?", "*a*<br>[b](c) <d>", "0.5"], ["_1_", "", "1"]]
  assert len(by_tag) == 1


@pytest.fixture
def wandb(monkeypatch):
  library = mock.MagicMock(__spec__=object())
  monkeypatch.setitem(sys.modules, "wandb", library)
  return library


def test_wandb_gets_metrics_and_a_resumed_run_keeps_its_id(tmp_path, wandb):
  with _writer(tmp_path, "tensorboard, wandb") as out:
    out.write(1, {"reward/mean": 0.5})
    out.sync()
  for first_step in (1, None):
    with _writer(tmp_path, "wandb", first_step):
      pass
  wandb.init.return_value.log.assert_called_once_with(
    {"reward/mean": 0.5}, step=1
  )
  assert wandb.init.return_value.finish.call_count == 3
  first, same, other = (x.kwargs for x in wandb.init.call_args_list)
  assert first == same and first["name"] == tmp_path.name
  assert first["config"] == CONFIG and other["id"] != first["id"]


def test_any_name_of_a_directory_suits_wandb(tmp_path, wandb):
  """It rejects ids that are longer than 128 or have one of these characters."""
  place = tmp_path / ("a:b#c?d%e=1,2 " * 12)
  place.mkdir()
  with _writer(place, "wandb"):
    pass
  options = wandb.init.call_args.kwargs
  assert re.fullmatch("[a-z0-9]{8,64}", options["id"])
  assert place.name.startswith(options["name"]) and len(options["name"]) <= 128


def test_wandb_gets_completions_and_takes_names_from_its_variables(
  tmp_path, wandb, monkeypatch
):
  monkeypatch.setenv("WANDB_NAME", "first try")
  with _writer(tmp_path, "wandb") as out:
    out.write_samples(3, "train", SAMPLES)
  wandb.Table.assert_called_once_with(
    columns=["problem", "completion", "reward"],
    data=[[x["problem"], x["completion"], x["reward"]] for x in SAMPLES],
  )
  wandb.init.return_value.log.assert_called_once_with(
    {"samples/train": wandb.Table.return_value}, step=3
  )
  options = wandb.init.call_args.kwargs
  assert options["name"] == "first try" and "project" not in options
  assert options["id"] == (tmp_path / "wandb_id").read_text()


@pytest.mark.parametrize("method", ["", "log", "finish"])
def test_tracker_that_fails_is_dropped(method, tmp_path, wandb, capsys):
  act = getattr(wandb.init.return_value, method) if method else wandb.init
  act.side_effect = ZeroDivisionError
  with _writer(tmp_path, "wandb") as out:
    for step in (1, 2):
      out.write(step, {"reward/mean": 0.5})
  shown = " ".join(capsys.readouterr().out.split())
  assert shown.count("wandb failed and is off from here on: ZeroDivision") == 1
  assert len(jsonl.read(tmp_path / "metrics.jsonl")) == 2


def test_unknown_tracker_is_rejected():
  with pytest.raises(UserError, match="has mlflow but may have tensorboard"):
    trackers.parse("mlflow")
  assert trackers.parse("") == []
