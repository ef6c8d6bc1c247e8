"""The methods, each a value that says how it differs from a simpler one.

| method | prompts             | completions              | weights |
|--------|---------------------|--------------------------|---------|
| grpo   | every_prompt        | every_completion         | 1       |
| dppo   | drop_by_history(r)  | drop_small_advantage(r)  | 1 / prob |

Adding one is a factory and a line in `METHODS`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from dppo_jax.algo import advantages, completion_rules, prompt_rules


class Method(NamedTuple):
  """A way to spend rollouts and updates, as pure functions.

  Attributes:
    prompts: chooses prompts before the rollout, from history.
    advantage: rewards `[Q, G]` to advantages `[Q, G]`.
    completions: chooses completions after it, from their groups.
  """

  prompts: prompt_rules.PromptRule
  advantage: Callable[[Float[Array, "Q G"]], Float[Array, "Q G"]]
  completions: completion_rules.CompletionRule


def grpo() -> Method:
  """Trains on every completion of every prompt.

  Source: Shao et al. 2024, arXiv:2402.03300.
  """
  return Method(
    prompts=prompt_rules.every_prompt(),
    advantage=advantages.group_normalized,
    completions=completion_rules.every_completion(),
  )


def dppo(prompt_rate: float = 0.5, completion_rate: float = 0.5) -> Method:
  """GRPO on fewer prompts and completions, with the same expected gradient.

  Args:
    prompt_rate: share dropped of the prompts whose last visit taught little.
    completion_rate: share dropped of the completions below their group's mean
      |advantage|.
  Source: DPPO, arXiv:2603.04135.
  Deviates:
    1. Draws at random with known probabilities, as the paper's proof needs;
       its algorithm 1 is said to floor a fixed share, which is biased.
    2. Divides by the counts of the unpruned batch, which is what the paper's
       factor C / (1 - P) amounts to where C is the share really kept.
    3. Pruned prompts wait for their next epoch and are not replaced.
    4. Rates, threshold and score are our reading: the text was not at hand.
  """
  return grpo()._replace(
    prompts=prompt_rules.drop_by_history(prompt_rate),
    completions=completion_rules.drop_small_advantage(completion_rate),
  )


METHODS = {"grpo": grpo, "dppo": dppo}
