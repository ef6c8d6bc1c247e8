"""What a config.json may say: the kind and the range of what is read of it."""

from collections.abc import Mapping
import math
import numbers
from typing import Any

__all__ = ["check", "shown"]

# Key -> the largest that it may be; each is a whole number of at least 1.
# Beyond the largest models that there are, so that a slip of the pen does not
# take all memory.
SIZES = {
  "vocab_size": 10_000_000,
  "hidden_size": 65_536,
  "num_hidden_layers": 1000,
  "num_attention_heads": 1024,
  "num_key_value_heads": 1024,
  "head_dim": 1024,
  "intermediate_size": 1_000_000,
  "num_experts": 1024,
  "num_local_experts": 1024,
  "num_experts_per_tok": 1024,
  "moe_intermediate_size": 1_000_000,
  "original_max_position_embeddings": 100_000_000,
}

# Key -> the range of a number; the least is one that it may not be.
NUMBERS = {
  "rms_norm_eps": (0.0, 0.1),
  "rope_theta": (0.0, 1e12),
  "factor": (0.0, 1e6),
  "low_freq_factor": (0.0, 1e6),
  "high_freq_factor": (0.0, 1e6),
}

FLAGS = ("tie_word_embeddings", "norm_topk_prob")
MAPPINGS = ("rope_scaling", "rope_parameters")


def check(settings: Mapping[str, Any]) -> None:
  """Refuses a config.json that describes no model.

  Args:
    settings: its content, without the keys that are null.
  Raises:
    ValueError: naming key, value and limit.
  """
  _check_names("architectures", settings.get("architectures", ["?"]))
  for key in MAPPINGS:
    if not isinstance(settings.get(key, {}), Mapping):
      raise _refusal(key, settings[key], "an object")
  rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
  for key, value in {**rope, **settings}.items():
    if key in SIZES:
      is_whole = type(value) is int and 1 <= value <= SIZES[key]
      if not is_whole:
        words = f"a whole number in 1..{SIZES[key]}"
        raise _refusal(key, value, words)
    if key in NUMBERS:
      least, most = NUMBERS[key]
      is_number = isinstance(value, numbers.Real) and type(value) is not bool
      if not (is_number and math.isfinite(value) and least < value <= most):
        words = f"a number above {least:g}, at most {most:g}"
        raise _refusal(key, value, words)
    if key in FLAGS and type(value) is not bool:
      raise _refusal(key, value, "true or false")
  _check_names("layer_types", settings.get("layer_types", []))
  _check_multiple(settings, "num_attention_heads", "num_key_value_heads")
  if "num_experts_per_tok" in settings and "num_experts" in settings:
    chosen, num = settings["num_experts_per_tok"], settings["num_experts"]
    if chosen > num:
      raise _refusal(
        "num_experts_per_tok", chosen, f"at most the {num} experts"
      )
  if settings.get("head_dim", 2) % 2:
    raise _refusal("head_dim", settings["head_dim"], "even")


def _check_names(key: str, value: Any) -> None:
  is_list = isinstance(value, list)
  if not (is_list and all(isinstance(name, str) for name in value)):
    raise _refusal(key, value, "a list of names")


def _check_multiple(settings: Mapping[str, Any], name: str, of: str) -> None:
  number, divisor = settings.get(name, 0), settings.get(of, 1)
  if number % divisor:
    raise _refusal(name, number, f"a multiple of {of}, {divisor}")


def _refusal(key: str, value: Any, words: str) -> ValueError:
  return ValueError(
    f"config.json sets {key} to {shown(value)} but it must be {words}"
  )


def shown(value: Any) -> str:
  """A value for a message, at most 60 characters."""
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."
