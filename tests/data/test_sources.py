"""Sources: each kind gives the same rows; malformed ones are named."""

import decimal
import gzip
import json
import pathlib
import re
import tempfile

from hypothesis import given
from hypothesis import strategies as st
from problems import ROWS, row
import pyarrow
import pyarrow.parquet
import pytest
from sources import write_jsonl, write_parquet, write_tfds
import tensorflow_datasets as tfds

from dppo_jax import data
from dppo_jax.data import sources
from dppo_jax.errors import UserError


def read(source, **options):
  return list(sources.read(source, **options))


def test_every_kind_of_source_gives_the_same_rows(tmp_path, monkeypatch):
  monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
  directory = write_tfds(tmp_path, ROWS)
  results = [
    read(source)
    for source in (
      lambda: iter(ROWS),
      write_jsonl(tmp_path / "rows.jsonl", ROWS),
      write_jsonl(tmp_path / "rows.jsonl.gz", ROWS),
      write_parquet(tmp_path / "rows.parquet", ROWS),
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


def test_rows_without_an_id_are_named_after_source_and_number(tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_text('{"problem": "p"}\n\n{"id": 7}\n{"id": null}\n')
  assert [r.id for r in read(str(path))] == [
    "rows.jsonl/0",
    "7",
    "rows.jsonl/2",
  ]


@pytest.mark.parametrize(
  ("value", "answer"),
  [
    ("18", "18"),
    (" 1,5 ", "1,5"),
    (18, "18"),
    (18.0, "18"),
    (0.5, "0.5"),
    ([0.5], "0.5"),
    (["$\\frac{1}{2}$"], "$\\frac{1}{2}$"),
    (["1", "2"], ""),
    ([], ""),
    (True, ""),
    ({"a": 1}, ""),
    (decimal.Decimal("18.00"), "18"),
    (float("nan"), ""),
    (None, ""),
    ("a #### 2 #### 1,234\n", "1234"),
    ("no tail ####", ""),
  ],
)
def test_answers_become_text(tmp_path, value, answer):
  table = pyarrow.table({"answer": [value]})
  pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
  records = [{"answer": value}]
  kinds = [lambda: records, str(tmp_path / "rows.parquet")]
  if not isinstance(value, decimal.Decimal):  # JSON has none
    kinds.append(write_jsonl(tmp_path / "rows.jsonl", records))
  for source in kinds:
    assert read(source)[0].answer == answer


def test_columns_become_plain_python(tmp_path):
  values = {
    "level": 3,
    "tests": [{"input": b"1", "output": [0.5, None]}],
    "price": decimal.Decimal("1.5"),
    "image": b"\xff\xd8",
  }
  (parquet,) = read(write_parquet(tmp_path / "rows.parquet", [values]))
  assert parquet.columns == {
    "level": 3,
    "tests": [{"input": "1", "output": [0.5, None]}],
    "price": 1.5,
    "image": b"\xff\xd8",
  }
  record = {"problem": "p", "answer": -1, "tag": "x"}
  (row,) = read(f"tfds:{write_tfds(tmp_path, [record])}")
  assert row.columns == record and type(row.columns["answer"]) is int
  assert row.answer == "-1"


def test_the_first_column_with_a_value_counts():
  records = [
    {"problem": None, "question": "q", "final_answer": ["$2$"]},
    {"problem": "p", "question": "q", "answer": 0, "final_answer": 1},
    {"prompt": "r", "reward_model.ground_truth": "flat"},
    {"prompt": "r", "reward_model": {"style": "rule"}},
  ]
  rows = read(lambda: records)
  expected = [("q", "$2$"), ("p", "0"), ("r", "flat"), ("r", "")]
  assert [(r.problem, r.answer) for r in rows] == expected
  (row,) = read(
    lambda: [{"a": {"b": "p"}, "c": 1}], problem_key="x,a.b", answer_key="c"
  )
  assert (row.problem, row.answer) == ("p", "1")


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
  olympiad_bench = {
    "id": 1606,
    "question": "Find $n$.",
    "solution": ["One way.", "Another."],
    "final_answer": ["$\\frac{1}{2}$"],
  }
  suffix = "jsonl" if write is write_jsonl else "parquet"
  for record, *expected in (
    (verl, "9a9b6eb4", messages, "34", ""),
    (gsm8k, f"rows.{suffix}/0", "How many?", "1024", ""),
    (olympiad_bench, "1606", "Find $n$.", "$\\frac{1}{2}$", ""),
  ):
    (row,) = read(write(tmp_path / f"rows.{suffix}", [record]))
    assert row == data.Row(*expected, record)


# What cannot be read --------------------------------------------------------


@pytest.mark.parametrize(
  ("line", "complaint"),
  [
    (b'{"problem": ', "JSONDecodeError"),
    (b'{"problem": "\xff"}', "UnicodeDecodeError"),
    (b'["problem"]', "a row must be a dict, not list"),
    (b'{"problem": ' + b"[" * 9999, "JSONDecodeError|RecursionError"),
  ],
)
def test_a_malformed_row_is_named(tmp_path, line, complaint):
  good = b'{"problem": "p", "answer": "1"}\n'
  for name, compress in (("r.jsonl", bytes), ("r.jsonl.gz", gzip.compress)):
    path = tmp_path / name
    path.write_bytes(compress(good + good + line + b"\n" + good))
    with pytest.raises(UserError, match=complaint) as error:
      read(str(path))
    assert str(error.value).startswith(f"{path} row 3: ")


@pytest.mark.parametrize(
  ("name", "contents"),
  [
    ("cut.jsonl.gz", gzip.compress(b'{"problem": "p"}\n' * 99, mtime=0)[:-9]),
    ("plain.jsonl.gz", b'{"problem": "p"}\n'),
    ("text.parquet", b'{"problem": "p"}\n'),
  ],
)
def test_a_damaged_file_is_named(tmp_path, name, contents):
  (tmp_path / name).write_bytes(contents)
  with pytest.raises(UserError, match=rf"{name} row \d+: \w+"):
    read(str(tmp_path / name))


@pytest.mark.parametrize(
  ("source", "complaint"),
  [
    ("absent.jsonl", r"there is no file 'absent\.jsonl': set config\.data"),
    ("absent.parquet", "there is no file"),
    ("rows.csv", r"none of arithmetic.*\*\.parquet, tfds:NAME"),
    ("absent.py:rows", r"no file absent\.py: set config\.data"),
    ("no.such:rows", r"no\.such cannot be imported: ModuleNotFoundError"),
    ("json:rows", "no function 'rows' in json"),
    ("arithmetics", r"none of arithmetic"),
    ("tfds:no_such_set", r"tfds:no_such_set row 1: .*not found"),
    ("tfds:{tiny}:test", r"row 1: .*Unknown split 'test'"),
  ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path, source, complaint):
  if "{tiny}" in source:
    source = source.format(tiny=write_tfds(tmp_path, ROWS))
  with pytest.raises(UserError, match=complaint):
    read(source)


@pytest.mark.parametrize(
  ("body", "complaint"),
  [
    ("raise KeyError('x')", r"row 1: KeyError: 'x' \(.*mine.py, line"),
    ("yield {}\n  yield 1 / 0", "row 2: ZeroDivisionError.*line 3"),
    ("return [{}, ['p']]", "row 2: .*a row must be a dict, not list"),
    ("pass", "row 1: .* 'NoneType' object is not iterable"),
    ("return {'problem': 'p'}", "row 1: .*a row must be a dict, not str"),
  ],
)
def test_a_function_that_fails_is_named_with_its_row(tmp_path, body, complaint):
  path = tmp_path / "mine.py"
  path.write_text(f"def rows():\n  {body}\n")
  with pytest.raises(UserError, match=complaint) as error:
    read(f"{path}:rows")
  assert str(error.value).startswith(f"{path}:rows ")
  assert "\n" not in str(error.value)


# Names of evaluation sets ---------------------------------------------------


@pytest.mark.parametrize(
  ("text", "named"),
  [
    ("", {}),
    ("arithmetic:64:2", {"arithmetic": "arithmetic:64:2"}),
    ("a/math500.jsonl.gz", {"math500": "a/math500.jsonl.gz"}),
    ("tfds:gsm8k:test", {"gsm8k": "tfds:gsm8k:test"}),
    ("tfds:a/b=c/", {"b_c": "tfds:a/b=c/"}),
    ("a,b=c.jsonl", {"a_b_c": "a,b=c.jsonl"}),
    ("m=a.jsonl, n=tfds:n:t", {"m": "a.jsonl", "n": "tfds:n:t"}),
  ],
)
def test_evaluation_sets_have_names(text, named):
  assert sources.parse_named(text) == named


@pytest.mark.parametrize(
  ("text", "reason"),
  [("a=x,y", "'y' is not NAME=SOURCE"), ("a=x,a=y", "names 'a' twice")],
)
def test_unnamed_and_repeated_sets_are_rejected(text, reason):
  with pytest.raises(UserError, match=f"config.data.eval.*{reason}"):
    sources.parse_named(text)


# Anything -------------------------------------------------------------------


class ByteTokenizer:
  template_note, pad_id = "", 0

  def prompt(self, prompt):
    return sources.text_of(prompt, with_system=True)

  def encode_prompt(self, prompt):
    return list(self.prompt(prompt).encode())


ANYTHING = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text(max_size=5)
  | st.just("1+2="),
  lambda inner: (
    st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["role", "content", "a"]), inner)
  ),
  max_leaves=4,
)
RECORD = st.dictionaries(
  st.sampled_from(["problem", "prompt", "answer", "solution", "id", "x"]),
  ANYTHING,
)
LINE = RECORD.map(lambda x: json.dumps(x).encode()) | st.binary(max_size=9)


@given(st.lists(LINE, max_size=4))
def test_every_row_is_used_or_counted_or_named(lines):
  good = b'{"problem": "1+1=", "answer": 2}'
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "r.jsonl"
    path.write_bytes(b"\n".join([good, *lines]))
    try:
      problems = data.prepare(
        "train", sources.read(str(path)), ByteTokenizer(), 64
      )
    except UserError as error:
      assert re.match(rf"{path} row \d+: ", str(error))
      assert "\n" not in str(error)
      return
  num_read, used, *left_out = map(int, re.findall(r"\d+(?= )", problems.report))
  left_out = [x for x in left_out if x != 64]
  assert (used, num_read) == (len(problems), used + sum(left_out))
