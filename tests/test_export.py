"""What is exported is what was trained, for us and for transformers."""

import functools
import json
import os
import pathlib
import re
import shutil

import commands
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tokenizers
from tokenizers import processors

from dppo_jax import config, data, export, rollout
from dppo_jax.models import hf, transformer
from dppo_jax.records import PromptBatch, TrainState
from dppo_jax.rng import Stage, rng_at
from dppo_jax.run import checkpoint
from dppo_jax.run.setup import setup_run
from dppo_jax.step import sft

pytestmark = pytest.mark.slow

PROBLEMS = ["3+9-5=", "1=", "15-15+4=", "0+0+12="]
SETTINGS = {
  "steps": 1,
  "model__shape__layers": 1,
  "model__shape__embed": 16,
  "model__shape__mlp": 32,
  "model__shape__head_dim": 8,
  "data__num_arithmetic": 20,
  "data__max_operations": 1,
  "data__prompts_per_step": 4,
  "data__eval_limit": 2,
  "rollout__max_tokens": 8,
  "rollout__num_slots": 2,
  "rollout__group_size": 2,
  "pack__row_length": 24,
  "pack__rows_per_micro": 2,
  "sft__steps": 0,
  "eval__prompts": 2,
}


def assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def run_of(workdir, params, step=0, **options) -> config.Config:
  """A workdir with nothing but these weights after `step`, and its config."""
  c = commands.config("arithmetic", **SETTINGS | options)
  state = TrainState(jnp.int32(step), jnp.int32(0), params, (), history=())
  with checkpoint.Checkpoints(workdir, keep=2) as checkpoints:
    checkpoints.save(step, state)
  return c


def weights(**options) -> transformer.Params:
  """Those that the arithmetic task begins with."""
  c = commands.config("arithmetic", **SETTINGS | options)
  return setup_run(c).initial_params()


@pytest.fixture
def begun(tmp_path):
  """`(config, workdir, weights)` of a run without a step."""
  params = weights()
  return run_of(tmp_path / "run", params), tmp_path / "run", params


# From a checkpoint ----------------------------------------------------------


def write_source(path, family="Qwen3ForCausalLM", **kwargs):
  """A tiny checkpoint with the tokenizer of the arithmetic task."""
  pytest.importorskip("torch")
  import checkpoints

  checkpoints.write(path, family, **kwargs)
  data.CharacterTokenizer().save(path)
  eos = {"eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": 99}
  (path / "generation_config.json").write_text(json.dumps(eos))


def trained(path, seed=0):
  """What training might make of the checkpoint: all weights are others."""
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
  tokens = np.zeros((len(prompts), 8), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: len(prompt)] = prompt
  batch = PromptBatch(
    np.arange(len(prompts), dtype=np.int32),
    tokens,
    np.array([len(prompt) for prompt in prompts], np.int32),
  )
  sample = functools.partial(
    rollout.sample,
    model_config=model,
    group_size=1,
    num_slots=len(prompts),
    prefill_batch=len(prompts),
    max_tokens=num_tokens,
    stop_ids=tokenizer.stop_ids,
    temperature=0.0,
  )
  rng = rng_at(jax.random.key(0), 0, Stage.EVALUATE)
  got = jax.device_get(jax.jit(sample)(params, prompts=batch, rng=rng))
  return [
    x[0, : n[0]].tolist() for x, n in zip(got.tokens, got.lengths, strict=True)
  ]


def their_tokens(path, num_tokens=12) -> list[list[int]]:
  """The same by transformers, from what the directory says alone."""
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(path)
  model = transformers.AutoModelForCausalLM.from_pretrained(path)
  found = []
  for problem in PROBLEMS:
    inputs = tokenizer(problem, return_tensors="pt")
    out = model.generate(**inputs, do_sample=False, max_new_tokens=num_tokens)
    found.append(out[0, inputs["input_ids"].shape[1] :].tolist())
  return found


@pytest.mark.parametrize(
  "family, is_tied",
  [
    ("Qwen2ForCausalLM", True),
    ("Qwen3ForCausalLM", False),
    ("LlamaForCausalLM", False),
  ],
)
def test_transformers_goes_on_greedily_as_we_do(tmp_path, family, is_tied):
  source, out = tmp_path / "source", tmp_path / "out"
  write_source(source, family, is_tied=is_tied)
  params = trained(source)
  c = run_of(tmp_path / "run", params, model__path=source)
  export.run(c, tmp_path / "run", out)
  assert_equal(hf.load(out)[0], params)
  ours = our_tokens(out)
  assert ours == their_tokens(out)
  assert len({tuple(tokens) for tokens in ours}) > 1


def test_a_checkpoints_own_files_come_along(tmp_path):
  """In the dtype of its files, rounded as transformers would."""
  source, out = tmp_path / "source", tmp_path / "out"
  write_source(source, dtype="bfloat16", rms_norm_eps=1e-5)
  (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
  (source / "LICENSE").write_text("as you like")
  hot = {"eos_token_id": 1, "max_new_tokens": 99, "top_p": 0.8}
  (source / "generation_config.json").write_text(json.dumps(hot))
  params = trained(source)
  options = {"model__path": source, "rollout__stop_ids": "(1,3)"}
  export.run(run_of(tmp_path / "run", params, **options), tmp_path / "run", out)
  for name in ("tokenizer.json", "chat_template.jinja", "LICENSE"):
    assert (out / name).read_bytes() == (source / name).read_bytes()
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation["eos_token_id"] == [1, 3]
  assert generation["max_new_tokens"] == 99
  assert "both sample with `top_p=0.8`:" in (out / "README.md").read_text()
  settings = json.loads((out / "config.json").read_text())
  assert settings["torch_dtype"] == "bfloat16"
  assert settings["rms_norm_eps"] == 1e-5
  assert settings["max_position_embeddings"] == 256
  rounded = jax.tree.map(
    lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params
  )
  assert_equal(hf.load(out)[0], rounded)


# From nothing ---------------------------------------------------------------


@pytest.fixture(scope="module")
def pair_of_tokenizers(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer")
  ours = data.CharacterTokenizer()
  ours.save(path)
  (path / "generation_config.json").write_text('{"eos_token_id": [1]}')
  alone = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
  assert alone.decode([4, 1, 5, 0]) == ours.decode([4, 1, 5, 0]) == "01"
  return ours, data.PretrainedTokenizer(str(path))


@hypothesis.given(
  symbols=st.lists(st.sampled_from(data.CharacterTokenizer.SYMBOLS[2:])),
  ids=st.lists(st.integers(0, len(data.CharacterTokenizer.SYMBOLS) - 1)),
)
def test_the_arithmetic_tokenizer_is_the_same_in_transformers(
  pair_of_tokenizers, symbols, ids
):
  ours, theirs = pair_of_tokenizers
  text = "".join(symbols)
  assert theirs.encode(text) == ours.encode(text)
  assert theirs.encode_prompt(text) == ours.encode_prompt(text)
  assert theirs.decode(ids) == ours.decode(ids)


def test_the_arithmetic_tokenizer_has_the_same_special_tokens(
  pair_of_tokenizers,
):
  ours, theirs = pair_of_tokenizers
  for name in ("vocab_size", "pad_id", "stop_ids"):
    assert getattr(theirs, name) == getattr(ours, name)
  with pytest.raises(Exception, match="UNK"):  # no token stands for it
    theirs.encode("1 + x")


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_an_export_holds_the_weights_of_the_run(begun, tmp_path, dtype):
  c, workdir, params = begun
  export.run(c, workdir, tmp_path / "out", dtype=dtype)
  expected = jax.tree.map(
    lambda p: p.astype(dtype or jnp.float32).astype(jnp.float32), params
  )
  assert_equal(hf.load(tmp_path / "out")[0], expected)


def test_the_files_say_what_a_server_asks_for(begun, tmp_path):
  """Keys that vLLM looks up, too, which the tests cannot start."""
  c, workdir, _ = begun
  export.run(c, workdir, tmp_path / "out")
  settings = json.loads((tmp_path / "out/config.json").read_text())
  assert (
    settings.items()
    >= {
      "architectures": ["Qwen3ForCausalLM"],
      "model_type": "qwen3",
      "torch_dtype": "float32",
      "tie_word_embeddings": True,
      "max_position_embeddings": 24,
      "eos_token_id": 1,
      "vocab_size": 24,
      "head_dim": 8,
    }.items()
  )
  words = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
  assert "token_type_ids" not in words["model_input_names"]  # as by default
  generation = json.loads((tmp_path / "out/generation_config.json").read_text())
  assert generation == {"eos_token_id": [1], "pad_token_id": 0}
  weights = tmp_path / "out/model.safetensors"
  with safetensors.safe_open(weights, framework="numpy") as opened:
    assert opened.metadata() == {"format": "pt"}
    assert "lm_head.weight" not in opened.keys()


def test_a_run_reads_its_problems_with_an_export_as_without(begun, tmp_path):
  """Prompts, solutions and stop tokens."""
  c, workdir, params = begun
  export.run(c, workdir, tmp_path / "out")
  before = setup_run(c)
  c.model.path = str(tmp_path / "out")
  after = setup_run(c)
  assert_equal(after.initial_params(), params)
  assert after.model == before.model
  assert after.stop_ids == before.stop_ids
  np.testing.assert_array_equal(after.train_set.tokens, before.train_set.tokens)
  solutions = [
    sft.tokenize_solutions(run.train_set, run.tokenizer, run.stop_ids[0], 24)
    for run in (before, after)
  ]
  jax.tree.map(np.testing.assert_array_equal, *solutions)


def eval_samples(workdir, step):
  lines = (workdir / "samples.jsonl").read_text().splitlines()
  found = [json.loads(line) for line in lines]
  return {
    x["problem"]: x["completion"]
    for x in found
    if x["split"] == "eval" and x["step"] == step
  }


def test_from_a_run_to_an_export_to_another_run(tmp_path):
  """By the command line; transformers says what both runs say."""
  first, out, second = (tmp_path / x for x in ("first", "out", "second"))
  options = SETTINGS | {"sft__steps": 20}
  train = lambda workdir, options: commands.main(
    "arithmetic:grpo", f"--workdir={workdir}", **options
  )
  done = [
    train(first, options),
    commands.command("--mode=export", f"--workdir={first}", f"--to={out}"),
    train(second, SETTINGS | {"model__path": out}),
  ]
  for command in done:
    assert command.returncode == 0, command.stderr
  said = " ".join(done[1].stdout.split())  # it is wrapped
  assert f"after step 1 to {out}, in float32" in said
  completions = eval_samples(first, 1)
  assert len(completions) == 2 and any(completions.values())
  assert eval_samples(second, 0) == completions

  pytest.importorskip("torch")
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  model = transformers.AutoModelForCausalLM.from_pretrained(out)
  for problem, completion in completions.items():
    inputs = tokenizer(problem, return_tensors="pt")
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=8)
    answer = tokens[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == completion


# The card -------------------------------------------------------------------


def test_the_card_says_what_was_done_and_with_what_result(begun, tmp_path):
  c, workdir, _ = begun
  metrics = [
    {"step": 0, "eval/accuracy": 0.125, "eval/stderr": 0.01}
    | {"eval/aime/accuracy": 0.25, "eval/aime/stderr": 0.03},
    {"step": 1, "tokens/generated": 1234, "tokens/trained": 567},
    {"step": 5, "eval/accuracy": 0.75, "eval/stderr": 0.02},
  ]
  lines = "".join(json.dumps(line) + "\n" for line in metrics)
  (workdir / "metrics.jsonl").write_text(lines)
  folder = workdir / "evaluation/step-0"
  folder.mkdir(parents=True)
  page = "# Sets\n\n![x](y.png)\n\n| a |\n\nIn [f](f.json), [g](https://g).\n"
  (folder / "results.md").write_text(page)
  export.run(c, workdir, tmp_path / "mine")
  card = (tmp_path / "mine/README.md").read_text()
  front, _, rest = card.removeprefix("---\n").partition("\n---\n")
  assert "library_name: transformers" in front and '"dppo"' in front
  assert "base_model" not in front
  assert rest.startswith("\n# mine\n")
  assert "| step | accuracy | aime |" in rest
  assert "\n| 0 | 0.125 ± 0.010 | 0.250 ± 0.030 |" in rest
  assert "0.750" not in rest  # of a later step
  assert "### Sets\n\n| a |\n\nIn f, [g](https://g).\n" in rest
  assert "`dppo(prompt_rate=0.5, " in rest
  shown = re.search(r"```json\n(.*)\n```", rest, re.DOTALL)[1]
  assert json.loads(shown)["rollout.max_tokens"] == 8


@pytest.mark.parametrize("template", ["", "Q: {{ messages[0].content }}\nA:"])
def test_the_card_asks_as_training_asked(
  tmp_path, monkeypatch, capsys, template
):
  """Its code runs, chat template or none, and says what we would say."""
  source, out = tmp_path / "source", tmp_path / "out"
  write_source(source)
  file = str(source / "tokenizer.json")
  words = tokenizers.Tokenizer.from_file(file)
  words.add_tokens(list("QA:\n"))
  words.post_processor = processors.TemplateProcessing(
    "<eos> $A", special_tokens=[("<eos>", 1)]
  )
  words.save(file)
  if template:
    (source / "chat_template.jinja").write_text(template)
  c = run_of(tmp_path / "run", trained(source), model__path=source)
  export.run(c, tmp_path / "run", out)
  card = (out / "README.md").read_text()
  code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
  monkeypatch.chdir(tmp_path)
  capsys.readouterr()
  found = {}
  exec(code, found)
  tokenizer = setup_run(c).tokenizer
  prompt = tokenizer.encode_prompt("3+9-5=")
  assert (prompt[0] == 1) == (not template)
  assert found["inputs"]["input_ids"][0].tolist() == prompt
  answer = tokenizer.decode(found["answer"])
  assert capsys.readouterr().out.endswith(answer + "\n")


def test_the_card_names_a_base_model_of_the_hub(begun, tmp_path, monkeypatch):
  c, workdir, _ = begun
  export.run(c, workdir, tmp_path / "base")
  c.model.hub_id = "them/base"
  monkeypatch.setattr(hf, "fetch", {"them/base": str(tmp_path / "base")}.get)
  export.run(c, workdir, tmp_path / "out")
  card = (tmp_path / "out/README.md").read_text()
  front, _, rest = card.removeprefix("---\n").partition("\n---\n")
  assert 'base_model: "them/base"' in front
  assert "From `them/base`, dppo_jax trained it" in rest


# Where it goes --------------------------------------------------------------


def content(path: pathlib.Path) -> dict[str, bytes]:
  return {x.name: x.read_bytes() for x in path.iterdir()}


def test_an_earlier_export_is_replaced_and_nothing_else(
  begun, tmp_path, capsys
):
  c, workdir, params = begun
  out = tmp_path / "there/out"
  out.mkdir(parents=True)  # an empty one will do
  export.run(c, workdir, out)
  again = jax.tree.map(lambda p: p + 1, params)
  run_of(workdir, again, step=7)
  export.run(c, workdir, out)
  assert "in place of those after step 0" in capsys.readouterr().out
  assert_equal(hf.load(out)[0], again)
  export.run(c, workdir, out, step=0)
  assert_equal(hf.load(out)[0], params)
  (out / "notes.txt").write_text("mine")
  before = content(out)
  with pytest.raises(ValueError, match=r"holds notes.txt beside an earlier"):
    export.run(c, workdir, out)
  assert content(out) == before
  assert [x.name for x in out.parent.iterdir()] == ["out"]


def test_a_directory_of_something_else_is_refused(begun, tmp_path):
  c, workdir, _ = begun
  for folder in (workdir, tmp_path):
    with pytest.raises(ValueError, match="neither empty nor an earlier export"):
      export.run(c, workdir, folder)
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="is a file"):
    export.run(c, workdir, tmp_path / "file")


def test_the_checkpoint_that_training_began_with_stays(begun, tmp_path):
  c, workdir, _ = begun
  export.run(c, workdir, tmp_path / "out")
  c.model.path = str(tmp_path / "out")
  with pytest.raises(ValueError, match="that training began with"):
    export.run(c, workdir, tmp_path / "out")


def test_an_export_is_whole_or_not_there(begun, tmp_path, monkeypatch):
  c, workdir, _ = begun
  out = tmp_path / "out"
  export.run(c, workdir, out)
  before = content(out)

  def fail(*unused, **also_unused):
    raise OSError("No space left on device")

  monkeypatch.setattr(export.model_card, "text", fail)
  for folder in (out, tmp_path / "other"):
    with pytest.raises(OSError, match="No space left"):
      export.run(c, workdir, folder)
  assert content(out) == before
  assert sorted(x.name for x in tmp_path.iterdir()) == ["out", "run"]


def test_an_earlier_export_comes_back_where_the_new_one_cannot_take_its_place(
  tmp_path, monkeypatch
):
  out = tmp_path / "out"
  out.mkdir()
  (out / "weights").write_text("earlier")
  rename = os.rename

  def fail_once(source, target):
    if pathlib.Path(source).name.endswith(".unfinished"):
      raise OSError("Input/output error")
    rename(source, target)

  monkeypatch.setattr(export.os, "rename", fail_once)
  with pytest.raises(OSError, match="Input"), export._replacing(out) as folder:
    (folder / "weights").write_text("new")
  assert [x.name for x in tmp_path.iterdir()] == ["out"]
  assert (out / "weights").read_text() == "earlier"


def test_a_disk_that_is_too_full_is_refused_at_once(
  begun, tmp_path, monkeypatch
):
  c, workdir, _ = begun
  full = shutil.disk_usage(tmp_path)._replace(free=1)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
  with pytest.raises(ValueError, match=r"takes 0.1 GB but .* has 0.0 GB left"):
    export.run(c, workdir, tmp_path / "out")


def test_weights_that_are_not_there_are_refused(begun, tmp_path):
  c, workdir, _ = begun
  with pytest.raises(ValueError, match=r"no checkpoint 3 .* there are 0"):
    export.run(c, workdir, tmp_path / "out", step=3)
  with pytest.raises(ValueError, match=r"holds no run .* --workdir"):
    export.run(c, tmp_path / "none", tmp_path / "out")
  c.model.shape["embed"] = 32
  with pytest.raises(ValueError, match=r"another model .* without --config"):
    export.run(c, workdir, tmp_path / "out")
  assert not (tmp_path / "out").exists()
