"""The methods, each a value that says how it differs from a simpler one.

| method | prompts              | completions          | tokens      | weights |
|--------|----------------------|----------------------|-------------|---------|
| grpo   | every                | every                | every       | 1       |
| dppo   | history below mean   | small advantage      | every       | 1/prob  |
| cppo   | every                | top advantage        | every       | equal   |
| greso  | zero-variance streak | every                | every       | equal   |
| d3s    | every                | as d2s, relaxing     | relaxing    | equal   |
| d2s    | every                | max variance (batch) | top entropy | equal   |
| d1s    | every                | max variance         | every       | equal   |
| pods   | every                | max variance         | every       | equal   |
| neyman | Beta posterior       | proportional to size | by size     | 1/prob  |

greso also draws again until the batch is full (dynamic sampling). "Equal"
weights are those of a mean over what was kept: such a method is biased and
says `unweighted`. Adding a method is a file with a factory, and a line in
`METHODS`; what its rules must do is said in method.py.
"""

from dppo_jax.methods.cppo import cppo, top_abs_advantage
from dppo_jax.methods.d3s import d1s, d2s, d3s, top_entropy
from dppo_jax.methods.dppo import dppo, drop_by_history, drop_small_advantage
from dppo_jax.methods.dynamic_sampling import DynamicSampling
from dppo_jax.methods.greso import drop_zero_variance_streaks, greso
from dppo_jax.methods.grpo import grpo
from dppo_jax.methods.method import (
  CompletionRule,
  Method,
  PromptRule,
  TokenRule,
  every_completion,
  every_prompt,
  unweighted,
  unweighted_prompts,
)
from dppo_jax.methods.neyman import (
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

__all__ = [
  "METHODS",
  "CompletionRule",
  "DynamicSampling",
  "Method",
  "PromptRule",
  "TokenRule",
  "cppo",
  "d1s",
  "d2s",
  "d3s",
  "dppo",
  "drop_by_history",
  "drop_small_advantage",
  "drop_zero_variance_streaks",
  "every_completion",
  "every_prompt",
  "greso",
  "grpo",
  "max_variance",
  "neyman",
  "neyman_completions",
  "neyman_prompts",
  "neyman_tokens",
  "pods",
  "top_abs_advantage",
  "top_entropy",
  "unweighted",
  "unweighted_prompts",
]
