"""The hub's cache with a tiny checkpoint and a few rows for every name in use.

Programs find it by HF_HOME, without a network. The checkpoints have the
architecture of their name and answer in a few bytes.
"""

import json
import pathlib
import sys

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
import transformers

from dppo_jax.models import hf, parameters
from dppo_jax.models.hf import saver
from tests.helpers.sources import write_parquet

COMMIT = "0123456789abcdef" * 2 + "01234567"
FAMILIES = {
  "Qwen/Qwen2.5-Math-1.5B": "Qwen2Config",
  "Qwen/Qwen3-0.6B": "Qwen3Config",
  "Qwen/Qwen3-1.7B": "Qwen3Config",
  "Qwen/Qwen3-30B-A3B": "Qwen3MoeConfig",
  "meta-llama/Llama-3.2-1B-Instruct": "LlamaConfig",
  "google/gemma-3-1b-it": "Gemma3TextConfig",
  "HuggingFaceTB/SmolLM2-135M-Instruct": "LlamaConfig",
}
SHAPE = {
  "vocab_size": 264,
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "head_dim": 8,
  "max_position_embeddings": 32_768,
  "tie_word_embeddings": True,
}
EXPERTS = {
  "num_attention_heads": 4,  # as many devices divide them
  "num_key_value_heads": 4,
  "moe_intermediate_size": 32,
  "num_experts": 8,
  "num_experts_per_tok": 2,
}
END = "<|im_end|>"
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
  "<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_ROWS = 160  # more than the prompts of a step


def write(home: pathlib.Path) -> None:
  """Fills HF_HOME with the models and data sets of the shipped configs."""
  for name, family in FAMILIES.items():
    write_checkpoint(_snapshot(home, "models", name, "main"), family)
  boxed = lambda i: f"Add. The answer is $\\boxed{{{i % 7 + i % 5}}}$."
  problem = lambda i: f"What is ${i % 7}+{i % 5}$? ({i})"
  rows = [
    dict(problem=problem(i), level="Level 1", type="Algebra", solution=boxed(i))
    for i in range(NUM_ROWS)
  ]
  _write_data(home, "DigitalLearningGmbH/MATH-lighteval", "default/train", rows)
  rows = [
    dict(
      problem=problem(i + NUM_ROWS),
      solution=boxed(i),
      answer=str(i % 7 + i % 5),
      unique_id=f"test/{i}",
    )
    for i in range(8)
  ]
  _write_data(home, "HuggingFaceH4/MATH-500", "default/test", rows)
  rows = [
    dict(question=f"{i % 7} + {i % 5}? ({i})", answer=f"Add.\n#### {i % 9}")
    for i in range(NUM_ROWS)
  ]
  _write_data(home, "openai/gsm8k", "main/train", rows[8:])
  _write_data(home, "openai/gsm8k", "main/test", rows[:8])


def write_checkpoint(path: pathlib.Path, family: str = "Qwen3Config") -> None:
  """Writes a checkpoint with a tokenizer of bytes, a third of them the end."""
  path.mkdir(parents=True, exist_ok=True)
  more = EXPERTS if "Moe" in family else {}
  settings = getattr(transformers, family)(**SHAPE | more).to_dict()
  kind = family.removesuffix("Config").removesuffix("Text")
  settings["architectures"] = [f"{kind}ForCausalLM"]
  (path / "config.json").write_text(json.dumps(settings))
  stop = _write_tokenizer(path)
  (path / "generation_config.json").write_text(
    json.dumps({"eos_token_id": stop})
  )
  config = hf.read_config(str(path))
  params = parameters.init(config, jax.random.key(0))
  flat = {k: np.array(x) for k, x in parameters.flatten(params).items()}
  flat["embed"] *= 0.1
  flat["embed"][:, 0] = 1.0
  flat["embed"][stop, 0] += 6.5 / np.sqrt(SHAPE["hidden_size"])
  saver.write_weights(path, flat, "float32")


def _write_tokenizer(path: pathlib.Path) -> int:
  """Writes the tokenizer; returns the id of the end of a turn."""
  names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", END]
  words = tokenizers.Tokenizer(
    models.BPE({x: i for i, x in enumerate(names)}, [])
  )
  words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  words.decoder = decoders.ByteLevel()
  words.add_special_tokens(names[-2:])
  words.save(str(path / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": "<|im_start|>",
    "chat_template": TEMPLATE,
  }
  (path / "tokenizer_config.json").write_text(json.dumps(settings))
  return names.index(END)


def _write_data(home: pathlib.Path, name: str, part: str, rows) -> None:
  folder = _snapshot(home, "datasets", name, "refs/convert/parquet") / part
  folder.mkdir(parents=True)
  write_parquet(folder / "0000.parquet", rows)


def _snapshot(
  home: pathlib.Path, kind: str, name: str, revision: str
) -> pathlib.Path:
  folder = home / "hub" / f"{kind}--{name.replace('/', '--')}"
  ref = folder / "refs" / revision
  ref.parent.mkdir(parents=True, exist_ok=True)
  ref.write_text(COMMIT)
  return folder / "snapshots" / COMMIT


if __name__ == "__main__":
  write(pathlib.Path(sys.argv[1]))
