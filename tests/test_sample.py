"""--mode=sample prints what the model says, and how likely it was."""

import copy
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import data, evaluate, export, main
from dppo_jax.errors import UserError
from dppo_jax.eval import eval_sets
from dppo_jax.models import transformer
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint, resume
from dppo_jax.run.setup import setup_run
from tests.helpers import commands

pytestmark = pytest.mark.slow

SETTINGS = {
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__train": "arithmetic:32:1",
  "data__prompts_per_step": 2,
  "data__eval_limit": 3,
  "rollout__max_tokens": 8,
  "rollout__temperature": 0.7,
  "pack__row_length": 24,
  "eval__samples": 2,
}
LINE = re.compile(
  r"\[(\d)\] (\d+) tokens, (stop|length), log-probability (\S+) "
  r"\((\S+) per token\)(?:, exact (\d))?\n(.*)"
)


@pytest.fixture(autouse=True, scope="module")
def several_batches():
  """Evaluates in batches of 2 problems."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(eval_sets, "BATCH", 2)
    yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
  """`(config, workdir, weights)` of a run that has a checkpoint of step 0."""
  folder = tmp_path_factory.mktemp("begun")
  c = commands.config("arithmetic", **SETTINGS)
  params = setup_run(c, trains=False).initial_params()
  params = jax.tree.map(lambda x: 3 * x, params)  # less uniform
  resume.write(folder, c)
  state = TrainState(jnp.int32(0), jnp.int32(0), params, (), history=())
  with checkpoint.Checkpoints(folder) as checkpoints:
    checkpoints.save(0, state)
  return c, folder, params


def _sample(capsys, *flags):
  """Returns `(text before it, matched line)` of each printed completion."""
  capsys.readouterr()
  main.main(["main", "--mode=sample", *flags])
  text, done, completions = capsys.readouterr().out, 0, []
  for match in LINE.finditer(text):
    completions.append((text[done : match.start()], match))
    done = match.end()
  assert completions, text
  return completions


@pytest.mark.parametrize("stops", [(), ("=", "1", "+", "2*")])
def test_samples_and_grades_are_those_of_an_evaluation(begun, capsys, stops):
  c, folder, _ = begun
  c = copy.deepcopy(c)
  c.rollout.stop_strings = stops
  evaluate.run(c, folder)
  paths = folder.glob("evaluation/*/completions.jsonl")
  path = max(paths, key=lambda path: path.stat().st_mtime_ns)
  lines = [json.loads(x) for x in path.read_text().splitlines()]
  lines = [x for x in lines if x["decoding"] == "sampled"]
  flags = f"--workdir={folder}", f"--config.rollout.stop_strings={stops}"
  printed = _sample(capsys, *flags, "--prompt=@")
  assert len(lines) == len(printed) == 6
  assert any(x["stopped"] for x in lines) or not stops
  assert not any(stop in x["completion"] for x in lines for stop in stops)
  for line, (before, match) in zip(lines, printed, strict=True):
    number, tokens, end, logprob, mean, grade, text = match.groups()
    assert text == line["completion"] and int(number) == line["sample"] + 1
    assert int(tokens) == line["tokens"] and int(grade) == line["correct"]
    assert end == ("stop" if line["stopped"] else "length")
    assert float(logprob) == pytest.approx(line["logprob"], abs=6e-4)
    assert float(mean) == pytest.approx(
      line["logprob"] / line["tokens"], abs=6e-4
    )
    if line["sample"] == 0:
      assert f"prompt: {line['problem']}\nanswer: {line['answer']}\n" in before


@pytest.mark.parametrize(("samples", "temperature"), [(2, 0.7), (0, 1.0)])
def test_log_probability_is_that_of_the_model(
  begun, capsys, samples, temperature
):
  """Computed again from the full text; greedy text has temperature 1."""
  c, folder, params = begun
  model = setup_run(c, trains=False).spec.model
  tokenizer = data.CharacterTokenizer()
  printed = _sample(
    capsys,
    f"--workdir={folder}",
    "--prompt=3+4=",
    f"--config.eval.samples={samples}",
  )
  assert len(printed) == max(samples, 1)
  for _, match in printed:
    prompt = tokenizer.encode("3+4=")
    ids = [*prompt, *tokenizer.encode(match[7])]
    ids += [1] * (len(prompt) + int(match[2]) - len(ids))  # the stop token
    tokens = jnp.array([ids], jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    hidden = transformer.forward(
      params, model, tokens, positions, jnp.full_like(tokens, tokens.shape[1])
    )
    logits = hidden[0] @ transformer.head(params, model).T
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    at = np.arange(len(prompt) - 1, len(ids) - 1)
    expected = float(logprobs[at, np.array(ids)[at + 1]].sum())
    assert float(match[4]) == pytest.approx(expected, abs=2e-3)
    assert expected < -0.1
    assert match[6] is None  # nothing is graded without an answer


def test_exported_directory_is_sampled_as_its_run_is(begun, capsys, tmp_path):
  """Without a run; on two devices; prompts of several lengths from a file."""
  c, folder, _ = begun
  export.run(c, folder, tmp_path / "exported")
  text = "\ufeff3+4=\n\n15-2+7=\n1+1=\n"
  (tmp_path / "prompts.txt").write_text(text, encoding="utf-8")
  flags = [f"--prompt=@{tmp_path}/prompts.txt", "--config.eval.samples=2"]
  flags.append("--config.data.eval_limit=1")  # not of lines
  of_run = _sample(capsys, f"--workdir={folder}", *flags)
  alone = _sample(
    capsys,
    f"--config.model.path={tmp_path / 'exported'}",
    "--config.rollout.max_tokens=8",
    "--config.rollout.temperature=0.7",
    "--config.mesh.data=2",
    *flags,
  )
  assert len(of_run) == 6
  assert [x[0] for _, x in alone] == [x[0] for _, x in of_run]
  assert "weights: step 0 of" in " ".join(of_run[0][0].split())
  assert f"weights: {tmp_path}/exported" in " ".join(alone[0][0].split())


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def test_lines_of_a_terminal_are_prompts(begun, capsys, monkeypatch):
  """A repeated prompt gets new samples; a mistake does not end the session."""
  lines = _Terminal("3+4=\n3+4=\n\nwhat?\n1+1=")
  monkeypatch.setattr("sys.stdin", lines)
  printed = _sample(capsys, f"--workdir={begun[1]}")
  assert len(printed) == 6
  first, again, last = (
    [x[7] for _, x in printed[i : i + 2]] for i in (0, 2, 4)
  )
  assert first != again
  assert "error: prompt/0: character 'w'" in printed[4][0]
  assert "prompt: 1+1=" in printed[4][0] and last


def test_empty_prompt_is_named(begun, capsys, tmp_path):
  with pytest.raises(UserError, match="--prompt is empty"):
    _sample(capsys, f"--workdir={begun[1]}", "--prompt=")
  with pytest.raises(
    UserError, match=r"--prompt: /dev/null.txt cannot be read"
  ):
    _sample(capsys, f"--workdir={begun[1]}", "--prompt=@/dev/null.txt")
  (tmp_path / "none.txt").write_text("\n")
  with pytest.raises(UserError, match=r"--prompt: .*none.txt has no prompt"):
    _sample(capsys, f"--workdir={begun[1]}", f"--prompt=@{tmp_path}/none.txt")


def test_a_mistake_in_a_pipe_ends_it_with_its_line(begun, capsys, monkeypatch):
  monkeypatch.setattr("sys.stdin", io.StringIO("3+4=\n\nwhat?\n1+1="))
  with pytest.raises(UserError, match=r"line 3 of the input: .*'w'"):
    _sample(capsys, f"--workdir={begun[1]}")


def test_input_that_is_not_utf_8_is_named(begun, capsys, monkeypatch):
  lines = io.TextIOWrapper(io.BytesIO(b"3+4=\n\xff\n"), encoding="utf-8")
  monkeypatch.setattr("sys.stdin", lines)
  with pytest.raises(UserError, match="the input is not UTF-8: invalid start"):
    _sample(capsys, f"--workdir={begun[1]}")
