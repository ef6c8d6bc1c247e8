"""Gemma 3: windows, checkpoints with images, exports and chats."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as stored

from dppo_jax import rollout, sharding
from dppo_jax.data.tokenizer import PretrainedTokenizer
from dppo_jax.errors import UserError
from dppo_jax.models import hf, kv_cache, parameters, transformer
from dppo_jax.models.config import LocalLayers, ModelConfig, drop_idle_window
from dppo_jax.models.hf import families
from dppo_jax.run import setup
from tests.helpers import commands, small

WITH_IMAGES = "Gemma3ForConditionalGeneration"
LENGTHS = (37, 9)  # tokens of the prompts; windows have 5
NUM_NEW = 64
MODEL = ModelConfig(
  vocab=64,
  embed=32,
  layers=4,
  heads=4,
  kv_heads=1,
  head_dim=16,
  mlp=48,
  has_qk_norm=True,
  has_post_norms=True,
  has_zero_centred_norms=True,
  has_scaled_embedding=True,
  activation="gelu_pytorch_tanh",
  query_size=24,
  local=LocalLayers((True, True, False, True), window=5, rope_theta=100.0),
  family="Gemma3ForCausalLM",
  remat="none",
)

_forward = jax.jit(transformer.forward, static_argnums=1)


def random_params(config, seed=1):
  """Weights of which none is without effect."""
  rng = np.random.default_rng(seed)
  return parameters.unflatten(
    {
      name: jnp.asarray(rng.normal(p.fill, 0.3, p.shape), jnp.float32)
      for name, p in parameters.parameter_table(config).items()
    }
  )


def prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(3, 64, n, np.int32) for n in LENGTHS]


@functools.partial(jax.jit, static_argnums=1)
def _continued(params, config, tokens, lengths):
  weights = parameters.to_inference_params(params, config)
  cache = transformer.prefill(weights, config, tokens, lengths, [48, 64])

  def step(carry, _):
    token, at, cache = carry
    hidden, cache = transformer.decode(weights, config, token, at, cache)
    logits = transformer.logits(weights, config, hidden)
    token = logits.argmax(-1).astype(jnp.int32)
    return (token, at + 1, cache), token

  last = jnp.take_along_axis(tokens, lengths[:, None] - 1, 1)[:, 0]
  carry = last, lengths - 1, cache
  return jax.lax.scan(step, carry, length=NUM_NEW)[1].T


def our_tokens(params, config):
  """Greedy continuations of each prompt, by prefill and decoding."""
  tokens, *_ = _rows([[x] for x in prompts()], length=40)
  lengths = jnp.array(LENGTHS, jnp.int32)
  return _continued(params, config, tokens, lengths).tolist()


def their_tokens(model):
  import torch

  continued = []
  for prompt in prompts():
    ids = torch.tensor(prompt[None], dtype=torch.long)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, max_new_tokens=NUM_NEW, **options)
    continued.append(out[0, len(prompt) :].tolist())
  return continued


def our_logits(params, config):
  tokens, *layout = _rows([[x] for x in prompts()])
  hidden = _forward(params, config, tokens, *layout)
  out = transformer.logits(params, config, hidden)
  return [x[:n] for x, n in zip(out, LENGTHS, strict=True)]


def _rows(rows, length=64):
  """Tokens, positions and ends of rows of sequences."""
  out = np.zeros((3, len(rows), length), np.int32)
  for r, row in enumerate(rows):
    start = 0
    for tokens in row:
      n = len(tokens)
      here = slice(start, start := start + n)
      out[:, r, here] = tokens, np.arange(n), np.full(n, start)
  return tuple(jnp.asarray(x) for x in out)


def assert_close(actual, expected, atol=1e-4):
  for x, y in zip(actual, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def _older_names(path):
  """Rewrites a checkpoint with the names and settings of other versions."""
  file = path / "model.safetensors"
  renamed = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
  }
  tensors = {}
  for name, x in stored.load_file(file).items():
    old = next(old for old in renamed if name.startswith(old))
    tensors[name.replace(old, renamed[old])] = x
  stored.save_file(tensors, file)
  settings = json.loads((path / "config.json").read_text())
  text = settings["text_config"]
  rope = text.pop("rope_parameters")
  text["rope_theta"] = rope["full_attention"].pop("rope_theta")
  text["rope_scaling"] = rope["full_attention"]
  text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
  for key in ("rms_norm_eps", "tie_word_embeddings", "hidden_activation"):
    del text[key]
  (path / "config.json").write_text(json.dumps(settings))


@pytest.mark.slow
@pytest.mark.parametrize("is_older", [False, True])
def test_text_tower_of_a_model_with_images(tmp_path, is_older):
  """Its logits and continuations, and those of its export."""
  torch = pytest.importorskip("torch")
  import transformers

  from tests.helpers import checkpoints

  source, out = tmp_path / "source", tmp_path / "out"
  theirs = checkpoints.write(source, WITH_IMAGES, num_key_value_heads=1)
  if is_older:
    _older_names(source)
  hf.check(source)
  params, config = hf.load(source)
  with torch.no_grad():
    run = lambda x: theirs(torch.tensor(x[None], dtype=torch.long)).logits[0]
    expected = [run(x).numpy() for x in prompts()]
  assert_close(our_logits(params, config), expected)
  tokens = our_tokens(params, config)
  assert tokens == their_tokens(theirs) and len(set(tokens[0])) > 8
  assert hf.stored_dtype(source) == "float32"

  moved = jax.tree.map(lambda x: x * 1.25, params)
  eos = {"eos_token_id": [1, 6]}
  hf.save(out, moved, config, source=str(source), generation=eos)
  again, same = hf.load(out)
  assert same == config
  jax.tree.map(np.testing.assert_array_equal, again, moved)
  model = transformers.AutoModelForCausalLM.from_pretrained(out)
  assert type(model).__name__ == "Gemma3ForCausalLM"
  assert model.generation_config.eos_token_id == [1, 6]
  tokens = our_tokens(moved, config)
  assert tokens == their_tokens(model) and len(set(tokens[0])) > 8


def test_five_local_layers_precede_a_global_one():
  """Defaults of transformers hold for what published files leave out."""
  settings = {
    "architectures": [WITH_IMAGES],
    "eos_token_id": [1, 106],
    "text_config": {
      "hidden_size": 2560,
      "intermediate_size": 10240,
      "num_hidden_layers": 34,
      "rope_scaling": {"rope_type": "linear", "factor": 8.0},
      "sliding_window": 1024,
    },
  }
  config = families.from_settings(settings)
  assert [i for i, x in enumerate(config.local.is_local) if not x] == [
    5, 11, 17, 23, 29,
  ]  # fmt: skip
  assert (config.vocab, config.heads, config.kv_heads) == (262208, 8, 4)
  assert (config.rope_theta, config.local.rope_theta) == (1e6, 1e4)
  assert config.local.window == 1024 and config.rope_scaling.factor == 8
  assert config.query_size is None and config.is_tied
  text = families.text_settings(settings)
  assert text["eos_token_id"] == [1, 106] and "vision_config" not in text


@pytest.mark.parametrize("has_head", [True, False])
def test_outer_key_decides_whether_a_model_with_images_is_tied(
  tmp_path, has_head
):
  """Transformers would initialise a missing head at random."""
  torch = pytest.importorskip("torch")
  from tests.helpers import checkpoints

  theirs = checkpoints.write(tmp_path, WITH_IMAGES, num_key_value_heads=1)
  settings = json.loads((tmp_path / "config.json").read_text())
  settings["tie_word_embeddings"] = False
  settings["text_config"]["tie_word_embeddings"] = True
  (tmp_path / "config.json").write_text(json.dumps(settings))
  if not has_head:
    with pytest.raises(UserError, match=r"lm_head.weight is missing"):
      hf.check(tmp_path)
    return
  file = tmp_path / "model.safetensors"
  tensors = stored.load_file(file)
  (embed,) = (x for name, x in tensors.items() if "embed_tokens" in name)
  head = np.random.default_rng(0).normal(size=embed.shape).astype(embed.dtype)
  stored.save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
  import transformers

  theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
  with torch.no_grad():
    run = lambda x: theirs(torch.tensor(x[None], dtype=torch.long)).logits[0]
    expected = [run(x).numpy() for x in prompts()]
  assert_close(our_logits(*hf.load(tmp_path)), expected)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping to 50.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping to 30.0"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"hidden_activation": "relu"}, "hidden_activation to 'relu'"),
    ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types to"),
    ({"rope_parameters": {"rope_theta": 1e5}}, "full_attention is missing"),
    (
      {"rope_parameters": {
        "full_attention": {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0},
      }},
      "rope_type of local layers to 'linear'",
    ),
  ],
)  # fmt: skip
def test_unsupported_variants_are_rejected(changes, message):
  settings = families.to_settings(MODEL)
  assert families.from_settings(settings, remat="none") == MODEL
  with pytest.raises(UserError, match=message):
    families.from_settings(settings | changes)


def test_packed_equals_alone_and_decoding_equals_forward():
  params, (a, b) = random_params(MODEL), prompts()
  alone = our_logits(params, MODEL)
  tokens, *layout = _rows([[b, a, b]])
  for backend in ("xla", "xla_by_row", "xla_dense"):
    config = dataclasses.replace(MODEL, attention=backend)
    hidden = _forward(params, config, tokens, *layout)
    out = transformer.logits(params, config, hidden)[0]
    assert_close([out[9:46], out[46:55]], alone)

  weights = parameters.to_inference_params(params, MODEL)
  start, sizes = np.array([12], np.int32), [16, 32]
  cache = transformer.prefill(
    weights, MODEL, jnp.asarray(a[None, :16]), jnp.asarray(start), sizes
  )
  read = jax.jit(
    lambda cache, at: transformer.decode(
      weights, MODEL, tokens[:, 9:46][:, at], at[None], cache
    )
  )
  for at in range(11, 37):
    hidden, cache = read(cache, jnp.int32(at))
    actual = transformer.logits(weights, MODEL, hidden)
    assert_close([actual], [alone[0][at : at + 1]])


@pytest.mark.slow
def test_a_gpu_samples_the_same_tokens():
  """Windows of 5 positions reach into the prompts, or do not."""

  def sample(config, **options):
    run = functools.partial(
      rollout.sample,
      model_config=config,
      group_size=3,
      max_tokens=24,
      stop_ids=(small.STOP,),
      **options,
    )
    inputs = random_params(MODEL), small.prompts(4)
    return jax.jit(run)(inputs[0], prompts=inputs[1], rng=jax.random.key(0))

  want = sample(MODEL, num_slots=12)
  config = dataclasses.replace(MODEL, attention="xla_dense")
  out = sample(config, num_slots=5)
  np.testing.assert_array_equal(out.tokens, want.tokens)
  np.testing.assert_allclose(out.logprobs, want.logprobs, atol=1e-4)


def test_a_window_hides_older_tokens_alone():
  local = LocalLayers((True,), window=5, rope_theta=100.0)
  config = dataclasses.replace(MODEL, layers=1, local=local)
  params, tokens = random_params(config), jnp.arange(20)
  layout = _rows([[np.asarray(tokens)]], length=20)[1:]

  def at_end(embed):
    changed = params | {"embed": embed}
    return transformer.forward(changed, config, tokens[None], *layout)[0, -1]

  grads = jax.jit(jax.jacrev(at_end))(params["embed"])  # [E, token, E]
  is_seen = np.asarray(abs(grads).max((0, 2)) > 0)[:20]
  np.testing.assert_array_equal(is_seen, np.arange(20) >= 15)


def test_a_window_that_no_sequence_exceeds_is_dropped():
  params = random_params(MODEL)
  longest = max(LENGTHS)
  assert drop_idle_window(MODEL, longest) == MODEL
  local = MODEL.local._replace(window=longest)
  config = dataclasses.replace(MODEL, local=local)
  assert drop_idle_window(config, longest + 1) == config
  without = drop_idle_window(config, longest)
  assert without.local.window is None
  for x, y in zip(
    our_logits(params, config), our_logits(params, without), strict=True
  ):
    np.testing.assert_array_equal(x, y)


def test_a_window_is_kept_while_the_prompts_are_unknown():
  """Completions alone do not exceed it, in --mode=sample."""
  c = commands.config("arithmetic", rollout__max_tokens=8)
  local = MODEL.local._replace(window=c.data.max_prompt_tokens)
  model = dataclasses.replace(MODEL, local=local)
  mesh = sharding.make_mesh()
  make = lambda c: setup.make_run(c, mesh, "cpu", "", None, model, None, {})
  assert make(c).spec.model.local.window
  c.data.max_prompt_tokens -= 8
  assert make(c).spec.model.local.window is None


def test_the_whole_cache_is_kept():
  cache = kv_cache.init(MODEL, 2, [16])
  assert sum(x.size for x in jax.tree.leaves(cache)) == 2 * 2 * 4 * 16 * 16


def test_chats_use_the_turns_of_the_template(tmp_path):
  """Generation settings have the end of a turn as a stop id."""
  import tokenizers
  from tokenizers import models, pre_tokenizers

  special = "<pad> <eos> <bos> <start_of_turn> <end_of_turn>".split()
  words = [*special, "user", "model", "What", "is", "1?", "<unk>"]
  vocab = {word: i for i, word in enumerate(words)}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, "<unk>"))
  tokenizer.add_special_tokens(special)
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "chat_template": "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  eos = {"eos_token_id": [1, 4]}
  (tmp_path / "generation_config.json").write_text(json.dumps(eos))
  tokenizer = PretrainedTokenizer(str(tmp_path))
  ids = tokenizer.encode_prompt("What is 1?")
  turn = "<bos> <start_of_turn> user What is 1? <end_of_turn> <start_of_turn>"
  assert [words[i] for i in ids] == [*turn.split(), "model"]
  assert tokenizer.stop_ids == (4, 1)  # the end of a turn first
