"""Settings in config.json, and the layout of tensors in the file."""

import json

import numpy as np
import pytest

from dppo_jax.errors import UserError
from dppo_jax.models import layers, lora, parameters
from dppo_jax.models.hf import families

QWEN2 = {  # Qwen2.5-Math-1.5B
  "architectures": ["Qwen2ForCausalLM"],
  "hidden_act": "silu",
  "hidden_size": 1536,
  "intermediate_size": 8960,
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
}
QWEN3 = QWEN2 | {  # Qwen3-0.6B
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "head_dim": 128,
  "hidden_size": 1024,
  "intermediate_size": 3072,
  "num_attention_heads": 16,
  "num_key_value_heads": 8,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
}
MOE = QWEN3 | {  # Qwen3-30B-A3B
  "architectures": ["Qwen3MoeForCausalLM"],
  "decoder_sparse_step": 1,
  "hidden_size": 2048,
  "intermediate_size": 6144,
  "mlp_only_layers": [],
  "moe_intermediate_size": 768,
  "norm_topk_prob": True,
  "num_attention_heads": 32,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 48,
  "num_key_value_heads": 4,
  "tie_word_embeddings": False,
}
LLAMA = {  # Llama-3.2-1B
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "head_dim": 64,
  "hidden_act": "silu",
  "hidden_size": 2048,
  "intermediate_size": 8192,
  "mlp_bias": False,
  "num_attention_heads": 32,
  "num_hidden_layers": 16,
  "num_key_value_heads": 8,
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
}
GEMMA = {  # gemma-3-1b-it
  "architectures": ["Gemma3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 1152,
  "intermediate_size": 6912,
  "num_attention_heads": 4,
  "num_hidden_layers": 26,
  "num_key_value_heads": 1,
  "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06,
  "rope_local_base_freq": 10000,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": 512,
  "sliding_window_pattern": 6,
  "vocab_size": 262144,
}
# Number of weights -> config.json of five published models.
PUBLISHED = {
  1_543_714_304: QWEN2,
  596_049_920: QWEN3,
  30_532_122_624: MOE,
  1_235_814_400: LLAMA,
  999_885_952: GEMMA,
}


@pytest.mark.parametrize("count", PUBLISHED)
def test_settings_survive_a_round_trip(count):
  config = families.from_settings(PUBLISHED[count], "bfloat16", remat="none")
  assert parameters.num_parameters(config) == count
  again = json.loads(json.dumps(families.to_settings(config)))
  assert families.from_settings(again, "bfloat16", remat="none") == config


def test_missing_keys_have_the_defaults_of_the_family_or_are_named():
  without = lambda settings, key: families.from_settings(
    {k: v for k, v in settings.items() if k != key}
  )
  for settings, head_dim in ((QWEN2, 128), (QWEN3, 128), (LLAMA, 64)):
    assert without(settings, "head_dim").head_dim == head_dim
  assert not without(QWEN2, "tie_word_embeddings").is_tied
  for key in ("architectures", "vocab_size", "rope_theta"):
    with pytest.raises(UserError, match=f"config.json: {key} is missing"):
      without(QWEN2, key)
  with pytest.raises(UserError, match="factor is missing"):
    scaling = {"rope_type": "llama3"}
    families.from_settings(LLAMA | {"rope_scaling": scaling})


@pytest.mark.parametrize("settings", PUBLISHED.values())
def test_both_styles_of_rotary_settings_are_equivalent(settings):
  new = dict(settings)
  scaling = new.pop("rope_scaling", None) or {"rope_type": "default"}
  rotary = {"rope_theta": new.pop("rope_theta"), **scaling}
  is_local = "rope_local_base_freq" in settings
  new["rope_parameters"] = {"full_attention": rotary} if is_local else rotary
  assert families.from_settings(new) == families.from_settings(settings)
  expected = layers.RopeScaling(32.0, 1.0, 4.0, 8192)
  assert families.from_settings(LLAMA).rope_scaling == expected


@pytest.mark.parametrize(
  ("settings", "changes"),
  [
    (QWEN3, {"hidden_act": "gelu"}),
    (QWEN3, {"use_sliding_window": True}),
    (QWEN3, {"attention_bias": True}),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}),
    (MOE, {"decoder_sparse_step": 2}),
    (MOE, {"mlp_only_layers": [3]}),
    (LLAMA, {"model_type": "mistral"}),
    (LLAMA, {"attention_bias": True}),
    (LLAMA, {"mlp_bias": True}),
    (LLAMA, {"attention_dropout": 0.1}),
    (LLAMA, {"is_causal": False}),
    (QWEN2, {"partial_rotary_factor": 0.5}),
    (QWEN2, {"quantization_config": {"quant_method": "fp8"}}),
    (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    (QWEN2, {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}),
  ],
)
def test_unsupported_options_are_rejected(settings, changes):
  (key,) = changes
  key = "rope_type" if key.startswith("rope") else key
  with pytest.raises(UserError, match=f"{key} to .*not supported"):
    families.from_settings(settings | changes)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize(
  ("per_token", "message"),
  [
    (0, "_tok is 0 but must"),
    (129, "_tok to 129, but a layer has 128 experts"),
  ],
)
def test_a_token_has_at_least_one_and_at_most_all_experts(
  key, per_token, message
):
  settings = {k: v for k, v in MOE.items() if k != "num_experts"} | {key: 128}
  changes = {"num_experts_per_tok": per_token}
  with pytest.raises(UserError, match=message):
    families.from_settings(settings | changes)


WRONG = (None, True, "x", -1, 0, 1.5, 10**400, [], [3], ["x"], {}, {"x": "x"})


@pytest.mark.parametrize("settings", PUBLISHED.values())
@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: repr(x)[:9])
def test_a_value_of_any_type_is_read_or_named(settings, wrong):
  rotary = {"rope_theta": 1e6, "rope_type": "llama3", "factor": 2.0}
  changed = [settings | {key: wrong} for key in settings]
  changed += [
    settings | {style: rotary | {key: wrong}}
    for style in ("rope_parameters", "rope_scaling")
    for key in (*rotary, "full_attention", "sliding_attention")
  ]
  changed.append({"architectures": list(families.TEXT_TOWERS)})
  changed[-1]["text_config"] = wrong
  for content in changed:
    try:
      config = families.from_settings(content)
      parameters.parameter_table(config)
    except UserError as error:
      assert "config.json" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("names", [["GemmaForCausalLM"], []])
def test_an_unknown_architecture_lists_the_supported_ones(names):
  with pytest.raises(
    ValueError, match=f"use one of {', '.join(families.FAMILIES)}"
  ):
    families.from_settings(QWEN2 | {"architectures": names})


def test_every_weight_of_every_family_has_a_tensor():
  used = set()
  for settings in PUBLISHED.values():
    untied = settings | {"tie_word_embeddings": False}
    config = families.from_settings(untied)
    table = parameters.parameter_table(config)
    adapters = lora.choose(table, rank=2, alpha=2.0, targets="all")
    used |= table.keys() | lora.adapter_table(table, adapters).keys()
  assert used == families.TENSORS.keys()


def test_a_projection_is_stored_transposed_with_its_heads_merged():
  weight = np.arange(2 * 3 * 5).reshape(2, 3, 5)  # [E, H, D]
  stored = families.to_file("layers/q", weight)
  assert stored.shape == families.file_shape("layers/q", (7, 2, 3, 5))
  assert stored[1 * 5 + 4, 0] == weight[0, 1, 4]
  again = families.from_file("layers/q", stored, (7, 2, 3, 5))
  np.testing.assert_array_equal(again, weight)
