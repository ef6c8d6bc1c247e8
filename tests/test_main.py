"""What a user gets wrong ends in one line; every option does something."""

import ast
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
from dppo_jax.config import options
from dppo_jax.models import hf
from dppo_jax.models.hf import reader as hf_checkpoint
from dppo_jax.run import compile_cache, workdir
from dppo_jax.run.setup import setup_run

SAVED = commands.ROOT / "dppo_jax/config/saved.py"
FILES = sorted(x.stem for x in commands.ROOT.glob("configs/[a-z]*.py"))
SECTIONS = {
  field.name: field.type
  for field in dataclasses.fields(configs.Config)
  if dataclasses.is_dataclass(field.type)
} | {"config": configs.Config}
ROWS = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(32)]
WORDS = "<eos> + = 0 1 2 3".split()
SFT = {"sft__steps": 1, "sft__sequences_per_step": 8}


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
    ("--config=configs/none.py", "there is no file 'configs/none.py'"),
    ("--config=configs/none.py:grpo --config.steps=3", "'configs/none.py'"),
    (
      "--config=configs/arithmetic.py:none",
      "the method is 'none' but must be one of grpo, dppo",
    ),
    (
      "--config=configs/arithmetic.py --config.warmup.steps=3",
      "config.warmup is now config.sft",
    ),
    (
      "--config=configs/arithmetic.py --config.method.name=grpo",
      "config.method.name is now set after .*FILE.py:METHOD",
    ),
    ("--config={tmp}/outdated.py", "config.pack.rows is now .*rows_per_micro"),
    (
      "--config=configs/arithmetic.py --config.rollout.grup_size=3",
      "there is no option config.rollout.grup_size: did you mean "
      "config.rollout.group_size.",
    ),
    ("--config=configs/arithmetic.py --config.steps=few", "invalid .* 'few'"),
    ("--config={tmp}/broken.py", "broken.py, line 1"),
    ("--config={tmp}/careless.py", "made no Config"),
    (
      "--config=configs/arithmetic.py --config.learning_rate=1e-3",
      "did you mean config.optimizer.learning_rate or config.sft.learning_rate",
    ),
    (
      "--config=configs/arithmetic.py --config.method.args.prompt_rte=1",
      "the method has no option 'prompt_rte'",
    ),
    (
      "--config=configs/arithmetic.py --config.data.template_args.thinks=False",
      "template_args is {'thinks': False} but the arithmetic tokenizer",
    ),
    ("--config={tmp}/mistyped.py", "no option config.rollout.grop_size: did"),
    (
      "--config=configs/arithmetic.py --config.data.train={tmp}/bad.jsonl",
      "bad.jsonl row 2: ",
    ),
  ],
)
def test_a_mistake_on_the_command_line_ends_in_one_line(tmp_path, argv, reason):
  (tmp_path / "broken.py").write_text("def get_config(:\n")
  (tmp_path / "careless.py").write_text("def get_config():\n  pass\n")
  (tmp_path / "mistyped.py").write_text(
    "from dppo_jax.config import Config\n\n\n"
    "def get_config():\n"
    "  config = Config()\n"
    "  config.rollout.grop_size = 4\n"
    "  return config\n"
  )
  (tmp_path / "outdated.py").write_text(
    "from dppo_jax.config import Config\n\n\n"
    "def get_config():\n"
    "  config = Config()\n"
    "  config.pack.rows = 4\n"
    "  return config\n"
  )
  (tmp_path / "bad.jsonl").write_text(json.dumps(ROWS[0]) + "\n{\n")
  argv = argv.format(tmp=tmp_path).split()
  done = commands.command(*argv, f"--workdir={tmp_path / 'run'}")
  assert done.returncode == 1
  assert done.stdout == ""
  assert re.fullmatch(f"error: [^\n]*{reason}[^\n]*\n", done.stderr)
  assert not (tmp_path / "run").exists()


def test_a_file_is_no_directory_of_a_run(tmp_path):
  (tmp_path / "run").touch()
  argv = ["--config=configs/arithmetic.py", f"--workdir={tmp_path / 'run'}"]
  done = commands.command(*argv)
  assert done.returncode == 1
  assert done.stderr == f"error: {argv[1]} is a file, not a directory\n"


# Values that cannot work ----------------------------------------------------


@pytest.mark.parametrize(
  "overrides, reason",
  [
    ({"rollout__group_size": 1}, "config.rollout.group_size is 1 .* least 2"),
    ({"steps": -1}, "config.steps is -1 but must be at least 0"),
    ({"rollout__temperature": 0.0}, "config.rollout.temperature is 0.0"),
    ({"rollout__top_p": 0.0}, "config.rollout.top_p is 0.0"),
    ({"model__dtype": "float16"}, "config.model.dtype .* float32, bfloat16"),
    ({"model__heads": 3}, "config.model.heads is 3 .* multiple"),
    ({"model__remat": "some"}, "remat is 'some' .* layers, dots, none"),
    ({"model__attention": "flash"}, "auto, xla, splash, triton"),
    ({"model__attention": "splash"}, "for a tpu, but JAX runs on a cpu"),
    ({"rollout__dtype": "float16"}, "config.rollout.dtype is 'float16'"),
    ({"reward__functions": "fair"}, "config.reward.functions: 'fair'"),
    ({"rollout__top_k": 99}, "config.rollout.top_k is 99 .* 24"),
    ({"optimizer__schedule": "wild"}, "constant, linear, cosine"),
    ({"method__args__prompt_rate": 1.5}, "1.5 .* config.method.args"),
    ({"method__args__completion_rate": -0.1}, "-0.1 .* config.method.args"),
    ({"objective__args__beta": -1.0}, "beta is -1.0 .* config.objective.args"),
    ({"objective__args__sampler_cap": 0.5}, "sampler_cap is 0.5 .* least 1"),
    ({"method__args__scope": "all"}, "scope is 'all' .* group, batch"),
    ({"reward__overlong_tokens": 99}, "99 but .*config.rollout.max_tokens, 64"),
    ({"sft__from_run": "none"}, "config.sft.from_run is none"),
    ({"pack__row_length": 40}, "holds 40: raise config.pack.row_length"),
    ({"data__prompts_per_step": 64}, "prompts_per_step is 64 .* 56 usable"),
    ({"data__train": "none.jsonl"}, "no file 'none.jsonl'.* config.data.train"),
    ({"data__train": "problems.tsv"}, "is none of .* config.data.train"),
    ({"data__template": "{q}"}, "arithmetic/.*template: KeyError: 'q'; .* sol"),
    ({"data__train": "arithmetic:1"}, "config.data.train: arithmetic:1"),
    (
      {"rollout__max_tokens": 4, "pack__row_length": 32, **SFT},
      "prompt and its solution .* holds 32: raise config.pack.row_length",
    ),
    ({"data__max_prompt_tokens": 2}, "0 used.* config.data.max_prompt_tokens"),
    ({"mesh__data": 0}, "config.mesh.data is 0"),
    ({"mesh__data": 99}, "needs 99 devices .* lower config.mesh.data"),
    ({"mesh__data": 3}, "prompts_per_step is 16 .* config.mesh.data"),
    ({"optimizer__b1": 1.0}, "config.optimizer.b1 is 1.0 .* below 1"),
    ({"optimizer__learning_rate": "inf"}, "learning_rate is inf .* finite"),
    ({"optimizer__clip_norm": "nan"}, "clip_norm is nan .* finite"),
    ({"mesh__model": 8}, "config.mesh.model is 8 .*heads"),
    ({"model__path": "none"}, "no directory 'none': set config.model.path"),
  ],
)
def test_a_value_that_cannot_work_is_refused_by_name(overrides, reason):
  with pytest.raises(ValueError, match=reason):
    setup_run(arithmetic(**overrides))


@pytest.mark.parametrize(
  "choice, overrides, reason",
  [
    ("greso", {"method__args__max_draws": 0}, "max_draws is 0"),
    ("greso", {"method__args__tuning": -1.0}, "tuning is -1.0"),
    (
      "greso",
      {"method__args__dynamic_sampling": "some"},
      "one of plain, exact, none",
    ),
    ("greso", {"method__args__is_weighted": True}, "exact or none where"),
    (
      "greso",
      {"method__args__dynamic_sampling": "exact", "objective__args__beta": 0.1},
      "objective.args.beta is 0.1 .* exact dynamic",
    ),
    (
      "greso,dapo",
      {"method__args__dynamic_sampling": "exact"},
      "tokens_per_completion is 0",
    ),
    ("neyman", {"method__args__prompt_budget": -0.1}, "prompt_budget is -0.1"),
    ("neyman", {"method__args__token_budget": 2.0}, "token_budget is 2.0"),
    ("neyman", {"method__args__proxy": "luck"}, "proxy is 'luck'"),
    ("cppo", {"method__args__keep": 0.0}, "keep is 0.0 .* config.method.args"),
    ("d2s", {"method__args__keep_tokens": 0.0}, "keep_tokens is 0.0"),
  ],
)
def test_a_methods_value_that_cannot_work_is_refused(choice, overrides, reason):
  c = commands.config(f"arithmetic:{choice}", **overrides)
  with pytest.raises(ValueError, match=reason):
    setup_run(c)


@pytest.mark.parametrize("what", ["method", "objective"])
def test_an_argument_that_a_factory_lacks_is_refused_by_name(what):
  c = arithmetic()
  getattr(c, what).args["luck"] = 1.0  # as a config file may do
  with pytest.raises(ValueError, match=rf"config.{what}.args .*'luck'"):
    setup_run(c)


def test_an_empty_file_is_refused(tmp_path):
  path = sources.write_jsonl(tmp_path / "empty.jsonl", [])
  with pytest.raises(ValueError, match=r"train: 0 read.* config.data.train"):
    setup_run(arithmetic(data__train=path))


def test_prompts_that_are_too_long_are_counted(tmp_path):
  rows = [*ROWS, {"problem": "1+1+1+1+1+1+1=", "answer": "7"}]
  path = sources.write_jsonl(tmp_path / "a.jsonl", rows)
  c = arithmetic(data__train=path, data__max_prompt_tokens=10)
  c.data.eval = path
  shown = setup_run(c).description()
  assert "train: 33 read, 32 used" in shown
  assert "1 over 10 prompt tokens" in shown
  first = f"first prompt ({len(ROWS[0]['problem'])} tokens, no chat template): "
  assert first + repr(ROWS[0]["problem"]) in shown


def test_a_hub_out_of_reach_says_how_to_get_the_files(monkeypatch):
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


# Checkpoints ----------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
  """A directory with a tiny model and a tokenizer of seven words."""
  path = tmp_path / "checkpoint"
  hf.save(str(path), small.params(), small.MODEL)
  vocabulary = {word: i for i, word in enumerate(WORDS)}
  words = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<eos>"))
  words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  words.save(str(path / "tokenizer.json"))
  return path


def run_from(path):
  return setup_run(arithmetic(model__path=path, rollout__stop_ids="(0,)"))


def edit(path, **settings):
  file = path / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_checkpoint_is_what_the_model_starts_from(checkpoint):
  params = run_from(checkpoint).initial_params()
  jax.tree.map(np.testing.assert_array_equal, params, small.params())


@pytest.mark.parametrize(
  "file", ["config.json", "model.safetensors", "tokenizer.json"]
)
def test_a_missing_checkpoint_file_is_named(checkpoint, file):
  (checkpoint / file).unlink()
  with pytest.raises(ValueError, match=file):
    run_from(checkpoint)


def test_a_tensor_of_the_wrong_shape_is_named(checkpoint):
  edit(checkpoint, intermediate_size=48)
  with pytest.raises(ValueError, match=r"mlp.*\(32, 16\).* \(48, 16\)"):
    run_from(checkpoint)


# One directory, one run -----------------------------------------------------


@pytest.fixture
def begun(tmp_path):
  """Where the config of a run is that has left a checkpoint."""
  workdir.write(tmp_path / "config.json", arithmetic())
  (tmp_path / "checkpoints" / "0").mkdir(parents=True)
  return tmp_path / "config.json"


def test_a_directory_of_another_run_is_refused_by_field(begun):
  with pytest.raises(ValueError, match="another --workdir") as error:
    workdir.write(begun, arithmetic(seed=7, steps=3, model__mlp=8))
  assert "config.seed was 0 and is now 7" in str(error.value)
  assert "config.model.mlp was 192 and is now 8" in str(error.value)
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


def test_a_run_that_left_no_checkpoint_may_be_replaced(begun):
  begun.with_name("checkpoints").joinpath("0").rmdir()
  begun.with_name("checkpoints").joinpath("0.orbax-checkpoint-tmp").mkdir()
  workdir.write(begun, arithmetic(seed=7))
  assert json.loads(begun.read_text())["seed"] == 7


@pytest.mark.parametrize("name", sorted(workdir.may_change(configs.Config())))
def test_a_run_may_go_on_under_another(begun, name):
  before = options.flatten(arithmetic())[name]
  other = {
    bool: lambda: not before,
    str: lambda: f"not {before}",
  }.get(type(before), lambda: before + 1)()
  workdir.write(begun, arithmetic(**{name.replace(".", "__"): other}))
  assert json.loads(begun.read_text())[name] == other


@pytest.mark.parametrize(
  "method, overrides, name",
  [
    ("d3s", {}, "steps"),
    ("dppo", {"method__args__prune_until": 0.5}, "steps"),
    ("neyman", {"method__args__token_budget": 0.5}, "pack__window"),
  ],
)
def test_what_a_method_depends_on_is_fixed(tmp_path, method, overrides, name):
  make = lambda **more: commands.config(
    f"arithmetic:{method}", **overrides, **more
  )
  workdir.write(tmp_path / "config.json", make())
  (tmp_path / "checkpoints" / "0").mkdir(parents=True)
  with pytest.raises(ValueError, match=rf"{name.replace('__', '.')} was"):
    workdir.write(tmp_path / "config.json", make(**{name: 999}))


def test_steps_are_fixed_where_the_learning_rate_depends_on_them(begun):
  cosine = {"optimizer__schedule": "cosine"}
  begun.write_text(json.dumps(options.flatten(arithmetic(**cosine))))
  with pytest.raises(ValueError, match=r"config.steps was .* is now 999"):
    workdir.write(begun, arithmetic(steps=999, **cosine))


# Configs --------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("method", [None, *methods.METHODS])
def test_every_config_fits_every_method(file, method):
  c = commands.config(f"{file}:{method}" if method else file)
  configs.validate(c)
  assert c.method.name == (method or "dppo")
  assert isinstance(configs.make_method(c), methods.Method)


def test_only_what_imitates_solutions_needs_them(tmp_path):
  """A run that takes another's weights does not."""
  options = {
    "data__train": sources.write_jsonl(tmp_path / "own.jsonl", ROWS),
    "sft__steps": 3,
    "sft__sequences_per_step": 99,
  }
  with pytest.raises(ValueError, match=r"sequences_per_step is 99 .* 32"):
    setup_run(arithmetic(**options))
  options["sft__sequences_per_step"] = 8
  with pytest.raises(ValueError, match="has a solution to imitate"):
    setup_run(arithmetic(**options))
  (tmp_path / "other/checkpoints/0").mkdir(parents=True)
  setup_run(arithmetic(sft__from_run=str(tmp_path / "other"), **options))


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
  for name, value in c.method.args.items():
    changed = other[type(value)](value)
    c = commands.config(
      f"arithmetic:{method}", **{f"method__args__{name}": changed}
    )
    assert c.method.args[name] == changed


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_every_objective_brings_its_own_arguments(name):
  c = commands.config(f"arithmetic:neyman,{name}", objective__args__beta=0.5)
  assert c.method.name == "neyman" and c.objective.name == name
  made = configs.make_objective(c)
  assert made == objectives.OBJECTIVES[name](beta=0.5)


def test_an_objective_with_anothers_arguments_is_refused():
  c = commands.config("arithmetic:cppo")
  c.objective.factory = objectives.dapo
  c.objective.args["luck"] = 1.0
  with pytest.raises(ValueError, match=r"do not fit dapo: .*FILE.py:grpo"):
    configs.validate(c)


def test_a_schedule_ends_with_the_run():
  for method in ("dppo", "d3s"):
    c = commands.config(f"arithmetic:{method}", steps=77)
    make = mock.create_autospec(methods.METHODS[method])
    make.return_value = methods.grpo()
    c.method.factory = make
    configs.make_method(c)
    assert make.call_args.kwargs["total_steps"] == 77


def _reads(tree: ast.AST) -> set[tuple[str, str]]:
  """`(section, field)` of every attribute that is read from a config."""
  section_of = {kind.__name__: name for name, kind in SECTIONS.items()}
  holder = {}  # a variable -> the section that it holds
  for node in ast.walk(tree):
    match node:
      case ast.Assign([ast.Name(name)], ast.Attribute(attr=section)):
        holder[name] = section
      case ast.arg(name, ast.Attribute(attr=kind)) if kind in section_of:
        holder[name] = section_of[kind]
  reads = set()
  for node in ast.walk(tree):
    match node:
      case ast.Attribute(ast.Attribute(attr=section), field):
        reads.add((section, field))
      case ast.Attribute(ast.Name(name), field):
        reads.add((holder.get(name, name), field))
      # All of a section as arguments: Python refuses one that no one takes.
      case ast.Call(
        ast.Attribute(attr="asdict"), [ast.Attribute(attr=section)]
      ):
        reads |= _fields(section)
      case ast.Call(ast.Attribute(attr="asdict"), [ast.Name(name)]) if (
        name in holder
      ):
        reads |= _fields(holder[name])
  return reads


def _fields(section: str) -> set[tuple[str, str]]:
  fields = dataclasses.fields(SECTIONS[section])
  return {(section, field.name) for field in fields} - {
    ("config", name) for name in SECTIONS
  }


def test_every_option_is_read():
  reads = set()
  for path in pathlib.Path(options.__file__).parent.rglob("*.py"):
    # Those check them, whoever reads them.
    if path.parent.name != "config" and path.name != "options.py":
      functions = ast.walk(ast.parse(path.read_text()))
      reads |= {
        read
        for function in functions
        if isinstance(function, ast.FunctionDef)
        for read in _reads(function)
      }
  choices, fields = ("method", "objective"), ("factory", "args")
  reads |= {(x, field) for x in choices for field in fields}  # in choice.py
  for section in SECTIONS:
    assert not _fields(section) - reads


# Whose fault it is ----------------------------------------------------------


def _raised(function):
  with pytest.raises(Exception) as caught:
    function()
  return caught.value


def test_errors_that_say_all_end_in_a_line_and_others_show_where():
  """A value of the user's; what JAX raises, for which we are to blame."""
  explained = lambda f: main._is_explained(_raised(f))
  assert explained(lambda: setup_run(arithmetic(mesh__data=0)))
  assert explained(lambda: open("/no/such/file"))
  assert not explained(lambda: jax.numpy.ones(2) + jax.numpy.ones(3))
  assert not explained(lambda: {}["a"])


def test_the_log_of_a_run_keeps_its_traceback(tmp_path, monkeypatch):
  monkeypatch.setattr(train, "_train", lambda *unused: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    train.run(arithmetic(), tmp_path)
  log = (tmp_path / "log.txt").read_text()
  assert "model: Qwen3ForCausalLM" in log
  assert "Traceback" in log and "ZeroDivisionError" in log


def test_logging_is_not_muted_for_everyone(caplog):
  compile_cache.quiet_libraries()
  absl_logging.warning("of another library")
  assert "of another library" in caplog.text


def test_a_config_is_read_back_as_it_was(tmp_path):
  c = commands.config(
    "arithmetic:neyman,dapo",
    method__args__completion_budget=0.3,
    rollout__stop_ids="(3,4)",
    steps=7,
  )
  workdir.write(tmp_path / "config.json", c)
  path = tmp_path / "config.json"
  assert configs.read(path) == c
  typed = commands.parse([f"--config={SAVED}:{path}", "--config.steps=9"])
  assert typed == dataclasses.replace(c, steps=9)


def test_an_option_newer_than_a_saved_config_has_its_default(tmp_path):
  c = commands.config("arithmetic:neyman", method__args__prompt_budget=0.5)
  path = tmp_path / "config.json"
  workdir.write(path, c)
  saved = json.loads(path.read_text())
  del saved["method.args"]["kappa"], saved["eval.samples"]
  path.write_text(json.dumps(saved))
  assert configs.read(path) == c


@pytest.mark.parametrize(
  "text, message",
  [
    ("{", "no config of a run"),
    ("[]", "no config of a run"),
    ('{"steps": 3}', "no config of a run"),
    (
      '{"method.name": "dppo", "objective.name": "grpo", "warmup.steps": 1}',
      "config.warmup is now config.sft",
    ),
    (
      '{"method.name": "dppo", "objective.name": "grpo", "stepps": 1}',
      "there is no config.stepps",
    ),
  ],
)
def test_a_file_that_is_no_config_says_so(tmp_path, text, message):
  path = tmp_path / "config.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=re.escape(message)):
    configs.read(path)


def test_modes_want_what_they_need(tmp_path):
  for words, message in (
    (["--mode=export", "--config=configs/gsm8k.py"], "--to is missing"),
    (["--to=x", "--config=configs/gsm8k.py"], "--to is for --mode=export"),
    (["--dtype=float16", "--config=configs/gsm8k.py"], "--dtype is for --mode"),
    (["--step=3", "--config=configs/gsm8k.py"], "--step is for --mode=eval"),
    ([f"--workdir={tmp_path}"], "holds no run"),
    (["--workdir", str(tmp_path)], "holds no run"),
    (["--config=nowhere/config.json"], "there is no file 'nowhere/config.json"),
  ):
    done = commands.command(*words)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_method_objective_and_option():
  done = commands.command("--help")
  assert done.returncode == 0
  lines = done.stdout.splitlines()
  assert max(map(len, lines)) < 80
  first = {line.split()[0] for line in lines if line.strip()}
  names = {
    name.rpartition(".")[2] for name, _, _ in configs.walk(configs.Config())
  }
  names |= methods.METHODS.keys() | objectives.OBJECTIVES.keys()
  assert names - {"factory"} <= first
  for flag in ("config", "mode", "workdir", "step", "to", "debug"):
    assert f"--{flag}" in first
