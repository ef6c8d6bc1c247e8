"""Problems and their tokens: where they come from, and in what order."""

from dppo_jax.data.problems import ProblemSet, draw, load, prepare
from dppo_jax.data.rows import Columns, Row
from dppo_jax.data.tokenizer import (
  CharacterTokenizer,
  PretrainedTokenizer,
  Tokenizer,
)

__all__ = [
  "CharacterTokenizer",
  "Columns",
  "PretrainedTokenizer",
  "ProblemSet",
  "Row",
  "Tokenizer",
  "draw",
  "load",
  "prepare",
]
