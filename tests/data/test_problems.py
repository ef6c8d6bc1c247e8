"""Problem sets: what is left out is counted, and draws can be repeated."""

import itertools

import jax
import numpy as np
from problems import ARITHMETIC, COLUMNS, ROWS, prepare, row
import pytest
from sources import write_jsonl

from dppo_jax import data
from dppo_jax.data import CharacterTokenizer, sources
from dppo_jax.data.problems import _epoch_order


def problem_set(size):
  return prepare([row(str(i), f"{i}+0=") for i in range(size)])


def epoch(problems, seed, number, num_prompts):
  """Ids of each batch of an epoch, `[batches, num_prompts]`."""
  key, per_epoch = jax.random.key(seed), len(problems) // num_prompts
  steps = range(number * per_epoch, (number + 1) * per_epoch)
  return np.array([data.draw(problems, key, s, num_prompts).ids for s in steps])


def test_rows_left_out_are_counted_and_the_first_of_a_copy_stays():
  rows = [
    row("a", "1+2=", columns={"level": 5}),
    row("b", " \n", "3"),
    row("c", "1+2=", ""),
    row("a", "1+2=", "3"),
    row("a", "3+4=", "7"),
    row("d", "1+2+3+4=", "10"),
    row("e", "5+6+10=", "21", "5+6=11", {"tag": "x"}),
    row("f")._replace(flaw="rows:8: half"),
    row("g")._replace(flaw="rows:9: half"),
  ]
  problems = prepare(rows, max_prompt_tokens=7)
  assert problems.names == ("a", "a", "e")
  assert problems.problems == ("1+2=", "3+4=", "5+6+10=")
  assert problems.answers == ("3", "7", "21")
  assert problems.solutions == ("", "", "5+6=11")
  assert problems.columns == {
    "level": (5, None, None),
    "tag": (None, None, "x"),
  }
  assert problems.columns_at(np.array([2, 0, 2]))["level"] == [None, 5, None]
  boxes = (r"\boxed{3}", r"\boxed{7}", r"\boxed{21}")
  assert problems.direct_solutions == boxes
  first = "first prompt (4 tokens, no chat template): '1+2='"
  assert problems.first_prompt == first
  assert problems.report == (
    "train: 9 read, 3 used (2 without problem or answer, 1 over 7 prompt "
    "tokens, 1 duplicate ids, 2 unusable, the first: rows:8: half); 1 have an "
    "id of another problem"
  )


def test_what_no_tokenizer_takes_is_left_out_and_counted(monkeypatch):
  """Before it is tokenized, which takes a hundred times as many bytes."""
  monkeypatch.setattr(data.problems, "MAX_CHARS", 100)
  seen = []
  encode = CharacterTokenizer.encode_prompt
  monkeypatch.setattr(
    CharacterTokenizer,
    "encode_prompt",
    lambda self, prompt: seen.append(prompt) or encode(self, prompt),
  )
  talk = ({"role": "system", "content": "1" * 101},)
  rows = [
    row("a", "1" * 101),
    row("b", "1+2=", "3", "x" * 101),
    row("c", "1+2=", "3")._replace(messages=talk),
    row("d", "1" * 100),
  ]
  problems = prepare(rows, max_prompt_tokens=200)
  assert problems.names == ("d",) and seen == ["1" * 100]
  assert ", 3 over 100 characters)" in problems.report


def test_prompts_stand_at_the_left_of_a_width_that_8_divides():
  problems = prepare([row("a", "1+2="), row("b", "1+2+3+4+5=")])
  assert problems.tokens.shape == (2, 16)
  assert problems.tokens.dtype == problems.lengths.dtype == np.int32
  assert problems.lengths.tolist() == [4, 10]
  tokenizer = CharacterTokenizer()
  for i, text in enumerate(problems.problems):
    line, length = problems.tokens[i], problems.lengths[i]
    assert line[:length].tolist() == tokenizer.encode(text)
    assert (line[length:] == tokenizer.pad_id).all()
  assert prepare([row("a", "1+2=3+4=")]).tokens.shape == (1, 8)


@pytest.mark.parametrize(
  "rows",
  [[row(answer="", columns={"q": 1, "a": 2})], [row(problem="")]],
)
def test_source_without_a_usable_row_gives_counts_and_columns(rows):
  has = "q, a" if rows[0].columns else "none"
  message = (
    rf"^a/b\.jsonl: train: {len(rows)} read, 0 used \({len(rows)} with.*; its "
    rf"columns are {has}: .* config\.data\.answer_key=answer and"
  )
  with pytest.raises(ValueError, match=message):
    prepare(rows, source="a/b.jsonl", columns=COLUMNS)


def test_a_source_without_rows_says_so():
  with pytest.raises(
    ValueError, match=r"a.jsonl has no rows .*config.data.train to"
  ):
    prepare([], source="a.jsonl", columns=COLUMNS)


def test_problems_also_in_train_are_reported(tmp_path):
  train = write_jsonl(tmp_path / "train.jsonl", [ROWS[0], ROWS[2]])
  others = [
    {"source": str(i), "problem": text, "answer": "1"}
    for i, text in enumerate(("1 + 2 =", "8-8=", "9-8="))
  ]
  eval_set = write_jsonl(tmp_path / "eval.jsonl", others)
  options = {**ARITHMETIC, "train": train, "eval": eval_set}
  train_set, eval_sets = data.load(CharacterTokenizer(), 0, **options)
  eval_set = eval_sets["eval"]
  assert eval_set.report.startswith("eval: 3 read, 3 used (")
  assert eval_set.report.endswith("; 1 also in train")
  assert train_set.report.startswith("train: 2 read, 2 used (")


def test_a_file_may_stand_beside_arithmetic(tmp_path):
  path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:1])
  options = {**ARITHMETIC, "eval": path}
  train, eval_sets = data.load(CharacterTokenizer(), 0, **options)
  assert train.names[0].startswith("arithmetic/") and len(train) == 350
  assert eval_sets["rows"].names == ("a",)


@pytest.mark.parametrize(
  ("text", "named"),
  [
    ("", {}),
    ("arithmetic", {"arithmetic": "arithmetic"}),
    ("a/math500.jsonl.gz", {"math500": "a/math500.jsonl.gz"}),
    ("tfds:gsm8k:test", {"gsm8k": "tfds:gsm8k:test"}),
    ("tfds:a/b=c/", {"b_c": "tfds:a/b=c/"}),
    ("a,b=c.jsonl", {"a_b_c": "a,b=c.jsonl"}),
    ("m=a.jsonl", {"m": "a.jsonl"}),
    ("m=a.jsonl, n=tfds:n:t", {"m": "a.jsonl", "n": "tfds:n:t"}),
  ],
)
def test_sources_to_evaluate_on_have_names(text, named):
  assert sources.parse_named(text) == named


@pytest.mark.parametrize(
  ("text", "reason"),
  [("a=x,y", "'y' is not NAME=SOURCE"), ("a=x,a=y", "names 'a' twice")],
)
def test_a_source_without_a_name_of_its_own_is_refused(text, reason):
  with pytest.raises(ValueError, match=f"config.data.eval.*{reason}"):
    sources.parse_named(text)


def test_sets_to_evaluate_on_share_a_width_and_need_no_train_set(tmp_path):
  paths = [write_jsonl(tmp_path / f"{n}.jsonl", ROWS[:n]) for n in (1, 2)]
  long = {**ROWS[0], "problem": "1+" * 20 + "1="}
  paths.append(write_jsonl(tmp_path / "3.jsonl", [long]))
  text = ",".join(f"s{i}={path}" for i, path in enumerate(paths))
  options = {**ARITHMETIC, "train": "", "eval": text, "eval_limit": 1}
  train, eval_sets = data.load(CharacterTokenizer(), 0, **options)
  assert train is None and list(eval_sets) == ["s0", "s1", "s2"]
  assert {x.tokens.shape for x in eval_sets.values()} == {(1, 48)}
  assert eval_sets["s1"].report.startswith("eval s1: 1 read, 1 used")


# Draws ---------------------------------------------------------------------


@pytest.mark.parametrize(("size", "num_prompts"), [(12, 4), (13, 4), (5, 5)])
def test_no_problem_is_drawn_twice_in_an_epoch(size, num_prompts):
  problems = problem_set(size)
  for number in range(4):
    ids = epoch(problems, 0, number, num_prompts)
    assert ids.shape == (size // num_prompts, num_prompts)
    assert len(set(ids.ravel().tolist())) == ids.size
    assert set(ids.ravel().tolist()) <= set(range(size))


def test_what_an_epoch_leaves_over_has_its_turn_in_another():
  problems = problem_set(7)
  sat_out = [
    set(range(7)) - set(epoch(problems, 0, number, 5).ravel().tolist())
    for number in range(8)
  ]
  assert all(len(ids) == 2 for ids in sat_out)
  assert not set.intersection(*sat_out)


def test_order_depends_on_seed_and_epoch():
  problems = problem_set(64)
  orders = [
    tuple(epoch(problems, seed, number, 64).ravel().tolist())
    for seed, number in itertools.product((0, 1), (0, 1, 2))
  ]
  assert len(set(orders)) == len(orders)


def test_a_draw_does_not_depend_on_the_draws_before_it():
  problems, key = problem_set(50), jax.random.key(2)
  run = [data.draw(problems, key, step, 8).ids for step in range(20)]
  for step in (19, 3, 11, 0):
    _epoch_order.cache_clear()
    resumed = data.draw(problem_set(50), jax.random.key(2), step, 8)
    np.testing.assert_array_equal(resumed.ids, run[step])


def test_order_does_not_depend_on_the_batch_size():
  problems = problem_set(24)
  by_four = epoch(problems, 0, 1, 4).ravel()
  np.testing.assert_array_equal(by_four, epoch(problems, 0, 1, 6).ravel())


def test_a_batch_holds_the_rows_that_its_ids_name():
  problems = prepare([row(str(i), "1+" * i + "1=") for i in range(20)])
  batch = data.draw(problems, jax.random.key(0), 3, 6)
  assert batch.ids.dtype == batch.tokens.dtype == batch.lengths.dtype == "int32"
  np.testing.assert_array_equal(batch.tokens, problems.tokens[batch.ids])
  np.testing.assert_array_equal(batch.lengths, problems.lengths[batch.ids])
  np.testing.assert_array_equal(batch.lengths, 2 * batch.ids + 2)


@pytest.mark.parametrize("num_prompts", [0, 4])
def test_more_prompts_than_problems_are_refused(num_prompts):
  limit = rf"{num_prompts} prompts a step are not in 1\.\.3"
  with pytest.raises(ValueError, match=limit):
    data.draw(problem_set(3), jax.random.key(0), 0, num_prompts)
