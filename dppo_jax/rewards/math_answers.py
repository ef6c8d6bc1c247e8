"""Compares the answer in a completion's last box with the gold answer.

math-verify compares what notation.py returns; README.md lists equal answers.
"""

from collections.abc import Callable
from fractions import Fraction
import functools
import itertools
import re
from typing import Any

from dppo_jax.errors import UserError
from dppo_jax.rewards import kinds, notation
from dppo_jax.rewards.notation import normalize

Form = Any  # an expression or relation of sympy, which is imported late

MAX_CHARS = 1_000_000  # of a completion: 0.2 s, if all of them are braces
MAX_ANSWER_CHARS = 1000  # ten times the longest gold answer of MATH

# A box and its brace; a box and a bare word; an escape, such as `\{`; a brace.
_TOKEN = re.compile(
  r"(?P<box>\\(?:boxed|fbox)\s*\{)"
  r"|\\(?:boxed|fbox)(?![a-zA-Z])\s*(?P<bare>-?\w+(?:[./]\w+)*)"
  r"|\\.|(?P<open>\{)|(?P<close>\})",
  re.DOTALL,
)


def last_boxed(text: str) -> str | None:
  r"""Returns what the last complete `\boxed{}` or `\fbox{}` holds, or None.

  The box that starts last is the last one. Takes time linear in the text.

  >>> last_boxed(r"not \boxed{4} but \boxed{\frac{1}{2}}, as \boxed{...")
  '\\frac{1}{2}'
  >>> last_boxed(r"hence $\boxed 5$.")
  '5'
  """
  text = text[-MAX_CHARS:]
  starts = []  # of the open braces: where a box's contents begin, or -1
  begin, end = -1, -1
  for token in _TOKEN.finditer(text):
    if token["bare"]:
      begin, end = token.span("bare")
    elif token["box"]:
      starts.append(token.end())
    elif token["open"]:
      starts.append(-1)
    elif token["close"] and starts:
      start = starts.pop()
      if start > begin:
        begin, end = start, token.start()
  return None if begin < 0 else text[begin:end]


def outcome_by_text(completion: str, gold: str) -> str | None:
  """Returns the outcome if the text alone decides it, in linear time."""
  answer = last_boxed(completion)
  if answer is None:
    return "unboxed"
  # The same text is right even if it cannot be parsed.
  if answer.strip() == gold.strip():
    return "right"
  if max(len(answer), len(gold)) > MAX_ANSWER_CHARS:
    return "unparsed"
  return "right" if normalize(answer) == normalize(gold) else None


def outcome(completion: str, gold: str) -> str:
  """Returns `right`, `wrong`, `unboxed` or `unparsed`.

  Takes unbounded time and memory: a box may hold 9^{9^{9}}.
  """
  if known := outcome_by_text(completion, gold):
    return known
  try:
    return _compare(normalize(gold), normalize(last_boxed(completion)))
  except (MemoryError, ImportError):
    raise
  except Exception:  # sympy raises many, such as RecursionError
    return "unparsed"


def warm_up() -> None:
  """Builds the tables of math-verify's parser, in half a second.

  Raises UserError if it cannot compare, as with another version of antlr.
  """
  if _compare(r"\frac{1}{2}", "0.5") != "right":
    raise UserError("'math' fails: reinstall math-verify as setup.py pins it")


def _compare(gold: str, answer: str) -> str:
  if kinds.differ_in_kind(gold, answer):
    return "wrong"
  # (E) 12 equals both E and 12, but not (D) 12.
  parts = kinds.choice(gold), kinds.choice(answer)
  if parts != ((gold,), (answer,)):
    has_same = len(parts[0]) == len(parts[1])
    pairs = zip(*parts, strict=True) if has_same else itertools.product(*parts)
    results = [_compare(*x) == "right" for x in pairs]
    return "right" if (all if has_same else any)(results) else "wrong"
  if named := kinds.by_symbol(gold, answer):
    return "right" if {_compare(*x) for x in named} == {"right"} else "wrong"
  # Percentages: 7.2\% equals 7.2 as well as 0.072.
  first, second = kinds.percent(gold), kinds.percent(answer)
  if first and second:
    gold, answer = first, second
  elif "%" in gold + answer:
    # math-verify reads no expression in front of a percent sign.
    hundredth = lambda x, y: rf"\frac{{{x}}}{{100}}" if x else y
    for pair in (
      map(kinds.without_percent, (gold, answer)),
      map(hundredth, (first, second), (gold, answer)),
    ):
      if _compare_parsed(*pair) == "right":
        return "right"
  return _compare_parsed(gold, answer)


def _compare_parsed(gold: str, answer: str) -> str:
  first, second = map(notation.without_text, (gold, answer))
  is_word = len(first) > 1 and first.isalpha()
  if first == second or (is_word and first.lower() == second.lower()):
    return "right"
  gold, answer = notation.without_units(gold), notation.without_units(answer)
  answer = notation.without_letter_unit(answer, gold)
  answer = notation.with_unions(answer, gold)
  texts = [re.sub(r"(?<!\d) | (?!\d)", "", x) for x in (gold, answer)]
  if texts[0] == texts[1]:
    return "right"
  golds, answers = _parse(notation.with_unions(gold, answer)), _parse(answer)
  if not golds or not answers:
    return "unparsed"
  forms = [golds[0], answers[0]]
  if _is_hollow(*forms):
    return "wrong"
  if "set" not in {kinds.brackets(gold), kinds.brackets(answer)}:
    forms = _with_repeats(*forms)
  # Not symmetric: the gold answer comes first. 6 decimals, 15 digits. A set may
  # be written as a relation, {x | x > 1}.
  is_equal = _equality()(*forms, 6, 15, answer.startswith(r"\{"))
  return "right" if is_equal else "wrong"


@functools.cache
def _equality() -> Callable:
  """Returns math-verify's comparison with two rules, which hold within lists.

  `_are_equal_numbers` compares numbers. Two equations that sympy finds no
  solutions of are not equal for that reason.
  """
  from math_verify import grader
  from sympy import Eq

  def with_numbers(compare: Callable) -> Callable:
    def are_equal(gold, answer, *args):
      equations = isinstance(gold, Eq) and isinstance(answer, Eq)
      if equations and gold.lhs.is_Symbol and gold.lhs == answer.lhs:
        gold, answer = gold.rhs, answer.rhs
      is_equal = _are_equal_numbers(gold, answer)
      return compare(gold, answer, *args) if is_equal is None else is_equal

    return are_equal

  def solve(*args, known_solve=grader.solve):
    if not (solutions := known_solve(*args)):
      raise ValueError("no solutions to compare")
    return solutions

  grader.solve = solve
  grader.sympy_expr_eq = with_numbers(grader.sympy_expr_eq)
  grader.sympy_numeric_eq = with_numbers(grader.sympy_numeric_eq)
  return grader.sympy_expr_eq


def _is_hollow(gold: Form, answer: Form) -> bool:
  """Returns True for relations that may be equal but answer nothing.

  For x = 5, x + 5 = 10 may be the problem. A relation that holds for all or no
  values, such as 1 = 100%, would equal 0 = 0.
  """
  import sympy

  golds, answers = (x.atoms(sympy.Rel) for x in (gold, answer))
  if not golds or not answers:
    return False
  sides = lambda relations: [x for y in relations for x in y.args]
  if not all(
    isinstance(x, sympy.Expr) and not x.is_Matrix
    for x in sides(golds | answers)
  ):
    return False
  is_solved = lambda relations: all(
    not x.free_symbols or any(x in (y, -y) for y in x.free_symbols)
    for x in sides(relations)
  )
  if is_solved(golds) and not is_solved(answers):
    return True
  return not any(sympy.simplify(x.lhs - x.rhs).free_symbols for x in golds)


def _with_repeats(*forms: Form) -> list:
  """Writes lists such as 1, 1, 2 as sorted tuples, for sets have no repeats."""
  import sympy

  # Of x = 1, 1, 2, the right side; `_unsorted_args` keeps what was written.
  rows = [getattr(getattr(x, "rhs", x), "_unsorted_args", ()) for x in forms]
  if not any(len({*row}) < len(row) for row in rows):
    return [*forms]

  def decimal(form):
    is_tuple = isinstance(form, sympy.Tuple)
    return sympy.Tuple(*map(decimal, form)) if is_tuple else sympy.N(form)

  key = lambda form: sympy.default_sort_key(decimal(form))
  return [sympy.Tuple(*sorted(row, key=key)) for row in rows]


def _are_equal_numbers(gold: Form, answer: Form) -> bool | None:
  """Compares real closed forms to 60 digits; returns None if that is unclear.

  Takes milliseconds for sums of roots that math-verify simplifies in minutes.
  A decimal is exact, but may differ from a number that it stands for by half of
  the sixth place and by 1e-5 of the number.
  """
  import sympy

  first, second = _number(gold), _number(answer)
  if first is None or second is None:
    return None
  error = abs(first - second)
  if gold.has(sympy.Float) or answer.has(sympy.Float):
    return bool(error <= min(Fraction(1, 2_000_000), abs(first) / 100_000))
  if first.is_Rational and second.is_Rational:
    return first == second
  if error <= abs(first) * Fraction(1, 10**60):
    return True
  return False if error > abs(first) * Fraction(1, 10**9) else None


def _number(form: Form) -> Form | None:
  """Returns a real closed form, exact or to 80 digits; None for others."""
  import sympy
  from sympy.concrete.expr_with_limits import ExprWithLimits

  if not isinstance(form, sympy.Expr) or form.free_symbols:
    return None
  try:
    decimals = form.atoms(sympy.Float)
    form = form.xreplace({x: sympy.Rational(str(x)) for x in decimals}).doit()
    if form.has(sympy.UnevaluatedExpr, ExprWithLimits):  # such as a percentage
      return None
    if not form.is_Rational:
      form = form.evalf(80, maxn=400, strict=True)
    return form if form.is_Rational or form.is_Float else None
  except MemoryError:
    raise
  except Exception:  # it seems to be 0, or sympy cannot evaluate it
    return None


@functools.lru_cache(maxsize=64)  # a group shares its gold answer
def _parse(text: str) -> list:
  """Returns what the text means, in a list as math-verify's parser does."""
  from latex2sympy2_extended import NormalizationConfig, normalize_latex
  from math_verify import parser

  text = notation.in_plain_forms(text)
  if not notation.is_readable(text):
    return []
  config = NormalizationConfig(
    basic_latex=True, malformed_operators=True, nits=True, boxed="none"
  )
  text = normalize_latex(notation.in_radians(text), config)
  # An i that has a value is an index, and complex numbers have no order.
  is_complex = re.match(
    r"(?!.*(?:[<>]|\\[lg]e(?![a-zA-Z])|(?<![a-zA-Z\\])i ?=))"
    r".*(?:(?<![a-zA-Z\\])i(?![a-zA-Z])|\\mathbb\{C\})",
    text,
  )
  # Of a = b = c, the last equation. math-verify's own search in a text would
  # accept any number that it finds, which a policy learns to exploit.
  for part in dict.fromkeys([text, parser.get_last_eq(text)]):
    try:
      return [_converter()(is_real=not is_complex).parse(part)]
    except MemoryError:
      raise
    except Exception:  # the parser raises no type of its own
      continue
  return []


@functools.cache
def _converter() -> Callable:
  """Returns math-verify's parser, without the sum or product of 1 in `1 {2}`.

  Of complex numbers, i is the imaginary unit.
  What may stand side by side in an answer, `in_plain_forms` writes as one.
  """
  from latex2sympy2_extended import latex2sympy2
  import sympy

  class Converter(latex2sympy2._Latex2Sympy):
    def convert_atom_expr(self, atom_expr):
      form = super().convert_atom_expr(atom_expr)
      return form.subs(sympy.Symbol("i", real=False), sympy.I)

    def convert_postfix_list(self, arr, i=0):
      form = super().convert_postfix_list(arr, i)
      factors = form.args if isinstance(form, sympy.Mul) else (form,)
      if i < len(arr) - 1 and all(isinstance(x, sympy.Number) for x in factors):
        raise ValueError("two numbers side by side")
      return form

  config = latex2sympy2.ConversionConfig(lowercase_symbols=False)
  return functools.partial(Converter, config=config)
