"""Values and files that nobody means are refused in one line, by name."""

import collections
import random
import re
import subprocess
import sys

import commands
import numpy as np
import pytest

import dppo_jax
from dppo_jax import config as configs
from dppo_jax import main
from dppo_jax.config import options
from dppo_jax.run.setup import setup_run

HUGE = [10**22, -(10**22), 10**500, 2**63]


def refusal(config) -> str | None:
  """What `validate` says, which is one line; None where it passes."""
  try:
    configs.validate(config)
  except ValueError as error:
    assert "\n" not in str(error)
    return str(error)
  return None


def holder(config, name: str) -> tuple[object, str]:
  section, _, field = name.rpartition(".")
  return (getattr(config, section) if section else config), field


INTEGERS = [
  name
  for name, value, _ in configs.walk(configs.Config())
  if type(value) is int
]
FLOATS = [
  name
  for name, value, _ in configs.walk(configs.Config())
  if type(value) is float
]


@pytest.mark.parametrize("name", INTEGERS)
def test_no_whole_number_is_without_bounds(name):
  for value in HUGE:
    config = configs.Config()
    setattr(*holder(config, name), value)
    assert re.match(
      rf"config\.{name} is .* but must be at (most|least)", refusal(config)
    )


@pytest.mark.parametrize("name", FLOATS)
def test_every_number_is_finite(name):
  for value in (float("nan"), float("inf"), float("-inf"), 1e300):
    config = configs.Config()
    setattr(*holder(config, name), value)
    assert refusal(config).startswith(f"config.{name} is ")


@pytest.mark.parametrize(
  ("name", "value", "reason"),
  [
    ("rollout", None, "config.rollout is None but must be a Rollout"),
    ("method", None, "config.method is None but must be a Method"),
    ("method.factory", None, "factory is None but must be a function"),
    ("method.args", None, "config.method.args is None but must be a dict"),
    ("method.args", {"prompt_rate": {1}}, "args.prompt_rate is .1. but must"),
    ("objective.args", {"clip_low": 1e300}, "args.clip_low is .* float32"),
    ("data.template_args", {"a": {1}}, "template_args.a is .1. but must be"),
    ("data.train", None, "config.data.train is None but must be text"),
    ("data.eval", 3, "config.data.eval is 3 but must be text"),
    ("steps", "ten", "config.steps is 'ten' but must be a whole number"),
    ("steps", 3.5, "config.steps is 3.5 but must be a whole number"),
    ("seed", True, "config.seed is True but must be a whole number"),
    ("seed", -1, "config.seed is -1 but must be at least 0"),
    ("optimizer.b1", "x", "config.optimizer.b1 is 'x' but must be a number"),
    ("pack.share_prefix", 1, "share_prefix is 1 but must be true or false"),
    ("rollout.stop_ids", 3, "config.rollout.stop_ids is 3 but must be a tuple"),
    ("rollout.temperature", 1e-30, "temperature is 1e-30 .* at least 0.01"),
    ("reward.timeout_seconds", 1e9, "timeout_seconds is .* at most 86400"),
    ("reward.num_workers", 10**9, "num_workers is .* at most 1024"),
  ],
)
def test_a_value_that_nobody_means_is_refused_by_name(name, value, reason):
  """As a config file may set it."""
  config = configs.Config()
  setattr(*holder(config, name), value)
  assert re.search(reason, refusal(config))


def test_any_value_is_refused_in_one_line_or_taken():
  """Fuzzed: what passes is of the option's kind, what does not is named."""
  rng = random.Random(0)
  values = [None, True, -1, 0, 3, 7.5, -0.0, 1e-320, float("nan"), "", "x"]
  values += ["\n", "a:b", (1,), [None], {}, {"x": 1}, {1}, b"x", print, object]
  values += HUGE
  counts = collections.Counter()
  walked = [*configs.walk(configs.Config())]
  for name, default, _ in walked * 8:
    value = rng.choice(values)
    config = configs.Config()
    setattr(*holder(config, name), value)
    said = refusal(config)
    counts["refused" if said else "taken"] += 1
    if said:
      assert name.rpartition(".")[2].replace("factory", "") in said
    elif not isinstance(default, str | type(print)):
      assert not isinstance(value, str | None)
  assert sum(counts.values()) > 400
  assert min(counts.values()) > 40, counts


def _reason(argv: list[str]) -> str:
  try:
    commands.parse(argv)
  except Exception as error:
    return main._reason(error, argv)
  pytest.fail(f"{argv} was taken")


def test_any_flag_is_refused_in_one_line_or_taken():
  """Fuzzed, as typed: parsed, then checked, as a run does first of all."""
  rng = random.Random(1)
  words = "None true no -1 0 3 7.5 1e22 1e-320 nan inf x a:b (1,) [] {} '' ' "
  words = [*words.split(" "), "9" * 400, "é", "\0", "lambda: 0", "__import__"]
  path = commands.ROOT / "configs/arithmetic.py"
  walked = [name for name, _, _ in configs.walk(configs.Config())]
  walked += [f"method.args.{name}" for name in configs.Config().method.args]
  walked += ["nothing", "rollout", "data.nothing", "seed.x", "method.args.no"]
  counts = collections.Counter()
  for name in walked * 4:
    argv = [f"--config={path}", f"--config.{name}={rng.choice(words)}"]
    try:
      said = refusal(commands.parse(argv))
    except Exception as error:
      said = main._reason(error, argv)
    assert said is None or "\n" not in said
    counts["refused" if said else "taken"] += 1
    if said:
      last = name.rpartition(".")[2]  # which a factory may call otherwise
      assert last in said or "see config.method.args" in said, argv
      assert "Traceback" not in said and "<class" not in said, argv
  assert sum(counts.values()) > 300 and min(counts.values()) > 50, counts


@pytest.mark.parametrize(
  ("option", "reason"),
  [
    ("sft=3", r"config.sft has parts.* as --config.sft.steps"),
    ("pack=", r"config.pack has parts.* as --config.pack.row_length"),
    ("method.args={}", r"config.method.args has parts.*args.prompt_rate"),
    ("data.template_args=3", r"config.data.template_args has .*args.NAME"),
  ],
)
def test_what_has_parts_is_not_set_as_a_whole(option, reason):
  argv = ["--config=configs/arithmetic.py", f"--config.{option}"]
  said = _reason([argv[0].replace("=", f"={commands.ROOT}/"), argv[1]])
  assert re.fullmatch(reason, said)


def test_an_error_of_two_lines_is_told_whole(tmp_path):
  path = tmp_path / "two.py"
  path.write_text("def get_config():\n  raise ValueError('first\\nsecond')\n")
  assert _reason([f"--config={path}"]) == "first; second"


@pytest.mark.parametrize("end", ["", ":dppo"])
def test_a_path_with_a_colon_is_refused(tmp_path, end):
  path = tmp_path / "a:b" / "mine.py"
  path.parent.mkdir()
  path.touch()
  with pytest.raises(ValueError, match="has a colon"):
    main._with_saved_config(["main", f"--config={path}{end}"])
  with pytest.raises(ValueError, match="has a colon"):
    main._with_saved_config(["main", "--config", f"{path}{end}"])


@pytest.mark.parametrize("path", ["/dev/zero", "/", "."])
def test_what_is_no_file_is_not_read_as_a_config(path):
  with pytest.raises(ValueError, match=r"--config: .* is no file"):
    main._with_saved_config(["main", f"--config={path}"])


def test_an_argument_of_the_chat_template_is_a_flag():
  words = ["main", "--config=x.py", "--config.steps=3", "--mode=train"]
  prefix = "--config.data.template_args."
  given = ["a=True", "b=false", "c=3", "d=text", "e=", "f={'x': 1}"]
  found = main._without_template_args(
    [*words, *(prefix + x for x in given), prefix + "g", "7"]
  )
  expected = dict(a=True, b=False, c=3, d="text", e="", f={"x": 1}, g=7)
  assert found == (words, expected)


def test_a_long_value_is_shortened():
  assert len(options.shown("x" * 1000)) < 70
  assert options.shown(10**5000) == "a whole number of 16610 bits"


def test_a_reward_that_there_is_not_is_refused_before_data_and_model(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("def fair(completions): return [1.0 for _ in completions]\n")
  config = commands.config(
    "arithmetic",
    reward__functions=f"math,{path}:unfair",
    data__train="none.jsonl",
    model__path="none",
  )
  with pytest.raises(ValueError, match=r"reward.functions: .*'unfair'"):
    setup_run(config)
  config.reward.functions = f"math,{path}:fair"
  with pytest.raises(ValueError, match="no directory 'none'"):
    setup_run(config)


@pytest.mark.parametrize("stop_id", [True, 1.0, "1", -1, 24, None, 10**30])
def test_a_stop_id_is_a_token(stop_id):
  config = commands.config("arithmetic", data__train="arithmetic:200")
  config.rollout.stop_ids = (1, stop_id)
  with pytest.raises(ValueError, match=r"stop id .* set config.rollout.stop"):
    setup_run(config)


def test_a_number_of_numpy_is_a_number():
  config = configs.Config()
  config.seed, config.optimizer.b1 = np.int64(3), np.float64(0.5)
  assert refusal(config) is None
  flat = options.flatten(config)
  assert (flat["seed"], flat["optimizer.b1"]) == (3, 0.5)


def test_too_few_devices_name_the_remedy_of_a_cpu():
  config = commands.config("arithmetic", mesh__data=16)
  with pytest.raises(ValueError, match=r"16 devices .*JAX_NUM_CPU_DEVICES=16"):
    setup_run(config)


def test_there_is_one_version():
  done = subprocess.run(
    [sys.executable, "setup.py", "--version"],
    capture_output=True,
    check=True,
    text=True,
    cwd=commands.ROOT,
  )
  assert done.stdout.split()[-1] == dppo_jax.__version__
