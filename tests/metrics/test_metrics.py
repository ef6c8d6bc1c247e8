"""What a run writes down, and what is read back."""

import json
import resource

import jax
import jax.numpy as jnp
import pytest

from dppo_jax.metrics import jsonl, progress, report
from dppo_jax.metrics import writer as metrics


def test_a_compilation_is_counted_while_the_context_lasts_and_no_longer():
  fresh = lambda n: jax.jit(lambda x: x * n + 0.5)(jnp.ones(n))
  with metrics.Compilations() as compilations:
    fresh(3).block_until_ready()
    assert compilations.since_last() >= 1
    jnp.ones(3).block_until_ready()
    assert compilations.since_last() == 0
  fresh(5).block_until_ready()
  assert compilations.since_last() == 0


def test_metrics_of_older_runs_go_by_their_present_names(tmp_path):
  path = tmp_path / "metrics.jsonl"
  old = {"step": 1, "completions/dead_groups": 3.0, "remember/seconds": 0.1}
  path.write_text(json.dumps(old) + "\n" + '{"step": 2, "cut')
  assert jsonl.read(path) == [
    {"step": 1, "groups/zero_std": 3.0, "update_history/seconds": 0.1}
  ]


def test_a_writer_keeps_what_was_said_and_what_was_written(tmp_path):
  with metrics.Writer(tmp_path, None, progress.Progress()) as writer:
    writer.say("begun")
    for step in (1, 2, 3):
      writer.write(step, {"reward/mean": step / 2})
    writer.log("Traceback: one\ntwo")
    writer.say("half a character: \ud800")  # as a reward may raise
  with metrics.Writer(tmp_path, 1, progress.Progress()) as writer:  # goes on
    writer.write(2, {"reward/mean": 7.0})
  lines = jsonl.read(tmp_path / "metrics.jsonl")
  assert [x["reward/mean"] for x in lines] == [0.5, 7.0]
  log = (tmp_path / "log.txt").read_text()
  assert "begun" in log and "Traceback: one\ntwo" in log


def test_what_is_said_fits_a_terminal_and_stands_whole_in_the_log(
  tmp_path, capsys
):
  path = "/a/path/" + "long/" * 20
  line = f"a reward failed in {path}, {'and so on ' * 9}to the end"
  with metrics.Writer(tmp_path, None, progress.Progress()) as writer:
    writer.say(line)
  shown = capsys.readouterr().out
  short, long = [], []
  for x in shown.splitlines():
    (long if path in x else short).append(x)
  assert len(long) == 1 and max(map(len, short)) <= 79
  assert " ".join(shown.split()) == line
  assert line in (tmp_path / "log.txt").read_text().splitlines()[0]


@pytest.fixture
def limit():
  """Sets how large a file may become, as a full disk does."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  yield lambda size: resource.setrlimit(
    resource.RLIMIT_FSIZE, (size, before[1])
  )
  resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_a_run_in_a_line_and_it_goes_on_with_room(
  tmp_path, limit
):
  path = tmp_path / "metrics.jsonl"
  with (
    pytest.raises(OSError, match=rf"{path} cannot be written: File too large"),
    metrics.Writer(tmp_path, None, progress.Progress()) as writer,
  ):
    writer.write(0, {"eval/accuracy": 0.5})
    limit(100)
    writer.write(1, {"reward/mean": 0.123456789, "reward/std": 0.123456789})
  assert b"\n" not in path.read_bytes()[path.read_bytes().index(b"\n") + 1 :]
  limit(resource.RLIM_INFINITY)
  with metrics.Writer(tmp_path, 0, progress.Progress()) as writer:
    writer.write(1, {"reward/mean": 0.5})
  assert [x["step"] for x in jsonl.read(path)] == [0, 1]
  assert "a last line, cut short" in (tmp_path / "log.txt").read_text()


def test_a_completion_with_credit_for_its_form_alone_is_not_called_right():
  sample = {"step": 0, "split": "eval", "problem": "1+1=", "answer": "2"}
  samples = [
    sample | {"completion": r"\boxed{3}", "reward": 0.5, "correct": 0.0},
    sample | {"completion": r"\boxed{2}", "reward": 0.0, "correct": 1.0},
  ]
  wrong, right = report._solutions(samples).split("Step 0, ")[1:]
  assert wrong.startswith("wrong") and right.startswith("right")
