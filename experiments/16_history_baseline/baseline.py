"""A baseline from the history of each prompt."""

import numpy as np


class History:
  """Rewards of earlier visits to each prompt, with less weight on older ones.

  The baseline of a completion mixes what was known before it was drawn: earlier
  rewards of its prompt, the mean reward of the other prompts of the step, and
  the rewards of the others in its group. It is therefore independent of the
  completion given these, and the policy gradient stays unbiased for groups of
  any size, also of 1.

  Args:
    num_prompts: size of the training set.
    decay: factor on the weight of a prompt's earlier rewards at each visit; 0
      keeps those of the last visit alone.
    prior: weight of the mean reward of the other prompts, in rewards.
    snaps: rounds baselines below 0.2 to 0 and above 0.8 to 1, so that most
      advantages are exactly 0.
  """

  def __init__(
    self, num_prompts: int, decay: float, prior: float, snaps: bool
  ) -> None:
    self._decay, self._prior, self._snaps = decay, prior, snaps
    self._sums, self._counts = np.zeros(num_prompts), np.zeros(num_prompts)

  def baselines(self, ids: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Returns the baseline of each completion, `[Q, G]`.

    Args:
      ids: prompts of a step, each at most once, `[Q]`.
      rewards: `[Q, G]`.
    """
    size = rewards.shape[1]
    group = rewards.sum(axis=1, keepdims=True)
    others = (rewards.sum() - group) / max(rewards.size - size, 1)
    total = self._sums[ids][:, None] + self._prior * others + group - rewards
    count = self._counts[ids][:, None] + self._prior + size - 1
    baseline = total / np.maximum(count, 1e-9)
    if self._snaps:
      baseline = np.where(baseline < 0.2, 0.0, baseline)
      baseline = np.where(baseline > 0.8, 1.0, baseline)
    return baseline

  def add(self, ids: np.ndarray, rewards: np.ndarray) -> None:
    """Adds the rewards of a step, after its baselines were taken."""
    self._sums[ids] = self._decay * self._sums[ids] + rewards.sum(axis=1)
    self._counts[ids] = self._decay * self._counts[ids] + rewards.shape[1]
