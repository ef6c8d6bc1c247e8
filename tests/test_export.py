"""Exports hold the trained weights, for this package and transformers."""

import functools
import json
import re

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import config, data, export, rollout
from dppo_jax.analysis import runs, statistics
from dppo_jax.errors import UserError
from dppo_jax.models import hf
from dppo_jax.records import PromptBatch, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import checkpoint
from dppo_jax.run.setup import setup_run
from tests.helpers import commands

pytestmark = pytest.mark.slow

PROBLEMS = ["3+9-5=", "1=", "15-15+4=", "0+0+12="]
SETTINGS = {
  "steps": 1,
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__train": "arithmetic:20:1",
  "data__prompts_per_step": 4,
  "data__eval_limit": 2,
  "rollout__max_tokens": 8,
  "rollout__num_slots": 2,
  "rollout__group_size": 2,
  "pack__row_length": 24,
  "pack__rows_per_micro": 2,
  "sft__steps": 0,
}


def assert_equal(actual, expected):
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def run_of(workdir, params, step=0, **options) -> config.Config:
  """A workdir with nothing but these weights after `step`, and its config."""
  c = commands.config("arithmetic", **SETTINGS | options)
  state = TrainState(jnp.int32(step), jnp.int32(0), params, (), history=())
  with checkpoint.Checkpoints(workdir, keep=2) as checkpoints:
    checkpoints.save(step, state)
  return c


@pytest.fixture
def begun(tmp_path):
  """`(config, workdir, weights)` of a run of the arithmetic task, at step 0."""
  params = setup_run(commands.config("arithmetic", **SETTINGS)).initial_params()
  return run_of(tmp_path / "run", params), tmp_path / "run", params


def write_source(path, family="Qwen3ForCausalLM", **kwargs):
  """A tiny checkpoint with the tokenizer of the arithmetic task."""
  pytest.importorskip("torch")
  from tests.helpers import checkpoints

  checkpoints.write(path, family, **kwargs)
  data.CharacterTokenizer().save(path)
  eos = {"eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": 99}
  (path / "generation_config.json").write_text(json.dumps(eos))


def trained(path, seed=0):
  """Returns the weights of the checkpoint, all of them changed."""
  params, _ = hf.load(path)
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: p + np.asarray(rng.normal(0, 0.1, p.shape), np.float32), params
  )


def our_tokens(path, num_tokens=12) -> list[list[int]]:
  """Greedy completions of PROBLEMS by the checkpoint in `path`."""
  params, model = hf.load(path)
  tokenizer = data.PretrainedTokenizer(path)
  prompts = [tokenizer.encode_prompt(problem) for problem in PROBLEMS]
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  tokens = np.array([x + [0] * (8 - len(x)) for x in prompts], np.int32)
  ids = np.arange(len(prompts), dtype=np.int32)
  batch = PromptBatch(ids, tokens, lengths)
  sample = functools.partial(
    rollout.sample,
    model_config=model,
    group_size=1,
    num_slots=len(prompts),
    max_tokens=num_tokens,
    stop_ids=tokenizer.stop_ids,
    temperature=0.0,
  )
  rng = rng_at(jax.random.key(0), 0, Stage.EVALUATE)
  rolled = jax.device_get(jax.jit(sample)(params, prompts=batch, rng=rng))
  pairs = zip(rolled.tokens, rolled.lengths, strict=True)
  return [x[0, : n[0]].tolist() for x, n in pairs]


def their_tokens(path, num_tokens=12) -> list[list[int]]:
  """Greedy completions of PROBLEMS by transformers, from the directory."""
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(path)
  model = transformers.AutoModelForCausalLM.from_pretrained(path)
  completions = []
  for problem in PROBLEMS:
    inputs = tokenizer(problem, return_tensors="pt")
    out = model.generate(**inputs, do_sample=False, max_new_tokens=num_tokens)
    completions.append(out[0, inputs["input_ids"].shape[1] :].tolist())
  return completions


@pytest.mark.parametrize(
  "family, is_tied",
  [
    ("Qwen2ForCausalLM", True),
    ("Qwen3ForCausalLM", False),
    ("LlamaForCausalLM", False),
    ("Gemma3ForConditionalGeneration", True),
  ],
)
def test_transformers_continues_greedily_as_we_do(tmp_path, family, is_tied):
  source, out = tmp_path / "source", tmp_path / "out"
  write_source(source, family, is_tied=is_tied)
  params = trained(source)
  c = run_of(tmp_path / "run", params, model__path=source)
  export.run(c, tmp_path / "run", out)
  assert_equal(hf.load(out)[0], params)
  ours = our_tokens(out)
  assert ours == their_tokens(out)
  assert len({tuple(tokens) for tokens in ours}) > 1


def test_an_export_keeps_the_files_and_the_dtype_of_its_source(tmp_path):
  source, out = tmp_path / "source", tmp_path / "out"
  write_source(source, dtype="bfloat16", rms_norm_eps=1e-5)
  (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
  (source / "LICENSE").write_text("as you like")
  (source / "tokenizer_old").mkdir()
  params, workdir = trained(source), tmp_path / "run"
  options = {"model__path": source, "rollout__stop_ids": "(1,3)"}
  export.run(run_of(workdir, params, **options), workdir, out)
  for name in ("tokenizer.json", "chat_template.jinja", "LICENSE"):
    assert (out / name).read_bytes() == (source / name).read_bytes()
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation["eos_token_id"] == [1, 3]
  assert generation["max_new_tokens"] == 99
  settings = json.loads((out / "config.json").read_text())
  assert settings["torch_dtype"] == "bfloat16"
  assert settings["rms_norm_eps"] == 1e-5
  rounded = jax.tree.map(
    lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params
  )
  assert_equal(hf.load(out)[0], rounded)


def test_an_export_has_the_chat_template_of_training(tmp_path):
  import transformers

  source, out = tmp_path / "source", tmp_path / "out"
  write_source(source)
  (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
  params, workdir = trained(source), tmp_path / "run"
  template = "one two {{ messages[0].content }}"
  c = run_of(workdir, params, model__path=source)
  c.data.template_args = {"chat_template": template}
  export.run(c, workdir, out)
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  talk = [{"role": "user", "content": "x"}]
  assert theirs.apply_chat_template(talk, tokenize=False) == "one two x"
  assert not (out / "chat_template.jinja").exists()
  ours = data.PretrainedTokenizer(str(source), c.data.template_args)
  assert data.PretrainedTokenizer(str(out)).prompt("x") == ours.prompt("x")


def test_the_arithmetic_tokenizer_is_the_same_in_transformers(tmp_path):
  ours = data.CharacterTokenizer()
  ours.save(tmp_path)
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1]}')
  theirs = data.PretrainedTokenizer(str(tmp_path))
  rng = np.random.default_rng(0)
  for _ in range(20):
    ids = rng.integers(len(ours.SYMBOLS), size=20).tolist()
    text = ours.decode(ids)
    assert theirs.decode(ids) == text
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.encode_prompt(text) == ours.encode_prompt(text)
  for name in ("vocab_size", "pad_id", "stop_ids"):
    assert getattr(theirs, name) == getattr(ours, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_randomly_initialised_model_gets_all_settings(begun, tmp_path, dtype):
  c, workdir, params = begun
  export.run(c, workdir, tmp_path / "out", dtype=dtype)
  rounded = jax.tree.map(lambda p: p.astype(dtype).astype(jnp.float32), params)
  assert_equal(hf.load(tmp_path / "out")[0], rounded)
  settings = json.loads((tmp_path / "out/config.json").read_text())
  expected = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": dtype,
    "tie_word_embeddings": True,
    "max_position_embeddings": 24,
    "eos_token_id": 1,
    "vocab_size": 24,
    "head_dim": 8,
  }
  assert settings.items() >= expected.items()
  generation = json.loads((tmp_path / "out/generation_config.json").read_text())
  assert generation == {"eos_token_id": [1], "pad_token_id": 0}


def eval_completions(workdir, step):
  lines = (workdir / "samples.jsonl").read_text().splitlines()
  samples = [json.loads(line) for line in lines]
  is_wanted = lambda x: (x["split"], x["step"]) == ("eval", step)
  return [x["completion"] for x in samples if is_wanted(x)]


def test_from_a_run_to_an_export_to_another_run(tmp_path):
  first, out, second = (tmp_path / x for x in ("first", "out", "second"))
  options = SETTINGS | {"sft__steps": 20}
  model = {"model__path": out, "steps": 0}
  for process in (
    commands.main("arithmetic:grpo", f"--workdir={first}", **options),
    commands.command("--mode=export", f"--workdir={first}", f"--to={out}"),
    commands.main("arithmetic:grpo", f"--workdir={second}", **SETTINGS | model),
  ):
    assert process.returncode == 0, process.stderr
  completions = eval_completions(first, 1)
  assert len(completions) == 2 and any(completions)
  assert eval_completions(second, 0) == completions
  # Without results of --mode=evaluate, the card has those of the run.
  card = (out / "README.md").read_text()
  for decoding, accuracy in runs.accuracies(runs.load(first).evals[-1]).items():
    shown = statistics.with_interval(accuracy)
    assert f"- {decoding} accuracy on 2 problems: {shown}\n" in card


def test_the_card_has_prompt_results_options_and_the_base_model(
  begun, tmp_path, monkeypatch
):
  c, workdir, _ = begun
  export.run(c, workdir, tmp_path / "base")
  c.model.hub_id = "them/base"
  monkeypatch.setattr(hf, "fetch", {"them/base": str(tmp_path / "base")}.get)
  estimate = {"value": 0.25, "low": 0.1, "high": 0.4}
  sets = {"aime": {"problems": 30, "estimates": {"greedy": estimate}}}
  for step in (0, 1):
    folder = workdir / f"evaluation/step-{step}"
    folder.mkdir(parents=True)
    results = {"step": step, "sets": sets if step == 0 else {}}
    (folder / "results.json").write_text(json.dumps(results))
  export.run(c, workdir, tmp_path / "out")
  card = huggingface_hub.ModelCard.load(tmp_path / "out/README.md")
  assert card.data.library_name == "transformers"
  assert card.data.base_model == "them/base"
  assert "dppo" in card.data.tags
  assert "were\n\n```\n{problem}\n```" in card.text
  assert "| aime | 30 | greedy accuracy | 0.250 | 0.100 to 0.400 |" in card.text
  options = re.search(r"```json\n(.*)\n```", card.text, re.DOTALL)[1]
  assert json.loads(options)["rollout.max_tokens"] == 8
  (workdir / "evaluation/step-0/results.json").write_text('{"step": 0, "s')
  with pytest.raises(UserError, match=r"results\.json .* delete it, or eval"):
    export.run(c, workdir, tmp_path / "again")


@pytest.mark.parametrize(
  ("template", "shown"),
  [
    ("", "{problem}"),
    ("{question}? {options}", "{question}? {options}"),
    ("Of {choices[0]} and {{1}}:", "Of {choices[0]} and {{1}}:"),
    ("my.py:prompt", "(made of each row by my.py:prompt)"),
  ],
)
def test_the_card_shows_the_template_of_any_columns(template, shown):
  assert export._prompt(template, data.CharacterTokenizer()) == shown


def test_the_card_says_that_a_template_needs_more_messages():
  class Picky(data.CharacterTokenizer):
    def prompt(self, prompt, tools=None):
      raise UserError("messages[1] is undefined")

  assert (
    export._prompt("", Picky()) == "(made of each row by the chat template)"
  )


def test_only_a_new_or_an_empty_directory_is_written(begun, tmp_path):
  c, workdir, params = begun
  out = tmp_path / "there/out"
  out.mkdir(parents=True)
  place = out.stat().st_ino  # a mounted directory cannot be replaced
  export.run(c, workdir, out)
  assert out.stat().st_ino == place
  assert_equal(hf.load(out)[0], params)
  (tmp_path / "file").write_text("")
  for taken in (out, workdir, tmp_path / "file"):
    with pytest.raises(UserError, match=r"is not empty, it has|is a file"):
      export.run(c, workdir, taken)
  assert [x.name for x in out.parent.iterdir()] == ["out"]
  link = tmp_path / "link"
  link.symlink_to(workdir)
  for run in (workdir, link):
    with pytest.raises(UserError, match="is among the checkpoints"):
      export.run(c, run, run / "checkpoints/9")


def test_missing_weights_raise(begun, tmp_path):
  c, workdir, _ = begun
  with pytest.raises(UserError, match="no checkpoint of step 3"):
    export.run(c, workdir, tmp_path / "out", step=3)
  with pytest.raises(UserError, match=r"--workdir: no checkpoint in"):
    export.run(c, tmp_path / "none", tmp_path / "out")
  c.model.shape["embed"] = 32
  with pytest.raises(UserError, match=r"another model.* use that run's config"):
    export.run(c, workdir, tmp_path / "out")
  assert not (tmp_path / "out").exists()
