"""Choice between rollouts with and without drafts, by their measured speed."""

from dppo_jax import distributed

# The slower kind is tried again after so many rollouts, then after 4 times that
# number, then 16 times.
RETRY = 128
DECAY = 0.7  # weight of what was measured, at each further rollout


class DraftChoice:
  """Chooses the program that samples the most tokens per second.

  A resumed run may choose again: but for rounding, tokens do not depend on the
  choice.

  Args:
    names: the programs to choose from.
  """

  def __init__(self, names: list[str]):
    self._sums = {name: [0.0, 0.0] for name in names}  # seconds and tokens
    self._count, self._retry = 0, RETRY

  def next(self) -> str:
    """Returns the program of the next rollout."""
    names = list(self._sums)
    if self._count < len(names):
      return names[self._count]
    by_speed = sorted(names, key=self._seconds_per_token)
    return by_speed[-1 if self._count == self._retry else 0]

  def add(self, name: str, seconds: float, tokens: float) -> None:
    """Adds a measurement; all processes use the first one's clock."""
    if len(self._sums) > 1:
      seconds, tokens = distributed.gather([seconds, tokens])[0]
    for sums in self._sums.values():
      sums[:] = (DECAY * x for x in sums)
    self._sums[name][0] += seconds
    self._sums[name][1] += tokens
    if self._count == self._retry:
      self._retry *= 4
    self._count += 1

  def _seconds_per_token(self, name: str) -> float:
    seconds, tokens = self._sums[name]
    return seconds / tokens if tokens else 0.0
