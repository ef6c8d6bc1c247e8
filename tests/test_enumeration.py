"""Draws that the enumeration would miss are errors."""

import jax
import jax.numpy as jnp
import pytest

from dppo_jax.algo import designs
from dppo_jax.records import Selection
from tests.helpers.enumeration import Draws

HALF = Selection(jnp.ones(3, bool), jnp.full((3,), 0.5))
UNPLANNED = {
  "another sampler": lambda key: jax.random.bernoulli(key, 0.5, (3,)),
  "other bits": lambda key: jax.random.bits(key, (3,)) > 0,
  "another shape": lambda key: jax.random.uniform(key, (2,))[:1] < 0.5,
  "two systematic draws": lambda key: (
    designs.systematic(key, HALF.prob) & designs.systematic(key, HALF.prob)
  ),
  "two kinds of draws": lambda key: (
    designs.systematic(key, HALF.prob) & designs.bernoulli(key, HALF.prob)
  ),
}


@pytest.mark.parametrize("name", UNPLANNED)
def test_a_draw_that_is_not_enumerated_is_an_error(name):
  draw = lambda: (HALF.replace(keep=UNPLANNED[name](jax.random.key(0))),)
  with pytest.raises(AssertionError, match=r"random|draw"):
    list(Draws(draw, (3,))())
