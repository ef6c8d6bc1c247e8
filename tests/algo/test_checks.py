"""Values outside their limits, or of another type, are rejected."""

import pytest

from dppo_jax.algo import validation
from dppo_jax.algo.validation import (
  COUNT,
  FINITE,
  FRACTION,
  RATE,
  SCHEDULE,
  one_of,
)
from dppo_jax.errors import UserError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
  ("limit", "valid", "invalid"),
  [
    (FRACTION, (0.1, 1), ("batch", None, [0.5], 0, NAN, float)),
    (SCHEDULE, (0.1, 1, float), ("batch", None, 0, NAN)),
    (RATE, (0, 0.9), ("0.5", 1, -0.1, NAN)),
    (FINITE, (0, 9.0), ("0", -1, INF, NAN)),
    (COUNT, (1, 2), (1.5, 2.0, 0, "2", None, INF)),
    (one_of("a", "b"), ("a", "b"), ("c", None, 1)),
  ],
)
def test_limits(limit, valid, invalid):
  for value in valid:
    validation.check(limit, keep=value)
  for value in invalid:
    with pytest.raises(UserError) as error:
      validation.check(limit, keep=value)
    assert str(error.value) == (
      f"keep is {value!r} but must be {limit.text}; see config.method.args"
    )
