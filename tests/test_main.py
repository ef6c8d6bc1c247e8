"""The command line, configs by file, and errors in one line."""

import dataclasses
import inspect
import json
import pathlib
import re
from unittest import mock

from absl import logging as absl_logging
import commands
import jax
import numpy as np
import pytest
import small
import sources
import tokenizers
from tokenizers import models, pre_tokenizers

from dppo_jax import config as configs
from dppo_jax import main, methods, train
from dppo_jax.algo import objectives
from dppo_jax.config import cli, options
from dppo_jax.errors import UserError
from dppo_jax.models import hf
from dppo_jax.models.hf import reader as hf_checkpoint
from dppo_jax.run import compile_cache, workdir
from dppo_jax.run.setup import setup_run

FILES = sorted(x.stem for x in commands.ROOT.glob("configs/[a-z]*.py"))
ARITHMETIC = f"--config={commands.ROOT}/configs/arithmetic.py"
ROWS = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(32)]
SETTINGS = {
  "data__train": "arithmetic:64",
  "sft__steps": 0,
  "data__prompts_per_step": 16,
  "rollout__max_tokens": 64,
  "pack__rows_per_micro": 4,
}


def arithmetic(**overrides):
  """The arithmetic config with few problems."""
  return commands.config("arithmetic", **SETTINGS | overrides)


# The command line -----------------------------------------------------------


@pytest.mark.parametrize(
  "argv, reason",
  [
    ("", "--config is missing"),
    ("--workdir={tmp}", "--config is missing"),
    ("--config=configs/none.py", "there is no file 'configs/none.py'"),
    ("{arithmetic}:none", "the method is 'none' .* one of grpo, dppo"),
    (
      "{arithmetic} --config.rollout.grup_size=3",
      "no option .*grup_size: did you mean --config.rollout.group_size",
    ),
    ("{arithmetic} --wrkdir=x", "no option --wrkdir: did you mean --workdir"),
    ("{arithmetic} --config.method.factory=grpo", "no option .*factory"),
    ("{arithmetic} --config.method.args.prompt_rte=1", "prompt_rate"),
    ("{arithmetic} --config.steps=few", "'few'"),
    ("{arithmetic} grpo", "unexpected argument 'grpo'"),
    ("{arithmetic} --mode=fly", "fly"),
    ("{arithmetic} --step=x", "step"),
    ("--config={tmp}/broken.py", "broken.py, line 1"),
    ("--config={tmp}/empty.py", "must return a dppo_jax.config.Config"),
    ("--config={tmp}/typo.py", "'grop_size'.*typo.py, line 4"),
    ("{arithmetic} --mode=export", "--to is missing"),
    ("{arithmetic} --to=x", "--to is for --mode=export"),
    ("{arithmetic} --step=3", "--step is for --mode=evaluate or export"),
  ],
)
def test_mistake_on_the_command_line_is_named(tmp_path, argv, reason):
  (tmp_path / "broken.py").write_text("def get_config(:\n")
  (tmp_path / "empty.py").write_text("def get_config():\n  pass\n")
  (tmp_path / "typo.py").write_text(
    "from dppo_jax.config import Config\n"
    "def get_config():\n"
    "  config = Config()\n"
    "  config.rollout.grop_size = 4\n"
    "  return config\n"
  )
  words = argv.format(tmp=tmp_path, arithmetic=ARITHMETIC).split()
  with pytest.raises(UserError, match=reason) as error:
    cli.parse(["main", *words])
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "error, argv, ends",
  [
    (UserError("a mistake"), [], (SystemExit, "error: a mistake")),
    (UserError("a mistake"), ["--debug"], (UserError, "a mistake")),
    (ValueError("a bug"), [], (ValueError, "a bug")),
    (KeyboardInterrupt(), [], (SystemExit, "130")),
  ],
)
def test_only_user_errors_lose_their_traceback(monkeypatch, error, argv, ends):
  monkeypatch.setattr(main, "main", mock.Mock(side_effect=error))
  monkeypatch.setattr("sys.argv", ["main", *argv])
  with pytest.raises(ends[0], match=ends[1]):
    main.run()


def test_flags_may_be_written_in_two_words():
  command = cli.parse(
    ["main", *ARITHMETIC.split("="), "--config.steps", "3", "--mode", "plan"]
  )
  assert command.config.steps == 3 and command.flags.mode == "plan"
  assert command.workdir == pathlib.Path("runs/arithmetic-dppo-seed0")


def test_arguments_of_the_chat_template_are_flags():
  given = ["a=True", "b=false", "c=3", "d=text", "e=", "f={'x': 1}"]
  prefix = "--config.data.template_args."
  config = commands.parse([ARITHMETIC, *(prefix + x for x in given)])
  expected = dict(a=True, b=False, c=3, d="text", e="", f={"x": 1})
  assert config.data.template_args == expected


def test_help_names_every_method_objective_and_option():
  done = commands.command("--help")
  assert done.returncode == 0
  lines = done.stdout.splitlines()
  assert max(map(len, lines)) <= 80
  first = {line.split()[0] for line in lines if line.strip()}
  names = {
    name.rpartition(".")[2]
    for name, _, metadata in configs.walk(configs.Config())
    if metadata
  }
  names |= methods.METHODS.keys() | objectives.OBJECTIVES.keys()
  names |= {"--config", "--mode", "--workdir", "--step", "--to", "--debug"}
  assert names <= first


# Configs by file ------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_every_config_fits_every_method(file):
  for method in ["", *methods.METHODS]:
    c = commands.config(f"{file}:{method}" if method else file)
    configs.validate(c)
    assert c.method.name == (method or "dppo")


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_argument_of_a_method_is_a_flag(method):
  arguments = inspect.signature(methods.METHODS[method]).parameters
  c = commands.config(f"arithmetic:{method}")
  assert c.method.args == {
    k: v.default for k, v in arguments.items() if k != "total_steps"
  }
  other = {
    bool: lambda x: not x,
    float: lambda x: x / 2,
    int: lambda x: x + 1,
    str: lambda x: x + "s",
  }
  changed = {k: other[type(x)](x) for k, x in c.method.args.items()}
  overrides = {f"method__args__{k}": x for k, x in changed.items()}
  c = commands.config(f"arithmetic:{method}", **overrides)
  assert c.method.args == changed


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_every_objective_has_its_own_arguments(name):
  c = commands.config(f"arithmetic:neyman,{name}", objective__args__beta=0.5)
  assert c.method.name == "neyman" and c.objective.name == name
  objective = objectives.OBJECTIVES[name](beta=0.5)
  assert configs.make_objective(c) == objective


@pytest.mark.parametrize("method", ["dppo", "d3s"])
def test_schedule_ends_with_the_run(method):
  c = commands.config(f"arithmetic:{method}", steps=77)
  make = mock.create_autospec(methods.METHODS[method])
  make.return_value = methods.grpo()
  c.method.factory = make
  configs.make_method(c)
  assert make.call_args.kwargs["total_steps"] == 77


def test_every_option_is_read():
  package = pathlib.Path(options.__file__).parents[1]
  files = [x for x in package.rglob("*.py") if x.parent.name != "config"]
  text = "\n".join(x.read_text() for x in files)
  for name, _, metadata in configs.walk(configs.Config()):
    field = name.rpartition(".")[2]
    if metadata and field != "args":
      assert re.search(rf"\b{field}\b", text), name


def test_config_is_read_back(tmp_path):
  c = commands.config(
    "arithmetic:neyman,dapo",
    method__args__completion_budget=0.3,
    rollout__stop_ids="(3,4)",
    steps=7,
  )
  path = tmp_path / "config.json"
  workdir.write(path, c)
  assert configs.read(path) == c
  for words in ([f"--config={path}"], [f"--workdir={tmp_path}"]):
    command = cli.parse(["main", *words, "--config.steps=9"])
    assert command.config == dataclasses.replace(c, steps=9)
    assert command.workdir == tmp_path


@pytest.mark.parametrize(
  "text, message",
  [
    ("{", "not the config of a run"),
    ('{"steps": 3}', "not the config of a run"),
    ('{"method.name": "dppo", "objective.name": "grpo", "stps": 1}', "stps"),
  ],
)
def test_file_without_a_config_is_named(tmp_path, text, message):
  path = tmp_path / "config.json"
  path.write_text(text)
  with pytest.raises(UserError, match=message):
    configs.read(path)


# Checkpoints and data -------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
  """A directory with a tiny model and a tokenizer of seven words."""
  path = tmp_path / "checkpoint"
  hf.save(str(path), small.params(), small.MODEL)
  words = "<eos> + = 0 1 2 3".split()
  vocabulary = {word: i for i, word in enumerate(words)}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<eos>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  tokenizer.save(str(path / "tokenizer.json"))
  return path


def run_from(path):
  return setup_run(arithmetic(model__path=path, rollout__stop_ids="(0,)"))


def test_model_starts_from_a_checkpoint(checkpoint):
  params = run_from(checkpoint).initial_params()
  jax.tree.map(np.testing.assert_array_equal, params, small.params())


@pytest.mark.parametrize(
  "file", ["config.json", "model.safetensors", "tokenizer.json"]
)
def test_missing_checkpoint_file_is_named(checkpoint, file):
  (checkpoint / file).unlink()
  with pytest.raises(ValueError, match=file):
    run_from(checkpoint)


def test_unreachable_hub_says_how_to_get_the_files(monkeypatch):
  def fail(*unused, **also_unused):
    raise OSError("no route\nand a long story")

  hub = hf_checkpoint.huggingface_hub
  monkeypatch.setattr(hub, "model_info", fail)
  monkeypatch.setattr(hub, "snapshot_download", fail)
  with pytest.raises(ValueError, match="no route") as error:
    setup_run(commands.config("gsm8k", mesh__data=1))
  assert "\n" not in str(error.value)
  assert "hf download Qwen/Qwen3-0.6B" in str(error.value)
  assert "--config.model.path=DIR" in str(error.value)


def test_long_prompts_are_counted(tmp_path):
  rows = [*ROWS, {"problem": "1+1+1+1+1+1+1=", "answer": "7"}]
  path = sources.write_jsonl(tmp_path / "a.jsonl", rows)
  c = arithmetic(data__train=path, data__max_prompt_tokens=10)
  c.data.eval = path
  shown = setup_run(c).description()
  assert "train: 33 read, 32 used" in shown
  assert "1 over 10 prompt tokens" in shown
  assert repr(ROWS[0]["problem"]) in shown


# One directory, one run -----------------------------------------------------


@pytest.fixture
def begun(tmp_path):
  """The config.json of a run that has left a checkpoint."""
  workdir.write(tmp_path / "config.json", arithmetic())
  (tmp_path / "checkpoints" / "0").mkdir(parents=True)
  return tmp_path / "config.json"


def test_directory_of_another_run_is_rejected_by_option(begun):
  other = arithmetic(seed=7, steps=3, model__shape__mlp=8)
  with pytest.raises(ValueError, match="another --workdir") as error:
    workdir.write(begun, other)
  assert "config.seed was 0 and is now 7" in str(error.value)
  assert "config.model.shape was" in str(error.value)
  assert str(error.value).count(" was ") == 2
  assert json.loads(begun.read_text())["seed"] == 0


def test_two_processes_do_not_train_in_one_directory(begun):
  with workdir.held(begun, arithmetic()):
    second = workdir.held(begun, arithmetic(steps=7))
    with pytest.raises(ValueError, match="another process trains"), second:
      pytest.fail("it was let in")
    assert json.loads(begun.read_text())["steps"] != 7
  with workdir.held(begun, arithmetic(steps=7)):  # the first is over
    assert json.loads(begun.read_text())["steps"] == 7


def test_run_without_a_checkpoint_may_be_replaced(begun):
  begun.with_name("checkpoints").joinpath("0").rmdir()
  begun.with_name("checkpoints").joinpath("0.orbax-checkpoint-tmp").mkdir()
  workdir.write(begun, arithmetic(seed=7))
  assert json.loads(begun.read_text())["seed"] == 7


def test_run_resumes_with_other_values_of_adjustable_options(begun):
  before = options.flatten(arithmetic())
  for name in workdir.may_change(configs.Config()):
    value = before[name]
    changed = {bool: lambda x: not x, str: lambda x: f"not {x}"}.get(
      type(value), lambda x: x + 1
    )(value)
    workdir.write(begun, arithmetic(**{name.replace(".", "__"): changed}))
    assert json.loads(begun.read_text())[name] == changed


@pytest.mark.parametrize(
  "method, overrides, name",
  [
    ("d3s", {}, "steps"),
    ("dppo", {"method__args__prune_until": 0.5}, "steps"),
    ("dppo", {"optimizer__schedule": "cosine"}, "steps"),
    ("neyman", {"method__args__token_budget": 0.5}, "pack__rows_per_micro"),
  ],
)
def test_options_that_a_method_depends_on_are_fixed(
  tmp_path, method, overrides, name
):
  make = lambda **more: commands.config(
    f"arithmetic:{method}", **overrides, **more
  )
  workdir.write(tmp_path / "config.json", make())
  (tmp_path / "checkpoints" / "0").mkdir(parents=True)
  with pytest.raises(ValueError, match=rf"{name.replace('__', '.')} was"):
    workdir.write(tmp_path / "config.json", make(**{name: 999}))


# Logs -----------------------------------------------------------------------


def test_log_of_a_run_keeps_its_traceback(tmp_path, monkeypatch):
  monkeypatch.setattr(train, "_train", lambda *unused: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    train.run(arithmetic(), tmp_path)
  log = (tmp_path / "log.txt").read_text()
  assert "model: Qwen3ForCausalLM" in log
  assert "Traceback" in log and "ZeroDivisionError" in log


def test_other_libraries_may_log(caplog):
  compile_cache.quiet_libraries()
  absl_logging.warning("of another library")
  assert "of another library" in caplog.text
