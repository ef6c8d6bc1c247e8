"""Problems for the tests of the data."""

from dppo_jax import data
from dppo_jax.data import CharacterTokenizer

ROWS = [
  {"id": "a", "problem": "1+2=", "answer": "3", "solution": "1+2=3"},
  {"id": "b", "problem": "Größe π?\n2", "answer": "1,5", "solution": ""},
  {"id": "c", "problem": "9-9=", "answer": "x\n#### 1,000", "solution": ""},
]
ARITHMETIC = {"train": "arithmetic:400:4", "eval": "arithmetic"}


def row(name="a", problem="1+2=", answer="3", solution="", columns=None):
  return data.Row(name, problem, answer, solution, columns or {})


def prepare(rows, max_prompt_tokens=64, template=""):
  tokenizer = CharacterTokenizer()
  return data.prepare("train", rows, tokenizer, max_prompt_tokens, template)
