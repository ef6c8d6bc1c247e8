"""GRPO, the baseline: group relative policy optimisation."""

from dppo_jax.methods.method import Method, every_completion, every_prompt


def grpo() -> Method:
  """Trains on every completion of every prompt.

  Source: Shao et al. 2024, arXiv:2402.03300.
  """
  return Method(prompts=every_prompt(), completions=every_completion())
