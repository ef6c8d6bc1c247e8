"""One reader of JSON objects names the file, the key and the expected type."""

import json

import pytest

from dppo_jax.errors import UserError
from dppo_jax.files import json_object

KINDS = {
  "flag": bool,
  "size": int,
  "scale": float,
  "names": dict[str, str],
  "ids": int | list[int] | None,
}
CONTENT = {"flag": True, "size": 3, "scale": 1, "names": {"a": "b"}, "more": []}


@pytest.fixture
def write(tmp_path):
  def write(content):
    file = tmp_path / "x.json"
    file.write_bytes(
      content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    return file

  return write


@pytest.mark.parametrize("ids", [{}, {"ids": None}, {"ids": 1}, {"ids": [1]}])
def test_an_object_of_the_expected_types_is_returned(write, ids):
  content = CONTENT | ids
  assert json_object.read(write(content), KINDS) == content


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"flag": 1}, "flag is 1 but must be true or false"),
    ({"size": True}, "size is True but must be a whole number"),
    ({"size": 3.0}, "size is 3.0 but must be a whole number"),
    ({"size": None}, "size is None but must be a whole number"),
    ({"scale": "1"}, "scale is '1' but must be a number"),
    ({"names": {"a": 1}}, "names is {'a': 1} but must be an object of text"),
    ({"names": ["a"]}, r"names is \['a'\] but must be an object of text"),
    ({"ids": ["1"]}, "a whole number or a list of whole numbers or null"),
  ],
)
def test_a_value_of_another_type_is_named(write, changes, message):
  file = write(CONTENT | changes)
  with pytest.raises(UserError, match=f"{file} .*{message}.*: fix it$"):
    json_object.read(file, KINDS, "fix it")


def test_a_missing_key_is_named(write):
  with pytest.raises(UserError, match=r"flag is missing but must be true or"):
    json_object.read(write({}), KINDS)


@pytest.mark.parametrize(
  "content", [b"", b"{", b"\xff", b"[1]", b"3", b"[" * 10**5, b"1" * 5000]
)
def test_a_damaged_file_is_named_in_one_line(write, content):
  file = write(content)
  with pytest.raises(UserError, match=f"cannot read {file} ") as error:
    json_object.read(file)
  assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(UserError, match=r"none\.json \(No such file or dir"):
    json_object.read(tmp_path / "none.json")
