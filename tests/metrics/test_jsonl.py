"""Files of lines as a kill, a power cut or a full disk leaves them."""

import json

import pytest

from dppo_jax.metrics import jsonl

LINES = "".join(
  json.dumps({"step": step, "text": "größer"}, ensure_ascii=False) + "\n"
  for step in (0, 1, 2)
).encode()


@pytest.mark.parametrize(
  "tail",
  [b'{"step": 3, "te', '{"step": 3, "text": "grö'.encode()[:-1], b"\0" * 99],
)
def test_a_last_line_cut_short_is_left_out_and_told(tmp_path, tail):
  """In the middle of a word, of a character, or what a power cut leaves."""
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(LINES + tail)
  assert [x["step"] for x in jsonl.read(path)] == [0, 1, 2]
  (said,) = jsonl.keep_until(path, 2)
  assert said == f"{path}: a last line, cut short, is left out"
  assert path.read_bytes() == LINES
  assert not jsonl.keep_until(path, 2)


@pytest.mark.parametrize("middle", [b"\0\0\n", b"{\n", b"[]\n", b"\xff\n"])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, middle):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(LINES + b"\n" + middle + LINES)
  for act in (jsonl.read, lambda path: jsonl.keep_until(path, 1)):
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5, is damaged"):
      act(path)
  assert path.read_bytes() == LINES + b"\n" + middle + LINES
  path.write_bytes(LINES + b"{}\n")
  with pytest.raises(ValueError, match="has a line without a step"):
    jsonl.keep_until(path, 1)


def test_lines_of_later_steps_are_dropped_and_counted(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(LINES)
  (said,) = jsonl.keep_until(path, 0)
  assert "2 lines of steps after 0 will be written anew" in said
  assert [x["step"] for x in jsonl.read(path)] == [0]


def test_a_run_that_begins_anew_keeps_what_an_earlier_one_wrote(tmp_path):
  """Where its checkpoints were deleted by hand, say."""
  path = tmp_path / "metrics.jsonl"
  for number in (1, 2):
    path.write_bytes(LINES)
    (said,) = jsonl.keep_until(path, -1)
    assert f"2 steps of a run without a checkpoint: it is now {path}" in said
    kept = tmp_path / f"metrics.jsonl.before-{number}"
    assert kept.read_bytes() == LINES and path.read_bytes() == b""
  path.write_bytes(LINES[: LINES.index(b"\n") + 1])  # no step was done
  jsonl.keep_until(path, -1)
  assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_cannot_be_replaced_stays_as_it_is(tmp_path, monkeypatch):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(LINES)

  def full(*unused):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(jsonl.os, "fsync", full)
  with pytest.raises(OSError, match=rf"{path} cannot be written: No space"):
    jsonl.keep_until(path, 0)
  assert [x.read_bytes() for x in tmp_path.iterdir()] == [LINES]
