"""The methods, each a value that replaces parts of a simpler one.

README.md in this directory compares them and explains how to write one;
method.py defines what a rule must do. Each method is a file with a factory, and
a line in `METHODS`.
"""

from dppo_jax.methods.cppo import cppo, top_abs_advantage
from dppo_jax.methods.d3s import d1s, d2s, d3s, top_entropy
from dppo_jax.methods.dppo import dppo, drop_by_history, drop_small_advantage
from dppo_jax.methods.dynamic_sampling import DynamicSampling
from dppo_jax.methods.greso import drop_zero_variance_streaks, greso
from dppo_jax.methods.grpo import grpo
from dppo_jax.methods.method import (
  Budget,
  CompletionRule,
  Method,
  PromptRule,
  TokenRule,
  every_completion,
  every_prompt,
  unweighted,
  unweighted_prompts,
)
from dppo_jax.methods.neyman.budget import BudgetPolicy, recorded_policy
from dppo_jax.methods.neyman.rules import (
  neyman,
  neyman_completions,
  neyman_prompts,
  neyman_tokens,
)
from dppo_jax.methods.pods import max_variance, pods

METHODS = {
  "grpo": grpo,
  "dppo": dppo,
  "cppo": cppo,
  "greso": greso,
  "d3s": d3s,
  "d2s": d2s,
  "d1s": d1s,
  "pods": pods,
  "neyman": neyman,
}
