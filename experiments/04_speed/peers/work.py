"""The work that every system is given: a checkpoint, prompts and a reward.

  python work.py DIR --steps=5     writes it; needs torch and transformers

Reading it needs the standard library alone, so that each system can.
"""

import argparse
from collections.abc import Callable
import json
import math
import pathlib

SEED = 0
PROMPTS = 8  # of a step
GROUP = 8  # completions of each
BATCH = PROMPTS * GROUP
SHORTEST, LONGEST = 32, 96  # tokens of a prompt
NEW = 128  # tokens of a completion at most, the stop token included
VOCAB = 4096
PAD, EOS = VOCAB - 2, VOCAB - 1
STOP = 1 / 50  # chance of each token to be the last
LEARNING_RATE = 1e-6
CLIP_NORM = 1.0
MODEL = {
  "vocab_size": VOCAB,
  "hidden_size": 256,
  "intermediate_size": 768,
  "num_hidden_layers": 4,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 32,
  "max_position_embeddings": 512,
  "tie_word_embeddings": True,
  "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
  "initializer_range": 0.05,
  "pad_token_id": PAD,
  "eos_token_id": EOS,
}


def text(ids: list[int]) -> str:
  r"""The text of ordinary tokens, which any of the tokenizers reads back.

  >>> text([7, 12])
  '\\boxed{1}7 \\boxed{0}12'
  """
  return " ".join(rf"\boxed{{{i % 2}}}{i}" for i in ids)


def reward(completion: str) -> float:
  """1 where the last token before the stop token has an even id, else 0."""
  tokens = completion.split()
  return float(bool(tokens) and tokens[-1].startswith(r"\boxed{0}"))


def problems(directory: pathlib.Path) -> list[str]:
  """The prompts as texts, in the order of their file."""
  lines = (directory / "problems.jsonl").read_text().splitlines()
  return [json.loads(line)["problem"] for line in lines]


def prompts(directory: pathlib.Path, seed: int) -> list[list[str]]:
  """The prompts of each step of the runs with this seed."""
  texts = problems(directory)
  order = json.loads((directory / f"order-{seed}.json").read_text())
  return [[texts[i] for i in step] for step in order]


def sequences(directory: pathlib.Path) -> dict:
  """One step's sequences for the check, as ids.

  Returns:
    `prompts`, those of the first problems, each GROUP times; `completions` of
    ordinary tokens; their `rewards` and the `advantages` that follow.
  """
  return json.loads((directory / "sequences.json").read_text())


def write(directory: pathlib.Path, steps: int) -> None:
  """Writes problems for `steps` steps, and sequences to check."""
  import numpy as np

  rng = np.random.default_rng(SEED)
  draw = lambda length: rng.integers(0, PAD, length).tolist()
  ids = [
    draw(rng.integers(SHORTEST, LONGEST + 1)) for _ in range(PROMPTS * steps)
  ]
  rows = [
    {"id": str(i), "problem": text(x), "answer": "0"} for i, x in enumerate(ids)
  ]
  rewards = rng.random((PROMPTS, GROUP))
  centred = rewards - rewards.mean(axis=1, keepdims=True)
  deviation = rewards.std(axis=1, keepdims=True, ddof=1)
  checked = {
    "prompts": [x for x in ids[:PROMPTS] for _ in range(GROUP)],
    "completions": [draw(rng.integers(1, NEW + 1)) for _ in range(BATCH)],
    "rewards": rewards.ravel().tolist(),
    "advantages": (centred / (deviation + 1e-6)).ravel().tolist(),
  }
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "problems.jsonl").write_text(
    "".join(json.dumps(row) + "\n" for row in rows)
  )
  (directory / "sequences.json").write_text(json.dumps(checked))


def write_checkpoint(path: str) -> None:
  """Writes the model and its tokenizer."""
  import torch
  import transformers

  torch.manual_seed(SEED)
  model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL))
  with torch.no_grad():
    # Fresh norms are 1: that a system forgets to read one would not show.
    for norm in (x for x in model.parameters() if x.ndim == 1):
      norm.add_(0.1 * torch.randn_like(norm))
    _let_stop(model, torch.randint(0, PAD, (64, LONGEST)))
  model.save_pretrained(path)
  write_tokenizer(path)


def write_tokenizer(path: str) -> None:
  """Writes the tokenizer, with a word for each token."""
  import tokenizers
  import transformers

  ids = {text([i]): i for i in range(PAD)} | {"<pad>": PAD, "<eos>": EOS}
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids))
  words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
  ).save_pretrained(path)


def _let_stop(model, ids) -> None:
  """Makes the stop token about equally likely, STOP, after every token.

  No layer writes to the last coordinate of the residual stream, and every
  ordinary token's embedding holds the same number there: after the last norm it
  is nearly the same everywhere. The stop token's row of the table, which is
  the head too, is 0 but there; so it needs no bias. The padding's row makes
  that token impossible.

  Args:
    ids: `[rows, length]`, ordinary tokens over whose states to average.
  """
  for layer in model.model.layers:
    layer.self_attn.o_proj.weight[-1] = 0
    layer.mlp.down_proj.weight[-1] = 0
  table = model.model.embed_tokens.weight
  table[:, -1] = 0.5
  table[PAD:] = 0
  hidden = model.model(ids).last_hidden_state.flatten(0, 1)
  others = (hidden @ table[:PAD].T).logsumexp(dim=-1)
  wanted = others + math.log(STOP / (1 - STOP))
  table[EOS, -1] = (wanted / hidden[:, -1]).mean()
  table[PAD, -1] = -4 * table[EOS, -1]


def padded(
  rows: list[list[int]], length: int, left: bool = False
) -> list[list[int]]:
  """Rows of ids, padded at their right, or at their left."""
  pad = lambda row: [PAD] * (length - len(row))
  return [pad(row) + row if left else row + pad(row) for row in rows]


def main(description: str, *modes: Callable) -> None:
  """Runs one mode of a system's program, which writes a file."""
  parser = argparse.ArgumentParser(description=description)
  by_name = {mode.__name__: mode for mode in modes}
  parser.add_argument("mode", choices=by_name)
  for name in ("work", "out"):
    parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
  for name in ("steps", "seed"):
    parser.add_argument(f"--{name}", type=int, required=True)
  parser.add_argument("--micro", required=True, help="size of a micro-batch")
  parser.add_argument("--method", help="of dppo_jax")
  args = parser.parse_args()
  by_name[args.mode](args)


if __name__ == "__main__":
  flags = argparse.ArgumentParser(description=__doc__)
  flags.add_argument("directory", type=pathlib.Path)
  flags.add_argument("--steps", type=int, required=True)
  given = flags.parse_args()
  write(given.directory, given.steps)
  write_checkpoint(str(given.directory / "checkpoint"))
