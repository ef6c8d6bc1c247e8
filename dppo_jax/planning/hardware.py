"""Figures of accelerators, as their makers state them."""

import re
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
  """One device.

  Attributes:
    platform: tpu or gpu.
    flops: dense bfloat16 operations a second.
    bandwidth: bytes a second to and from its memory.
    memory: bytes.
    network: bytes a second that it receives from the other devices of its
      domain, and sends at the same time.
    domain: devices that are joined by that network.
  """

  platform: str
  flops: float
  bandwidth: float
  memory: int
  network: float
  domain: int


# Sources: cloud.google.com/tpu/docs, pages v4, v5e, v5p, v6e (peak bf16, HBM
# capacity and bandwidth, inter-chip bandwidth per chip in bits); NVIDIA's data
# sheets of A100 80GB SXM, H100 SXM and H200 SXM (bf16 without sparsity, NVLink
# halved to one direction). Memory of the GPUs is what their driver reports.
CHIPS = {
  "v4": Chip("tpu", 275e12, 1.2e12, 32 * GIB, 300e9, 4096),
  "v5e": Chip("tpu", 197e12, 0.82e12, 16 * GIB, 200e9, 256),
  "v5p": Chip("tpu", 459e12, 2.76e12, 95 * GIB, 600e9, 6144),
  "v6e": Chip("tpu", 918e12, 1.64e12, 32 * GIB, 448e9, 256),
  "a100": Chip("gpu", 312e12, 2.04e12, 80 * GIB, 300e9, 8),
  "h100": Chip("gpu", 989e12, 3.35e12, 80 * GIB, 450e9, 8),
  "h200": Chip("gpu", 989e12, 4.8e12, 140 * GIB, 450e9, 8),
}

# What is left of the memory for a program: JAX's and the compiler's own part
# is between 1.5% (15.75 of a v5e's 16 GiB) and some 5% on a GPU.
USABLE = {"tpu": 0.984, "gpu": 0.95}


class Hardware(NamedTuple):
  """Devices of one kind.

  Attributes:
    kind: a key of `CHIPS`.
    topology: how TPUs are wired, as in 4x4; empty where it does not matter.
  """

  kind: str
  num: int
  topology: str = ""

  @property
  def chip(self) -> Chip:
    return CHIPS[self.kind]

  @property
  def memory(self) -> float:
    """Bytes of one device that a program may use."""
    return self.chip.memory * USABLE[self.chip.platform]

  @property
  def name(self) -> str:
    return f"{self.kind}:{self.topology or self.num}"


def parse(text: str, flag: str = "--hardware") -> Hardware:
  """`KIND:NUMBER`, as in h200:8, or `KIND:TOPOLOGY`, as in v5e:4x4.

  Raises:
    ValueError: for a kind that there is not, or what is no number of devices.
  """
  kind, _, size = text.strip().partition(":")
  if kind not in CHIPS:
    raise ValueError(
      f"{flag} is {text!r} but must be KIND:NUMBER or KIND:TOPOLOGY, where "
      f"KIND is one of {', '.join(CHIPS)}"
    )
  if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,3}){0,2}", size or "1"):
    raise ValueError(
      f"{flag} is {text!r} but what follows the colon must be a number of "
      "devices, as in h200:8, or a topology, as in v5e:4x4 or v5p:2x2x1"
    )
  num = 1
  for side in (size or "1").split("x"):
    num *= int(side)
  is_wired = "x" in size
  return Hardware(kind, num, size if is_wired else "")
