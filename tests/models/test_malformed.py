"""A checkpoint that is none is refused in one line: file, value, remedy."""

import json
import os

import jax
import pytest

from dppo_jax.data.tokenizer import find_stop_ids
from dppo_jax.models import hf, moe, transformer
from dppo_jax.models.hf import families, reader

BILLION = 10**9
FAMILY = "Qwen3MoeForCausalLM"
MODEL = transformer.ModelConfig(
  vocab=32,
  embed=16,
  layers=3,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp=24,
  has_qk_norm=True,
  experts=moe.Experts(4, 2, 6, True),
  family=FAMILY,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  path = tmp_path_factory.mktemp("whole")
  params = transformer.init(MODEL, jax.random.key(0))
  hf.save(path, params, MODEL, shard_bytes=4000)
  return path


@pytest.fixture
def path(whole, tmp_path):
  """A copy of a checkpoint in several files, which may be spoiled."""
  for file in whole.iterdir():
    os.link(file, tmp_path / file.name)
    if file.suffix == ".json":
      (tmp_path / file.name).unlink()
      (tmp_path / file.name).write_text(file.read_text())
  return tmp_path


def change_settings(path, **changes):
  file = path / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(path) -> str:
  with pytest.raises(ValueError) as error:
    hf.check(str(path))
  assert "\n" not in str(error.value) and len(str(error.value)) < 600
  assert str(path) in str(error.value)
  return str(error.value)


def test_the_copy_is_a_checkpoint(path):
  hf.check(str(path))


@pytest.mark.parametrize(
  ("key", "values"),
  [
    ("architectures", ["Qwen3ForCausalLM", [3], {"a": 1}, 7, [], [None]]),
    ("num_hidden_layers", [BILLION, 0, -1, 2.0, True, "3", [3], 10**400]),
    ("num_attention_heads", [0, -4, "x", 3, BILLION]),
    ("num_key_value_heads", [0, 3, None, "2"]),
    ("hidden_size", [0, 1e22, "wide"]),
    ("vocab_size", [0, BILLION, {}]),
    ("head_dim", [0, 7, BILLION]),
    ("num_experts", [0, 10**7, 1]),
    ("num_experts_per_tok", [0, 5, "all"]),
    ("rms_norm_eps", [-1, 0, "x", float("nan"), 1.0, True]),
    ("rope_theta", ["x", 0, -1, float("nan"), float("inf"), [1], True]),
    ("rope_scaling", ["x", [1], 3]),
    ("tie_word_embeddings", ["no", 1, []]),
    ("norm_topk_prob", ["yes", 0]),
    ("layer_types", ["full_attention", [{}], 3]),
  ],
)
def test_a_setting_that_is_none_is_refused_by_name(path, key, values):
  for value in values:
    if value is None:  # as if it were absent
      continue
    change_settings(path, **{key: value})
    said = refusal(path)
    assert "config.json" in said
    assert key.removesuffix("s") in said


def test_any_value_of_a_setting_is_refused_in_one_line_or_taken(path):
  """Fuzzed, one key at a time."""
  values = [None, True, 0, -1, 3, 1.5, 1e308, 10**30, "", "x", [], [[]], {}]
  known = json.loads((path / "config.json").read_text())
  num_refused = 0
  for key in known:
    for value in values:
      change_settings(path, **known | {key: value})
      try:
        hf.check(str(path))
      except ValueError as error:
        num_refused += 1
        assert str(path) in str(error) and "\n" not in str(error)
  assert num_refused > 100


def test_a_part_of_rotary_scaling_is_refused_by_name(path):
  scaling = {"rope_type": "llama3", "factor": 0}
  change_settings(path, rope_scaling=scaling)
  assert "sets factor to 0" in refusal(path)


@pytest.mark.parametrize("name", ["config.json", reader.INDEX])
@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "", "[" * 100_000])
def test_a_file_that_is_no_object_is_named(path, name, text):
  (path / name).write_text(text)
  said = refusal(path)
  assert name in said and "fetch it again" in said


@pytest.mark.parametrize(
  "weight_map",
  [
    [],
    3,
    "x",
    {"lm_head.weight": 3},
    {"lm_head.weight": ["a"]},
    {"lm_head.weight": "../secret.safetensors"},
    {"lm_head.weight": "/etc/passwd"},
    {"lm_head.weight": "sub/model.safetensors"},
    {"lm_head.weight": ""},
    {"lm_head.weight": ".."},
  ],
)
def test_an_index_names_files_beside_it(path, weight_map):
  """And no other: what it points to would be read."""
  index = path / reader.INDEX
  index.write_text(json.dumps({"weight_map": weight_map}))
  said = refusal(path)
  assert "weight_map must name files beside it" in said
  assert str(index) in said and "fetch it again" in said


def test_few_tensors_are_not_listed_for_nothing():
  """A model of many layers and experts has names for as many tensors."""
  largest = families.settings_check.SIZES
  assert largest["num_hidden_layers"] * largest["num_experts"] <= 2**20


def test_a_generation_config_that_is_a_list_is_named(tmp_path):
  (tmp_path / "generation_config.json").write_text("[]")
  with pytest.raises(ValueError, match=r"generation_config.json is damaged"):
    find_stop_ids(str(tmp_path), 7)
