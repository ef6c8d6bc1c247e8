"""Values of another type than the option's are refused like those outside."""

import pytest

from dppo_jax.algo import validation
from dppo_jax.methods import method

SHARE = (method.check_share, "in \\(0, 1\\]")
RATE = (method.check_rate, "in \\[0, 1\\)")
FINITE = (method.check_finite, "at least 0 and finite")


@pytest.mark.parametrize(
  ("check", "limit", "value"),
  [
    *((*SHARE, x) for x in ("batch", None, [0.5], 0, float("nan"))),
    *((*RATE, x) for x in ("0.5", 1, -0.1, float("nan"))),
    *((*FINITE, x) for x in ("0", -1, float("inf"), float("nan"))),
  ],
)
def test_what_is_no_such_number_is_refused(check, limit, value):
  check = getattr(check, "__wrapped__", check)  # not by the type's annotation
  with pytest.raises(ValueError, match=f"keep is .* but must be {limit}.*args"):
    check("keep", value)


@pytest.mark.parametrize("value", [1.5, 0, "2", None, float("inf")])
def test_what_is_no_whole_number_is_refused(value):
  check = getattr(method.check_whole, "__wrapped__", method.check_whole)
  with pytest.raises(ValueError, match=r"a whole number of at least 1"):
    check("draws", value, 1)


def test_the_message_says_it_all():
  with pytest.raises(ValueError) as error:
    validation.check(
      "rate", 2, lambda x: x < 1, "below 1", "config.method.args"
    )
  assert (
    str(error.value) == "rate is 2 but must be below 1; see config.method.args"
  )
