"""Pretrained checkpoints against transformers: logits, tokens, prompts, export.

Skipped unless `python experiments/15_real_model/fetch.py MODEL` made the
directory, and torch is installed.
"""

import dataclasses
import functools
import importlib

from dppo_jax.configs import smollm2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import data, rollout
from dppo_jax.models import hf, lora, parameters, transformer
from dppo_jax.models.hf import peft
from dppo_jax.records import PromptBatch
from dppo_jax.rng import Stage, rng_at

torch = pytest.importorskip("torch")
CACHE = importlib.import_module("experiments.15_real_model.fetch").CACHE
NUM_PROMPTS, NUM_TOKENS, NUM_LOGITS = 8, 64, 4
# A greedy token may differ where the two best logits are this close.
TIE = 2e-3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def checkpoint(request):
  path = CACHE / request.param
  if not (path / "config.json").exists():
    pytest.skip(f"there is no {path}: run fetch.py")
  return str(path)


@pytest.fixture(scope="module")
def ours(checkpoint):
  """Weights, architecture and stop ids."""
  return *hf.load(checkpoint), data.PretrainedTokenizer(checkpoint).stop_ids


@pytest.fixture(scope="module")
def theirs(checkpoint):
  import transformers

  load = transformers.AutoModelForCausalLM.from_pretrained
  return load(checkpoint, dtype="float32").eval()


@pytest.fixture(scope="module")
def prompts(checkpoint):
  """Tokens of chat prompts, of text alone for a model without a template."""
  tokenizer = data.PretrainedTokenizer(checkpoint)
  problems = [row["problem"] for row in smollm2.words_test()]
  return [tokenizer.encode_prompt(x) for x in problems[:NUM_PROMPTS]]


@functools.partial(jax.jit, static_argnums=1)
def _forward(params, config, tokens, positions):
  hidden = transformer.forward(
    params, config, tokens, positions, jnp.full_like(tokens, tokens.shape[1])
  )
  return transformer.logits(params, config, hidden)


def _logits(model, tokens):
  with torch.no_grad():
    return model(torch.tensor([tokens])).logits[0].numpy()


def _greedy(params, config, prompts, stop_ids):
  """Returns our greedy completions."""
  width = -(-max(map(len, prompts)) // 8) * 8
  batch = PromptBatch(
    np.arange(len(prompts), dtype=np.int32),
    np.array([x + [0] * (width - len(x)) for x in prompts], np.int32),
    np.array([len(x) for x in prompts], np.int32),
  )
  sample = lambda params, batch: rollout.sample(
    params,
    config,
    batch,
    rng_at(jax.random.key(0), 0, Stage.EVALUATE),
    group_size=1,
    num_slots=len(prompts),
    max_tokens=NUM_TOKENS,
    stop_ids=stop_ids,
    temperature=0.0,
  )
  rolled = jax.device_get(jax.jit(sample)(params, batch))
  lengths = rolled.lengths[:, 0]
  pairs = zip(rolled.tokens, lengths, strict=True)
  return [x[0, :n].tolist() for x, n in pairs]


def _assert_greedy(model, prompt, completion, stop_ids):
  """Each token is the argmax of their logits, up to ties."""
  logits = _logits(model, prompt + completion)[len(prompt) - 1 : -1]
  chosen = logits[np.arange(len(completion)), completion]
  assert (logits.max(axis=1) - chosen <= TIE).all()
  is_stopped = completion[-1] in stop_ids
  assert is_stopped or len(completion) == NUM_TOKENS
  assert not set(completion[:-1]) & set(stop_ids)


def test_logits_agree_with_transformers(ours, theirs, prompts):
  params, config, _ = ours
  for tokens in prompts[:NUM_LOGITS]:
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    array = jnp.array([tokens], jnp.int32)
    actual = _forward(params, config, array, positions)[0]
    want = _logits(theirs, tokens)
    np.testing.assert_allclose(actual, want, atol=1e-5 * np.abs(want).max())


def test_greedy_tokens_agree_with_transformers(ours, theirs, prompts):
  stop_ids = ours[-1]
  completions = _greedy(*ours[:2], prompts, stop_ids)
  for prompt, completion in zip(prompts, completions, strict=True):
    _assert_greedy(theirs, prompt, completion, stop_ids)


def test_chat_prompts_are_those_of_transformers(checkpoint, prompts):
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
  problem = next(smollm2.words_test())["problem"]
  if tokenizer.chat_template:
    turn = [{"role": "user", "content": problem}]
    want = tokenizer.apply_chat_template(
      turn, add_generation_prompt=True, return_dict=False
    )
  else:
    want = tokenizer(problem)["input_ids"]
  assert prompts[0] == want


def test_an_export_is_continued_by_transformers_as_by_us(
  checkpoint, ours, prompts, tmp_path
):
  import transformers

  params, config, stop_ids = ours
  noise = np.random.default_rng(0)
  moved = jax.tree.map(
    lambda p: p * (1 + 0.01 * noise.standard_normal(p.shape, np.float32)),
    params,
  )
  hf.save(tmp_path, moved, config, source=checkpoint)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype="float32"
  ).eval()
  completions = _greedy(moved, config, prompts, stop_ids)
  for prompt, completion in zip(prompts, completions, strict=True):
    _assert_greedy(model, prompt, completion, stop_ids)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from peft itself
def test_an_adapter_computes_the_same_in_peft(
  checkpoint, ours, theirs, prompts, tmp_path
):
  package = pytest.importorskip("peft")
  params, config, _ = ours
  table = parameters.parameter_table(config)
  adapted = lora.choose(table, rank=4, alpha=8.0, targets="all")
  config = dataclasses.replace(config, lora=adapted)
  noise = np.random.default_rng(0)
  adapters = jax.tree.map(
    lambda p: jnp.asarray(0.02 * noise.normal(size=p.shape), jnp.float32),
    parameters.init_adapters(config, jax.random.key(0)),
  )
  params = {**params, **adapters}
  peft.save(str(tmp_path), params, config, checkpoint, "", "float32")
  model = package.PeftModel.from_pretrained(theirs, tmp_path).eval()
  tokens = prompts[0]
  positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
  array = jnp.array([tokens], jnp.int32)
  actual = _forward(params, config, array, positions)[0]
  want = _logits(model, tokens)
  np.testing.assert_allclose(actual, want, atol=1e-5 * np.abs(want).max())
