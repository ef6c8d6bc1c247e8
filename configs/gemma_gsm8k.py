r"""Gemma 3 1B (instruction-tuned) on GSM8K, grade-school word problems.

  python -m dppo_jax.main --config=configs/gemma_gsm8k.py

The checkpoint, whose licence has to be accepted there first, and the data set
come from the Hugging Face hub.

Hardware: one GPU of 80 GB, or a v5e-8. By calculation it takes 30 GiB on one
GPU, and compiled without one 7 GiB on each device of a v5e-8. **It has never
been run at this size**: hours and accuracy are unknown. The code path is tested
with tiny checkpoints. Other sizes:
`--config.model.hub_id=google/gemma-3-270m-it` or `google/gemma-3-4b-it`.

Prompts and completions exceed the window of 512 tokens, so attention on TPUs is
plain XLA. There, `--config.data.max_prompt_tokens=192
--config.rollout.max_tokens=320` allows the splash kernel.
"""

from dppo_jax.config import Config, use_method


def get_config(method: str = "grpo") -> Config:
  config = Config()
  use_method(config, method)
  config.steps = 200
  config.model.hub_id = "google/gemma-3-1b-it"
  config.model.dtype = "bfloat16"
  config.data.train = "hf:openai/gsm8k:main:train"
  config.data.eval = "hf:openai/gsm8k:main:test"
  config.data.eval_limit = 0  # all 1,319
  config.data.template = (
    "{problem}\nReason step by step and put the final answer in \\boxed{{}}."
  )
  config.data.max_prompt_tokens = 256
  config.data.prompts_per_step = 64
  config.reward.functions = "math"
  config.rollout.group_size = 8
  config.rollout.max_tokens = 512
  config.rollout.num_slots = 0  # as many as fit
  config.pack.row_length = 2048
  config.pack.rows_per_micro = 2
  config.optimizer.learning_rate = 1e-6
  config.optimizer.warmup_steps = 5
  config.eval.every = 25
  config.checkpoint.every = 25
  config.mesh.data = -1  # all devices
  return config
