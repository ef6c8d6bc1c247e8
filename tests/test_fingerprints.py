"""Data or code that changed under the same name is noticed on resume."""

import json

import pytest

from dppo_jax import config as configs
from dppo_jax.errors import UserError
from dppo_jax.files import user_code
from dppo_jax.run import resume
from dppo_jax.run.setup import setup_run
from tests.helpers import commands, sources

ROWS = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(32)]
MODULE = "mine_too.inner"
_METHOD = """
from dppo_jax import methods

def mine(mode: str = "plain"):
  return methods.grpo()
"""
REWARD = "def brief(completions):\n  return [-len(x) for x in completions]\n"


def _prints(config):
  run = setup_run(config)
  return resume.fingerprints(config, run.train_set, run.eval_sets)


@pytest.fixture
def run(tmp_path):
  """Returns a config whose data and reward are files, and its fingerprints."""
  data = sources.write_jsonl(tmp_path / "data.jsonl", ROWS)
  (tmp_path / "mine.py").write_text(REWARD)

  def make(**more):
    c = commands.config(
      "arithmetic",
      data__train=data,
      data__prompts_per_step=16,
      sft__steps=0,
      **{
        "data__eval": data,
        "reward__functions": f"{tmp_path}/mine.py:brief,exact",
      }
      | more,
    )
    return c, _prints(c)

  return make


def _begin(tmp_path, config, prints):
  path = tmp_path / "run/config.json"
  resume.write(path.parent, config, prints)
  (tmp_path / "run/checkpoints/0").mkdir(parents=True)
  return path


def test_the_same_data_and_code_have_the_same_fingerprint(run, tmp_path):
  config, prints = run()
  assert run()[1] == prints
  assert {x.partition(".")[2] for x in prints} == {"data", "eval", "code"}
  path = _begin(tmp_path, config, prints)
  resume.write(path.parent, config, prints)
  assert configs.read(path) == config


@pytest.mark.parametrize("what", ["answer", "problem"])
def test_changed_data_is_rejected(run, tmp_path, what):
  config, prints = run()
  path = _begin(tmp_path, config, prints)
  rows = [row | {what: "5" if row is ROWS[3] else row[what]} for row in ROWS]
  sources.write_jsonl(tmp_path / "data.jsonl", rows)
  _, other = run()
  with pytest.raises(UserError, match=r"config\.fingerprints\.data was"):
    resume.write(path.parent, config, other)
  # What the message allows.
  saved = json.loads(path.read_text())
  path.write_text(json.dumps(saved | other))
  resume.write(path.parent, config, other)


def test_changed_evaluation_data_is_said_or_rejected(run, tmp_path):
  """Accuracies before and after are of different problems."""
  file = sources.write_jsonl(tmp_path / "eval.jsonl", ROWS[:8])
  config, prints = run(data__eval=file)
  path = _begin(tmp_path, config, prints)
  sources.write_jsonl(tmp_path / "eval.jsonl", ROWS[8:16])
  best, other = run(data__eval=file, checkpoint__best="eval/accuracy")
  with pytest.raises(UserError, match=r"config\.fingerprints\.eval was"):
    resume.write(path.parent, best, other)
  (line,) = resume.write(path.parent, *run(data__eval=file))
  assert line.startswith("changed config.fingerprints.eval from")
  assert (
    "fingerprints.eval after step 0" in json.loads(path.read_text())["changes"]
  )


def test_only_a_run_that_never_started_is_removed(run, tmp_path):
  workdir = tmp_path / "new"
  for text in ("", '{"step": 1}\n'):  # without checkpoints: they were moved
    with pytest.raises(UserError), resume.held(workdir, *run()):
      (workdir / "metrics.jsonl").write_text(text)
      raise UserError
    assert workdir.exists() == bool(text)


def test_changed_template_or_reward_is_noticed(run, tmp_path):
  config, prints = run()
  _, other = run(data__template="1+{problem}")
  assert other != prints
  (tmp_path / "mine.py").write_text(REWARD.replace("-len", "len"))
  with pytest.raises(UserError, match=r"fingerprints\.code was"):
    resume.write(_begin(tmp_path, config, prints).parent, *run())


def test_changed_modules_are_noticed_and_installed_ones_may_change(
  run, tmp_path, monkeypatch
):
  monkeypatch.syspath_prepend(tmp_path)
  package = tmp_path / "mine_too"
  package.mkdir()
  for name in ("__init__", "inner"):
    (package / f"{name}.py").write_text(REWARD)
  before = [
    run(reward__functions=f"{name}:brief")[1] for name in ("mine", MODULE)
  ]
  (package / "inner.py").write_text(REWARD + "# changed")
  (tmp_path / "mine.py").write_text(REWARD + "# changed")
  after = [
    run(reward__functions=f"{name}:brief")[1] for name in ("mine", MODULE)
  ]
  key = "fingerprints.code"
  assert all(x[key] != y[key] for x, y in zip(before, after, strict=True))
  config, prints = run(optimizer__function="optax:lion")
  assert prints[key] == run()[1][key]  # an upgrade of optax is no change
  names = ["reward.functions", "optimizer.function"]
  assert [*configs.user_functions(config, names)] == [
    f"{tmp_path}/mine.py:brief",
    "optax:lion",
  ]


def test_columns_that_a_reward_of_the_users_may_read_count(run, tmp_path):
  change = lambda rows: sources.write_jsonl(tmp_path / "data.jsonl", rows)
  more = [row | {"level": 1} for row in ROWS]
  change(more)
  before, built_in = run()[1], run(reward__functions="exact")[1]
  change([*more[:3], more[3] | {"level": 2}, *more[4:]])
  assert run(reward__functions="exact")[1] == built_in
  key = "fingerprints.data"
  assert run()[1][key] != before[key]


def test_code_is_files_in_directories_with_any_name(tmp_path):
  file = tmp_path / "lr=1/mine.py"
  c = commands.config("arithmetic", data__eval=f"a={file}:f,b=x.jsonl")
  c.optimizer.function, c.callbacks = f"{file}:g", f"{file}:h,{file}:i"
  c.method.args["keep"] = f"{file}:k"
  file.parent.mkdir()
  file.write_text("")
  names = "data.eval optimizer.function callbacks method.args".split()
  files = configs.user_functions(c, names)
  assert files == {f"{file}:{x}": str(file) for x in "fghik"}


def test_a_method_of_the_users_may_move(run, tmp_path):
  (tmp_path / "a").mkdir()
  (tmp_path / "a/mine.py").write_text(_METHOD)
  words = [f"--config={commands.ROOT}/configs/arithmetic.py:{{}}/mine.py:mine"]
  words += ["--config.sft.steps=0"]
  before = commands.parse([x.format(tmp_path / "a") for x in words])
  path = _begin(tmp_path, before, _prints(before))
  (tmp_path / "a").rename(tmp_path / "b")
  after = commands.parse([x.format(tmp_path / "b") for x in words])
  resume.write(path.parent, after, _prints(after))
  assert configs.read(path).method.factory.__name__ == "mine"


def test_arguments_that_are_text_stay_text(tmp_path):
  """Also if they read as the reference of a function."""
  (tmp_path / "mine.py").write_text(_METHOD)
  config = commands.parse(
    [
      f"--config={commands.ROOT}/configs/arithmetic.py:{tmp_path}/mine.py:mine",
      "--config.method.args.mode=min:max",
    ]
  )
  (tmp_path / "config.json").write_text(json.dumps(configs.flatten(config)))
  assert configs.read(tmp_path / "config.json").method.args == {
    "mode": "min:max"
  }


def test_files_of_one_name_are_different_modules(tmp_path):
  references = []
  for folder in ("m", "o.v2"):
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "my.v1.py"
    file.write_text(f"def {folder[0]}():\n  pass\n")
    references.append(f"{file}:{folder[0]}")
  functions = [user_code.load(x) for x in references]
  assert [user_code.reference_of(x) for x in functions] == references


def test_a_package_with_a_fault_is_named(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "faulty").mkdir()
  (tmp_path / "faulty/__init__.py").write_text("1 / 0\n")
  assert user_code.file_of("faulty.inner:f") == ""
  with pytest.raises(UserError, match=r"cannot be imported: ZeroDivisionError"):
    user_code.load("faulty.inner:f")


def test_a_source_is_no_user_code(tmp_path, monkeypatch):
  """Even if a module has its name, such as the file of a config."""
  monkeypatch.syspath_prepend(tmp_path)
  file = tmp_path / "arithmetic.py"
  file.write_text("")
  assert user_code.file_of("arithmetic:16") == ""
  assert user_code.file_of("arithmetic:rows") == str(file)


def test_changes_need_a_run_to_resume(run, tmp_path):
  with pytest.raises(UserError, match=r"--allow_change: .*new has no checkpo"):
    resume.is_done(run()[0], tmp_path / "new", allowed="optimizer")
  assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("cut", [None, 40])
def test_checkpoints_without_a_config_are_rejected(run, tmp_path, cut):
  config, prints = run()
  path = _begin(tmp_path, config, prints)
  content = path.read_bytes()
  path.unlink() if cut is None else path.write_bytes(content[:cut])
  match = r"config.json .*run has checkpoints: restore it"
  with pytest.raises(UserError, match=match):
    resume.write(path.parent, config, prints)
  path.write_bytes(content)
  resume.write(path.parent, config, prints)
