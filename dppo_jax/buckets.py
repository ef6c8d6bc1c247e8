"""The few shapes that jit may see: rounding of sizes happens here alone."""


def round_up(size: int, multiple: int) -> int:
  """The smallest multiple of `multiple` that is at least `size`."""
  return -(-size // multiple) * multiple


def largest_divisor(size: int, limit: int) -> int:
  """The largest divisor of `size` that is at most `limit`, at least 1."""
  return next(
    d for d in range(min(size, max(limit, 1)), 0, -1) if size % d == 0
  )
