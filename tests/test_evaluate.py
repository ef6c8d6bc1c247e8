"""--mode=evaluate on a run, on a checkpoint and on several sets."""

import errno
import json
import re
import shutil

import jax
import numpy as np
import pytest

from dppo_jax import config as configs
from dppo_jax import data, evaluate, main, sample, train
from dppo_jax.errors import UserError
from dppo_jax.eval import eval_sets
from dppo_jax.run.description import description, warnings
from dppo_jax.run.setup import setup_run
from tests.helpers import commands, sources

pytestmark = pytest.mark.slow

SMALL = {
  "steps": 2,
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__train": "arithmetic:100:1",
  "data__prompts_per_step": 8,
  "data__eval_limit": 10,
  "rollout__group_size": 4,
  "rollout__max_tokens": 8,
  "rollout__num_slots": 4,
  "pack__row_length": 24,
  "pack__rows_per_micro": 8,
  "sft__steps": 150,
}


def _config(**overrides) -> configs.Config:
  return commands.config("arithmetic", **SMALL | overrides)


@pytest.fixture(autouse=True, scope="module")
def several_batches():
  """Evaluates in batches of 8 problems."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(eval_sets, "BATCH", 8)
    yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("trained")
  train.run(_config(), workdir)
  return workdir


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
  """An option that names two sets."""
  path = tmp_path_factory.mktemp("sets") / "own.jsonl"
  rows = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
  return f"short=arithmetic,own={sources.write_jsonl(path, rows)}"


def _results(workdir, folder="step-2"):
  directory = workdir / "evaluation" / folder
  lines = (directory / "completions.jsonl").read_text().splitlines()
  results = json.loads((directory / "results.json").read_text())
  return results, [json.loads(line) for line in lines]


def _key(line):
  return line["set"], line["decoding"]


def test_the_command_line_evaluates_several_sets(trained, sets):
  before = (trained / "config.json").read_text()
  process = commands.command(
    "--mode=evaluate",
    f"--workdir={trained}",
    f"--config.data.eval={sets}",
    "--config.data.train=missing.jsonl",
    "--config.eval.samples=4",
  )
  assert process.returncode == 0, process.stderr
  assert (trained / "config.json").read_text() == before
  assert "weights: step 2 of" in process.stdout
  results, lines = _results(trained)
  page = (trained / "evaluation/step-2/results.md").read_text()
  for name, num in (("short", 10), ("own", 9)):
    for label in ("sampled accuracy, avg@4", "maj@4", "greedy accuracy"):
      assert f"| {name} | {num} | {label} |" in page
    estimates = results["sets"][name]["estimates"]
    greedy, sampled = (
      np.array([x["correct"] for x in lines if _key(x) == (name, decoding)])
      for decoding in ("greedy", "sampled")
    )
    expected = {
      "greedy": greedy.mean(),
      "avg@4": sampled.mean(),
      "pass@4": sampled.reshape(num, 4).max(1).mean(),
    }
    for estimate, value in expected.items():
      assert estimates[estimate]["value"] == pytest.approx(value)
  assert len(lines) == 19 * 5
  for line in lines:
    assert line["correct"] == (line["extracted"] == line["answer"])
    assert line["stopped"] or line["tokens"] == 8
  # The samples of a set do not depend on the other sets.
  options = {"data__eval": "short=arithmetic", "data__train": "missing.jsonl"}
  evaluate.run(_config(eval__samples=4, **options), trained)
  _, again = _results(trained, "step-2.1")
  assert again == [x for x in lines if x["set"] == "short"]


def test_sets_have_independent_random_numbers():
  at = lambda *args: jax.random.key_data(
    eval_sets.rng_of_set(jax.random.key(0), *args).key
  ).tolist()
  assert at("a", 0) == at("b", 0)  # the first set, under any name
  assert at("a", 1) == at("a", 2) != at("b", 1)


def test_greedy_accuracy_equals_that_of_training(trained):
  lines = (trained / "metrics.jsonl").read_text().splitlines()
  lines = [json.loads(line) for line in lines]
  logged = {x["step"]: x.get("eval/greedy_accuracy") for x in lines}
  evaluate.run(_config(), trained, 0)
  results, _ = _results(trained, "step-0")
  estimates = results["sets"]["arithmetic"]["estimates"]
  assert estimates["greedy"]["value"] == pytest.approx(logged[0])
  assert logged[0] > 0  # or the test would say nothing


def test_a_step_or_a_model_of_another_run_raises(trained):
  with pytest.raises(UserError, match=r"no checkpoint of step 7"):
    evaluate.run(_config(), trained, 7)
  with pytest.raises(UserError, match=r"another model.* use that run's config"):
    evaluate.run(_config(model__shape__embed=32), trained)
  with pytest.raises(UserError, match=r"config.data.eval is empty"):
    evaluate.run(_config(data__eval=""), trained)


def test_a_run_that_cannot_be_written_is_named_before_anything_is_sampled(
  trained, monkeypatch
):
  def mkdir(path, *unused, **options):
    raise OSError(errno.EROFS, "Read-only file system", str(path))

  monkeypatch.setattr("pathlib.Path.mkdir", mkdir)
  monkeypatch.setattr(evaluate, "_evaluate_set", None)
  argv = ["main", "--mode=evaluate", f"--workdir={trained}"]
  monkeypatch.setattr("sys.argv", argv)
  message = r"error: .*/evaluation/step-2.*: Read-only file system"
  with pytest.raises(SystemExit, match=message):
    main.run()


def test_results_that_cannot_be_written_are_shown(trained, monkeypatch, capsys):
  def replace(path, *unused):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))

  monkeypatch.setattr("os.replace", replace)
  argv = ["main", "--mode=evaluate", f"--workdir={trained}"]
  monkeypatch.setattr("sys.argv", argv)
  with pytest.raises(SystemExit, match=r"No space left"):
    main.run()
  assert re.search(r"arithmetic +10 +greedy", capsys.readouterr().out)
  shutil.rmtree(trained / "evaluation")


def test_every_mode_names_an_end_of_turns_that_does_not_stop(
  trained, monkeypatch, capsys
):
  warning = "a turn ends in 7"
  tokenizer = data.CharacterTokenizer
  monkeypatch.setattr(tokenizer, "stop_warning", warning)
  for stop_ids in ((), (7,)):
    c = _config(rollout__stop_ids=stop_ids)
    lines = description(setup_run(c), c).splitlines()
    assert (warning in lines) == (not stop_ids)
  evaluate.run(_config(eval__samples=0, data__eval_limit=2), trained)
  assert capsys.readouterr().out.count(warning) == 1
  sample.run(_config(eval__samples=0), trained, prompt="1+1=")
  assert capsys.readouterr().out.count(warning) == 1


def test_training_logs_every_set_and_several_samples(tmp_path, sets):
  train.run(_config(steps=0, data__eval=sets, eval__samples=3), tmp_path)
  (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
  metrics = json.loads(line)
  for stage in ("eval", "eval/own"):
    names = ("accuracy_low", "greedy_accuracy", "tokens", "stopped")
    assert {f"{stage}/{name}" for name in names} <= metrics.keys()
    names = ("accuracy", "pass_at_2", "pass_at_3")
    values = [metrics[f"{stage}/{name}"] for name in names]
    assert values == sorted(values)
  samples = (tmp_path / "samples.jsonl").read_text().splitlines()
  splits = [json.loads(x)["split"] for x in samples]
  assert set(splits) == {"eval", "eval/own"}


def test_without_checkpoints_the_weights_are_the_initial_ones(tmp_path):
  evaluate.run(_config(data__train=""), tmp_path)
  results, _ = _results(tmp_path, "step-0")
  assert results["weights"].startswith("random")
  estimates = results["sets"]["arithmetic"]["estimates"]
  assert list(estimates) == ["avg@1", "greedy"]


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("spare", [-1, 0, None])
def test_lengths_beyond_the_positions_of_the_model_are_reported(
  tmp_path, spare, is_nested
):
  run = setup_run(c := _config())
  sets = (run.train_set, *run.eval_sets.values())
  longest = max(x.lengths.max() for x in sets) + c.rollout.max_tokens
  settings = {"max_position_embeddings": int(longest) + (spare or 0)}
  settings = {} if spare is None else settings
  if is_nested:
    name = "Gemma3ForConditionalGeneration"
    settings = {"architectures": [name], "text_config": settings}
  (tmp_path / "config.json").write_text(json.dumps(settings))
  lines = warnings(run._replace(path=str(tmp_path)), c)
  assert len(lines) == (spare == -1)
  if lines:
    assert f"{longest} tokens, but the model has {longest - 1} " in lines[0]
