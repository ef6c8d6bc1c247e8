"""Configs of the tasks that several experiments use."""

from dppo_jax.config import Config
from dppo_jax.files import user_code

from . import rings
from .processes import ROOT

RINGS = ROOT / "experiments" / "03_comparison"
CONFIGS = {
  "arithmetic": ROOT / "experiments" / "common" / "arithmetic.py",
  "rings": RINGS / "config.py",
}


def grpo_config(task: str) -> Config:
  """Returns the GRPO config of a task; writes its problems if it is rings."""
  if task == "rings":
    rings.write(RINGS / "data")
  return user_code.load(f"{CONFIGS[task]}:get_config")("grpo")
