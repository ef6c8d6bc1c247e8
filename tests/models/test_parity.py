"""The passes of the transformer against transformers and each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.models import hf, kv_cache, layers, parameters, transformer
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.hf import families

TOLERANCE = 1e-4  # of a float32 logit
LENGTHS = (40, 23, 17, 1)  # 40 is beyond the context that llama3 stretches
PROMPT = 17  # padded tokens of a prompt
SIZES = (8, 16, 32)  # positions of each part of the cache

forward = jax.jit(transformer.forward, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(1, 4))
def decoded(params, config, tokens, starts, num_steps):
  """Logits `[slot, num_steps, V]` of the tokens from `starts - 1` on.

  The tokens before `starts` are prefilled; the last of them is then fed again,
  as the sampler does.
  """
  params = parameters.to_inference_params(params, config)
  cache = kv_cache.init(config, len(tokens), SIZES)
  prompts = transformer.prefill(
    params, config, tokens[:, :PROMPT], starts, SIZES[:2]
  )
  cache = kv_cache.put_slots(cache, prompts, jnp.int32(0))

  def step(carry, _):
    at, cache = carry
    now = jnp.take_along_axis(tokens, at[:, None], 1)[:, 0]
    hidden, cache = transformer.decode(params, config, now, at, cache)
    return (at + 1, cache), transformer.logits(params, config, hidden)

  _, out = jax.lax.scan(step, (starts - 1, cache), length=num_steps)
  return out.swapaxes(0, 1)


def sequences():
  rng = np.random.default_rng(0)
  return [rng.integers(0, 64, n, np.int32) for n in LENGTHS]


def laid_out(rows, length=48):
  """`(tokens, positions, end)` of rows that are lists of sequences."""
  out = np.zeros((3, len(rows), length), np.int32)
  for r, row in enumerate(rows):
    start = 0
    for tokens in row:
      n = len(tokens)
      here = slice(start, start := start + n)
      out[:, r, here] = tokens, np.arange(n), np.full(n, start)
  return tuple(jnp.asarray(x) for x in out)


def packed(a, b, c, d):
  """Rows of two sequences; as many as rows of one."""
  return [[b, c], [d, a], [], []]


def logits_of(params, config, rows):
  """The logits of each sequence, cut from the rows that hold them."""
  row_arrays = laid_out(rows)
  out = transformer.logits(params, config, forward(params, config, *row_arrays))
  return [
    np.asarray(x)
    for r, row in enumerate(rows)
    for x in np.split(out[r], np.cumsum([len(y) for y in row]))[:-1]
  ]


def reference_logits(model):
  """Computes each sequence alone with transformers."""
  import torch

  with torch.no_grad():
    return [
      model(torch.tensor(x[None], dtype=torch.long)).logits[0].numpy()
      for x in sequences()
    ]


def assert_close(actual, expected):
  for f, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(f, e, rtol=0, atol=TOLERANCE)


@pytest.fixture(
  scope="module",
  params=[(f, t) for f in families.FAMILIES for t in (True, False)],
  ids=lambda p: f"{p[0]}-{'tied' if p[1] else 'untied'}",
)
def checkpoint(request, tmp_path_factory):
  """`(path, logits of each sequence)` of a checkpoint by transformers."""
  pytest.importorskip("torch")
  from tests.helpers import checkpoints

  family, is_tied = request.param
  path = tmp_path_factory.mktemp(family)
  model = checkpoints.write(path, family, is_tied=is_tied)
  return path, reference_logits(model)


@pytest.fixture(scope="module")
def network():
  """`(params, config)` with every option on, and no weight without effect."""
  config = ModelConfig(
    vocab=64,
    embed=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=48,
    rope_scaling=layers.RopeScaling(8.0, 1.0, 4.0, 32),
    has_qkv_bias=True,
    has_qk_norm=True,
    is_tied=False,
    remat="none",
  )
  rng = np.random.default_rng(1)
  flat = {
    name: jnp.asarray(rng.normal(p.fill, 0.3, p.shape), jnp.float32)
    for name, p in parameters.parameter_table(config).items()
  }
  return parameters.unflatten(flat), config


def test_padded_rows_agree_with_transformers(checkpoint):
  path, expected = checkpoint
  rows = [[x] for x in sequences()]
  assert_close(logits_of(*hf.load(path), rows), expected)


def test_packed_rows_agree_with_transformers(checkpoint):
  path, (a, b, c, d) = checkpoint
  actual = logits_of(*hf.load(path), packed(*sequences()))
  assert_close(actual, [b, c, d, a])


def test_decoding_agrees_with_transformers(checkpoint):
  path, expected = checkpoint
  tokens = laid_out([[x] for x in sequences()])[0]
  starts = np.array([5, 17, 8, 1], np.int32)
  actual = decoded(*hf.load(path), tokens, starts, 36)
  assert_close(
    [x[: n + 1 - at] for x, n, at in zip(actual, LENGTHS, starts, strict=True)],
    [x[at - 1 :] for x, at in zip(expected, starts, strict=True)],
  )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_shards_become_float32_weights(tmp_path, dtype):
  pytest.importorskip("torch")
  from tests.helpers import checkpoints

  model = checkpoints.write(
    tmp_path, "Qwen2ForCausalLM", dtype=dtype, max_shard_size="10KB"
  )
  assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
  params, config = hf.load(tmp_path)
  assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  actual = logits_of(params, config, [[x] for x in sequences()])
  assert_close(actual, reference_logits(model))


@pytest.mark.parametrize("has_source", [False, True])
def test_transformers_loads_what_is_saved(checkpoint, tmp_path, has_source):
  torch = pytest.importorskip("torch")
  import transformers

  path, expected = checkpoint
  params, config = hf.load(path)
  source = str(path) if has_source else ""
  eos = {"eos_token_id": [3, 5]}
  hf.save(tmp_path, params, config, source=source, generation=eos)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, attn_implementation="eager"
  )
  assert model.dtype == torch.float32
  assert model.config.tie_word_embeddings == config.is_tied
  assert model.generation_config.eos_token_id == [3, 5]
  for actual, logits in zip(reference_logits(model), expected, strict=True):
    np.testing.assert_array_equal(actual, logits)


def test_a_bfloat16_file_is_what_transformers_rounds(tmp_path):
  torch = pytest.importorskip("torch")
  import transformers

  from tests.helpers import checkpoints

  model = checkpoints.write(tmp_path / "a", is_tied=False)
  params, config = hf.load(tmp_path / "a")
  hf.save(tmp_path / "b", params, config, dtype="bfloat16")
  saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
  expected = model.to(torch.bfloat16).state_dict()
  weights = saved.state_dict()
  assert weights.keys() == expected.keys()
  for name in expected:
    assert weights[name].dtype == torch.bfloat16
    assert torch.equal(weights[name], expected[name]), name


def test_a_token_depends_on_its_past_in_its_segment_alone(network):
  params, config = network
  # Each position holds another token, so that the gradient with respect to an
  # embedding is that with respect to a position.
  tokens = np.arange(24, dtype=np.int32)
  _, *layout = laid_out([[tokens[:9], tokens[9:20]]], length=24)
  probe = jax.random.normal(jax.random.key(2), (config.embed,))

  def projected(embed):
    hidden = forward({**params, "embed": embed}, config, tokens[None], *layout)
    return hidden[0] @ probe  # [position]

  # [position, position, E]
  grads = jax.jit(jax.jacrev(projected))(params["embed"])[:, :24]
  is_seen = np.asarray(jnp.abs(grads).max(-1) > 0)
  index = np.arange(24)
  is_visible = index[:, None] < np.maximum(layout[1][0], index + 1)
  is_visible &= index[:, None] >= index
  np.testing.assert_array_equal(is_seen, is_visible)


def test_packed_equals_alone(network):
  a, b, c, d = sequences()
  alone = logits_of(*network, [[b], [c], [d], [a]])
  assert_close(logits_of(*network, packed(a, b, c, d)), alone)


@pytest.mark.parametrize("side_by_side", [1, 2, 4])
def test_decoding_equals_forward(network, side_by_side, monkeypatch, request):
  """Holds for any number of unrolled layers."""
  monkeypatch.setattr(kv_cache, "MAX_GROUPS", side_by_side)
  decoded.clear_cache()
  request.addfinalizer(decoded.clear_cache)
  sequence = sequences()[0]
  (expected,) = logits_of(*network, [[sequence]])
  tokens = jnp.asarray(np.stack([sequence, sequence]))
  starts = np.array([4, 17], np.int32)
  actual = decoded(*network, tokens, starts, 24)
  assert_close(actual, [expected[at - 1 :][:24] for at in starts])
