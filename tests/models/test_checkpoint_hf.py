"""Reading and writing checkpoints, without torch."""

import json

import huggingface_hub
import jax
import numpy as np
import pytest
from safetensors import numpy as stored

from dppo_jax import sharding
from dppo_jax.models import checkpoint_hf, families, transformer

# What the config.json of three published models say; they have this many
# weights.
PUBLISHED = {
  1_543_714_304: {  # Qwen2.5-Math-1.5B
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 4096,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
  },
  596_049_920: {  # Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
  },
  1_235_814_400: {  # Llama-3.2-1B
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
      "factor": 32.0,
      "high_freq_factor": 4.0,
      "low_freq_factor": 1.0,
      "original_max_position_embeddings": 8192,
      "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
  },
}
QWEN2, QWEN3, LLAMA = PUBLISHED.values()


def tiny(family="Qwen3ForCausalLM", **changes):
  """`(params, config)` in which every number is another."""
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
    "family": family,
  }
  config = transformer.ModelConfig(**fields | changes)
  flat, start = {}, 1
  for name, p in transformer.parameter_table(config).items():
    size = int(np.prod(p.shape))
    flat[name] = np.arange(start, start + size, dtype=np.float32)
    flat[name] = jax.device_put(flat[name].reshape(p.shape) / 7)
    start += size
  return transformer.unflatten(flat), config


def assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def path(tmp_path):
  """A checkpoint of `tiny()`."""
  checkpoint_hf.save(tmp_path, *tiny())
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


# Settings.


@pytest.mark.parametrize("count", PUBLISHED)
def test_published_models_have_their_number_of_weights(count):
  config = families.from_settings(PUBLISHED[count])
  assert transformer.num_parameters(config) == count


@pytest.mark.parametrize("settings", PUBLISHED.values())
def test_settings_survive_a_round_trip(settings):
  config = families.from_settings(settings, "bfloat16", remat=False)
  again = json.loads(json.dumps(families.to_settings(config)))
  assert families.from_settings(again, "bfloat16", remat=False) == config


@pytest.mark.parametrize("settings", PUBLISHED.values())
def test_both_styles_of_rotary_settings_say_the_same(settings):
  new = dict(settings)
  scaling = new.pop("rope_scaling", None) or {"rope_type": "default"}
  new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), **scaling}
  assert families.from_settings(new) == families.from_settings(settings)


def test_llama3_scaling_is_read():
  expected = transformer.RopeScaling(32.0, 1.0, 4.0, 8192)
  assert families.from_settings(LLAMA).rope_scaling == expected
  assert families.from_settings(QWEN3).rope_scaling is None


@pytest.mark.parametrize(
  ("settings", "head_dim"), [(QWEN2, 128), (QWEN3, 128), (LLAMA, 64)]
)
def test_head_dim_defaults_to_that_of_the_family(settings, head_dim):
  settings = {k: v for k, v in settings.items() if k != "head_dim"}
  assert families.from_settings(settings).head_dim == head_dim


def test_the_head_is_not_tied_unless_config_json_says_so():
  settings = {k: v for k, v in QWEN2.items() if k != "tie_word_embeddings"}
  assert not families.from_settings(settings).is_tied


@pytest.mark.parametrize(
  "key",
  [
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "rope_theta",
  ],
)
def test_a_missing_key_is_named(path, key):
  change_settings(path, **{key: ...})
  with pytest.raises(ValueError, match=f"{path}: config.json lacks '{key}'"):
    checkpoint_hf.read_config(path)


@pytest.mark.parametrize(
  "key", ["factor", "low_freq_factor", "original_max_position_embeddings"]
)
def test_a_missing_key_of_llama3_scaling_is_named(key):
  scaling = {k: v for k, v in LLAMA["rope_scaling"].items() if k != key}
  with pytest.raises(ValueError, match=f"lacks '{key}'"):
    families.from_settings(LLAMA | {"rope_scaling": scaling})


@pytest.mark.parametrize(
  ("settings", "key", "value"),
  [
    (QWEN3, "hidden_act", "gelu"),
    (QWEN3, "use_sliding_window", True),
    (QWEN3, "attention_bias", True),
    (LLAMA, "attention_bias", True),
    (LLAMA, "mlp_bias", True),
    (LLAMA, "attention_dropout", 0.1),
    (QWEN2, "is_causal", False),
    (QWEN2, "partial_rotary_factor", 0.5),
    (QWEN2, "quantization_config", {"quant_method": "fp8"}),
  ],
)
def test_what_is_not_implemented_is_refused(settings, key, value):
  with pytest.raises(ValueError, match=f"{key} to .*not implemented"):
    families.from_settings(settings | {key: value})


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "longrope"])
def test_other_rotary_scalings_are_refused(style, key, kind):
  rope = {key: kind, "factor": 4.0}
  with pytest.raises(ValueError, match=f"rope_type to '{kind}'"):
    families.from_settings(QWEN2 | {style: rope})


def test_sliding_layers_are_refused():
  layer_types = ["full_attention", "sliding_attention"]
  with pytest.raises(ValueError, match="'sliding_attention'"):
    families.from_settings(QWEN3 | {"layer_types": layer_types})


@pytest.mark.parametrize("names", [["GemmaForCausalLM"], []])
def test_an_unknown_architecture_is_told_the_known(names):
  with pytest.raises(
    ValueError, match=f"known are {', '.join(families.FAMILIES)}"
  ):
    families.from_settings(QWEN2 | {"architectures": names})


# Weights.


def test_every_weight_of_every_family_has_a_tensor():
  used = set()
  for family in families.FAMILIES:
    used |= transformer.parameter_table(tiny(family, is_tied=False)[1]).keys()
  assert used == families.TENSORS.keys()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_saved_then_loaded_is_bit_equal(tmp_path, family, is_tied):
  params, config = tiny(family, is_tied=is_tied)
  checkpoint_hf.save(tmp_path, params, config)
  found, found_config = checkpoint_hf.load(tmp_path)
  assert found_config == config
  assert_equal(found, params)


def test_a_bfloat16_file_is_bit_equal_from_then_on(tmp_path):
  params, config = tiny()
  checkpoint_hf.save(tmp_path / "a", params, config, dtype="bfloat16")
  rounded, _ = checkpoint_hf.load(tmp_path / "a")
  expected = jax.tree.map(
    lambda p: p.astype("bfloat16").astype("float32"), params
  )
  assert_equal(rounded, expected)
  checkpoint_hf.save(tmp_path / "b", rounded, config, dtype="bfloat16")
  files = [tmp_path / d / "model.safetensors" for d in "ab"]
  assert files[0].read_bytes() == files[1].read_bytes()


def test_shards_are_one_model(path):
  split_in_shards(path)
  assert_equal(checkpoint_hf.load(path)[0], tiny()[0])


def test_weights_go_where_they_are_told(path):
  mesh = sharding.make_mesh(1, min(2, jax.device_count()))
  params, config = tiny()
  where = transformer.shardings(config, mesh)
  found, _ = checkpoint_hf.load(path, shardings=where)
  assert jax.tree.map(lambda p: p.sharding, found) == where
  assert_equal(found, params)


def test_dtype_and_remat_are_of_the_computation(path):
  params, config = checkpoint_hf.load(path, dtype="bfloat16", remat=False)
  assert (config.dtype, config.remat) == ("bfloat16", False)
  assert_equal(params, tiny()[0])


def test_what_the_checkpoint_began_with_comes_along(tmp_path):
  source, out = tmp_path / "source", tmp_path / "out"
  params, config = tiny()
  checkpoint_hf.save(source, params, config, dtype="bfloat16", stop_ids=[9])
  change_settings(source, max_position_embeddings=512)
  (source / "tokenizer.json").write_text("words")
  checkpoint_hf.save(out, params, config, source=source)
  settings = json.loads((out / "config.json").read_text())
  assert settings["max_position_embeddings"] == 512
  assert settings["torch_dtype"] == "float32"
  assert (out / "tokenizer.json").read_text() == "words"
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation == {"eos_token_id": [9]}
  assert_equal(checkpoint_hf.load(out)[0], params)


def test_a_tied_file_may_repeat_the_embedding(path):
  embed = np.asarray(tiny()[0]["embed"])
  frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
  extras = {"lm_head.weight": embed, frequencies: np.ones(4, np.float32)}
  change_tensors(path, extras)
  assert_equal(checkpoint_hf.load(path)[0], tiny()[0])


def test_a_tied_file_may_not_have_another_head(path):
  embed = np.asarray(tiny()[0]["embed"])
  change_tensors(path, {"lm_head.weight": embed + 1})
  with pytest.raises(ValueError, match=r"lm_head.weight that differs from"):
    checkpoint_hf.load(path)


# Errors of load.


def test_a_missing_directory_names_the_knobs(tmp_path):
  with pytest.raises(
    ValueError, match=r"config.model.path .* config.model.hub"
  ):
    checkpoint_hf.load(tmp_path / "none")


def test_a_missing_config_json_is_named(path):
  (path / "config.json").unlink()
  with pytest.raises(ValueError, match=f"there is no {path}/config.json"):
    checkpoint_hf.load(path)


def test_a_damaged_config_json_is_named(path):
  (path / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config.json is not JSON"):
    checkpoint_hf.load(path)


def test_missing_weights_name_what_was_looked_for(path):
  (path / "model.safetensors").unlink()
  looked_for = r"neither model.safetensors nor model.safetensors.index.json$"
  with pytest.raises(ValueError, match=looked_for):
    checkpoint_hf.load(path)


def test_bin_files_must_be_converted(path):
  (path / "model.safetensors").rename(path / "pytorch_model.bin")
  with pytest.raises(ValueError, match=r"\*.bin files must be converted"):
    checkpoint_hf.load(path)


def test_a_missing_shard_is_named(path):
  split_in_shards(path)
  (path / "1.safetensors").unlink()
  with pytest.raises(ValueError, match=r"lacks 1.safetensors, named by"):
    checkpoint_hf.load(path)


def test_an_index_without_a_map_is_refused(path):
  split_in_shards(path)
  (path / "model.safetensors.index.json").write_text("{}")
  with pytest.raises(ValueError, match=r"index.json lacks 'weight_map'"):
    checkpoint_hf.load(path)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_named(path, name):
  change_tensors(path, {f"model.{name}": None})
  with pytest.raises(ValueError, match=f"lacks model.{name}"):
    checkpoint_hf.load(path)


def test_a_few_of_many_missing_tensors_are_named(path):
  change_settings(path, num_hidden_layers=4)
  with pytest.raises(ValueError, match=r"lacks model.layers.3.* and 6 more"):
    checkpoint_hf.load(path)


@pytest.mark.parametrize(
  "name", ["lm_head.bias", "model.layers.0.self_attn.q_proj.bias"]
)
def test_an_unknown_tensor_is_named(path, name):
  change_tensors(path, {name: np.ones(32, np.float32)})
  with pytest.raises(ValueError, match=f"has {name}, unknown"):
    checkpoint_hf.load(path)


def test_a_head_does_not_stand_in_for_the_embedding(path):
  change_tensors(path, {"model.embed_tokens.weight": None})
  change_tensors(path, {"lm_head.weight": np.ones((32, 16), np.float32)})
  with pytest.raises(ValueError, match=r"lacks model.embed_tokens.weight"):
    checkpoint_hf.load(path)


def test_a_wrong_shape_is_told_the_right_one(path):
  name = "model.layers.2.self_attn.o_proj.weight"
  change_tensors(path, {name: np.ones((32, 16), np.float32)})
  shapes = r"\(32, 16\), but the model's is \(16, 32\)"
  with pytest.raises(ValueError, match=f"{name} in shape {shapes}"):
    checkpoint_hf.load(path)


def test_integer_weights_are_refused(path):
  change_tensors(path, {"model.norm.weight": np.ones(16, np.int8)})
  with pytest.raises(ValueError, match=r"model.norm.weight in I8"):
    checkpoint_hf.load(path)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file_is_named(path, size):
  file = path / "model.safetensors"
  file.write_bytes(file.read_bytes()[:size])
  with pytest.raises(ValueError, match=f"{file} is damaged, cut short"):
    checkpoint_hf.load(path)


def test_a_git_lfs_pointer_is_suspected(path):
  pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
  (path / "model.safetensors").write_text(pointer)
  with pytest.raises(ValueError, match=r"git-lfs pointer"):
    checkpoint_hf.load(path)


# Errors of save.


def test_params_of_another_model_are_refused(tmp_path):
  params, _ = tiny()
  _, untied = tiny(is_tied=False)
  with pytest.raises(ValueError, match=r"params lacks head"):
    checkpoint_hf.save(tmp_path, params, untied)
  params, _ = tiny(is_tied=False)
  with pytest.raises(ValueError, match=r"params has head, unknown"):
    checkpoint_hf.save(tmp_path, params, tiny()[1])
  with pytest.raises(ValueError, match=r"embed in shape \(32, 16\), but"):
    checkpoint_hf.save(tmp_path, tiny()[0], tiny(embed=8)[1])


def test_a_model_that_no_config_json_describes_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"Qwen3ForCausalLM describes"):
    checkpoint_hf.save(tmp_path, *tiny(has_qkv_bias=True))


def test_a_source_of_another_model_is_refused(path, tmp_path):
  with pytest.raises(ValueError, match=f"{path} describes"):
    checkpoint_hf.save(tmp_path / "out", *tiny(mlp=32), source=path)


def test_the_source_is_not_overwritten(path):
  with pytest.raises(ValueError, match=r"that training began with"):
    checkpoint_hf.save(path, *tiny(), source=path)


def test_files_are_float32_or_bfloat16(tmp_path):
  with pytest.raises(ValueError, match=r"'float16': a file is"):
    checkpoint_hf.save(tmp_path, *tiny(), dtype="float16")


# The hub.


def test_a_hub_out_of_reach_says_how_to_get_the_files(monkeypatch):
  def fail(*args, **kwargs):
    raise OSError("no route\nto the host")

  monkeypatch.setattr(huggingface_hub, "model_info", fail)
  monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
  remedy = r"OSError: no route\).* `hf download a/b --local-dir DIR`.*path=DIR"
  with pytest.raises(ValueError, match=remedy) as error:
    checkpoint_hf.fetch("a/b")
  assert error.value.__suppress_context__


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_hub_out_of_reach_leaves_the_cache(monkeypatch, is_reachable):
  def model_info(hub_id, timeout):
    if not is_reachable:
      raise OSError("no route")

  def snapshot_download(hub_id, allow_patterns, local_files_only):
    assert local_files_only != is_reachable
    return f"/cache/{hub_id}"

  monkeypatch.setattr(huggingface_hub, "model_info", model_info)
  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  assert checkpoint_hf.fetch("a/b") == "/cache/a/b"
