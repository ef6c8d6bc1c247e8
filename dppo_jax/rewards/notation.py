r"""Rewrites the many notations of an answer in LaTeX that math-verify reads.

`normalize` also runs in the trainer's process: it takes linear time. The other
functions run in workers, on short answers that `normalize` returned.
"""

from decimal import Decimal
from fractions import Fraction
import re

_COMMANDS = (
  r"× \times · \cdot ⋅ \cdot ÷ \div ≤ \le ≥ \ge ≠ \ne ≈ \approx ± \pm π \pi "
  r"∞ \infty ∪ \cup ∩ \cap ∈ \in ∅ \emptyset ° ^\circ "
  r"½ \frac{1}{2} ⅓ \frac{1}{3} ⅔ \frac{2}{3} ¼ \frac{1}{4} ¾ \frac{3}{4}"
).split()
DASHES = {ord(c): "-" for c in "\u2010\u2011\u2012\u2013\u2212"}  # en dash, ...
_CHARS = str.maketrans(
  {c: f"{x} " for c, x in zip(_COMMANDS[::2], _COMMANDS[1::2], strict=True)}
  | DASHES
  | dict.fromkeys("\u200b\u2060\ufeff", "")  # of no width
  | {chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)}  # full-width ASCII
  | dict.fromkeys("€£¥", "")
  | {"~": " "}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_ZEROS = dict(hundred=2, thousand=3, million=6, billion=9, trillion=12)


def _repeating(match: re.Match) -> str:
  r"""Writes 0.1\overline{6} as a fraction."""
  whole, start, period = match[1], match[2], match[3] or match[4]
  number = int(whole + start + period) - int(whole + start or "0")
  return rf"\frac{{{number}}}{{{'9' * len(period) + '0' * len(start)}}}"


def _multiplied(match: re.Match) -> str:
  r"""Writes 5.2 million as 5200000; a `\text{` before the word stays open."""
  number = Decimal(match["number"].replace(",", ""))
  number = number.scaleb(_ZEROS[match["word"].lower()])
  return f"{number.normalize():f}{match['text'] or ''}"


_SKIP = r" ?(?:\\[ ,;:] ?)?"  # between the parts of a number
_TEXT = r"\\(?:text|mbox|mathrm|textrm|textnormal) ?\{"

# Applied in this order. Each takes linear time: it repeats what is bounded, or
# what no other match can begin in.
_RULES = [
  (r"√\s?(?:(\d+(?:\.\d+)?)|\(([^()]*)\))", r"\\sqrt{\1\2}"),
  ("√", r"\\sqrt "),
  ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}"),
  (r"\s+", " "),  # from here on there are no two blanks in a row
  (r"(?<!\\)\$", ""),  # around mathematics
  (r"^ ?(?:=|\\approx(?![a-zA-Z])) ?", ""),
  (r",?\\!", ""),
  (r"\\degree(?![a-zA-Z])", r"^\\circ"),
  (r"\\(?:displaystyle|euro|pounds)(?![a-zA-Z]) ?", ""),
  (r"\\(?:text)?color ?\{[^{}]{0,40}\} ?", ""),
  (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
  (r"\\mathrm ?\{ ?([ei]) ?\}", r"\1"),  # no units
  # 1 000, but neither 1 2 nor 1 100/300 nor \frac 1 200.
  (
    rf"(?<![\d.,^_a-zA-Z\\])(?<![\da-zA-Z}})\]] )[1-9]\d{{0,2}}"
    rf"(?:(?: |\\[,;: ] ?)\d{{3}}){{1,6}}(?!{_SKIP}[\d/])",
    lambda m: re.sub(r"\D", "", m[0]),
  ),
  (
    r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot) ?"
    r"(?:\{(\d{1,20})\}|(\d))(?! ?[\d^])",
    _repeating,
  ),
  (
    r"(?<![\d.,])(?P<number>(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,18})(?:\.\d{1,18})?)"
    rf"{_SKIP}(?P<text>{_TEXT} ?)?"
    r"(?P<word>(?i:hundred|thousand|million|billion|trillion))s?(?![a-zA-Z])",
    _multiplied,
  ),
  (rf"{_TEXT} ?\}}", ""),
]


def normalize(answer: str) -> str:
  r"""Returns the answer in plain LaTeX, in time linear in the text.

  >>> normalize("11,\\! 111,\\! 100."), normalize(r"\textcolor{red}{–½}")
  ('11111100', '-\\frac{1}{2}')
  >>> normalize(r"0.1\overline{6}"), normalize(r"5.2\text{ million}")
  ('\\frac{15}{90}', '5200000')
  """
  is_colored = "color" in answer
  answer = answer.translate(_CHARS)
  for pattern, new in _RULES:
    answer = re.sub(pattern, new, answer)
  answer = re.sub(r"(?<!\\)[.,;]$", "", answer.strip()).strip()
  # Braces around everything are TeX's, but in {1,2} they stand for a set.
  if _is_group(answer) and (is_colored or "," not in answer):
    answer = answer[1:-1].strip()
  return answer


def _is_group(text: str, brackets: str = "{}") -> bool:
  """Returns True if the text begins with a bracket that closes at its end."""
  depth = 0
  for token in re.finditer(rf"\\.|[{brackets}]", text, re.DOTALL):
    depth += {brackets[0]: 1, brackets[1]: -1}.get(token[0], 0)
    if depth <= 0:
      return text.startswith(brackets[0]) and token.end() == len(text)
  return False


_WORDS = (
  "[mcdk]m|in|inch(?:es)?|ft|foot|feet|yards?|miles?|met(?:er|re)s?|[mk]g|"
  "grams?|lbs?|pounds?|ounces?|seconds?|minutes?|hours?|days?|weeks?|months?|"
  "years?|lit(?:er|re)s?|gallons?|mph|km/h|m/s|degrees?|radians?|units?|"
  "cents?|dollars?|points?|square|cubic|sq\\.?|cu\\.?|per"
)
_POWER = r"(?: ?\^ ?(?:\d|\{-?\d\}))?"
_AND = r"[,\s]*(?:and|or)\b"
_UNITS = [
  # A text between a value and the end, or the end of one of several values.
  rf"(?<=[\d}})%a-zA-Z]) ?(?:\\[ ,;:] ?|\\q?quad ?)*{_TEXT}(?!{_AND})(?! ?\d)"
  rf"[^{{}}]*\}}{_POWER}(?= ?(?:$|[,;)\]]|\\right|\\\}}|{_TEXT}{_AND}))",
  # Words that are units.
  rf"(?<=[\d}}]) ?(?:{_WORDS})(?: (?:{_WORDS}))*{_POWER}$",
]


def without_units(answer: str) -> str:
  """Returns the answer without units, the words behind a value."""
  for pattern in _UNITS:
    answer = re.sub(pattern, "", answer)
  return answer.strip()


def without_letter_unit(answer: str, other: str) -> str:
  """Writes 5 m as 5 if the other answer has no letters; 2s may be 2 times s."""
  if re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", other)):
    return answer
  return re.sub(rf"(?<=\d) ?[mgshlL]{_POWER}$", "", answer)


# Not an argument, exponent or index, such as the 1 and 2 of \frac 1 2.
_BARE = r"(?<![\w.}\]^_])(?<!frac )(?<!sqrt )"
_FRAC = r"\\frac ?(?:\{ ?(\d++) ?\}|(\d)) ?(?:\{ ?(\d++) ?\}|(\d))"
_BLANK = r"(?: |\\[ ,;:])"
_BAR = r"(?:\\left ?|\\right ?)?(?:\||\\[lr]?vert(?![a-zA-Z])) ?"
_BELOW = r"(<|\\leq?q?(?![a-zA-Z])|\\leqslant(?![a-zA-Z])) ?"


def _mixed(match: re.Match) -> str:
  r"""Writes 3 1/2 as \frac{7}{2}, if the fraction is below 1."""
  whole, top, bottom = (int(digits) for digits in match.groups() if digits)
  if not 0 < top < bottom:
    return match[0]
  return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _scientific(match: re.Match) -> str:
  r"""Writes 1.5e-3 as \frac{3}{2000}."""
  number = Fraction(match[0])
  return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


_FORMS = [
  (r"(?<![\w.}])\d++(?:\.\d++)?[eE][+-]?0*\d{1,3}(?![\w.])", _scientific),
  (
    rf"{_BARE}(?!(?<=\d,)\d{{3}}\D)(\d++)"
    rf"(?:{_BLANK}*+{_FRAC}|{_BLANK}++(\d\d?)/(\d++)(?![\d/^.]))",
    _mixed,
  ),
  (
    rf"^{_BAR}([^|<>=,]+?){_BAR}{_BELOW}"
    r"((?:[^|<>=,;\\]|\\(?:frac|sqrt|pi)(?![a-zA-Z]))+)$",
    r"-(\3) \2 \1 \2 \3",
  ),
]


def in_plain_forms(answer: str) -> str:
  r"""Returns the answer without forms that parsers misread.

  >>> in_plain_forms("3 1/2"), in_plain_forms("2e3"), in_plain_forms("|x|<1")
  ('\\frac{7}{2}', '\\frac{2000}{1}', '-(1) < x < 1')
  """
  for pattern, new in _FORMS:
    answer = re.sub(pattern, new, answer)
  return answer


def is_readable(answer: str) -> bool:
  r"""Returns False for the misread `5\text{ h }30`, `1 2` and `1,\ldots,9`."""
  has_text = rf"[\d}})] ?(?:\\[ ,;:] ?)*{_TEXT}(?!{_AND})"
  is_row = rf"{_BARE}\d[\d.]*+{_BLANK}+\d"
  has_gap = rf"[\d)\]] ?\\q?quad(?! ?(?:{_TEXT}|[,;]|\\q?quad|$))|\\[lc]?dots"
  return not re.search(f"{has_text}|{is_row}|{has_gap}", answer)


def in_radians(answer: str) -> str:
  r"""Writes degrees in functions, such as `\sin 30^\circ`, as radians."""
  functions = r"\\(?:sin|cos|tan|cot|sec|csc)(?! ?\^ ?\{ ?-)"
  degrees = r"(\d+(?:\.\d+)?) ?\^ ?(?:\\circ(?![a-zA-Z])|\{ ?\\circ ?\})"
  parts = re.split(r"([=,;])", answer)
  for i, part in enumerate(parts):
    if re.search(functions, part):
      parts[i] = re.sub(degrees, r"\\frac{\1\\pi}{180}", part)
  return "".join(parts)


def percent(answer: str) -> str | None:
  r"""Returns the 7.2 of `7.2\%`; None if the answer is not a percentage."""
  pattern = r"(.*?) ?(?:\\?%|\\text\{ ?percent\}| percent)"
  match = re.fullmatch(pattern, answer, re.DOTALL)
  return match[1] if match and "=" not in match[1] else None


_CHOICE = (
  r"(?:\\(?:text|math)[a-z]* ?\{)? ?\(([A-J])\)(?:\}| |\\[ ,;:]|\\q?quad)+"
  r"((?!.*(?<![a-zA-Z])[A-J](?![a-zA-Z])).+)"
)


def choice(answer: str) -> tuple[str, str] | None:
  r"""Returns the E and 12 of `\textbf{(E)}\ 12`, but not of two letters."""
  match = re.fullmatch(_CHOICE, answer, re.DOTALL)
  return match.groups() if match else None


def with_unions(answer: str, other: str) -> str:
  """Writes `or` between intervals as a union if the other answer has one."""
  if r"\cup" not in other:
    return answer
  word = rf"(?<=[)\]]),? ?(?:{_TEXT} ?or ?\}}|or) ?(?=[(\[]|\\left)"
  return re.sub(word, r"\\cup ", answer)


def differ_in_kind(first: str, second: str) -> bool:
  """Returns True for a set and a tuple, and for different times of day."""
  noon = r"\d ?(?:\\[ ,;:] ?)*\\text ?\{ ?([ap])\.? ?m\b"
  halves = {x.lower() for x in re.findall(noon, f"{first} & {second}", re.I)}
  kinds = {brackets(first), brackets(second)}
  # 8:30 is no 4:15, but 4:6 may be the ratio 2:3.
  clock = re.search(r"(?<![\d.:])\d\d?:[0-5]\d(?![\d.])", f"{first} & {second}")
  times = [re.findall(r"\d[\d:]*:\d+", x) for x in (first, second)]
  times = [[x.lstrip("0") for x in row] for row in times]
  is_other_time = clock and all(times) and times[0] != times[1]
  return kinds == {"set", "tuple"} or len(halves) > 1 or bool(is_other_time)


def brackets(answer: str) -> str | None:
  r"""Returns `set` for `\{1,2\}`, `tuple` for `(1,2)`, None for `1,2`."""
  value = re.split(r"=|\\in(?![a-zA-Z])", answer)[-1]
  value = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", value).strip()
  if re.fullmatch(r"\\\{.*\\\}", value, re.DOTALL):
    return "set"
  return "tuple" if "," in value and _is_group(value, "()") else None
