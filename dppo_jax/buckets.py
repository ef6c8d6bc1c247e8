"""The few shapes that jit may see: rounding of sizes happens here alone."""


def round_up(size: int, multiple: int) -> int:
  """The smallest multiple of `multiple` that is at least `size`."""
  return -(-size // multiple) * multiple


def block(size: int) -> int:
  """How many cells of a row of `size` are handled at once.

  About an eighth, in multiples of 64, at most 512: smaller blocks skip more of
  what is not needed, larger ones keep a machine busier. A row of few is one.
  """
  return min(size, 512, round_up(-(-size // 8), 64))


def largest_divisor(size: int, limit: int) -> int:
  """The largest divisor of `size` that is at most `limit`, at least 1."""
  return next(
    d for d in range(min(size, max(limit, 1)), 0, -1) if size % d == 0
  )


def doublings(least: int, most: int) -> list[int]:
  """`least`, its double and so on, and `most` at the end."""
  sizes = [most]
  while least < most:
    sizes.insert(-1, least)
    least *= 2
  return sizes
