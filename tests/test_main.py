"""The command line, configs by file, and errors in one line."""

import dataclasses
import io
import json
import os
import pathlib
import re
import sys
from unittest import mock

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from dppo_jax import config as configs
from dppo_jax import main, methods, train
from dppo_jax.algo import objectives
from dppo_jax.config import cli, options
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket
from dppo_jax.models import hf
from dppo_jax.run import checkpoint_steps, resume
from dppo_jax.run.setup import setup_run
from tests.helpers import commands, option_reads, small

FILES = sorted(x.stem for x in commands.ROOT.glob("configs/[a-z]*.py"))
ARITHMETIC = f"--config={commands.ROOT}/configs/arithmetic.py"
SETTINGS = {
  "data__train": "arithmetic:64",
  "sft__steps": 0,
  "data__prompts_per_step": 16,
  "rollout__max_tokens": 64,
  "pack__rows_per_micro": 4,
}

TINY = {
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "data__eval": "",
  "rollout__num_slots": 2,
  "rollout__group_size": 2,
}


def arithmetic(**overrides):
  """The arithmetic config with few problems."""
  return commands.config("arithmetic", **SETTINGS | overrides)


# The command line -----------------------------------------------------------


@pytest.mark.parametrize(
  "argv, reason",
  [
    ("", "--config is missing"),
    ("--workdir={tmp}", "--workdir: .* has no config.json: name the"),
    ("--workdir=runs/nne", "--workdir: runs/nne has no config.json: name the"),
    ("--config=configs/none.py", "there is no file 'configs/none.py'"),
    ("{arithmetic}:none", "the method is 'none' .* one of grpo, dppo"),
    (
      "{arithmetic} --config.rollout.grup_size=3",
      "no option .*grup_size: did you mean --config.rollout.group_size",
    ),
    ("{arithmetic} --wrkdir=x", "no option --wrkdir: did you mean --workdir"),
    (
      "{arithmetic} --config.optimzer.lr=1",
      "optimzer.lr: config.optimizer has function, learning_rate, schedule",
    ),
    ("{arithmetic} --config.top_k=3", "did you mean --config.rollout.top_k"),
    ("{arithmetic} --config.stps=3", "did you mean --config.steps?"),
    ("{arithmetic} --steps=3", "did you mean --config.steps?"),
    ("{arithmetic} --sted=3", "did you mean --step?"),
    ("{arithmetic} --config.step=3", "did you mean --config.steps?"),
    ("{arithmetic} --config.steps=3.5", "not a whole number: '3.5'"),
    ("{arithmetic} --config.seed=x", "not a whole number: 'x'"),
    (f"--config={pathlib.Path(__file__).parent}", "is a directory: name a"),
    (
      "{arithmetic} --config.method.args.completion_rate=0.5",
      "config.method.args has prompt_budget, completion_budget",
    ),
    ("{arithmetic} --config.xyz.qqq=3", "no option --config.xyz.qqq: see --h"),
    ("{arithmetic} --config.method.factory=grpo", "no option .*factory"),
    ("{arithmetic}:dppo --config.method.args.prompt_rte=1", "prompt_rate"),
    ("{arithmetic} --config.steps=few", "'few'"),
    ("{arithmetic} grpo", "unexpected argument 'grpo'"),
    ("{arithmetic} --mode=fly", "fly"),
    ("{arithmetic} --step=x", "step"),
    ("--config={tmp}/broken.py", "broken.py, line 1"),
    ("--config={tmp}/empty.py", "must return a dppo_jax.config.Config"),
    ("--config={tmp}/typo.py", "'grop_size'.*typo.py, line 4"),
    ("--config={tmp}/exits.py", "exits.py: SystemExit: 0 .*exits.py, line 2"),
    ("{arithmetic} --mode=export", "--to is missing"),
    ("{arithmetic} --to=x", "--to is for --mode=export"),
    ("{arithmetic} --step=3", "--step is for --mode=evaluate or export or s"),
    ("--mode=sample", "--config is missing"),
    ("--config=", "--config is empty"),
    ("{arithmetic} --workdir=", "--workdir is empty"),
    ("{arithmetic} --workdir={tmp}/typo.py", "--workdir: .*typo.py' is a file"),
    ("--workdir={tmp}/typo.py/a", "--workdir: .*typo.py' is a file"),
  ],
)
def test_mistake_on_the_command_line_is_named(tmp_path, argv, reason):
  (tmp_path / "broken.py").write_text("def get_config(:\n")
  (tmp_path / "empty.py").write_text("def get_config():\n  pass\n")
  (tmp_path / "exits.py").write_text("def get_config():\n  exit(0)\n")
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
    (Unreachable("gs://x"), [], (SystemExit, str(os.EX_TEMPFAIL))),
    (UserError("a mistake"), ["--debug"], (UserError, "a mistake")),
    (ValueError("a bug"), [], (ValueError, "a bug")),
    (KeyboardInterrupt(), [], (SystemExit, "130")),
    (PermissionError(13, "No", "/x/y"), [], (SystemExit, "error: /x/y: No")),
    (OSError(30, "Read-only", "/x"), ["--debug"], (OSError, "Read-only")),
    (FileNotFoundError(2, "No", "/x"), [], (FileNotFoundError, "/x")),
  ],
)
def test_only_user_errors_lose_their_traceback(monkeypatch, error, argv, ends):
  monkeypatch.setattr(main, "main", mock.Mock(side_effect=error))
  monkeypatch.setattr("sys.argv", ["main", *argv])
  with pytest.raises(ends[0], match=ends[1]):
    main.run()


@pytest.mark.parametrize("is_open", [True, False])
def test_output_that_is_closed_or_of_few_characters_is_no_error(
  monkeypatch, is_open
):
  written = io.BytesIO()
  output = io.TextIOWrapper(written, encoding="ascii") if is_open else None
  monkeypatch.setattr("sys.stdout", output)
  monkeypatch.setattr(main, "main", lambda argv: print("ü", flush=True))
  main.run()
  assert written.getvalue() == (b"\\xfc\n" if is_open else b"")
  sys.stdout.close()


def test_user_code_that_exits_is_an_error(monkeypatch):
  monkeypatch.setattr(train, "run", lambda *unused: sys.exit(0))
  monkeypatch.setattr("sys.argv", ["main", ARITHMETIC])
  message = r"error: user code ended the run: SystemExit: 0 \(.*_main.py, line"
  with pytest.raises(SystemExit, match=message):
    main.run()


def test_flags_may_be_written_in_two_words():
  config, folder, flags = cli.parse(
    ["main", *ARITHMETIC.split("="), "--config.steps", "3", "--mode", "plan"]
  )
  assert config.steps == 3 and flags.mode == "plan"
  assert folder == pathlib.Path.cwd() / "runs/arithmetic-neyman-seed0"


def test_settings_of_a_sweep_have_different_default_directories():
  """Options that a resumed run may change, and unchanged ones, do not count."""
  parse = lambda *words: bucket.shown(
    cli.parse(["main", ARITHMETIC, *words])[1]
  )
  rate = "--config.optimizer.learning_rate="
  cases = [
    ([], ""),
    (["--config.steps=9", "--config.rollout.group_size=8"], ""),
    ([rate + "1e-6"], "-optimizer.learning_rate=1e-06"),
    ([rate + "0.000001"], "-optimizer.learning_rate=1e-06"),
    (["--config.method.args.prompt_budget=0.5"], "-method.prompt_budget=0.5"),
    (["--config.data.train=my.jsonl"], "-data.train=my.jsonl"),
  ]
  for words, changes in cases:
    expected = f"runs/arithmetic-neyman{changes}-seed0"
    assert parse(*words) == expected == parse(*words)
  templates = ["a/{problem}", "b/{problem}", "b/{problem}?", "x" * 500]
  names = [parse(f"--config.data.template={x}") for x in templates]
  assert len(set(names)) == 4
  assert names[0].startswith("runs/arithmetic-neyman-data.template=_problem_-")
  for name in names:
    assert len(name) < 160 and re.fullmatch(r"runs/[\w.=+-]+", name)


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
  options = configs.walk(configs.Config())
  names = {name for name, _, metadata in options if metadata}
  names |= methods.METHODS.keys() | objectives.OBJECTIVES.keys()
  names |= {"--config", "--mode", "--workdir", "--step", "--to", "--debug"}
  assert names <= first


def test_help_marks_the_options_that_may_change_on_resume():
  text = cli._parser().format_help()
  legend, options = text.partition("options: --config.OPTION")[2].split("\n\n")
  assert "  *         may change on resume" in legend
  assert "[...]" in legend and "FUNCTION" in legend
  names = re.findall(r"^  ([\w.]+)( \*)?  +", options, re.M)
  expected = {
    (name, " *" * metadata["may_change"])
    for name, _, metadata in configs.walk(configs.Config())
    if metadata
  }
  assert set(names) == expected and {mark for _, mark in expected} == {"", " *"}


def test_texts_of_help_start_in_one_column():
  for section in cli._parser().format_help().split("\n\n")[3:]:
    lines = [x for x in section.splitlines() if x.startswith("  ")]
    columns = {re.match(r"  [^ ]+(?: [^ ]+)?  +|  +", x).end() for x in lines}
    assert len(columns) == 1, section


# Configs by file ------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_every_config_fits_every_method(file):
  assert commands.config(file).method.name == "dppo"
  for method, factory in methods.METHODS.items():
    args = configs.default_args(factory)
    values = {f"method__args__{name}": x for name, x in args.items()}
    c = commands.config(f"{file}:{method}", **values)
    configs.validate(c)
    assert (c.method.name, c.method.args) == (method, args)


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_every_objective_has_its_own_arguments(name):
  c = commands.config(f"arithmetic:neyman,{name}", objective__args__beta=0.5)
  assert c.method.name == "neyman" and c.objective.name == name
  objective = objectives.OBJECTIVES[name](beta=0.5)
  assert configs.make_objective(c) == objective


def test_schedule_ends_with_the_run():
  c = commands.config("arithmetic:d3s", steps=77)
  make = mock.create_autospec(methods.d3s)
  make.return_value = methods.grpo()
  c.method.factory = make
  configs.make_method(c)
  assert make.call_args.kwargs["total_steps"] == 77


def test_every_option_is_read():
  """In its own section: many names occur in several."""
  package = pathlib.Path(options.__file__).parents[1]
  reads = set().union(
    *(option_reads.reads(x.read_text()) for x in package.rglob("*.py"))
  )
  names = {x for x, _, metadata in configs.walk(configs.Config()) if metadata}
  unread = {x for x in names if x.rpartition(".")[::2] not in reads}
  assert unread <= {"method.args"}  # read as `chosen.args` of either kind


def test_an_option_that_is_not_read_is_noticed():
  source = """
def one(run, options: configs.LoraConfig, unused: int):
  c, r = run.config, run.config.rollout
  return c.seed, r.top_k, options.rank, run.model.dtype, r.max_tokens.bit_length

def two(config: Config):
  return dataclasses.asdict(config.log), config.model

def validate(config: Config):
  return config.steps
"""
  assert option_reads.reads(source) - {
    ("", x) for x in option_reads.SECTIONS
  } == {
    ("", "seed"),
    ("rollout", "top_k"),
    ("rollout", "max_tokens"),
    ("lora", "rank"),
    ("log", "writers"),
  }


def test_config_is_read_back(tmp_path):
  c = commands.config(
    "arithmetic:neyman,dapo",
    method__args__completion_budget=0.3,
    rollout__stop_ids="(3,4)",
    steps=7,
  )
  path = tmp_path / "config.json"
  resume.write(tmp_path, c)
  assert configs.read(path) == c
  for words in ([f"--config={path}"], [f"--workdir={tmp_path}"]):
    config, folder, _ = cli.parse(["main", *words, "--config.steps=9"])
    assert config == dataclasses.replace(c, steps=9) and folder == tmp_path


@pytest.mark.parametrize(
  "text, message",
  [
    ("{", "not the config of a run"),
    ('{"steps": 3}', "not the config of a run"),
    ("3", "not the config of a run"),
    ('{"method.name": "dppo", "objective.name": "grpo", "stps": 1}', "stps"),
    (
      '{"method.name": "dppo", "objective.name": "grpo", "steps": "3"}',
      "config.json: config.steps is '3' but must be a whole number",
    ),
  ],
)
def test_file_without_a_config_is_named(tmp_path, text, message):
  path = tmp_path / "config.json"
  path.write_text(text)
  with pytest.raises(UserError, match=message):
    configs.read(path)


# Checkpoints and data -------------------------------------------------------


def test_model_starts_from_a_checkpoint(tmp_path):
  hf.save(str(tmp_path), small.params(), small.MODEL)
  vocabulary = {word: i for i, word in enumerate("<eos> + = 0 1 2 3".split())}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<eos>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text("{}")
  c = arithmetic(model__path=tmp_path, rollout__stop_ids="(0,)")
  params = setup_run(c).initial_params()
  jax.tree.map(np.testing.assert_array_equal, params, small.params())


# One directory, one run -----------------------------------------------------


@pytest.fixture
def begun(tmp_path):
  """The config.json of a run that has left a checkpoint."""
  resume.write(tmp_path, arithmetic())
  (tmp_path / "checkpoints" / "0").mkdir(parents=True)
  return tmp_path / "config.json"


def test_the_config_of_a_run_takes_no_other_method(begun):
  with pytest.raises(UserError, match=r"has its own method: omit 'grpo'"):
    cli.parse(["main", f"--config={begun}:grpo"])


@pytest.mark.parametrize("name", ["rollout.drafts", "method.source"])
def test_an_option_that_is_gone_is_not_ignored(begun, name):
  old = json.loads(begun.read_text())
  begun.write_text(json.dumps(old | {name: "mine.py:f"}))
  with pytest.raises(UserError, match=f"config.{name} was 'mine.py:f' and is"):
    resume.write(begun.parent, arithmetic())


def test_directory_of_another_run_is_rejected_by_option(begun):
  other = arithmetic(seed=7, steps=3, model__shape__mlp=8)
  with pytest.raises(UserError, match="another --workdir") as error:
    resume.write(begun.parent, other)
  assert "config.seed was 0 and is now 7" in str(error.value)
  assert "config.model.shape was" in str(error.value)
  assert str(error.value).count(" was ") == 2
  assert json.loads(begun.read_text())["seed"] == 0


def test_a_resumed_run_that_is_stopped_ends_with_that(tmp_path, monkeypatch):
  """Not with the error of a bucket that is out of reach by then."""
  with (
    pytest.raises(KeyboardInterrupt),
    resume.held(tmp_path, commands.config("arithmetic")),
  ):
    unreachable = mock.Mock(side_effect=UserError("out of reach"))
    monkeypatch.setattr(checkpoint_steps, "complete_steps", unreachable)
    raise KeyboardInterrupt


def test_two_processes_do_not_train_in_one_directory(begun):
  with resume.held(begun.parent, arithmetic()):
    second = resume.held(begun.parent, arithmetic(steps=7))
    with pytest.raises(UserError, match="another process trains"), second:
      pytest.fail("the second process may train")
  with resume.held(begun.parent, arithmetic(steps=7)):
    pass  # the first is over


def test_run_resumes_with_other_values_of_adjustable_options(begun):
  before = options.flatten(arithmetic())
  for name in resume.may_change(configs.Config()):
    value = before[name]
    changed = {bool: lambda x: not x, str: lambda x: f"not {x}"}.get(
      type(value), lambda x: x + 1
    )(value)
    resume.write(begun.parent, arithmetic(**{name.replace(".", "__"): changed}))
    assert json.loads(begun.read_text())[name] == changed


@pytest.mark.parametrize("name", ["arithmetic:d3s", "arithmetic"])
def test_steps_are_fixed_if_a_schedule_depends_on_them(begun, name):
  config = lambda **more: commands.config(name, **SETTINGS | more)
  option = {} if "d3s" in name else {"optimizer__schedule": "cosine"}
  begun.write_text(json.dumps(options.flatten(config(**option))))
  with pytest.raises(UserError, match="steps was"):
    resume.write(begun.parent, config(**option, steps=999))


def test_changes_of_the_optimizer_need_a_flag_and_are_kept(begun):
  """All but its function; another resume keeps them."""
  rates = lambda *x: [
    {"optimizer__learning_rate": rate, "optimizer__schedule": "cosine"}
    for rate in x
  ]
  before = arithmetic().optimizer.learning_rate
  one, two = (arithmetic(**x, steps=9) for x in rates(0.1, 0.2))
  with pytest.raises(UserError, match="--allow_change=optimizer"):
    resume.write(begun.parent, one)
  lines = resume.write(begun.parent, one, allowed="optimizer")
  assert len(lines) == 3 and "cosine" in "".join(lines)
  assert resume.write(begun.parent, one) == []
  assert len(resume.write(begun.parent, two, allowed="optimizer")) == 1
  changes = json.loads(begun.read_text())["changes"]
  name = "optimizer.learning_rate after step 0"
  assert changes[name] == f"{before} to 0.1 to 0.2"
  assert configs.read(begun) == two
  other = arithmetic(optimizer__function="optax:lion", steps=9)
  with pytest.raises(UserError, match="function was") as error:
    resume.write(begun.parent, other, allowed="optimizer")
  assert "allow_change" not in str(error.value)
  with pytest.raises(UserError, match="seed was"):
    resume.write(begun.parent, arithmetic(seed=7), allowed="optimizer")


# Logs -----------------------------------------------------------------------


def test_log_of_a_run_keeps_its_traceback(tmp_path, monkeypatch):
  monkeypatch.setattr(train, "_train", lambda *unused: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    train.run(arithmetic(**TINY), tmp_path)
  log = (tmp_path / "log.txt").read_text()
  assert "model: Qwen3ForCausalLM" in log
  assert "Traceback" in log and "ZeroDivisionError" in log


# The code of others ----------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "evaluate", "export", "sample"])
def test_only_training_imports_callbacks_and_optimizer(tmp_path, capfd, mode):
  """Each mode says whose code it imports, before it does so."""
  for name in ("stop", "lion"):
    code = f"raise OSError({name!r})\ndef f(*args): pass\n"
    (tmp_path / f"{name}.py").write_text(code)
  (tmp_path / "fine.py").write_text("def f(completions): return [0]\n")
  config = arithmetic(
    callbacks=f"{tmp_path}/stop.py:f",
    optimizer__function=f"{tmp_path}/lion.py:f",
    reward__functions=f"{tmp_path}/fine.py:f",
    data__eval=f"named={tmp_path}/fine.py:f",
  )
  run = tmp_path / "run"
  resume.write(run, config)
  more = [f"--to={tmp_path}/out"] * (mode == "export")
  more += ["--step=7"] * (mode != "train")  # there is none: no mode gets far
  with pytest.raises(UserError) as info:
    main.main(["main", f"--mode={mode}", f"--workdir={run}", *more])
  printed = capfd.readouterr().out
  assert ("stop.py" in str(info.value)) == (mode == "train")
  names = {"stop", "lion", "fine"} if mode == "train" else {"fine"}
  listed = {x for x in ("stop", "lion", "fine") if f"{x}.py:f" in printed}
  assert listed == names
