"""Reading and writing checkpoints, without torch."""

import json
import os

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors
from safetensors import numpy as stored

from dppo_jax import sharding
from dppo_jax.errors import UserError
from dppo_jax.models import hf, moe, parameters
from dppo_jax.models.config import ModelConfig
from dppo_jax.models.hf import families


def tiny(family="Qwen3ForCausalLM", **changes):
  """Returns `(params, config)` in which all numbers differ."""
  known = families.FAMILIES[family]
  fields = {
    "vocab": 32,
    "embed": 16,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp": 24,
    "has_qkv_bias": known.has_qkv_bias,
    "has_qk_norm": known.has_qk_norm,
    "experts": moe.Experts(4, 2, 6, True) if known.has_experts else None,
    "family": family,
    **known.fields,
  }
  config = ModelConfig(**fields | changes)
  flat, start = {}, 1
  for name, p in parameters.parameter_table(config).items():
    size = int(np.prod(p.shape))
    flat[name] = np.arange(start, start + size, dtype=np.float32)
    flat[name] = jax.device_put(flat[name].reshape(p.shape) / 7)
    start += size
  return parameters.unflatten(flat), config


def assert_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture
def path(tmp_path):
  """Writes a checkpoint of `tiny()`."""
  hf.save(tmp_path, *tiny())
  return tmp_path


def change_settings(path, **changes):
  """Sets keys of config.json; ... takes a key out."""
  settings = json.loads((path / "config.json").read_text()) | changes
  settings = {k: v for k, v in settings.items() if v is not ...}
  (path / "config.json").write_text(json.dumps(settings))


def change_tensors(path, changes):
  """Sets tensors of the file; None takes one out."""
  tensors = stored.load_file(path / "model.safetensors") | changes
  tensors = {k: v for k, v in tensors.items() if v is not None}
  stored.save_file(tensors, path / "model.safetensors")


def split_in_shards(path):
  """Makes two shards and an index of the one file."""
  tensors = stored.load_file(path / "model.safetensors")
  (path / "model.safetensors").unlink()
  weight_map = {name: f"{i % 2}.safetensors" for i, name in enumerate(tensors)}
  for shard in set(weight_map.values()):
    part = {k: v for k, v in tensors.items() if weight_map[k] == shard}
    stored.save_file(part, path / shard)
  index = path / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_saved_then_loaded_is_bit_equal(tmp_path, family, is_tied):
  params, config = tiny(family, is_tied=is_tied)
  hf.save(tmp_path, params, config)
  loaded, loaded_config = hf.load(tmp_path)
  assert loaded_config == config
  assert_equal(loaded, params)


def test_a_bfloat16_file_is_bit_equal_from_then_on(tmp_path):
  params, config = tiny()
  hf.save(tmp_path / "a", params, config, dtype="bfloat16")
  rounded, _ = hf.load(tmp_path / "a")
  expected = jax.tree.map(
    lambda p: p.astype("bfloat16").astype("float32"), params
  )
  assert_equal(rounded, expected)
  hf.save(tmp_path / "b", rounded, config, dtype="bfloat16")
  files = [tmp_path / d / "model.safetensors" for d in "ab"]
  assert files[0].read_bytes() == files[1].read_bytes()


def test_no_file_exceeds_its_limit(tmp_path):
  """No tensor is lost or repeated; files of an earlier save are gone."""
  params, config = tiny(is_tied=False)
  for limit in (4000, 8000, 10**9):
    hf.save(tmp_path, params, config, shard_bytes=limit)
    files = [stored.load_file(x) for x in tmp_path.glob("*.safetensors")]
    sizes = [x.nbytes for file in files for x in file.values()]
    assert sum(sizes) == sum(x.nbytes for x in jax.tree.leaves(params))
    for file in files:
      assert len(file) == 1 or sum(x.nbytes for x in file.values()) <= limit
    assert_equal(hf.load(tmp_path)[0], params)
    if limit < 10**9:
      index = tmp_path / "model.safetensors.index.json"
      total = json.loads(index.read_text())["metadata"]["total_size"]
      assert total == sum(sizes) and len(files) > 2
  assert [x.name for x in tmp_path.glob("model*")] == ["model.safetensors"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
  def save_file(*unused):
    raise safetensors.SafetensorError("I/O error: No space left on device")

  monkeypatch.setattr(stored, "save_file", save_file)
  with pytest.raises(
    UserError, match=r"cannot write .*safetensors: .*No space"
  ):
    hf.save(tmp_path, *tiny())


def test_rotary_settings_are_written_in_both_styles(path, tmp_path):
  """Transformers 4 ignores those of 5, and would take another theta."""
  params, config = tiny(rope_theta=4e9)
  change_settings(
    path,
    rope_theta=...,
    rope_scaling=...,
    rope_parameters={"rope_theta": 4e9, "rope_type": "default"},
  )
  hf.save(tmp_path / "out", params, config, source=path)
  settings = json.loads((tmp_path / "out/config.json").read_text())
  assert settings["rope_theta"] == 4e9
  assert settings["rope_parameters"]["rope_theta"] == 4e9
  assert hf.read_config(tmp_path / "out").rope_theta == 4e9


def test_weights_have_the_given_shardings(path):
  mesh = sharding.make_mesh(1, min(2, jax.device_count()))
  params, config = tiny()
  where = parameters.shardings(config, mesh)
  loaded, _ = hf.load(path, shardings=where)
  assert jax.tree.map(lambda p: p.sharding, loaded) == where
  assert_equal(loaded, params)


def test_files_of_the_source_are_copied(tmp_path):
  source, out = tmp_path / "source", tmp_path / "out"
  params, config = tiny()
  eos = lambda i: {"eos_token_id": [i]}
  hf.save(source, params, config, dtype="bfloat16", generation=eos(9))
  change_settings(source, max_position_embeddings=512)
  (source / "tokenizer.json").write_text("words")
  hf.save(out, params, config, source=source)
  settings = json.loads((out / "config.json").read_text())
  assert settings["max_position_embeddings"] == 512
  assert settings["torch_dtype"] == "float32"
  assert (out / "tokenizer.json").read_text() == "words"
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation == {"eos_token_id": [9]}
  hf.save(out, params, config, source=source, generation=eos(7))
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation == {"eos_token_id": [7]}
  assert_equal(hf.load(out)[0], params)


def test_files_are_as_readable_as_the_umask_lets_them(tmp_path):
  before = os.umask(0o022)
  try:
    hf.save(tmp_path, *tiny())
  finally:
    os.umask(before)
  modes = {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
  assert modes == {0o644}


def test_head_is_ignored_if_the_embedding_is_tied(path):
  embed = np.asarray(tiny()[0]["embed"])
  frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
  extras = {"lm_head.weight": embed, frequencies: np.ones(4, np.float32)}
  change_tensors(path, extras)
  assert_equal(hf.load(path)[0], tiny()[0])


def test_a_head_alone_is_the_embedding_if_they_are_tied(path):
  embed = np.asarray(tiny()[0]["embed"])
  name = families.TENSORS["embed"].name
  change_tensors(path, {"lm_head.weight": embed, name: None})
  hf.check(path)
  assert_equal(hf.load(path)[0], tiny()[0])
  assert hf.stored_dtype(path) == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_that_differs_from_a_tied_embedding_is_rejected(tmp_path, dtype):
  """Transformers would use it."""
  params, config = tiny(is_tied=False)
  hf.save(tmp_path, params, config, dtype=dtype)
  change_settings(tmp_path, tie_word_embeddings=True)
  for act in (hf.check, hf.load):
    with pytest.raises(
      UserError, match=r"lm_head\.weight .*embeddings to fals"
    ):
      act(tmp_path)
  change_settings(tmp_path, tie_word_embeddings=False)
  assert not hf.load(tmp_path)[1].is_tied


def with_norm(weight):
  """Returns a change of the final norm in the file."""
  return lambda path: change_tensors(path, {"model.norm.weight": weight})


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda p: (p / "config.json").unlink(), "cannot read .*config.json"),
    (
      lambda p: (p / "config.json").write_text("{"),
      "cannot read .*config.json",
    ),
    (lambda p: change_settings(p, hidden_size=...), "hidden_size is missing"),
    (
      lambda p: change_settings(p, num_hidden_layers=4),
      "layers.3.input_layernorm.weight is missing, .*more differ",
    ),
    (lambda p: (p / "model.safetensors").unlink(), "neither"),
    (lambda p: (p / "model.safetensors").write_text("version"), "git-lfs"),
    (lambda p: os.truncate(p / "model.safetensors", 100), "truncated"),
    (with_norm(None), "model.norm.weight is missing"),
    (with_norm(np.ones(16, np.int8)), "in I8"),
    (with_norm(np.ones(8, np.float32)), r"is \(8,\), but must be \(16,\)"),
    (with_norm(np.full(16, np.nan, np.float32)), "weight has infinite or NaN"),
    (
      lambda p: change_tensors(p, {"lm_head.bias": np.ones(32, np.float32)}),
      r"lm_head.bias is \(32,\), but must be absent",
    ),
    (
      lambda p: (split_in_shards(p), (p / "1.safetensors").unlink()),
      "1.safetensors is missing",
    ),
    (
      lambda p: (
        split_in_shards(p),
        (p / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
      ),
      "weight_map is 3 but must be an object of text",
    ),
  ],
)
def test_a_damaged_checkpoint_is_rejected(path, spoil, message):
  spoil(path)
  with pytest.raises(UserError, match=message) as error:
    hf.load(path)
  assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_dtype_of_a_file_is_rejected(tmp_path):
  with pytest.raises(UserError, match="'float64': a file is float32 or"):
    hf.save(tmp_path, *tiny(), dtype="float64")


def test_overflow_in_the_dtype_of_a_file_is_rejected(tmp_path):
  params, config = tiny()
  hf.save(tmp_path, params, config, dtype="float16")
  assert hf.stored_dtype(tmp_path) == "float16"
  params["final_norm"] = params["final_norm"].at[3].set(1e5)
  hf.save(tmp_path, params, config, dtype="bfloat16")
  assert hf.stored_dtype(tmp_path) == "bfloat16"
  with pytest.raises(ValueError, match=r"model.norm.weight .* in float16"):
    hf.save(tmp_path, params, config, dtype="float16")


@pytest.mark.parametrize("is_reachable", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_hub_out_of_reach_leaves_the_cache(
  monkeypatch, is_reachable, is_cached
):
  def model_info(hub_id, revision, timeout):
    if not is_reachable:
      raise OSError("no route\nto the host")

  def snapshot_download(hub_id, revision, allow_patterns, local_files_only):
    if local_files_only == is_reachable or not is_cached:
      raise FileNotFoundError("not cached")
    return f"/cache/{hub_id}"

  monkeypatch.setattr(huggingface_hub, "model_info", model_info)
  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  if is_cached:
    assert hf.fetch("a/b") == "/cache/a/b"
    return
  reason = "not cached" if is_reachable else "no route"
  remedy = rf"{reason}\).* `hf download a/b --local-dir DIR`.*path=DIR"
  with pytest.raises(UserError, match=remedy):
    hf.fetch("a/b")
