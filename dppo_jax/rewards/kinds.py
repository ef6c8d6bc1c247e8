"""The kinds of answers: percentages, choices, lists by symbol, sets, tuples.

These functions run in workers, on answers that notation.py returned.
"""

import re

from dppo_jax.rewards.notation import BUILDER, LABEL, is_group


def percent(answer: str) -> str | None:
  r"""Returns the 7.2 of `7.2\%`; None if the answer is not a percentage."""
  match = re.fullmatch(r"([^=,;]*?) ?\\?%", answer)
  return match[1] if match else None


def without_percent(answer: str) -> str:
  """Returns the answer without the percent signs behind its values."""
  return re.sub(r" ?\\?%(?= ?(?:$|[,;)\]]|\\\}))", "", answer)


def by_symbol(gold: str, answer: str) -> list[tuple[str, str]]:
  """Returns the pairs to compare of `x=3,y=4` and `3,4`; else an empty list."""
  named = re.findall(r"(?:^|,) ?([a-zA-Z]) ?= ?([^,=]+)", gold)
  values = answer.removeprefix("(").removesuffix(")").split(",")
  num = len({x for x, _ in named})
  is_list = 1 < num == len(named) == len(values)
  if not is_list or re.search(r"[=()\[\]{}]", "".join(values)):
    return []
  return [(x, y.strip()) for (_, x), y in zip(named, values, strict=True)]


def choice(answer: str) -> tuple[str, ...]:
  r"""Returns the E and 12 of `(E) 12`, the E of `E)`, and any other answer.

  A label is `(E)`, `[E]`, `E)`, `E.` or `E:`. Of two letters none is a label.
  """
  value = r"(?!.*(?<![a-zA-Z])[A-J](?![a-zA-Z]))(.+)"
  pattern = rf"({LABEL})(?:(?: |\\q?quad)+{value})?"
  if not (match := re.fullmatch(pattern, answer, re.DOTALL)):
    return (answer,)
  return tuple(x for x in (match[1].strip("()[].:"), match[2]) if x)


_MARK = (
  r"'|(?<=\^)T|(?<=\^\{)T(?=\})|\\partial[a-zA-Z]|"
  r"(?<![a-zA-Z])d[a-zA-Z](?![a-zA-Z])"
)
# Relations, and text without numbers.
_LOGIC = r"[<>]|\\[lgn]e(?![a-zA-Z])|^(?:\\text|[a-zA-Z{}(),. ])+$"


def differ_in_kind(first: str, second: str) -> bool:
  """Returns True for a set and a tuple, and other times of day or bases."""
  kinds = {brackets(first), brackets(second)}
  # 8:30 is no 4:15, but 4:6 may be the ratio 2:3.
  clock = re.search(r"(?<![\d.:])\d\d?:[0-5]\d(?![\d.])", f"{first} & {second}")
  # T is not t, but Yes is yes.
  words = r"(?:\\text ?\{)?[a-zA-Z .-]{2,}\}?|-?\d[^_]*"
  is_other_case = first != second and first.lower() == second.lower()

  def differ(pattern: str) -> bool:
    matches = [re.findall(pattern, x.lower()) for x in (first, second)]
    return all(matches) and matches[0] != matches[1]

  # Derivatives and transposes, of what is compared.
  is_relation = "=" in first and "=" in second
  marks = [
    sorted(re.findall(_MARK, x if is_relation else x.rpartition("=")[2]))
    for x in (first.replace(" ", ""), second.replace(" ", ""))
  ]
  return (
    kinds == {"set", "tuple"}
    or "ratio" in kinds != {"ratio"}
    or differ(r"\d ?\\text ?\{ ?([ap])\.? ?m\b")  # halves of the day
    or marks[0] != marks[1]
    or (bool(re.search(_LOGIC, first)) and differ(r"\b(and|or)\b"))
    or (clock is not None and differ(r"0*(\d[\d:]*:\d+)"))
    or differ(r"\d_\W*(?:text\W*)?(\d+)")  # bases
    or (is_other_case and not re.fullmatch(words, first, re.DOTALL))
  )


def brackets(answer: str) -> str | None:
  r"""Returns `set` for `\{1,2\}`, `tuple` for `(1,2)`, None for `1,2`."""
  value = re.sub(r"^(?:(?!\\\{).)*(?:=|\\in(?![a-zA-Z]))", "", answer).strip()
  if value.count(":") > 1:
    return "ratio"
  if re.fullmatch(rf"(?!{BUILDER})\\\{{.*\\\}}", value, re.DOTALL):
    return "set"
  return "tuple" if "," in value and is_group(value, "()") else None
