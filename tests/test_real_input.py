"""Real problems, tokenizers and checkpoint files, all the way to the report.

The model is the only stand-in: two random layers that lean towards a digit in
a box, so that some completions are right, some are boxed and some are neither.
"""

import copy
import gzip
import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest

from dppo_jax import evaluate, train
from dppo_jax.data import PretrainedTokenizer
from tests.helpers import commands, sources

torch = pytest.importorskip("torch")
from tests.helpers import checkpoints  # noqa: E402

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
if not DATA.is_dir():
  pytest.skip("the real data are not available", allow_module_level=True)

pytestmark = pytest.mark.slow

STOPS = ("<|im_end|>", "<|endoftext|>")
# What the model leans towards, step by step.
STAGES = (("\\",), ("boxed",), ("{",), tuple("0123456789"), ("}",), STOPS)

SMALL = {
  "steps": 5,
  "data__eval_limit": 8,
  "data__prompts_per_step": 4,
  "data__max_prompt_tokens": 96,
  "rollout__group_size": 8,
  "rollout__max_tokens": 16,
  "rollout__num_slots": 3,
  "reward__functions": "math,boxed:0.1",
  "pack__row_length": 128,
  "pack__rows_per_micro": 2,
  "optimizer__learning_rate": 1e-2,
}


def rows(name, num=64):
  """The first problems of a file."""
  lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
  columns = ("source", "problem", "answer")
  return [{k: json.loads(line)[k] for k in columns} for line in lines[:num]]


def write_checkpoint(path, family, tokenizer):
  """A checkpoint with a real tokenizer, that leans towards boxed digits."""
  path.mkdir()
  for file in (DATA / "tokenizers" / tokenizer).iterdir():
    if file.suffix == ".gz":
      (path / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    else:
      shutil.copyfile(file, path / file.name)
  words = PretrainedTokenizer(str(path))
  stages = [[words.encode(word)[0] for word in stage] for stage in STAGES]
  model = checkpoints.write(path, family, vocab_size=151936, is_tied=False)
  embed, head = model.model.embed_tokens.weight, model.lm_head.weight
  with torch.no_grad():
    model.model.norm.weight[:] = 1.0
    embed[:, -1] = 100.0  # the first stage may follow any token
    head[stages[0], -1] = 2.85
    for axis, (now, after) in enumerate(itertools.pairwise(stages)):
      embed[now, axis] = 200.0
      head[after, axis] = 2.85
  model.save_pretrained(path)
  stop_ids = {"eos_token_id": stages[-1]}
  (path / "generation_config.json").write_text(json.dumps(stop_ids))
  return str(path)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
  """Five steps from the command line, in bfloat16, with a KL penalty."""
  home = tmp_path_factory.mktemp("gsm8k")
  done = commands.main(
    "gsm8k",
    f"--workdir={home / 'run'}",
    model__path=write_checkpoint(home / "ck", "Qwen3ForCausalLM", "qwen3"),
    data__train=sources.write_jsonl(home / "a.jsonl", rows("gsm8k_train")),
    data__eval=sources.write_jsonl(home / "b.jsonl", rows("gsm8k_test")),
    objective__args__beta=0.04,
    **SMALL,
  )
  assert done.returncode == 0, done.stderr
  return home / "run", done


@pytest.fixture(scope="module")
def math_home(tmp_path_factory):
  home = tmp_path_factory.mktemp("math")
  write_checkpoint(home / "ck", "Qwen2ForCausalLM", "qwen2.5")
  sources.write_jsonl(home / "eval.jsonl", rows("math500"))
  return home


@pytest.fixture(scope="module")
def math(math_home):
  """In float32, with two updates per rollout."""
  config = commands.config(
    "qwen_math",
    model__path=math_home / "ck",
    model__dtype="float32",
    data__train=sources.write_jsonl(math_home / "a.jsonl", rows("math_train")),
    data__eval=math_home / "eval.jsonl",
    objective__inner_updates=2,
    mesh__data=1,
    **SMALL,
  )
  train.run(config, math_home / "run")
  return config


def metrics(workdir):
  """Lines of steps, and lines of evaluations."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  lines = [json.loads(line) for line in lines]
  is_eval = lambda line: "eval/accuracy" in line
  return [x for x in lines if not is_eval(x)], [x for x in lines if is_eval(x)]


def check_run(workdir):
  """Checks the report and the metrics of a run."""
  assert (workdir / "report.png").read_bytes().startswith(b"\x89PNG")
  report = (workdir / "report.md").read_text()
  assert "step 5 of 5" in report
  assert "report.png" in report
  steps, evals = metrics(workdir)
  assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
  assert [line["step"] for line in evals] == [0, 5]
  for line in steps:
    assert all(np.isfinite(value) for value in line.values())
    assert line["update/skipped"] == line["reward/timeouts"] == 0
    assert 0 < line["pack/fill"] <= 1
  assert all(line["update/compiles"] == 0 for line in steps[1:])
  total = lambda name: sum(line[name] for line in steps)
  assert total("reward/mean") > 0
  assert total("reward/unboxed") < len(steps)
  assert 0 < total("completions/stopped") < len(steps)
  assert total("update/grad_norm") > 0
  assert max(line["weights/max"] for line in steps) > 1
  assert any(line["completions/kept"] < 32 for line in steps)


def test_command_line_trains_on_gsm8k(gsm8k):
  workdir, done = gsm8k
  check_run(workdir)
  assert done.stderr == ""
  assert "bfloat16" in done.stdout
  steps, _ = metrics(workdir)
  # The policy is its own reference at first, up to bfloat16's rounding.
  assert steps[0]["update/kl"] < 1e-4
  assert steps[-1]["update/kl"] > 1e-3


def test_run_trains_on_math(math_home, math):
  check_run(math_home / "run")
  steps, _ = metrics(math_home / "run")
  for line in steps:
    assert line["tokens/trained"] > 0
    assert line["update/policy_ratio_max"] > 1.001  # moved between updates


def test_run_on_math_is_evaluated_on_two_sets(math_home, math):
  gsm8k = sources.write_jsonl(math_home / "b.jsonl", rows("gsm8k_test"))
  math500 = DATA / "math500.jsonl"
  c = copy.deepcopy(math)
  c.data.train = "none.jsonl"
  c.data.eval = f"gsm8k={gsm8k},math500={math500}"
  c.data.eval_limit = 12
  c.eval.samples = 3
  evaluate.run(c, math_home / "run")
  directory = math_home / "run/evaluation/step-5"
  sets = json.loads((directory / "results.json").read_text())["sets"]
  for of_set in sets.values():
    value = lambda name, of_set=of_set: of_set["estimates"][name]["value"]
    assert value("avg@3") <= value("pass@3") < 1  # digits in boxes
    assert value("maj@3") <= value("pass@3")
  assert sets["math500"]["completions"]["sampled"]["unboxed"] < 1
  lines = (directory / "completions.jsonl").read_text().splitlines()
  assert len(lines) == 4 * sum(x["problems"] for x in sets.values())
