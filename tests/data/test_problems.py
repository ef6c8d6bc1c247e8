"""Problem sets: skipped rows are counted, and draws can be repeated."""

import itertools

import jax
import numpy as np
import pytest

from dppo_jax import data
from dppo_jax.data import CharacterTokenizer, sources
from dppo_jax.data.problems import make_prompt, tokenize_solutions
from dppo_jax.errors import UserError
from tests.helpers.problems import ROWS, prepare, row
from tests.helpers.sources import write_jsonl


def problem_set(size):
  return prepare([row(str(i), f"{i}+0=") for i in range(size)])


def epoch(problems, seed, number, num_prompts):
  """Ids of each batch of an epoch, `[batches, num_prompts]`."""
  key, per_epoch = jax.random.key(seed), len(problems) // num_prompts
  steps = range(number * per_epoch, (number + 1) * per_epoch)
  return np.array([data.draw(problems, key, s, num_prompts).ids for s in steps])


# Sets -----------------------------------------------------------------------


def test_skipped_rows_are_counted_and_the_first_copy_stays():
  rows = [
    row("a", "1+2=", columns={"level": 5}),
    row("b", " \n", "3"),
    row("c", "1+2=", ""),
    row("a", "1+2=", "3"),
    row("a", "3+4=", "7"),
    row("d", "1+2+3+4=", "10"),
    row("e", "5+6+10=", "21", "5+6=11", {"tag": "x"}),
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
  assert problems.first_prompt == "first prompt (4 tokens): '1+2='"
  assert problems.report == (
    "train: 7 read, 3 used; left out: 2 without problem or answer (text or a "
    "number), 1 with id and problem of an earlier row, 1 over 7 prompt tokens"
  )


def test_prompts_without_tokens_are_left_out(monkeypatch):
  """A chat template may render nothing of some prompts."""
  encode = CharacterTokenizer.encode
  silent = lambda self, text: [] if text == "0=" else encode(self, text)
  monkeypatch.setattr(CharacterTokenizer, "encode", silent)
  problems = prepare([row("a", "0="), row("b", "1=")])
  assert problems.names == ("b",)
  assert problems.report.endswith("left out: 1 without prompt tokens")


def test_prompts_are_padded_on_the_right_to_a_multiple_of_8(monkeypatch):
  """With an id of every model: a pad token may have no embedding."""
  monkeypatch.setattr(CharacterTokenizer, "pad_id", 99)
  problems = prepare([row("a", "1+2="), row("b", "1+2+3+4+5=")])
  assert problems.tokens.shape == (2, 16)
  assert problems.tokens.dtype == problems.lengths.dtype == np.int32
  assert problems.lengths.tolist() == [4, 10]
  tokenizer = CharacterTokenizer()
  for i, text in enumerate(problems.problems):
    line, length = problems.tokens[i], problems.lengths[i]
    assert line[:length].tolist() == tokenizer.encode(text)
    assert not line[length:].any()
  assert prepare([row("a", "1+2=3+4=")]).tokens.shape == (1, 8)


def test_source_without_a_usable_row_is_rejected():
  message = (
    r"^train: 1 read, 0 used.*; the columns are q, a: check config\.data"
  )
  with pytest.raises(UserError, match=message):
    prepare([row(answer="", columns={"q": 1, "a": 2})])


@pytest.mark.parametrize("answer", ['["3"]', '{"target": 3}', '"3"'])
def test_answers_in_json_are_reported(answer):
  answers = [answer, "[1, 2]", "3", r"\{1\}"]
  report = prepare(
    [row(str(i), answer=x) for i, x in enumerate(answers)]
  ).report
  assert "4 used; 1 answers are JSON text, which" in report


def test_evaluation_sets_share_a_width_and_report_problems_in_train(tmp_path):
  paths = [write_jsonl(tmp_path / f"{n}.jsonl", ROWS[:n]) for n in (1, 2)]
  rows = [
    {"problem": text, "answer": "1"} for text in ("1 + 2 =", "1+" * 20 + "1=")
  ]
  paths.append(write_jsonl(tmp_path / "3.jsonl", rows))
  train = write_jsonl(tmp_path / "train.jsonl", [ROWS[0], ROWS[2]])
  text = ",".join(f"s{i}={path}" for i, path in enumerate(paths))
  load = lambda **options: data.load(
    CharacterTokenizer(), 0, train=train, eval=text, **options
  )
  train_set, eval_sets = load(eval_limit=1)
  assert train_set.report == "train: 2 read, 2 used"
  assert list(eval_sets) == ["s0", "s1", "s2"]
  assert {x.tokens.shape for x in eval_sets.values()} == {(1, 8)}
  report = "eval s2: 1 of 2 read, 1 used; 1 also in train"
  assert eval_sets["s2"].report == report
  write_jsonl(tmp_path / "2.jsonl", ROWS[:1])
  none, eval_sets = load(trains=False)
  assert none is None
  assert {x.tokens.shape[1] for x in eval_sets.values()} == {48}
  assert eval_sets["s2"].report == "eval s2: 2 read, 2 used"


def test_solutions_end_with_a_stop_id_and_fit_a_row():
  tokenizer = CharacterTokenizer()
  problems = prepare([row(solution="1+2=3"), row("b", "4=", "4")])
  tokens, lengths = tokenize_solutions(problems, tokenizer, 1, 9)
  texts = [["1+2=3", r"\boxed{4}"], [r"\boxed{3}", r"\boxed{4}"]]
  assert tokens.shape == (2, 2, 8)
  for kind, i in np.ndindex(2, 2):
    ids = tokens[kind, i, : lengths[kind, i]].tolist()
    assert ids == [*tokenizer.encode(texts[kind][i]), 1]
    assert not tokens[kind, i, lengths[kind, i] :].any()
  with pytest.raises(UserError, match=r"a and its solution take 9 .* holds 8:"):
    tokenize_solutions(problems, tokenizer, 1, 8)


def test_prompts_to_continue_are_reported():
  talk = [{"role": "user", "content": "1+2="}]
  begun = [{"role": "assistant", "content": "5="}]
  rows = [row("a", talk), row("b", begun), row("c", "3+4=")]
  report = "3 used; 1 end with an assistant message, to be continued"
  assert report in prepare(rows).report


# Templates ------------------------------------------------------------------


def test_prompt_without_a_template_is_the_problem():
  messages = [{"role": "user", "content": "1+2="}]
  for problem in ("1+2=", messages):
    assert make_prompt("", problem, {"problem": "x"}) == problem
    assert prepare([row(problem=problem)]).problems == ("1+2=",)


def test_text_with_columns_becomes_the_prompt():
  columns = {"problem": "1+2=", "level": 5, "more": {"unit": "m"}, "none": None}
  template = "Q: {problem} ({level:03}, {more[unit]}{none}){{}}\nuser: x"
  assert make_prompt(template, "", columns) == "Q: 1+2= (005, m){}\nuser: x"
  rows = [row("a", "1+2=", columns={"hint": "3"}), row("b", "3+4=")]
  problems = prepare(rows, template="{problem}{problem}{hint}")
  assert problems.lengths.tolist() == [len("1+2=1+2=3"), len("3+4=3+4=")]
  assert problems.problems == ("1+2=", "3+4=")
  assert problems.first_prompt.endswith(": '1+2=1+2=3'")


def test_text_that_starts_with_a_role_becomes_messages():
  template = "system: Be brief.\nuser:1+1=\nassistant: 2\nuser: {problem}\nBox."
  columns = {"problem": "x\nsystem: {y}"}  # a problem starts no message
  assert make_prompt(template, "", columns) == [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "x\nsystem: {y}\nBox."},
  ]


def test_function_returns_text_or_messages(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(
    "def text(row):\n"
    "  return row['problem'] + row.pop('x')\n"
    "def talk(row):\n"
    "  return [{'role': 'user', 'content': row['x'], 'name': 'me'}]\n"
  )
  columns = {"problem": "p", "x": "y"}
  assert make_prompt(f"{path}:text", "", columns) == "py"
  assert columns == {"problem": "p", "x": "y"}
  message = {"role": "user", "content": "y"}
  message["name"] = "me"  # all keys are for the chat template
  assert make_prompt(f"{path}:talk", "", columns) == [message]
  assert make_prompt(lambda row: row["x"], "", columns) == "y"


@pytest.mark.parametrize(
  ("template", "complaint"),
  [
    ("Solve it.", "'Solve it.' is neither FILE.py:NAME nor"),
    ("absent.py:f", r"there is no file .*absent\.py"),
    ("{quest}", "KeyError: 'quest'; the columns are x, problem"),
    (r"{problem} \frac{1}{2}", "literal braces are written {{ and }}"),
    (lambda row: " ", "must give text or a list of messages .*, not ' '"),
    (lambda row: [], "must give text or a list .*, not"),
    (lambda row: [{"role": "user"}], "template: message 1 of the prompt"),
    (lambda row: row["z"], r"KeyError: 'z' \(.*test_problems.py, line"),
    ("y{problem}", "character 'y' of 'y1"),  # the tokenizer's
  ],
)
def test_template_that_cannot_work_is_named(template, complaint):
  with pytest.raises(UserError, match=complaint) as error:
    prepare([row("id7", columns={"x": "y"})], template=template)
  assert str(error.value).startswith("id7: ")
  assert "\n" not in str(error.value)


# Draws ---------------------------------------------------------------------


@pytest.mark.parametrize(("size", "num_prompts"), [(12, 4), (13, 4), (5, 5)])
def test_no_problem_is_drawn_twice_in_an_epoch(size, num_prompts):
  problems = problem_set(size)
  for number in range(4):
    ids = epoch(problems, 0, number, num_prompts)
    assert ids.shape == (size // num_prompts, num_prompts)
    assert len(set(ids.ravel().tolist())) == ids.size
    assert set(ids.ravel().tolist()) <= set(range(size))


def test_order_depends_on_seed_and_epoch():
  problems = problem_set(64)
  orders = [
    tuple(epoch(problems, seed, number, 64).ravel().tolist())
    for seed, number in itertools.product((0, 1), (0, 1, 2))
  ]
  assert len(set(orders)) == len(orders)
  # The batch size does not matter.
  by_four = epoch(problems, 1, 2, 4).ravel().tolist()
  assert tuple(by_four) == orders[-1]


def test_draw_depends_on_its_step_alone():
  problems, key = problem_set(50), jax.random.key(2)
  run = [data.draw(problems, key, step, 8).ids for step in range(20)]
  for step in (19, 3, 0):
    ids = data.draw(problems, key, step, 8).ids
    np.testing.assert_array_equal(ids, run[step])


def test_batch_holds_the_rows_that_its_ids_name():
  problems = prepare([row(str(i), "1+" * i + "1=") for i in range(20)])
  batch = data.draw(problems, jax.random.key(0), 3, 6)
  assert batch.ids.dtype == batch.tokens.dtype == batch.lengths.dtype == "int32"
  np.testing.assert_array_equal(batch.tokens, problems.tokens[batch.ids])
  np.testing.assert_array_equal(batch.lengths, problems.lengths[batch.ids])
  np.testing.assert_array_equal(batch.lengths, 2 * batch.ids + 2)


def test_a_limit_says_of_how_many(tmp_path, monkeypatch):
  listed = lambda: [{"problem": f"{i}=", "answer": str(i)} for i in range(9)]
  endless = lambda: map(listed()[:1].__getitem__, itertools.repeat(0))
  path = write_jsonl(tmp_path / "a.jsonl", listed())

  def report(source, limit):
    tokenizer = CharacterTokenizer()
    _, sets = data.load(
      tokenizer, 0, train="", eval=source, eval_limit=limit, trains=False
    )
    return next(iter(sets.values())).report

  for source in (path, "arithmetic:72:1"):
    assert report(source, 4) == "eval: 4 of 9 read, 4 used"
    assert report(source, 9) == report(source, 0) == "eval: 9 read, 9 used"
  assert report(listed, 4) == "eval: 4 read, 4 used"
  assert report(endless, 4).startswith("eval: 4 read, ")
  monkeypatch.setattr(sources, "_MAX_COUNTED", 3)
  assert report(path, 4) == "eval: 4 of 7 or more read, 4 used"
