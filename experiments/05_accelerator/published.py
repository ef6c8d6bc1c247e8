"""Published figures of other engines, for comparison."""

from typing import NamedTuple


class Decoding(NamedTuple):
  """Decoding by another engine.

  Attributes:
    slots: sequences side by side, on average.
    context: tokens of cache of each on average, where half of the output has
      been written; prompts are short against it and not counted.
    tokens_per_second: of output, ramps included.
    step_ms: median time between tokens.
    bandwidth: of the device's memory by its data sheet, bytes/s.
    weight_bytes, cache_bytes: of the model, and of a token of its cache.
  """

  engine: str
  model: str
  device: str
  slots: int
  context: int
  tokens_per_second: float
  step_ms: float
  bandwidth: float
  weight_bytes: float
  cache_bytes: float

  @property
  def share_of_bandwidth(self) -> float:
    """Bytes that a step must read per second, over the bandwidth."""
    needed = self.weight_bytes + self.slots * self.context * self.cache_bytes
    return needed / (self.step_ms * 1e-3) / self.bandwidth


# ML.ENERGY leaderboard, public/data/tasks/lm-arena-chat.json of
# github.com/ml-energy/leaderboard at 0cd52da (2026-02-27): vLLM in bfloat16 on
# one GPU, mean outputs of 639 to 660 tokens (8B) and 404 (Llama). Bandwidths:
# NVIDIA's data sheet of the H100 SXM. Parameters: 8.19e9 (Qwen3-8B, of which
# the embedding's 0.62e9 are not read), 8.03e9 (Llama-3.1-8B, 0.53e9).
_QWEN, _LLAMA = 2 * (8.19e9 - 0.62e9), 2 * (8.03e9 - 0.53e9)
DECODING = (
  Decoding(
    "vLLM", "Qwen3-8B", "H100", 64, 322, 4315, 13.95, 3.35e12, _QWEN, 147_456
  ),
  Decoding(
    "vLLM", "Qwen3-8B", "H100", 255, 327, 7719, 31.36, 3.35e12, _QWEN, 147_456
  ),
  Decoding(
    "vLLM",
    "Llama-3.1-8B-Instruct",
    "H100",
    255,
    202,
    9010,
    26.13,
    3.35e12,
    _LLAMA,
    131_072,
  ),
)
