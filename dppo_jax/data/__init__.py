"""Problems: sources, prompts as tokens, and the order of drawing them."""

from dppo_jax.data.problems import ProblemSet, check, draw, load, prepare
from dppo_jax.data.sources import Row
from dppo_jax.data.tokenizer import (
  CharacterTokenizer,
  PretrainedTokenizer,
  Tokenizer,
)
