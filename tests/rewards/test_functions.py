"""Names of reward functions, their import, and values of the built-in ones."""

import sys
import types

from hypothesis import given
from hypothesis import strategies as st
import pytest

from dppo_jax.errors import UserError
from dppo_jax.files import user_code
from dppo_jax.rewards import Grader, RewardSpec, functions, parse
from tests.helpers import commands


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
  """Restores the import path, which a loaded file extends."""
  monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
  "values",
  [
    {"0": 1.0},
    {"outcome": 1.0},
    "1",
    [types.SimpleNamespace(outcome={"right": 1})],
    [types.SimpleNamespace(outcome="tokens")],
  ],
)
def test_function_that_returns_no_list_of_numbers_is_an_error(values):
  with pytest.raises(TypeError):
    functions.call(lambda completions: values, {"completions": ["a"]})


def test_built_in_functions_return_their_outcome():
  texts = [r"\boxed{ 18 }", r"\boxed{18.0}", "18", r"\boxed{4} \boxed{**}"]
  exact = functions.exact(texts, [" 18"] * 4)
  math = functions.math(texts, [" 18"] * 4)
  assert exact == [1.0, 0.0, 0.0, 0.0]
  assert [x.outcome for x in exact] == ["right", "wrong", "unboxed", "wrong"]
  assert [x.outcome for x in math] == ["right", "right", "unboxed", "unparsed"]
  assert functions.boxed(texts) == [1.0, 1.0, 0.0, 1.0]
  assert functions.exact([r"\boxed{T}", r"\boxed{t}"], ["t"] * 2) == [0.0, 1.0]


LAST_NUMBERS = [
  ("1234", ["it costs $1,234.", r"\$1,234.00", "12 or 1,234,", "+1234%"]),
  ("8", ["8.0", "8.", "08", "-8 + 16 = 8", "5-8", "5 - 8", "5 -8", "x-8"]),
  ("-8", ["is -8", "=-8.", "(-8)", "-$8", "$-8$", "\u22128", "1, -8", "*-8*"]),
  ("0.5", [".5", "it is .5.", "0.50", "-1.5+.5", "50 cents or $0.5"]),
  ("-$1,000.50", ["-1000.5", "-1,000.500 dollars", "$-1000.50"]),
  ("+5", ["5", "+5", "$5"]),
  ("75%", ["75", r"75\%", "75 %", "of 100, 75 percent"]),
  ("30000000000000000000001", ["30,000,000,000,000,000,000,001"]),
]
OTHER_NUMBERS = [
  ("234", ["1,234", "1234.5", "-234", "234, not 235"]),
  ("1", ["1.0001", "1 of 2"]),
  ("8", ["-8", "1,8888", "8,888", "8.8", "-$8", r"-\$8", "(-8)", "\u22128"]),
  ("30000000000000000000001", ["30000000000000000000002"]),
]


@pytest.mark.parametrize("gold, texts", LAST_NUMBERS)
def test_the_last_number_is_read_in_many_notations(gold, texts):
  verdicts = functions.last_number(texts, [gold] * len(texts))
  assert {*verdicts} == {1.0}, [*zip(texts, verdicts, strict=True)]


@pytest.mark.parametrize("gold, texts", OTHER_NUMBERS)
def test_another_last_number_is_wrong(gold, texts):
  verdicts = functions.last_number(texts, [gold] * len(texts))
  assert {x.outcome for x in verdicts} == {"wrong"}


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_every_number_equals_itself_with_separators(number):
  texts = [f"1, then {number:{style}}." for style in ("f", ",f", ",.5f")]
  assert functions.last_number(texts, [f"{number:f}"] * 3) == [1.0] * 3


def test_false_positives_of_the_last_number_are_those_documented():
  texts = ["5, 6, 7, 8", "It is 9. (Checked in 8 steps.)", "8 km", "9 - 1 = 8"]
  texts += ["1/8", "x^8", "1e8", r"\frac{1}{8}", "1{,}008", "so far it is 8"]
  assert functions.last_number(texts, ["8"] * len(texts)) == [1.0] * len(texts)


def test_no_number_is_unparsed_in_completion_and_answer():
  pairs = [("none", "5"), ("", "5"), ("5", "five"), ("5", r"\frac{5}{1}")]
  pairs += [("5", ""), ("5", "4, 5"), ("5", "5 or 6"), ("5", "x=5")]
  verdicts = functions.last_number(*zip(*pairs, strict=True))
  assert {x.outcome for x in verdicts} == {"unparsed"}


@pytest.mark.parametrize(
  "piece",
  ["1", "1,", "111,", "1.", "-", "- ", "-$", "$", "\\$", " ", ".", "0."],
)
def test_the_last_number_takes_linear_time(piece):
  text = piece * (1_000_000 // len(piece))  # quadratic time would be hours
  assert functions.last_number([text + " 5"], ["5"]) == [1.0]
  assert functions.last_number([text], ["5"]) == [0.0]


def test_a_config_names_functions_and_weights(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = (
    "math, boxed:0.5,mine.py:f:-1e-1,a.b:h,c:g:2,"
    "m:M:batched,n:N:0.5:batched,o:batched"
  )
  assert parse(text) == (
    RewardSpec("math", "math", 1.0),
    RewardSpec("boxed", "boxed", 0.5),
    RewardSpec("f", f"{tmp_path}/mine.py:f", -0.1),
    RewardSpec("h", "a.b:h", 1.0),
    RewardSpec("g", "c:g", 2.0),
    RewardSpec("M", "m:M", 1.0, batched=True),
    RewardSpec("N", "n:N", 0.5, batched=True),
    RewardSpec("batched", "o:batched"),
  )


def test_a_config_file_may_give_a_function_of_its_own(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(
    "from dppo_jax.config import Config\n\n\n"
    "def brevity(completions):\n"
    "  return [1 / len(text) for text in completions]\n\n\n"
    "class Length:\n"
    "  def __call__(self, completions):\n"
    "    return [len(text) for text in completions]\n\n\n"
    "def get_config():\n"
    "  config = Config()\n"
    "  config.reward.functions = [brevity, Length, 'boxed:2']\n"
    "  return config\n"
  )
  chosen = commands.parse([f"--config={path}"]).reward.functions
  brevity, length, boxed = parse(chosen)
  assert brevity == RewardSpec("brevity", f"{path}:brevity")
  assert length == RewardSpec("Length", f"{path}:Length")
  assert boxed == RewardSpec("boxed", "boxed", 2.0)
  with Grader(chosen, 1) as grader:
    grader.self_check()
    assert grader.grade(["1?"], ["12"], ["1"]).rewards == [2.5]


@pytest.mark.parametrize(
  "given, message",
  [
    ("maths", "'maths' is none of exact, math, last_number, boxed, FILE.py"),
    ("math:1:2", "'math:1:2' is none of"),
    ("math,,boxed", "'' is none of"),
    ("a b.c:f", "'a b.c:f' is none of"),
    ("math:batched", "'math:batched': only functions of your own may be bat"),
    ("a:f:batched:2", "'a:f:batched:2' is none of"),
    ("a:f:Batched", "the weight 'Batched' is not a finite number"),
    ("math:heavy", "the weight 'heavy' is not a finite number"),
    ("a.b:f:nan", "'a.b:f:nan': the weight 'nan' is not"),
    ("math,boxed,math:2", "the name math is taken"),
    ("a:f,b:f", "the name f is taken"),
    ("math,a:overlong", "the name overlong is taken"),
    ([], "is empty"),
    (lambda completions: [], "<lambda>' is none of"),
  ],
)
def test_bad_items_are_rejected_in_one_line(given, message):
  with pytest.raises(UserError, match=message) as error:
    parse(given)
  assert str(error.value).startswith("config.reward.functions: ")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "source, message",
  [
    ("def g(): pass", "there is no function 'f' in /.*/mine.py"),
    ("f = 3", "there is no function 'f'"),
    ("import no_such", r"ModuleNotFoundError: .*mine.py, line 1\)"),
    ("x = 1\nraise OSError('a\\nb')", r"cannot be imported: OSError: .*line 2"),
    ("def f(:", r"SyntaxError.*mine.py, line 1\)"),
    ("exit(3)", "SystemExit"),
    ("", "there is no file /.*/mine.py"),
  ],
)
def test_an_import_that_fails_is_one_line_with_its_cause(
  tmp_path, source, message
):
  if source:
    (tmp_path / "mine.py").write_text(source)
  (spec,) = parse(f"{tmp_path}/mine.py:f")
  with pytest.raises(UserError, match=message) as error:
    user_code.load(spec.reference)
  assert "\n" not in str(error.value)
  assert ("OSError" in message) <= isinstance(error.value.__cause__, OSError)


def test_a_module_that_does_not_exist_is_rejected():
  with pytest.raises(UserError, match=r"no_such\.module cannot be imported"):
    user_code.load("no_such.module:f")


def test_required_arguments_have_no_default():
  def f(completions, *others, level, tag="", **more):
    return []

  assert functions.required_arguments(f) == ["completions", "level"]
