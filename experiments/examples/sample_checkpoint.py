"""Samples completions of one prompt from a Hugging Face checkpoint.

  python experiments/examples/sample_checkpoint.py DIR "Is 17 prime?"

DIR is a directory with Qwen2, Qwen3 or Llama 3 weights and their tokenizer.
"""

import argparse

import jax
import numpy as np

from dppo_jax import data, models, rollout
from dppo_jax.records import PromptBatch


def main() -> None:
  """Prints completions with their mean log-probability."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("checkpoint")
  parser.add_argument("prompt")
  parser.add_argument("--samples", type=int, default=4)
  parser.add_argument("--max_tokens", type=int, default=64)
  args = parser.parse_args()

  params, model = models.hf.load(args.checkpoint)
  tokenizer = data.PretrainedTokenizer(args.checkpoint)
  ids = tokenizer.encode_prompt(args.prompt)
  prompts = PromptBatch(
    ids=np.arange(1, dtype=np.int32),
    tokens=np.array([ids], np.int32),  # [N, P]; shorter prompts are padded
    lengths=np.array([len(ids)], np.int32),
  )
  completions = rollout.sample(
    params,
    model,
    prompts,
    jax.random.key(0),
    group_size=args.samples,
    num_slots=args.samples,
    max_tokens=args.max_tokens,
    stop_ids=tokenizer.stop_ids,
  )
  lengths = np.asarray(completions.lengths)[0]  # [G]
  for i, length in enumerate(lengths):
    logprobs = np.asarray(completions.logprobs)[0, i, :length]
    text = tokenizer.decode(np.asarray(completions.tokens)[0, i, :length])
    print(f"{length} tokens, mean log-probability {logprobs.mean():.2f}")
    print(f"  {text!r}")


if __name__ == "__main__":
  main()
