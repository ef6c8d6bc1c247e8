"""Problems as token arrays."""

from dppo_jax.data.problems import ProblemSet, draw, load, prepare
from dppo_jax.data.sources import Columns, Row, read
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
  "read",
]
