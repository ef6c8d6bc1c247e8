r"""Rewrites the many notations of an answer in LaTeX that math-verify reads.

`normalize` also runs in the trainer's process: it takes linear time. The other
functions run in workers, on short answers that `normalize` returned.
"""

from collections.abc import Callable
from decimal import Decimal
import functools
import re
from unicodedata import category


def _table(text: str) -> dict[str, str]:
  """Reads rows of a value, a blank, and the keys that have it."""
  rows = [row.partition(" ") for row in text.split(" & ")]
  return {key: value for value, _, keys in rows for key in keys.split()}


_CHARACTERS = _table(
  r"\times × & \cdot · ⋅ & \div ÷ & \le ≤ & \ge ≥ & \ne ≠ & \approx ≈ & \pm ± "
  r"& \pi π & \infty ∞ & \cup ∪ & \cap ∩ & \in ∈ & \emptyset ∅ & ^\circ ° ℃ & "
  r"( ⟨ & ) ⟩ & . 。 & , 、 & \frac{1}{2} ½ & \frac{1}{3} ⅓ & \frac{2}{3} ⅔ & "
  r"\frac{1}{4} ¼ & \frac{3}{4} ¾ &  ~ `"
)
DASHES = {ord(c): "-" for c in "\u2010\u2011\u2012\u2013\u2212"}  # en dash, ...
_CHARS = str.maketrans(
  {c: f"{x} " for c, x in _CHARACTERS.items()}
  | DASHES
  | dict.fromkeys("\u200b\u2060\ufeff", "")  # of no width
  | dict.fromkeys("\u2019\u2032", "'")  # an apostrophe, a prime
  | {chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)}  # full-width ASCII
  | {c: " " for c in map(chr, range(128, 0x10000)) if category(c) == "Sc"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_ZEROS = _table(  # the stems of words
  "1 十 & 2 hundred 百 백 & 3 thousand 千 천 тыс & 4 万 萬 만 & "
  "6 million млн миллион & 8 亿 億 억 & 9 billion млрд миллиард & "
  "12 trillion 兆 조 трлн триллион"
)
# TeX's commands: other names, blanks (here tabs), and those of no value.
_COMMANDS = _table(
  r"\text mbox hbox emph mathrm textrm textnormal textbf textit textsl textsf "
  r"texttt textup textsc unit si & \frac dfrac tfrac cfrac & \cup bigcup & "
  r"\emptyset varnothing & \cap bigcap & \le leq leqq leqslant & \ne neq & "
  r"\ge geq geqq geqslant & < lt & > gt & \{ lbrace & \} rbrace & [ lbrack & "
  r"] rbrack & ( lparen langle & ) rparen rangle & | vert mid & : colon & "
  r"\tan tg & \cot ctg & \arctan arctg & ^\circ degree textdegree & \\ cr & "
  r"\! negthinspace negmedspace negthickspace & "
  "' prime & "
  "\t ( ) [ ] $ , ; : > thinspace medspace thickspace enspace space hfill "
  "nobreakspace newline & "
  " / boxed fbox framebox ensuremath left right middle big Big bigg Bigg bigl "
  "Bigl biggl Biggl bigr Bigr biggr Biggr bigm Bigm biggm Biggm displaystyle "
  "textstyle scriptstyle limits nolimits mathbf boldsymbol bm pmb bold mathsf "
  "mathit mathtt mathnormal mathord mathop mathstrut strut underline uline ul "
  "uuline rm bf it sl sf tt em bfseries itshape normalfont tiny small "
  "normalsize large Large LARGE huge Huge hline therefore blacksquare "
  "checkmark euro pounds textdollar texteuro"
)


def _repeating(match: re.Match) -> str:
  r"""Writes 0.1\overline{6} as a fraction."""
  whole, start, period = match[1], match[2], match[3] or match[4]
  number = int(whole + start + period) - int(whole + start or "0")
  return rf"\frac{{{number}}}{{{'9' * len(period) + '0' * len(start)}}}"


def _multiplied(match: re.Match) -> str:
  r"""Writes 5.2 million as 5200000; a `\text{` before the word stays open."""
  number = Decimal(match["number"].replace(",", ""))
  number = number.scaleb(int(_ZEROS[match["word"].lower()]))
  return f"{number.normalize():f}{match['text'] or ''}"


_TEXT = r"\\text ?\{"
LABEL = r"(?:\([A-J]\)[.:]?|\[[A-J]\]|[A-J][).:])"

Rule = tuple[str, str | Callable[[re.Match], str]]  # pattern and replacement

# Applied in this order. Each takes linear time: it repeats what is bounded, or
# what no other match can begin in.
_TEX: list[Rule] = [
  (r"√\s?(?:(\d+(?:\.\d+)?)|\(([^()]*)\))", r"\\sqrt{\1\2}"),
  ("√", r"\\sqrt "),
  ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}"),
  (r"\\(?:left|right)\s?\.", ""),  # invisible
  # Between rows.
  (r"\\\\\s?\[-?[\d.]{1,9}\s?(?:\\[a-z]{1,15}|[a-z]{2})\]", r"\\\\ "),
  (r"\{\s?\\rm(?![a-zA-Z])", r"\\mathrm{"),
  (r"\\(?:mathrm|text)\s?\{\s?([ei]|d(?=\s?\}\s?[a-z]))\s?\}", r"\1"),
  (  # but 5\text{ min} is a unit
    r"(?:\\operatorname\*?|(?<![\d}])(?<!\d\s)(?<!\\[ ,;:])\\(?:mathrm|text))"
    r"\s?\{((?:arc?)?(?:sin|cos|tan|cot|sec|csc)h?|(?:arc)?c?tg|ln|log|exp|gcd|"
    r"lcm|max|min)\s?\}",
    r"\\\1 ",
  ),
  ("smallmatrix", "matrix"),
  (r"\\mathbb\s?([A-Z])", r"\\mathbb{\1}"),
  (r"\\([a-zA-Z]+|.?)", lambda m: _COMMANDS.get(m[1].strip() or ",", m[0])),
  (r"[\s$]+", " "),  # from here on there are no two blanks in a row
  (r"\\(?:begin|end) ?\{(?:equation|align|gather|displaymath)\*?\}", ""),
  (r"(?<![\w)}])\*\*([^*]+)\*\*(?![\w({])", r"\1"),  # bold in Markdown
  (r"\\(?:(?:text)?color|colorbox|[hm]space\*?|tag) ?\{[^{}]{0,40}\} ?", ""),
  (r"^ ?(?:=|\\approx(?![a-zA-Z])) ?", ""),
  (r"(?<![a-zA-Z]),?\\!|\\!(?![a-zA-Z])", ""),
  (r"\^ ?(?:\^ ?\\circ|\{ ?(?:\^ ?)?\\circ ?\})", r"^\\circ"),
  (
    r"(?<![a-zA-Z\\{])((?:arc)?(?:sin|cos|tan)|ln|log|pi)(?![a-zA-Z])",
    r"\\\1 ",
  ),
  (r"(?:\\text ?\{ ?)?(?<![a-zA-Z])per ?cent(?: ?\})?$", r"\\%"),
  (r"\^ ?(?:\{ ?('[' ]*)\}|(?='))", r"\1"),
  (r"\\not ?=", r"\\ne "),
  # 6th; 5 PM, and 5 apples or anything else that is too long for a product.
  (r"(?<=\d)(?: ?\^ ?\{ ?(?:\\text ?\{ ?)?)?(?:st|nd|rd|th)[ }]{0,4}$", ""),
  (r"(?<=\d)(?: | ?(?=[AP]))([aApP])\.? ?[mM]\.?$", r"\\text{ \1m}"),
  (r"(?<=\d) ((?!dozens?$)[a-z]{4,})$", r"\\text{ \1}"),
  (r"\\\{ ?\\\}", r"\\emptyset "),
]
_RULES: list[Rule] = [
  (r"(?<=\\circ) ?(?:\\text ?\{ ?[CF] ?\}|[CF](?![a-zA-Z]))", ""),
  # A label in braces, alone or before the choice.
  (rf"^(?:\\text ?)?\{{ ?({LABEL}) ?\}}", r"\1 "),
  (rf"^\\text ?\{{ ?({LABEL}) ", r"\1 \\text{"),
  (r"^(?:\\text ?)?\{ ?([A-J]) ?\} ?(?=[).:])", r"\1"),
  (rf"{_TEXT}([.,])\}}", r"{\1}"),
  (  # 0{,}5, but not 1{,}000
    r"(?<![\d.,}])(\d+)\{,\}(?:(?<=\b0\{,\})|(?!\d{3}(?!\d)))(\d+)(?!\d|\{,)",
    r"\1.\2",
  ),
  (r"(?<=\d)(?<!\d{4})\{,\}(?=\d{3}(?!\d))", ""),
  (r"\{([.,])\}", r"\1"),
  # 1 000, but neither 1 2 nor 1 100/300 nor \frac 1 200. With commas before a
  # letter or operator, or as all that follows: elsewhere 1,000 may be a list.
  (
    r"(?<![\d.,^_a-zA-Z\\])(?<![\da-zA-Z}})\]] )[1-9]\d{0,2}"
    r"(?:[ ']\d{3}){1,6}(?! ?[\d/])"
    r"|(?<![\d.,}(\[{])(?<![,(\[{] )[1-9]\d{0,2}(?:,\d{3}){1,6}(?=(?:\.\d+)? ?"
    r"(?:[a-zA-Z!^+*/<=>-]|\\(?:pi|sqrt|frac|cdot|times|div|le|ge|text)(?![a-z])))"
    r"|(?:^|(?<=[<=>+-])|(?<=[<=>+a-z-] )|(?<=[^\\]\{)|(?<=[dr] \})|"
    r"(?<=[dr] \} ))[1-9]\d{0,2}(?:,\d{3}){1,6}(?=(?:\.\d+)?(?:$|\}))",
    lambda m: re.sub("[ ',]", "", m[0]),
  ),
  (
    r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot) ?"
    r"(?:\{(\d{1,20})\}|(\d))(?! ?[\d^])",
    _repeating,
  ),
  *[  # also 5 hundred thousand
    (
      r"(?<![\d.,])(?P<number>(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,18})(?:\.\d{1,18})?)"
      rf" ?(?P<text>{_TEXT} {{0,2}})?(?P<word>(?i:{'|'.join(_ZEROS)}))"
      r"(?<!千(?=[克米]))(?:s|[а-я]{1,9})?\.?(?![a-zA-Z])",
      _multiplied,
    )
  ]
  * 2,
  # Choices, such as A, C and E.
  (rf"{_TEXT} ?([A-Z](?:(?:,? (?:and|or) |, ?)[A-Z])+) ?\}}", r"\1"),
  (rf"^{_TEXT} ?([\d.:,]+)( ?[a-zA-Z.]+) ?\}}$", r"\1\\text{\2}"),
  (rf", ?(?=(?:{_TEXT} ?)?(?:and|or)\b)", " "),
  # A text without letters is no text.
  (rf"{_TEXT}((?:[^a-zA-Z\d{{}}\\]|\\%)*)\}}", r"\1 "),
  (rf"{_TEXT}((?:[^a-zA-Z{{}}\\]|\\%)*)\}}", r"{\1}"),
]


_AROUND = (
  r"^(?:\\q?quad ?)+|(?<!quad)(?<!quad )(?:\\q?quad ?)+$|(?<![\\.,;])[.,;]$"
)


@functools.lru_cache(maxsize=1024)  # a group shares its gold answer
def normalize(answer: str) -> str:
  r"""Returns the answer in plain LaTeX, in time linear in the text.

  >>> normalize("11,\\! 111,\\! 100."), normalize(r"\textcolor{red}{–½}")
  ('11111100', '-\\frac{1}{2}')
  >>> normalize(r"0.1\overline{6}"), normalize(r"5.2\text{ million}")
  ('\\frac{15}{90}', '5200000')
  """
  # Braces around everything are TeX's, but in {1,2} they stand for a set.
  is_set = re.match(r"[\s$]*\{[^{\\(\[]*,", answer)
  answer = answer.translate(_CHARS)
  for rules in (_TEX, _RULES):
    for pattern, new in rules:
      answer = re.sub(pattern, new, answer)
    for _ in range(3):  # a group within another
      answer = re.sub(_AROUND, "", " ".join(answer.split())).strip()
      if is_group(answer) and not (is_set and "," in answer):
        answer = answer[1:-1]
  answer = answer.strip()
  return rf"\{{{answer[1:-1]}\}}" if is_set and is_group(answer) else answer


def is_group(text: str, brackets: str = "{}") -> bool:
  """Returns True if the text begins with a bracket that closes at its end."""
  depth = 0
  for token in re.finditer(rf"\\.|[{brackets}]", text, re.DOTALL):
    depth += {brackets[0]: 1, brackets[1]: -1}.get(token[0], 0)
    if depth <= 0:
      return text.startswith(brackets[0]) and token.end() == len(text)
  return False


_MONEY = r"Rs\.?|INR|USD?|EUR|GBP|CNY|RMB|JPY|руб\.?|人民币|美元"
_WORDS = (
  "[mcdk]m|in|inch(?:es)?|ft|foot|feet|yards?|miles?|[mk]g|lbs?|pounds?|"
  "(?:centi|milli|kilo)?(?:met(?:er|re)|gram)s?|ounces?|sec(?:ond)?s?|"
  "min(?:ute)?s?|h(?:ou)?rs?|days?|weeks?|months?|years?|lit(?:er|re)s?|"
  "gallons?|mph|km/h|m/s|degrees?|Celsius|Fahrenheit|radians?|units?|cents?|"
  "dollars?|euros?|yuan|yen|rupees?|points?|square|cubic|sq\\.?|cu\\.?|per|"
  f"{_MONEY}"
)
_POWER = r"(?: ?\^ ?(?:\d|\{-?\d\}))?"
_AND = r"[,\s]*(?:and|or)\b"
_OTHER = "[\u0400-\u1fff\u2e80-\ud7ff]"  # not Latin or Greek, such as 元
# A text without a second number or alternative, or words that are units.
_NAME = (
  rf"(?:(?:\\mu ?)?{_TEXT}(?:(?!\b(?:and|or|dozens?)\b)[^{{}}\d]|"
  rf"(?<=[\^a-z])\d|(?<=\^)\{{-?\d\}})*\}}|{_OTHER}++\.?|"
  rf"(?<![a-zA-Z])(?:{_WORDS})(?![a-zA-Z])|\{{ ?(?:{_WORDS}) ?\}}){_POWER}"
)
_UNITS = [
  # Before a value.
  rf"^(?:\\text ?\{{ ?)?(?:{_MONEY})(?: ?\}})? ?(?=[\d.{{-]|\\frac)",
  # Between a value and the end, or the end of one of several values.
  rf"(?:(?<=[\d}})%])|(?<=\\pi)|(?<=[a-zA-Z]) ?(?=\\|{_OTHER})) ?"
  rf"(?:\\q?quad ?)*(?:{_NAME}|\\frac ?\{{{_NAME}\}} ?\{{{_NAME}\}})"
  rf"(?: ?(?:(?:/|\\cdot) ?)?{_NAME})*+(?= ?(?:$|[,;)\]]|\\\}}|{_TEXT}{_AND}))",
]


def without_units(answer: str) -> str:
  """Returns the answer without units, the words before or behind a value."""
  return re.sub("|".join(_UNITS), "", answer).strip()


def without_text(answer: str) -> str:
  r"""Returns the answer without `\text` and blanks, but between digits."""
  answer = re.sub(rf"{_TEXT}([^{{}}]*)\}}", r"\1", answer)
  return re.sub(r"(?<!\d) | (?!\d)", "", answer)


def without_letter_unit(answer: str, other: str) -> str:
  """Writes 5 m as 5 if the other answer has no letters; 2s may be 2 times s."""
  if re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", other):
    return answer
  return re.sub(rf"(?<=[\d}}]) ?[mgshlLNJWV]{_POWER}$", "", answer)


# Not an argument, exponent or index, such as the 1 and 2 of \frac 1 2.
_BARE = r"(?<![\w.}\]^_])(?<!frac )(?<!sqrt )"
_FRAC = r"\\frac ?(?:\{ ?(\d++) ?\}|(\d)) ?(?:\{ ?(\d++) ?\}|(\d))"
_BAR = r"(?:\||\\[lr]vert(?![a-zA-Z])) ?"
_BELOW = r"(<|\\le(?![a-zA-Z])) ?"


def _mixed(match: re.Match) -> str:
  r"""Writes 3 1/2 as \frac{7}{2}, if the fraction is below 1."""
  whole, top, bottom = (int(digits) for digits in match.groups() if digits)
  if not 0 < top < bottom:
    return match[0]
  return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


BUILDER = r"\\\{ ?[a-zA-Z] ?(?:\\in ?\\mathbb\{R\} ?)?[|:]"
_PART = "([^:=,]+)"
_END = r"[^\[\](),;]+"  # of an interval
_FORMS: list[Rule] = [
  (rf"^{BUILDER}(.*)\\\}}$", r"\1"),  # the relation of a set
  (
    r"(?<![\w.}])(\d++(?:\.\d++)?)[eE]\+?(-?0*\d{1,3})(?![\w.])",
    r"\1\\times10^{\2}",
  ),
  (
    rf"{_BARE}(?!(?<=\d,)\d{{3}}\D)(\d++)"
    rf" ?(?:{_FRAC}|(?<= )(\d\d?)/(\d++)(?![\d/^.]))",
    _mixed,
  ),
  (
    rf"^{_BAR}([^|<>=,]+?){_BAR}{_BELOW}"
    r"((?:[^|<>=,;\\]|\\(?:frac|sqrt|pi)(?![a-zA-Z]))+)$",
    r"-(\3) \2 \1 \2 \3",
  ),
  # A word, a date or a figure's corners: no product, no difference.
  (r"^[A-Z](?:[A-Z]+|[a-z]{2,}(?: \d+)?)$", r"\\text{\g<0>}"),
  (r"^\d{4}-\d\d?-\d\d?$", r"\\text{\g<0>}"),
  (
    r"\\angle ?([A-Z]{3})(?![a-zA-Z])",
    lambda m: rf"\text{{{min(m[1], m[1][::-1])}}}",
  ),
  (r"\\sqrt ?\[ ?(\d*[13579]) ?\] ?\{ ?-(\d+) ?\}", r"(-\\sqrt[\1]{\2})"),
  # 5 > x > 2 is 2 < x < 5.
  (
    r"(?!.*(?:[<=,;]|\\[ln]e|\\text|\bor\b|\band\b))(?=.*(?:>|\\ge).*(?:>|\\ge)).+",
    lambda m: (
      "".join(re.split(r"(>|\\ge)", m[0])[::-1])
      .replace(">", "<")
      .replace(r"\ge", r"\le ")
    ),
  ),
  # Intervals: ]0,1[ and (0;1).
  (rf"(?:(?<![\w}}\]])|(?<=\\cup))\]({_END}[,;]{_END}[\[\])])", r"(\1"),
  (rf"([\[(]{_END}[,;]{_END})(?<!sqrt)\[", r"\1)"),
  (rf"([\[(]{_END});({_END}[\])])", r"\1,\2"),
  # Both signs, alone, in a set, or in a tuple.
  (
    r"^(?!.*\\(?:pm|mp).*\\(?:pm|mp))(.*=|) ?(\\\{|) ?([^=,]*|\([^=()]*)"
    r"\\(?:pm|mp)(?![a-zA-Z])"
    r"([^,]*?|[^()]*\))(\\\}|)$",
    r"\1 \2\3+\4, \3-\4\5",
  ),
  # Ratios, as shares of the whole.
  (
    rf"^(?:.*=|){_PART}:{_PART}:{_PART}$",
    r"(\\frac{\1}{\1+\2+\3}, \\frac{\2}{\1+\2+\3}, \\frac{\3}{\1+\2+\3})",
  ),
]


def in_plain_forms(answer: str) -> str:
  r"""Returns the answer without forms that parsers misread.

  >>> in_plain_forms("3 1/2"), in_plain_forms("2e3"), in_plain_forms("|x|<1")
  ('\\frac{7}{2}', '2\\times10^{3}', '-(1) < x < 1')
  """
  for pattern, new in _FORMS:
    answer = re.sub(pattern, new, answer)
  return answer


def is_readable(answer: str) -> bool:
  r"""Returns False for the misread `5\text{ h }30`, `1 2` and `1,\ldots,9`."""
  has_text = rf"[\d}})] ?{_TEXT}(?!{_AND})"
  is_row = rf"{_BARE}\d[\d.]*+[ '\"]\d|:[^:,]*:"
  has_gap = (
    rf"!!|[\d)\]] ?\\q?quad(?! ?(?:{_TEXT}|[,;]|\\q?quad|$))|\\[lc]?dots"
  )
  return not re.search(f"{has_text}|{is_row}|{has_gap}", answer)


def in_radians(answer: str) -> str:
  r"""Writes degrees in functions, such as `\sin 30^\circ`, as radians."""
  functions = r"\\(?:sin|cos|tan|cot|sec|csc)(?! ?\^ ?\{ ?-)"
  degrees = r"(\d+(?:\.\d+)?) ?\^ ?\\circ(?![a-zA-Z])"
  parts = re.split(r"([=,;])", answer)
  for i, part in enumerate(parts):
    if re.search(functions, part):
      parts[i] = re.sub(degrees, r"\\frac{\1\\pi}{180}", part)
  return "".join(parts)


def with_unions(answer: str, other: str) -> str:
  """Writes `or` between intervals as a union if the other answer has one."""
  if r"\cup" not in other:
    return answer
  word = rf"(?<=[)\]]),? ?(?:{_TEXT} ?or ?\}}|or) ?(?=[(\[])"
  return re.sub(word, r"\\cup ", answer)
