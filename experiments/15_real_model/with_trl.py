"""Trains the same model on the same prompts by TRL's GRPOTrainer.

Runs in an environment with torch, trl, accelerate and datasets, started by
`run.py --stage=trl`. Prints nothing; writes the seconds, tokens and accuracy of
each step, and the peak memory, as JSON.
"""

import argparse
import json
import os
import pathlib
import resource
import time

import datasets
import torch
import transformers
import trl

from dppo_jax.rewards import functions

END_OF_TURN = "<|im_end|>"


class Steps(transformers.TrainerCallback):
  """Measures each optimizer step, with the rollout before it."""

  def __init__(self):
    names = "seconds", "cpu_seconds", "accuracy", "generated"
    self.columns = {name: [] for name in names}
    self._start = time.monotonic(), time.process_time()

  def reward(self, completions, answer, completion_ids, **unused):
    """Grades the completions of a step by the reward of our runs."""
    texts = [messages[0]["content"] for messages in completions]
    values = [float(x) for x in functions.last_number(texts, list(answer))]
    self.columns["accuracy"].append(sum(values) / len(values))
    self.columns["generated"].append(sum(map(len, completion_ids)))
    return values

  def on_train_begin(self, args, state, control, **unused):
    self._start = time.monotonic(), time.process_time()

  def on_step_end(self, args, state, control, **unused):
    now, start = (time.monotonic(), time.process_time()), self._start
    self.columns["seconds"].append(now[0] - start[0])
    self.columns["cpu_seconds"].append(now[1] - start[1])
    self._start = now


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name in ("model", "prompts", "out"):
    parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
  parser.add_argument("--rate", type=float, required=True)
  parser.add_argument("--seed", type=int, required=True)
  parser.add_argument("--micro", type=int, required=True)
  args = parser.parse_args()
  work = json.loads(args.prompts.read_text())
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
  end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
  if tokenizer.eos_token_id != end:
    raise ValueError(f"a turn ends with {tokenizer.eos_token_id}, not {end}")
  rows = [row for step in work["steps"] for row in step]
  steps = Steps()
  trainer = trl.GRPOTrainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(
      args.model, dtype=torch.float32
    ),
    processing_class=tokenizer,
    reward_funcs=steps.reward,
    train_dataset=datasets.Dataset.from_list(
      [
        {
          "prompt": [{"role": "user", "content": row["problem"]}],
          "answer": row["answer"],
        }
        for row in rows
      ]
    ),
    callbacks=[steps],
    args=trl.GRPOConfig(
      output_dir=str(args.out.with_suffix("")),
      seed=args.seed,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      per_device_train_batch_size=args.micro,
      gradient_accumulation_steps=work["batch"] // args.micro,
      max_steps=len(work["steps"]),
      num_generations=work["group_size"],
      max_completion_length=work["max_tokens"],
      shuffle_dataset=False,
      generation_kwargs={"eos_token_id": end},
      temperature=1.0,
      top_p=1.0,
      top_k=0,
      loss_type="grpo",
      beta=work["beta"],
      num_iterations=1,
      learning_rate=args.rate,
      lr_scheduler_type="constant",
      weight_decay=0.0,
      max_grad_norm=work["clip_norm"],
      logging_strategy="no",
      save_strategy="no",
      report_to="none",
      disable_tqdm=True,
      dataloader_pin_memory=False,
    ),
  )
  trainer.train()
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  versions = {"trl": trl.__version__, "torch": torch.__version__}
  result = {**steps.columns, "peak_bytes": peak, "versions": versions}
  args.out.write_text(json.dumps(result))


if __name__ == "__main__":
  main()
