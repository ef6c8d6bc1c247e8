"""Names of reward functions, their import, and values of the built-in ones."""

import sys

import commands
import pytest

from dppo_jax import user_code
from dppo_jax.errors import UserError
from dppo_jax.rewards import Grader, RewardSpec, functions, parse


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
  """Restores the import path, which a loaded file extends."""
  monkeypatch.setattr(sys, "path", [*sys.path])


def test_built_in_functions_return_their_outcome():
  texts = [r"\boxed{ 18 }", r"\boxed{18.0}", "18", r"\boxed{4} \boxed{**}"]
  exact = functions.exact(texts, [" 18"] * 4)
  math = functions.math(texts, [" 18"] * 4)
  assert exact == [1.0, 0.0, 0.0, 0.0]
  assert [x.outcome for x in exact] == ["right", "wrong", "unboxed", "wrong"]
  assert [x.outcome for x in math] == ["right", "right", "unboxed", "unparsed"]
  assert functions.boxed(texts) == [1.0, 1.0, 0.0, 1.0]


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
    ("maths", "'maths' is none of exact, math, boxed, FILE.py:FUNCTION"),
    ("math:1:2", "'math:1:2' is none of"),
    ("math,,boxed", "'' is none of"),
    ("a b.c:f", "'a b.c:f' is none of"),
    ("math:batched", "'math:batched': only functions of your own may be bat"),
    ("a:f:batched:2", "'a:f:batched:2' is none of"),
    ("a:f:Batched", "the weight 'Batched' is not a finite number"),
    ("math:heavy", "the weight 'heavy' is not a finite number"),
    ("a.b:f:nan", "'a.b:f:nan': the weight 'nan' is not"),
    ("math,boxed,math:2", "has a name twice"),
    ("a:f,b:f", "has a name twice"),
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
