"""Other data, or other code, under the same name does not go unnoticed."""

import dataclasses
import json

import commands
import pytest
import sources

from dppo_jax import config as configs
from dppo_jax.run import fingerprints, workdir
from dppo_jax.run.setup import setup_run

ROWS = [
  {"problem": f"{i}+1=", "answer": str(i + 1), "hint": i} for i in range(32)
]
REWARD = "def brief(completions):\n  return [-len(x) for x in completions]\n"


@pytest.fixture
def run(tmp_path):
  """Makes a config whose data and reward are files, and its fingerprints."""
  data = sources.write_jsonl(tmp_path / "data.jsonl", ROWS)
  (tmp_path / "mine.py").write_text(REWARD)

  def make(**more):
    c = commands.config(
      "arithmetic",
      data__train=data,
      data__eval="",
      data__prompts_per_step=16,
      sft__steps=0,
      reward__functions=f"{tmp_path}/mine.py:brief,exact",
      **more,
    )
    return c, fingerprints.of_run(c, setup_run(c).train_set)

  return make


def _begin(tmp_path, config, prints):
  path = tmp_path / "run/config.json"
  workdir.write(path, config, prints)
  (tmp_path / "run/checkpoints/0").mkdir(parents=True)
  return path


def test_the_same_data_and_code_have_the_same_fingerprint(run, tmp_path):
  config, prints = run()
  assert run()[1] == prints
  assert prints.keys() == {"data.train", "reward.functions"}
  path = _begin(tmp_path, config, prints)
  workdir.write(path, config, prints)
  assert configs.read(path) == config  # it is no option


@pytest.mark.parametrize("what", ["answer", "hint", "problem"])
def test_other_data_under_the_same_name_are_refused(run, tmp_path, what):
  config, prints = run()
  path = _begin(tmp_path, config, prints)
  rows = [row | {what: "5" if row is ROWS[3] else row[what]} for row in ROWS]
  sources.write_jsonl(tmp_path / "data.jsonl", rows)
  _, other = run()
  with pytest.raises(ValueError, match=r"config\.data\.train names is not"):
    workdir.write(path, config, other)
  # The way out that it tells of.
  saved = json.loads(path.read_text())
  del saved[workdir.PRINTS]["data.train"]
  path.write_text(json.dumps(saved))
  workdir.write(path, config, other)
  assert json.loads(path.read_text())[workdir.PRINTS] == other


def test_another_template_or_reward_is_other_data_or_code(run, tmp_path):
  config, prints = run()
  _, other = run(data__template="1+{problem}")
  assert other["data.train"] != prints["data.train"]
  (tmp_path / "mine.py").write_text(REWARD.replace("-len", "len"))
  with pytest.raises(ValueError, match=r"config\.reward\.functions names is"):
    workdir.write(_begin(tmp_path, config, prints), *run())


def test_what_has_no_text_of_its_own_does_not_differ_by_its_address(run):
  c = run()[0]
  train_set = setup_run(c).train_set
  prints = []
  for _ in range(2):
    columns = train_set.columns | {"x": (object(), b"1", {"a": object()})}
    other = dataclasses.replace(train_set, columns=columns)
    prints.append(fingerprints.of_run(c, other))
  assert prints[0] == prints[1] != fingerprints.of_run(c, train_set)


@pytest.mark.parametrize("cut", [None, 40, 0])
def test_checkpoints_without_a_config_are_refused(run, tmp_path, cut):
  """Deleted or cut short: what may change could not be checked."""
  config, prints = run()
  path = _begin(tmp_path, config, prints)
  content = path.read_bytes()
  path.unlink() if cut is None else path.write_bytes(content[:cut])
  what = "no" if cut is None else "a damaged"
  match = rf"run has checkpoints but {what} config.json .* put it back"
  with pytest.raises(ValueError, match=match):
    workdir.write(path, config, prints)
  path.write_bytes(content)
  workdir.write(path, config, prints)
