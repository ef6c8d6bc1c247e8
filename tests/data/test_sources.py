"""Sources: each kind gives the same rows; malformed ones are named."""

import decimal
import subprocess
import sys

import pytest
import tensorflow_datasets as tfds

from dppo_jax import data
from dppo_jax.data import sources
from dppo_jax.errors import UserError
from tests.helpers.problems import ROWS, row
from tests.helpers.sources import (
  write_jsonl,
  write_parquet,
  write_saved_dataset,
  write_tfds,
)


def read(source, **options):
  return sources.read(source, **options)[0]


def test_every_kind_of_source_gives_the_same_rows(tmp_path, monkeypatch):
  monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
  directory = write_tfds(tmp_path, ROWS)
  results = [
    read(source)
    for source in (
      lambda: iter(ROWS),
      write_jsonl(tmp_path / "rows.jsonl", ROWS),
      write_parquet(tmp_path / "rows.parquet", ROWS),
      write_saved_dataset(tmp_path / "saved", ROWS),
      f"tfds:{directory}",
      f"tfds:{directory}:train",
      "tfds:tiny",
      "tfds:tiny:train[:100%]",
    )
  ]
  assert all(rows == results[0] for rows in results)
  assert results[0] == [
    row("a", "1+2=", "3", "1+2=3", columns=ROWS[0]),
    row("b", "Größe π?\n2", "1,5", columns=ROWS[1]),
    row("c", "9-9=", "1000", columns=ROWS[2]),
  ]


def test_a_damaged_row_beyond_the_limit_has_its_own_number(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", 4 * [ROWS[0]])
  with open(path, "a") as file:
    file.write("{\n")
  with pytest.raises(UserError, match=r"rows.jsonl row 5: "):
    read(path, limit=2)


def test_limit_takes_the_first_rows_of_an_endless_function(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(
    "import itertools\n"
    "def rows():\n"
    "  for n in itertools.count():\n"
    "    yield {'problem': f'{n}+1=', 'answer': n + 1}\n"
  )
  rows = read(f"{path}:rows", limit=2)
  assert [(r.id, r.problem, r.answer) for r in rows] == [
    ("mine.py:rows/0", "0+1=", "1"),
    ("mine.py:rows/1", "1+1=", "2"),
  ]


@pytest.mark.parametrize(
  ("value", "answer"),
  [
    (" 1,5 ", "1,5"),
    *[
      (18.0, "18"),
      (-0.0, "0"),
      (0.00001, "0.00001"),
      (-1e20, f"-1{'0' * 20}"),
    ],
    (6.02e23, f"602{'0' * 21}"),
    (decimal.Decimal(10) ** 30, f"1{'0' * 30}"),
    (decimal.Decimal("Infinity"), ""),
    (decimal.Decimal("18.00"), "18"),
    (decimal.Decimal("0.5"), "0.5"),
    ([0.5], "0.5"),
    (["1", "2"], ""),
    (True, ""),
    (float("nan"), ""),
    (float("inf"), ""),
    (None, ""),
    ("a #### 2 #### 1,234\n", "1234"),
    ("#### -1,234,567.5", "-1234567.5"),
    ("#### (3,4)", "(3,4)"),
    ("#### 1, 2", "1, 2"),
  ],
)
def test_answers_become_text(value, answer):
  assert read(lambda: [{"answer": value}])[0].answer == answer


def test_columns_become_plain_python(tmp_path):
  values = {"level": 3, "tests": [{"input": b"1", "output": [0.5, None]}]}
  (parquet,) = read(write_parquet(tmp_path / "rows.parquet", [values]))
  assert parquet.columns == {
    "level": 3,
    "tests": [{"input": "1", "output": [0.5, None]}],
  }
  (row,) = read(lambda: [{"problem": "p", 3: {(1, 2): "x"}, "tags": {*"cab"}}])
  assert row.columns == {
    "problem": "p",
    "3": {"(1, 2)": "x"},
    "tags": ["a", "b", "c"],
  }
  record = {"problem": "p", "answer": -1, "tag": "x"}
  (row,) = read(f"tfds:{write_tfds(tmp_path, [record])}")
  assert row.columns == record and type(row.columns["answer"]) is int
  assert row.answer == "-1"


def test_first_column_with_a_value_counts():
  records = [
    {"problem": None, "question": "q", "final_answer": ["$2$"]},
    {"problem": "p", "question": "q", "answer": 0, "final_answer": 1},
    {"prompt": "r", "reward_model.ground_truth": "flat"},
    {"prompt": "r", "reward_model": {"style": "rule"}},
    {"problem": "", "question": "q", "answer": [], "final_answer": 1},
  ]
  rows = read(lambda: records)
  expected = [("q", "$2$"), ("p", "0"), ("r", "flat"), ("r", ""), ("q", "1")]
  assert [(r.problem, r.answer) for r in rows] == expected
  (row,) = read(
    lambda: [{"a": {"b": "p"}, "c": 1}], problem_key="x, a.b", answer_key="c"
  )
  assert (row.problem, row.answer) == ("p", "1")


@pytest.mark.parametrize("key", ["ground_truth", "expected_answer", "solution"])
def test_the_columns_of_trl_need_no_option(key):
  messages = [{"role": "user", "content": "1+1="}]
  (row,) = read(lambda: [{"prompt": messages, key: "2", "answer": None}])
  assert (row.problem, row.answer, row.solution) == (messages, "2", "")


def test_the_reply_in_a_column_of_messages_is_no_part_of_the_prompt():
  talk = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "It is 2."},
  ]
  record = {"messages": talk, "prompt": talk, "answer": 2}
  (row,) = read(lambda: [record], problem_key="messages")
  assert row.problem == talk[:1] and row.columns == record
  (row,) = read(lambda: [record | {"messages": talk[:1]}])
  assert row.problem == talk  # to be continued


@pytest.mark.parametrize(
  ("columns", "answer", "is_worked"),
  [
    ({"solution": r"As 1+1=2,\nit is $\boxed{2}$."}, "2", True),
    ({"solution": "1+1\nis 2."}, "", True),
    ({"solution": r"\frac{1}{2}"}, r"\frac{1}{2}", False),
    ({"solution": "1+1=2", "ground_truth": "2"}, "2", True),
    ({"solution": ["1+1=2;\\boxed{2}"]}, "2", True),
    ({"solution": ["2"]}, "2", False),
    ({"answer": r"It is \boxed{ 2 }."}, "2", False),
  ],
)
def test_a_solution_is_the_answer_if_no_other_column_is(
  columns, answer, is_worked
):
  (row,) = read(lambda: [columns])
  assert row.answer == answer
  solution = columns.get("solution")
  worked = solution[0] if isinstance(solution, list) else solution
  assert row.solution == (worked if is_worked else "")


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_well_known_layouts_need_no_option(tmp_path, write):
  messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is $1+1$?"},
  ]
  verl = {
    "prompt": messages,
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
  }
  work = "Half of 48 is <<48/2=24>>24.\n#### 1,024"
  gsm8k = {"question": "How many?", "answer": work}
  suffix = "jsonl" if write is write_jsonl else "parquet"
  for record, *expected in (
    (verl, "9a9b6eb4", messages, "34", ""),
    (gsm8k, f"rows.{suffix}/0", "How many?", "1024", ""),
  ):
    (row,) = read(write(tmp_path / f"rows.{suffix}", [record]))
    assert row == data.Row(*expected, record)


# What cannot be read --------------------------------------------------------

GOOD = b'{"problem": "p", "answer": "1"}\n'
PYTHON = b"def rows():\n  yield {}\n  yield {}\n  "


@pytest.mark.parametrize(
  ("name", "contents", "complaint"),
  [
    ("r.jsonl", GOOD * 2 + b'{"a": ', "3: JSONDecodeError"),
    ("r.jsonl", GOOD * 2 + b"[]", r"3: \[\] is not an object with columns"),
    ("r.jsonl", b"[" + GOOD.strip() + b"]", r"1: \[{.* is not an object"),
    ("r.parquet", GOOD, "1: .*ArrowInvalid"),
    ("r.py", PYTHON + b"yield 1 / 0", "3: ZeroDivisionError.*line 4"),
    ("r.py", PYTHON + b"yield 'p'", "3: .*'p' is not an object"),
  ],
)
def test_malformed_record_is_named(tmp_path, name, contents, complaint):
  path = tmp_path / name
  path.write_bytes(contents)
  source = f"{path}:rows" if name == "r.py" else str(path)
  with pytest.raises(UserError, match=f"^{source} row {complaint}") as error:
    read(source)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "message",
  [
    {"content": "1+1="},
    {"role": "user"},
    {"role": "user", "content": None},
    {"role": "user", "content": [{"type": "image"}, {"type": "text"}]},
    "1+1=",
  ],
)
def test_a_message_without_role_or_text_is_named(tmp_path, message):
  rows = [{"prompt": [{"role": "system", "content": ""}, message]}]
  source = write_jsonl(tmp_path / "r.jsonl", rows)
  with pytest.raises(UserError, match=r"jsonl row 1: message 2 of the prompt"):
    read(source)


FLIP = """
import collections, pathlib, sys
from dppo_jax.data import sources
from dppo_jax.errors import UserError

folder = pathlib.Path(sys.argv[1])
file = min(folder.glob("*.arrow"))
content, outcomes = file.read_bytes(), collections.Counter()
for bit in range(0, 8 * len(content), int(sys.argv[2])):
  damaged = bytearray(content)
  damaged[bit // 8] ^= 1 << bit % 8
  file.write_bytes(damaged)
  try:
    outcomes["read"] += len(sources.read(str(folder))[0]) > 0
  except UserError as error:
    outcomes["rejected"] += str(folder) in str(error)
print(outcomes)
assert min(outcomes.values()) > 100
"""


def test_a_bit_of_a_saved_split_that_flips_kills_no_process(tmp_path):
  folder = write_saved_dataset(tmp_path / "saved", ROWS)
  done = subprocess.run(
    [sys.executable, "-c", FLIP, folder, "11"],
    capture_output=True,
    check=False,
    text=True,
  )
  assert done.returncode == 0, (done.stdout, done.stderr)


def test_a_directory_must_be_one_saved_split(tmp_path):
  with pytest.raises(UserError, match=r"state\.json \(No such file"):
    read(str(tmp_path))
  write_saved_dataset(tmp_path / "train", ROWS)
  (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
  with pytest.raises(UserError, match=f"use {tmp_path}/train or {tmp_path}/t"):
    read(str(tmp_path))


@pytest.mark.parametrize(
  ("source", "complaint"),
  [
    ("absent.jsonl", r"there is no file 'absent\.jsonl'"),
    (
      "rows.csv",
      r"'rows.csv' .*a source is arithmetic.*\*\.parquet.*CSV.*data/README",
    ),
    ("absent.py:rows", r"no file .*absent\.py; a source is"),
    ("tfds:no_such_set", r"tfds:no_such_set row 1: .*not found"),
    ("tfds:{tiny}:test", r"row 1: .*Unknown split 'test'"),
  ],
)
def test_source_that_cannot_be_read_is_named(tmp_path, source, complaint):
  if "{tiny}" in source:
    source = source.format(tiny=write_tfds(tmp_path, ROWS))
  with pytest.raises(UserError, match=complaint):
    read(source)


# Names of evaluation sets ---------------------------------------------------


@pytest.mark.parametrize(
  ("text", "named"),
  [
    ("", {}),
    ("arithmetic:64:2", {"arithmetic": "arithmetic:64:2"}),
    ("a/math500.jsonl", {"math500": "a/math500.jsonl"}),
    ("tfds:gsm8k:test", {"gsm8k": "tfds:gsm8k:test"}),
    ("hf:a/MATH-500:default:test", {"MATH-500": "hf:a/MATH-500:default:test"}),
    ("my/sums.py:held_out", {"held_out": "my/sums.py:held_out"}),
    ("a.b.c:held_out", {"held_out": "a.b.c:held_out"}),
    ("gs://b/c.jsonl", {"c": "gs://b/c.jsonl"}),
    ("m=a.jsonl, n=tfds:n:t", {"m": "a.jsonl", "n": "tfds:n:t"}),
  ],
)
def test_evaluation_sets_have_names(text, named):
  assert sources.parse_named(text) == named


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("arithmetic:64", "arithmetic:64"),
    ("a.jsonl", "{here}/a.jsonl"),
    ("../a/b.parquet", "{above}/a/b.parquet"),
    ("~/a.jsonl", "{home}/a.jsonl"),
    ("./saved", "{here}/saved"),
    ("folder", "{here}/folder"),
    ("arithmetic", "arithmetic"),  # also if there is such a directory
    ("my.py:rows", "{here}/my.py:rows"),
    ("a.b:rows", "a.b:rows"),
    ("hf:openai/gsm8k:main", "hf:openai/gsm8k:main"),
    ("tfds:glue/mrpc:test", "tfds:glue/mrpc:test"),
    ("tfds:prepared:test", "tfds:{here}/prepared:test"),
    (
      "m=a.jsonl, n=hf:n:t,o=~/o.jsonl",
      "m={here}/a.jsonl,n=hf:n:t,o={home}/o.jsonl",
    ),
    ("split=a/b.jsonl", "{here}/split=a/b.jsonl"),  # a path that exists
    ("gs://b/a.jsonl", "gs://b/a.jsonl"),
    ("", ""),
  ],
)
def test_paths_of_sources_are_made_absolute(
  text, expected, tmp_path, monkeypatch
):
  here = tmp_path / "work"
  (here / "folder").mkdir(parents=True)
  (here / "arithmetic").mkdir()
  (here / "prepared").mkdir()
  (here / "prepared/dataset_info.json").touch()
  (here / "split=a").mkdir()
  (here / "split=a/b.jsonl").touch()
  monkeypatch.chdir(here)
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  places = dict(here=here, above=tmp_path, home=tmp_path / "home")
  absolute = sources.absolute(text)
  assert absolute == expected.format(**places)
  assert sources.absolute(absolute) == absolute


@pytest.mark.parametrize("text", ["a=x,y", "a=x,a=y"])
def test_unnamed_and_repeated_sets_are_rejected(text):
  with pytest.raises(UserError, match=r"config\.data\.eval"):
    sources.parse_named(text)
