"""The work done by TRL's GRPOTrainer."""

import json

import datasets
import torch
import transformers
import trl

from . import clock, work


def build(args, prompts: list[str], reward_fn, callbacks=()) -> trl.GRPOTrainer:
  """A trainer on the checkpoint; one optimizer step a generation."""
  path = str(args.work / "checkpoint")
  micro = int(args.micro)
  return trl.GRPOTrainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(
      path, dtype=torch.float32
    ),
    processing_class=transformers.AutoTokenizer.from_pretrained(path),
    reward_funcs=reward_fn,
    train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
    callbacks=list(callbacks),
    args=trl.GRPOConfig(
      output_dir=str(args.out.with_suffix("")),
      seed=args.seed,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      per_device_train_batch_size=micro,
      gradient_accumulation_steps=work.BATCH // micro,
      max_steps=args.steps,
      num_generations=work.GROUP,
      max_completion_length=work.NEW,
      shuffle_dataset=False,
      temperature=1.0,
      top_p=1.0,
      top_k=0,
      loss_type="grpo",
      beta=0.0,
      epsilon=0.2,
      num_iterations=1,
      learning_rate=work.LEARNING_RATE,
      lr_scheduler_type="constant",
      weight_decay=0.0,
      max_grad_norm=work.CLIP_NORM,
      logging_strategy="no",
      save_strategy="no",
      report_to="none",
      disable_tqdm=True,
      dataloader_pin_memory=False,
    ),
  )


class Ends(transformers.TrainerCallback):
  """Stamps the end of each optimizer step."""

  def __init__(self, watch: clock.Clock):
    self._watch = watch

  def on_step_end(self, args, state, control, **unused):
    self._watch.end()


def steps(args) -> None:
  watch = clock.Clock(args.out)

  def reward_fn(completions, completion_ids, **unused):
    tokens = sum(map(len, completion_ids))
    watch.add(generated=tokens, trained=tokens)
    return [work.reward(x) for x in completions]

  batches = work.prompts(args.work, args.seed)[: args.steps]
  prompts = [prompt for batch in batches for prompt in batch]
  trainer = build(args, prompts, reward_fn, [Ends(watch)])
  model = trainer.model
  model.generate = watch.timed("rollout_seconds", model.generate)
  trainer.train()


def check(args) -> None:
  data = work.sequences(args.work)
  texts = work.problems(args.work)[: work.PROMPTS]
  trainer = build(args, texts, lambda completions, **unused: [0.0])
  trainer.current_gradient_accumulation_steps = 1
  model = trainer.model.train()
  prompts = torch.tensor(work.padded(data["prompts"], work.LONGEST, left=True))
  ids = torch.tensor(work.padded(data["completions"], work.NEW))
  both = torch.cat([prompts, ids], dim=1)
  is_token = lambda ids: (ids != work.PAD).long()
  with torch.no_grad():
    logprobs = trainer._get_per_token_logps_and_entropies(
      model, both, is_token(both), work.NEW
    )[0]
  inputs = {
    "prompt_ids": prompts,
    "prompt_mask": is_token(prompts),
    "completion_ids": ids,
    "completion_mask": is_token(ids),
    "advantages": torch.tensor(data["advantages"]),
  }
  trainer.compute_loss(model, inputs).backward()
  # A norm that bounds nothing.
  norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
  results = {
    "prompt_ids": trainer.processing_class(text=texts)["input_ids"],
    "logprobs": logprobs.tolist(),
    "norm": norm.item(),
  }
  args.out.write_text(json.dumps(results))


def decode(args) -> None:
  """Generates a batch whose completions all have NEW tokens."""
  prompts = work.sequences(args.work)["prompts"]
  ids = torch.tensor(work.padded(prompts, max(map(len, prompts)), left=True))
  model = transformers.AutoModelForCausalLM.from_pretrained(
    str(args.work / "checkpoint"), dtype=torch.float32
  ).eval()
  model.generation_config = transformers.GenerationConfig(
    max_new_tokens=work.NEW, do_sample=True, top_k=0, pad_token_id=work.PAD
  )

  def generate():
    out = model.generate(input_ids=ids, attention_mask=ids != work.PAD)
    assert out.shape[1] == ids.shape[1] + work.NEW

  args.out.write_text(json.dumps(clock.repeat(generate)))


if __name__ == "__main__":
  work.main(__doc__, steps, check, decode)
