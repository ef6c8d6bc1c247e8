r"""Qwen3-0.6B on GSM8K, grade-school word problems.

  python -m dppo_jax.main --config=configs/gsm8k.py

The checkpoint and the data set come from the Hugging Face hub. Local ones are
named by `--config.model.path=DIR` and `--config.data.train=FILE.jsonl`; a file
needs the columns `problem` or `question`, and `answer`.

Hardware: one GPU of 40 GB or more, or a TPU slice; by calculation 18 GiB in the
update on one GPU, and 8 GiB and the cache in the rollout. **It has never been
run at this size**: hours and accuracy are unknown. The code path is tested with
tiny checkpoints on GSM8K's own rows.
"""

from dppo_jax.config import Config, use_method


def get_config(method: str = "grpo") -> Config:
  config = Config()
  use_method(config, method)
  config.steps = 200
  config.model.hub_id = "Qwen/Qwen3-0.6B"
  config.model.dtype = "bfloat16"
  config.data.train = "hf:openai/gsm8k:main:train"
  config.data.eval = "hf:openai/gsm8k:main:test"
  config.data.eval_limit = 0  # all 1,319
  config.data.template = (
    "{problem}\nReason step by step and put the final answer in \\boxed{{}}."
  )
  config.data.template_args = {"enable_thinking": False}
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
