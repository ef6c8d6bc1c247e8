"""Rows of problems, and sets of them, for the tests of the data."""

from dppo_jax import data
from dppo_jax.data import CharacterTokenizer, rows

COLUMNS = data.Columns("problem", "answer", "source", "solution")
# Those that a config has if nobody says otherwise.
DEFAULTS = data.Columns(
  "problem,question,prompt",
  "answer,final_answer,reward_model.ground_truth",
  "id,extra_info.index",
  "",
)
ROWS = [
  {"source": "a", "problem": "1+2=", "answer": "3", "solution": "1+2=3"},
  {"source": "b", "problem": "Größe π?\n2", "answer": "1,5", "solution": ""},
  {"source": "c", "problem": "9-9=", "answer": "x\n#### 1,000", "solution": ""},
]
ARITHMETIC = {
  "train": "arithmetic",
  "eval": "arithmetic",
  "train_limit": 0,
  "eval_limit": 0,
  "columns": COLUMNS,
  "max_prompt_tokens": 64,
  "num_arithmetic": 400,
  "max_operations": 4,
}


def row(name="a", problem="1+2=", answer="3", solution="", columns=None):
  return data.Row(name, problem, answer, solution, columns or {})


def read(source, columns=COLUMNS, limit=0):
  """The rows of a source, without where they are."""
  return [r._replace(place="") for r in rows.read(source, columns, limit)]


def prepare(rows, max_prompt_tokens=64, **options):
  tokenizer = CharacterTokenizer()
  return data.prepare("train", rows, tokenizer, max_prompt_tokens, **options)
