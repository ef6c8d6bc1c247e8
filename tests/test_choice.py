"""Methods, objectives and callbacks: by name, by file, and as functions."""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import algo, methods, rewards, train
from dppo_jax import config as configs
from dppo_jax.config import options
from dppo_jax.data import sources
from dppo_jax.errors import UserError
from dppo_jax.files import user_code
from dppo_jax.records import Groups
from dppo_jax.rng import StepRng
from tests.helpers import commands

FILE = """
import jax.numpy as jnp
from dppo_jax import algo, methods
from dppo_jax.records import Selection

def ramp(step):
  return 0.5

def coin(share: float = 0.5) -> methods.Method:
  def rule(rng, groups, budget):
    prob = jnp.full(groups.advantages.shape, share)
    return Selection(algo.bernoulli(rng.key, prob), prob)
  return methods.grpo()._replace(completions=rule)

def squares(beta: float = 0.0) -> algo.Objective:
  def loss(ratio, advantages, logprobs):
    return -jnp.square(ratio) * advantages, jnp.zeros(ratio.shape, bool)
  return algo.grpo(beta=beta)._replace(token_loss=loss)

def number(): return 3
def broken(): raise KeyError("no")
def optionless(share): return methods.grpo()
CONSTANT = 3
"""


def here(keep: float = 0.25) -> methods.Method:
  """A method of this module, which is no file of the package."""
  return methods.cppo(keep)


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(FILE)
  return path


def test_method_and_objective_of_a_file(file):
  choice = f"arithmetic:{file}:coin,{file}:squares"
  c = commands.config(choice, method__args__share=0.25)
  assert (c.method.name, c.objective.name) == ("coin", "squares")
  assert c.method.args == {"share": 0.25} and c.objective.args == {"beta": 0.0}
  configs.validate(c)
  loss, _ = configs.make_objective(c).token_loss(*[jnp.full((1, 1), 2.0)] * 3)
  assert loss == -8
  rewards = jnp.array([[1.0, 0.0]])
  groups = Groups(rewards, rewards - 0.5, jnp.ones((1, 2), jnp.int32))
  rng = StepRng(jax.random.key(0), jnp.int32(0))
  chosen = configs.make_method(c).completions(rng, groups, 1.0)
  assert (chosen.prob == 0.25).all()


@pytest.mark.parametrize(
  "choice, names",
  [
    ("neyman,{}:squares", ("neyman", "squares")),
    ("{}:coin,cispo", ("coin", "cispo")),
    ("dppo_jax.methods.cppo:cppo", ("cppo", "grpo")),
  ],
)
def test_built_in_and_user_choices_combine(file, choice, names):
  c = commands.config(f"arithmetic:{choice.format(file)}")
  assert (c.method.name, c.objective.name) == names


def test_saved_config_finds_a_users_functions(file, tmp_path):
  c = commands.config(f"arithmetic:{file}:coin,{file}:squares")
  c.method.args["share"] = 0.125
  saved, flat = tmp_path / "config.json", options.flatten(c)
  saved.write_text(json.dumps(flat))
  assert flat["method.name"] == "coin"  # what reports show
  assert flat["method.source"] == f"{file}:coin"
  again = configs.read(saved)
  assert options.flatten(again) == flat
  assert configs.make_method(again) is not None
  c.method.args["share"] = user_code.load(f"{file}:ramp")
  saved.write_text(json.dumps(options.flatten(c)))
  assert configs.read(saved).method.args == c.method.args
  c.method.args["share"] = lambda step: 0.5
  with pytest.raises(UserError, match=r"args.share is .*<lambda>, which"):
    configs.make_method(c)
  # The file itself has been imported: only a new process would not find it.
  flat["method.source"] = f"{tmp_path}/gone.py:coin"
  saved.write_text(json.dumps(flat))
  with pytest.raises(UserError, match=r"the method: .*there is no file"):
    configs.read(saved)


def test_functions_in_python():
  c = configs.Config()
  configs.use_method(c, here, algo.rloo)
  assert c.method.args == {"keep": 0.25} and c.objective.name == "rloo"
  flat = options.flatten(c)
  assert flat["method.source"] == f"{__file__}:here"
  assert "objective.source" not in flat  # one of ours
  configs.use_method(c, "neyman", "cispo")
  assert (c.method.name, c.objective.name) == ("neyman", "cispo")


@pytest.mark.parametrize(
  "name", ["step", "reward/mean", "eval/accuracy", "warnings/mine"]
)
def test_callback_does_not_replace_the_metrics_of_the_run(name):
  def mine(done, info, state):
    return {"mine": 3.0, name: 77.0} if done > 1 else None

  values = {"reward/mean": 0.5}
  assert train.call(mine, values, 1, None, None) == values
  with pytest.raises(UserError, match=f"returned the metric '{name}'"):
    train.call(mine, values, 2, None, None)
  other = lambda *unused: {"reward/mine": 1.0}
  assert train.call(other, values) == values | {"reward/mine": 1.0}


@pytest.mark.parametrize(
  "result", [[1.0], [], np.ones(2), {1: 2.0}, {"a": "b"}, {"a": None}, 3, "ab"]
)
def test_callback_returns_a_dict_of_numbers(result):
  with pytest.raises(UserError, match="a dict of numbers by name") as info:
    train.call(lambda: result, {"reward/mean": 0.5})
  assert "\n" not in str(info.value)


def test_metrics_of_callbacks_are_floats():
  mine = lambda: {"a": np.float32(0.5), "b": True, "c": jnp.ones(())}
  assert train.call(mine, {}) == {"a": 0.5, "b": 1.0, "c": 1.0}
  assert train.call(lambda: {}, {}) == {}


def test_callbacks_are_functions_or_references(file, tmp_path):
  c = configs.Config()
  assert configs.load_callbacks(c) == ()
  c.callbacks = f"{file}:number, {__name__}:rows"
  number, second = configs.load_callbacks(c)
  assert number() == 3 and second() == rows()
  for callbacks in (rows, [rows, brevity]):
    c.callbacks = callbacks
    configs.validate(c)
    assert configs.load_callbacks(c)[0] is rows
    (tmp_path / "config.json").write_text(json.dumps(options.flatten(c)))
    saved = configs.read(tmp_path / "config.json")
    assert configs.load_callbacks(saved)[0]() == rows()
  for callbacks in (f"{file}:none", f"{file}:CONSTANT", [3], "number"):
    c.callbacks = callbacks
    with pytest.raises(UserError, match=r"config\.callbacks"):
      configs.validate(c)


def rows():
  return [{"problem": "1+1=", "answer": 2}]


def brevity(completions):
  return [1 / (1 + len(text)) for text in completions]


def test_saved_config_finds_data_and_rewards_that_were_functions(tmp_path):
  c = configs.Config()
  c.data.train, c.data.template = rows, lambda row: row["problem"]
  c.reward.functions = ["math:2", brevity]
  flat = options.flatten(c)
  (tmp_path / "config.json").write_text(json.dumps(flat))
  again = configs.read(tmp_path / "config.json")
  assert options.flatten(again) == flat
  assert again.data.train == f"{__file__}:rows"
  assert [x.columns for x in sources.read(again.data.train)[0]] == rows()
  assert [x.weight for x in rewards.parse(again.reward.functions)] == [2, 1]


def test_edited_file_is_read_again(file):
  assert user_code.load(f"{file}:number") is user_code.load(f"{file}:number")
  file.write_text("def number(): return 47")
  os.utime(file, (0, 0))
  assert user_code.load(f"{file}:number")() == 47


def test_function_without_a_name_is_rejected():
  c = configs.Config()
  c.data.train = functools.partial(rows)
  with pytest.raises(UserError, match=r"partial.* has no name .* with def"):
    options.flatten(c)


@pytest.mark.parametrize(
  ("choice", "reason"),
  [
    ("nothing", "the method is 'nothing' but must be one of grpo, .*FILE.py:F"),
    ("grpo,nothing", "the objective is 'nothing' but must be one of grpo"),
    ("no.such.module:coin", "the method: no.such.module cannot be imported"),
    ("{}:CONSTANT", "the method: there is no function 'CONSTANT'"),
    ("{}:optionless", "'share' of the method optionless must have a"),
    ("{}:number", "the method number.. returned int, not Method"),
    ("{}:squares", "the method squares.. returned Objective, not Method"),
    ("{}:broken", "the method broken: KeyError: 'no' .*mine.py, line"),
  ],
)
def test_wrong_choice_is_named_in_one_line(file, choice, reason):
  c = configs.Config()
  with pytest.raises(UserError, match=reason) as error:
    configs.use_method(c, choice.format(file))
    configs.validate(c)
  assert "\n" not in str(error.value)
