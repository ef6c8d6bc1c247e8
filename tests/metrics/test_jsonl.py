"""Files of lines as a kill, a power cut or a full disk leaves them."""

import pytest

from dppo_jax.errors import UserError
from dppo_jax.files import jsonl

LINES = b"".join(
  jsonl.line({"step": step, "text": "größer"}).encode() for step in (0, 1, 2)
)
DEEP = b"[" * 200_000 + b"\n"


@pytest.mark.parametrize(
  "tail",
  [b'{"step": 3, "te', '{"step": 3, "text": "grö'.encode()[:-1], b"\0" * 99],
  ids=["in a word", "in a character", "a power cut"],
)
@pytest.mark.parametrize(("step", "left"), [(2, 3), (0, 1), (-1, 0)])
def test_truncated_line_and_lines_of_later_steps_are_removed(
  tmp_path, tail, step, left
):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(LINES + tail)
  assert [x["step"] for x in jsonl.read(path)] == [0, 1, 2]
  jsonl.keep_until(path, step)
  assert path.read_bytes() == b"".join(LINES.splitlines(True)[:left])


@pytest.mark.parametrize(
  "middle",
  [
    b"\0\0\n",
    b"{\n",
    b"\xff\n",
    b"[]\n",
    b'{"step": "1"}\n',
    b'{"step": 1}\n',  # of a file that was doubled, say
    DEEP,
  ],
)
def test_damaged_line_is_named(tmp_path, middle):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(LINES + middle + LINES)
  for act in (jsonl.read, lambda path: jsonl.keep_until(path, 1)):
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 4, is damaged"):
      act(path)
  assert path.read_bytes() == LINES + middle + LINES


def test_new_file_is_empty_and_lone_surrogate_survives(tmp_path):
  path = tmp_path / "samples.jsonl"
  jsonl.keep_until(path, 0)
  assert path.read_bytes() == b""
  text = '{"step": 0, "text": "\\ud800"}\n{"step": 1}\n'
  path.write_text(text)
  jsonl.keep_until(path, 0)
  assert path.read_text() == text.splitlines(True)[0]


def test_file_that_cannot_be_replaced_is_unchanged(tmp_path, monkeypatch):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(LINES)

  def full(*unused):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(jsonl.os, "fsync", full)
  with pytest.raises(UserError, match=rf"{path} cannot be written: No space"):
    jsonl.keep_until(path, 0)
  assert path.read_bytes() == LINES
