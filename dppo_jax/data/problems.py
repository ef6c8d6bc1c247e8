"""Problems: gathered, checked, tokenized once, and drawn step by step.

Rows that cannot be used are left out, counted and reported.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import reprlib
from typing import Any, Self

import jax
from jaxtyping import Int
import numpy as np

from dppo_jax import sharding
from dppo_jax.data import arithmetic, prompts, sources
from dppo_jax.data.rows import Columns, Row, read
from dppo_jax.data.tokenizer import Tokenizer
from dppo_jax.records import PromptBatch
from dppo_jax.rng import Stage, rng_at

ARITHMETIC = "arithmetic"  # the source that is made on the spot

# Of a problem, answer or solution: a tokenizer takes a hundred times as many
# bytes, and no prompt is as long.
MAX_CHARS = 1_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class ProblemSet:
  """`M` problems in the order of their source, with their prompts as tokens.

  Attributes:
    names: the source's ids.
    problems: as written, without template or instruction.
    answers: what a grader compares with.
    solutions: worked out, empty where the source has none.
    columns: every column of the source by its own name, as the source has it
      and as long as `problems`; None where a row lacks it. For reward
      functions.
    tokens: `[M, P]`, prompts at the left, padded at the right; P is the length
      of the longest, rounded up to a multiple of 8.
    lengths: `[M]`, tokens in each prompt.
    first_prompt: one line that shows it as the model reads it.
    report: one line that says how many rows were read and used.
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

  @classmethod
  def of_shape(cls, num: int, width: int) -> Self:
    """Stands for problems that are not read: `num` prompts of `width`."""
    texts = ("",) * num
    return cls(
      names=texts,
      problems=texts,
      answers=texts,
      solutions=texts,
      columns={},
      tokens=np.broadcast_to(np.int32(0), (num, width)),
      lengths=np.full(num, width, np.int32),
      first_prompt="",
      report=f"{num:,} problems, not read: prompts of {width} tokens",
    )

  def __len__(self) -> int:
    return len(self.names)

  @property
  def direct_solutions(self) -> tuple[str, ...]:
    """Solutions that state the answer without the work."""
    return tuple(arithmetic.boxed(answer) for answer in self.answers)

  def columns_at(self, ids: Iterable[int]) -> dict[str, list[Any]]:
    """The columns of the problems numbered `ids`, in their order."""
    ids = [int(i) for i in ids]
    return {
      name: [values[i] for i in ids] for name, values in self.columns.items()
    }


def load(
  tokenizer: Tokenizer,
  seed: int,
  *,
  train: sources.Source,
  eval: sources.Source,
  train_limit: int,
  eval_limit: int,
  columns: Columns,
  max_prompt_tokens: int,
  num_arithmetic: int,
  max_operations: int,
  template: str | Callable = "",
) -> tuple[ProblemSet | None, dict[str, ProblemSet]]:
  """The problems to train on and, by name, those to evaluate on.

  The sets to evaluate on have prompts of one padded length, so that one
  compiled program serves them all. Their solutions are not read.

  Args:
    seed: of the arithmetic problems.
    train: this and the rest are as in `config.data`; empty for none.
    eval: likewise; `eval_limit` is each set's.
  Raises:
    ValueError: if a source cannot be read or leaves nothing to use.
  """
  named = sources.parse_named(eval)
  made: tuple[list[Row], list[Row]] = ([], [])
  if ARITHMETIC in (train, *named.values()):
    problems = arithmetic.make(seed, num_arithmetic, max_operations)
    made = arithmetic.split(
      [
        Row(f"{ARITHMETIC}/{i}", *problem, problem._asdict())
        for i, problem in enumerate(problems)
      ]
    )

  def gather(label, source, limit, own, columns):
    if source == ARITHMETIC:
      rows = own[: limit or None]
    else:
      rows = read(source, columns, limit)
    return prepare(
      label,
      rows,
      tokenizer,
      max_prompt_tokens,
      source=sources.name_of(source),
      template=template,
      columns=columns,
    )

  train_set = None
  if train:
    train_set = gather("train", train, train_limit, made[0], columns)
  columns = columns._replace(solution="")
  known = {_squeeze(x) for x in train_set.problems} if train_set else set()
  eval_sets = {}
  for name, source in named.items():
    label = f"eval {name}" if len(named) > 1 else "eval"
    found = gather(label, source, eval_limit, made[1], columns)
    if train_set:
      shared = sum(_squeeze(problem) in known for problem in found.problems)
      report = f"{found.report}; {shared} also in train"
      found = dataclasses.replace(found, report=report)
    eval_sets[name] = found
  width = max((x.tokens.shape[1] for x in eval_sets.values()), default=0)
  return train_set, {
    name: _pad_prompts(found, width, tokenizer.pad_id)
    for name, found in eval_sets.items()
  }


def _pad_prompts(problems: ProblemSet, width: int, pad_id: int) -> ProblemSet:
  missing = width - problems.tokens.shape[1]
  padding = ((0, 0), (0, missing))
  tokens = np.pad(problems.tokens, padding, constant_values=pad_id)
  return dataclasses.replace(problems, tokens=tokens)


@dataclasses.dataclass
class _Counts:
  """Rows that were read, and those of them that were left out, by reason."""

  read: int = 0
  incomplete: int = 0
  repeated: int = 0
  too_large: int = 0
  too_long: int = 0
  flaws: list[str] = dataclasses.field(default_factory=list)
  sharing_id: int = 0  # these are used

  def report(self, used: int, max_prompt_tokens: int) -> str:
    parts = [
      f"{self.incomplete} without problem or answer",
      f"{self.too_long} over {max_prompt_tokens} prompt tokens",
      f"{self.repeated} duplicate ids",
    ]
    if self.too_large:
      parts.append(f"{self.too_large} over {MAX_CHARS:,} characters")
    if self.flaws:
      parts.append(f"{len(self.flaws)} unusable, the first: {self.flaws[0]}")
    line = f"{self.read} read, {used} used ({', '.join(parts)})"
    if self.sharing_id:
      line += f"; {self.sharing_id} have an id of another problem"
    return line


def prepare(
  label: str,
  rows: Iterable[Row],
  tokenizer: Tokenizer,
  max_prompt_tokens: int,
  *,
  source: str = "",
  template: str | Callable = "",
  columns: Columns | None = None,
) -> ProblemSet:
  """The usable ones of `rows`, tokenized.

  Left out are rows without a problem or an answer, those with a flaw or more
  than `MAX_CHARS`, copies (of a row before them they have the id and the
  problem), and prompts of more than `max_prompt_tokens` tokens.

  Args:
    label: `train` or `eval`, perhaps with a name after it, for the report.
    source: where the rows are from, for the error; this and `columns`.
    template: as in `config.data`.
    columns: what was looked for.
  Raises:
    ValueError: if no row is left, or a prompt cannot be made.
  """
  counts = _Counts()
  found: dict[str, None] = {}  # names of columns, in order
  candidates = list(_distinct(rows, counts, found))
  make_prompt = prompts.template(template)
  kept, tokenized, first = [], [], ""
  for row in candidates:
    try:
      fields = {**dict.fromkeys(found), **row.columns, "problem": row.problem}
      prompt = make_prompt(row.prompt, fields)
      if not prompts.is_unicode(prompt):
        counts.flaws.append(f"{row.place}: half a character in the prompt")
        continue
      tokens = tokenizer.encode_prompt(prompt)
    except ValueError as error:
      raise ValueError(f"{row.place or row.id}: {error}") from error
    if len(tokens) > max_prompt_tokens:
      counts.too_long += 1
      continue
    first = first or tokenizer.prompt(prompt)
    kept.append(row)
    tokenized.append(tokens)
  report = f"{label}: {counts.report(len(kept), max_prompt_tokens)}"
  if not kept:
    if not counts.read:
      raise ValueError(
        f"{source or label} has no rows ({label}: 0 read): set "
        f"config.data.{label.split()[0]} to a source that has some"
      )
    raise ValueError(_nothing_used(label, source, report, found, columns))
  lengths = np.array([len(tokens) for tokens in tokenized], np.int32)
  width = sharding.round_up(int(lengths.max()), 8)
  padded = np.full((len(kept), width), tokenizer.pad_id, np.int32)
  for i, tokens in enumerate(tokenized):
    padded[i, : len(tokens)] = tokens
  return ProblemSet(
    names=tuple(row.id for row in kept),
    problems=tuple(row.problem for row in kept),
    answers=tuple(row.answer for row in kept),
    solutions=tuple(row.solution for row in kept),
    columns={
      name: tuple(row.columns.get(name) for row in kept)
      for name in dict.fromkeys(name for row in kept for name in row.columns)
    },
    tokens=padded,
    lengths=lengths,
    first_prompt=_first_prompt(tokenizer, first, lengths[0]),
    report=report,
  )


def _distinct(
  rows: Iterable[Row], counts: _Counts, found: dict[str, None]
) -> Iterator[Row]:
  """Complete rows without a flaw, and no copy of one before it.

  Args:
    counts: gets what is left out.
    found: gets the names of columns.
  """
  seen: dict[str, set[str]] = {}  # problems of each id
  for row in rows:
    counts.read += 1
    found.update(dict.fromkeys(row.columns))
    if row.flaw:
      counts.flaws.append(row.flaw)
    elif not (row.problem.strip() and row.answer.strip()):
      counts.incomplete += 1
    elif _is_too_large(row):
      counts.too_large += 1
    elif row.problem in seen.setdefault(row.id, set()):
      counts.repeated += 1
    else:
      counts.sharing_id += bool(seen[row.id])
      seen[row.id].add(row.problem)
      yield row


def _is_too_large(row: Row) -> bool:
  texts = (row.problem, row.answer, row.solution)
  return any(
    len(text) > MAX_CHARS
    for text in (*texts, *(m["content"] for m in row.messages))
  )


def _first_prompt(tokenizer: Tokenizer, text: str, length: int) -> str:
  notes = [f"{length} tokens", *filter(None, [tokenizer.template_note])]
  shortened = reprlib.Repr()
  shortened.maxstring = 400  # beyond, the middle is left out
  return f"first prompt ({', '.join(notes)}): {shortened.repr(text)}"


def _nothing_used(
  label: str,
  source: str,
  report: str,
  found: Iterable[str],
  columns: Columns | None,
) -> str:
  looked_for = lambda name: f"={getattr(columns, name)}" if columns else ""
  return (
    f"{source or label}: {report}; its columns are "
    f"{', '.join(found) or 'none'}: check config.data.{label.split()[0]}, "
    f"config.data.problem_key{looked_for('problem')}, "
    f"config.data.answer_key{looked_for('answer')} and "
    "config.data.max_prompt_tokens"
  )


def draw(
  problems: ProblemSet, root_key: jax.Array, step: int, num_prompts: int
) -> PromptBatch:
  """The prompts of one step: distinct, a function of the key and `step` alone.

  Each epoch has an order of its own and as many batches as it fills. The up to
  `num_prompts - 1` prompts left over sit out that epoch only.

  Raises:
    ValueError: if there are fewer problems than `num_prompts`.
  """
  if not 1 <= num_prompts <= len(problems):
    raise ValueError(
      f"{num_prompts} prompts a step are not in 1..{len(problems)}, the number "
      "of problems to train on"
    )
  epoch, index = divmod(int(step), len(problems) // num_prompts)
  order = _epoch_order(
    tuple(jax.random.key_data(root_key).tolist()),
    jax.random.key_impl(root_key),
    epoch,
    len(problems),
  )
  ids = order[index * num_prompts : (index + 1) * num_prompts]
  return PromptBatch(ids, problems.tokens[ids], problems.lengths[ids])


@functools.lru_cache(maxsize=4)  # within an epoch, a draw is an indexing
def _epoch_order(
  key_words: tuple[int, ...], key_impl: str, epoch: int, num_problems: int
) -> Int[np.ndarray, "M"]:
  """Row numbers in the order of `epoch`; a key is no dictionary key itself."""
  words = np.array(key_words, np.uint32)
  root_key = jax.random.wrap_key_data(words, impl=key_impl)
  key = rng_at(root_key, epoch, Stage.DATA).key
  return np.asarray(jax.random.permutation(key, num_problems), np.int32)


def _squeeze(text: str) -> str:
  """`text` without white space, in which copies of a problem may differ."""
  return "".join(text.split())
