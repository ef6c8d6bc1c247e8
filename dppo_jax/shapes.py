"""Rounding of sizes, so that jit sees few shapes."""

__all__ = ["block", "doublings", "largest_divisor", "round_up"]


def round_up(size: int, multiple: int) -> int:
  """The smallest multiple of `multiple` that is at least `size`."""
  return -(-size // multiple) * multiple


def block(size: int) -> int:
  """How many tokens of a row of `size` are processed at once.

  About an eighth, in multiples of 64, at most 512: smaller blocks skip more
  padding, larger ones launch less. A short row is one block.
  """
  return min(size, 512, round_up(-(-size // 8), 64))


def largest_divisor(size: int, limit: int) -> int:
  """The largest divisor of `size` that is at most `limit`, at least 1."""
  return next(
    d for d in range(min(size, max(limit, 1)), 0, -1) if size % d == 0
  )


def doublings(least: int, most: int) -> list[int]:
  """`least` and its doublings below `most`, then `most`."""
  sizes = [most]
  while least < most:
    sizes.insert(-1, least)
    least *= 2
  return sizes
