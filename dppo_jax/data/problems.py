"""Problem sets: read, tokenized once, and drawn step by step.

Rows that cannot be used are left out, counted and reported.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import json
import re
from typing import Any

import jax
from jaxtyping import Int
import numpy as np

from dppo_jax import sharding
from dppo_jax.data import arithmetic, sources
from dppo_jax.data.sources import Prompt, Row, is_begun, parse_messages, text_of
from dppo_jax.data.tokenizer import Tokenizer
from dppo_jax.errors import UserError
from dppo_jax.files import user_code
from dppo_jax.records import PromptBatch
from dppo_jax.rng import Stage, rng_at

_ROLE = re.compile(r"^(system|user|assistant):", re.MULTILINE)


@dataclasses.dataclass(frozen=True, eq=False)
class ProblemSet:
  """`M` problems in the order of their source, with their prompts as tokens.

  Attributes:
    names: row ids.
    problems: texts without template.
    answers: texts that a grader compares with.
    solutions: worked solutions; empty if the source has none.
    columns: values of all columns, for reward functions; None if absent.
    tokens: `[M, P]`, prompts padded on the right; P is a multiple of 8.
    lengths: `[M]`, tokens in each prompt.
    first_prompt: line that shows the first prompt as the model reads it.
    report: line with the number of rows read, used and left out.
    direct_share: fraction of the solutions that state only the answer, where
      they are imitated.
  """

  names: tuple[str, ...]
  problems: tuple[str, ...]
  answers: tuple[str, ...]
  solutions: tuple[str, ...]
  columns: dict[str, tuple[Any, ...]]
  tokens: Int[np.ndarray, "M P"]
  lengths: Int[np.ndarray, "M"]
  first_prompt: str
  report: str
  direct_share: float = 0.0

  def __len__(self) -> int:
    return len(self.names)

  def columns_at(self, ids: Iterable[int]) -> dict[str, list[Any]]:
    """Returns the columns of the problems numbered `ids`, in their order."""
    ids = list(map(int, ids))
    return {name: [x[i] for i in ids] for name, x in self.columns.items()}

  def padded(self, width: int) -> "ProblemSet":
    """Returns the set with its prompts padded to `width` tokens."""
    padding = ((0, 0), (0, width - self.tokens.shape[1]))
    return dataclasses.replace(self, tokens=np.pad(self.tokens, padding))

  def prompts_at(self, ids: Int[np.ndarray, "N"]) -> PromptBatch:
    """Returns the prompts of the problems numbered `ids`, in their order."""
    return PromptBatch(ids, self.tokens[ids], self.lengths[ids])


def check(train: sources.Source, eval: sources.Source) -> None:
  """Raises UserError unless both sources exist; empty ones are skipped.

  It needs no tokenizer, so that it can precede the download of a model. A set
  of TFDS is looked for when it is read.
  """
  named = [("train", train)] if train else []
  named += [("eval", x) for x in sources.parse_named(eval).values()]
  for name, source in named:
    try:
      if not arithmetic.is_source(source):
        sources.reader(source)
    except UserError as error:
      raise type(error)(f"config.data.{name}: {error}") from error


def load(
  tokenizer: Tokenizer,
  seed: int,
  *,
  train: sources.Source,
  eval: sources.Source,
  eval_limit: int = 0,
  problem_key: str = sources.PROBLEM_KEY,
  answer_key: str = sources.ANSWER_KEY,
  max_prompt_tokens: int = 512,
  template: str | Callable = "",
  trains: bool = True,
  needs_answers: bool = True,
) -> tuple[ProblemSet | None, dict[str, ProblemSet]]:
  """Reads the problems to train on and, by name, those to evaluate on.

  All evaluation sets are padded to one prompt length, so that one compiled
  program serves them all.

  Args:
    seed: seed of the arithmetic problems; for the others see `config.data`.
    trains: False to skip `train` and return None in its place.
    needs_answers: False to use rows without an answer too.
  """

  def read(label: str, source: sources.Source, limit: int) -> ProblemSet:
    if arithmetic.is_source(source):
      rows = arithmetic.read(source, seed, held_out=label != "train")
      of = f" of {len(rows):,}" * (0 < limit < len(rows))
      direct_share = arithmetic.DIRECT_SHARE
    else:
      direct_share = 0.0
      rows, of = sources.read(source, problem_key, answer_key, limit)
    limits = max_prompt_tokens, template, needs_answers
    rows = rows[: limit or None]
    problems = prepare(label, rows, tokenizer, *limits, of)
    return dataclasses.replace(problems, direct_share=direct_share)

  train_set = read("train", train, 0) if trains else None
  named = sources.parse_named(eval)
  eval_sets = {}
  for name, source in named.items():
    is_held_out = source == "arithmetic" and arithmetic.is_source(train)
    label = f"eval {name}" if len(named) > 1 else "eval"
    eval_sets[name] = read(label, train if is_held_out else source, eval_limit)
  width = max((x.tokens.shape[1] for x in eval_sets.values()), default=0)
  squeeze = lambda text: "".join(text.split())  # copies differ in white space
  known = set(map(squeeze, train_set.problems if train_set else ()))
  for name, loaded in eval_sets.items():
    report = loaded.report
    if train_set:
      shared = sum(squeeze(x) in known for x in loaded.problems)
      report += f"; {shared} also in train"
    widened = loaded.padded(width)
    eval_sets[name] = dataclasses.replace(widened, report=report)
  return train_set, eval_sets


def prepare(
  label: str,
  rows: Iterable[Row],
  tokenizer: Tokenizer,
  max_prompt_tokens: int,
  template: str | Callable = "",
  needs_answers: bool = True,
  of: str = "",
) -> ProblemSet:
  """Tokenizes the usable rows; leaves out and counts the others.

  Args:
    label: `train` or `eval`, perhaps followed by a name, for the report.
    of: number of all rows for the report, as ` of 500`.
  """
  rows = list(rows)
  names = dict.fromkeys(name for row in rows for name in row.columns)
  left_out: collections.Counter[str] = collections.Counter()
  used: list[Row] = []
  seen, tokens, num_begun = set(), [], 0
  for row in rows:
    problem = text_of(row.problem)
    has_answer = row.answer.strip() or not needs_answers
    if not (problem.strip() and has_answer):
      left_out["without problem or answer (text or a number)"] += 1
      continue
    if (row.id, problem) in seen:
      left_out["with id and problem of an earlier row"] += 1
      continue
    seen.add((row.id, problem))
    columns = {**dict.fromkeys(names), **row.columns, "problem": problem}
    try:
      prompt = make_prompt(template, row.problem, columns)
      tools = columns.get("tools")
      ids = tokenizer.encode_prompt(prompt, tools)
    except UserError as error:
      raise UserError(f"{row.id}: {error}") from error
    if not 0 < len(ids) <= max_prompt_tokens:
      limits = f"over {max_prompt_tokens}" if ids else "without"
      left_out[f"{limits} prompt tokens"] += 1
      continue
    used.append(row)
    num_begun += is_begun(prompt)
    tokens.append(ids)
  report = f"{label}: {len(rows):,}{of} read, {len(used):,} used"
  if left_out:
    counts = [f"{count:,} {reason}" for reason, count in left_out.items()]
    report += f"; left out: {', '.join(counts)}"
  if num_begun:
    report += f"; {num_begun:,} end with an assistant message, to be continued"
  if num_json := sum(_is_json(row.answer) for row in used):
    report += (
      f"; {num_json:,} answers are JSON text, which math and exact compare as "
      "it is: set config.data.answer_key or a reward of your own"
    )
  if not used:
    raise UserError(
      f"{report}; the columns are {', '.join(names) or 'none'}: check "
      f"config.data.{label.split()[0]}, config.data.problem_key, "
      "config.data.answer_key and config.data.max_prompt_tokens"
    )
  padded, lengths = _pad(tokens)
  first_text = tokenizer.decode(tokens[0], skip_special_tokens=False)
  return ProblemSet(
    names=tuple(row.id for row in used),
    problems=tuple(text_of(row.problem) for row in used),
    answers=tuple(row.answer for row in used),
    solutions=tuple(row.solution for row in used),
    columns={x: tuple(row.columns.get(x) for row in used) for x in names},
    tokens=padded,
    lengths=lengths,
    first_prompt=f"first prompt ({lengths[0]} tokens): {first_text!r}",
    report=report,
  )


def _is_json(answer: str) -> bool:
  """Returns True for a JSON object, text or list of texts, unlike `[1, 2]`."""
  try:
    value = json.loads(answer)
  except (ValueError, RecursionError):
    return False
  items = value if isinstance(value, list) else [value]
  return any(isinstance(x, str | dict) for x in items)


def _pad(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
  """Returns `[M, P]` ids, P a multiple of 8, and `[M]` lengths."""
  lengths = np.array([len(row) for row in rows], np.int32)
  width = sharding.round_up(int(lengths.max()), 8)
  padded = np.zeros((len(rows), width), np.int32)  # an id that all models have
  for i, row in enumerate(rows):
    padded[i, : len(row)] = row
  return padded, lengths


def make_prompt(
  template: str | Callable, prompt: Prompt, columns: Mapping[str, Any]
) -> Prompt:
  """Applies `config.data.template` to columns; if empty, keeps the prompt."""
  if not template:
    return prompt
  try:
    if isinstance(template, str) and "{" in template:
      result = _fill(template, columns)
    else:
      function = template if callable(template) else user_code.load(template)
      result = function(dict(columns))
    filled = result if isinstance(result, str) else parse_messages(result)
  except UserError as error:
    raise UserError(f"config.data.template: {error}") from error
  except Exception as error:  # of the user's code or format
    raise UserError(
      f"config.data.template: {user_code.one_line(error)}; the columns are "
      f"{', '.join(columns)}, and literal braces are written {{{{ and }}}}"
    ) from error
  if not filled or not text_of(filled).strip():
    raise UserError(
      "config.data.template must give text or a list of messages with role and "
      f"content, not {str(result)[:80]!r}"
    )
  return filled


def _fill(template: str, columns: Mapping[str, Any]) -> Prompt:
  values = {name: "" if x is None else x for name, x in columns.items()}
  before, *parts = _ROLE.split(template)
  if before or not parts:
    return template.format_map(values)
  return [
    {"role": role, "content": content.strip().format_map(values)}
    for role, content in zip(parts[::2], parts[1::2], strict=True)
  ]


def draw(
  problems: ProblemSet, root_key: jax.Array, step: int, num_prompts: int
) -> PromptBatch:
  """Draws distinct prompts, a function of the key and the step alone.

  Each epoch has its own order and only full batches: up to `num_prompts - 1`
  prompts are left over and not drawn in that epoch.
  """
  epoch, index = divmod(int(step), len(problems) // num_prompts)
  key = rng_at(root_key, epoch, Stage.DATA).key
  words = tuple(jax.random.key_data(key).tolist())
  order = _shuffled(words, str(jax.random.key_impl(key)), len(problems))
  begin = index * num_prompts
  return problems.prompts_at(order[begin : begin + num_prompts])


@functools.lru_cache(maxsize=4)  # an epoch is shuffled once
def _shuffled(key_words: tuple[int, ...], impl: str, size: int) -> np.ndarray:
  """Returns the row numbers in a random order; keys are not hashable."""
  key = jax.random.wrap_key_data(np.array(key_words, np.uint32), impl=impl)
  return np.asarray(jax.random.permutation(key, size), np.int32)


def tokenize_solutions(
  problems: ProblemSet, tokenizer: Tokenizer, stop_id: int, row_length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens `[2, M, T]` and lengths `[2, M]` of solutions.

  Index 0 has the worked solutions, index 1 the direct ones, which state the
  boxed answer. A direct solution replaces a missing worked one.
  """
  direct = [arithmetic.boxed(answer) for answer in problems.answers]
  worked = [x or y for x, y in zip(problems.solutions, direct, strict=True)]
  ids = [[*tokenizer.encode(text), stop_id] for text in (*worked, *direct)]
  tokens, lengths = _pad(ids)
  shape = (2, len(problems))
  tokens, lengths = tokens.reshape(*shape, -1), lengths.reshape(shape)
  totals = (problems.lengths + lengths - 1).max(0)
  longest = totals.argmax()
  if totals[longest] > row_length:
    raise UserError(
      f"{problems.names[longest]} and its solution take {totals[longest]} "
      f"tokens but a row holds {row_length}: raise config.pack.row_length"
    )
  return tokens, lengths
