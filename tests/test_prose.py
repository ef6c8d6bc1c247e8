"""Docstrings, comments, messages and pages are plain technical English."""

import ast
import io
import pathlib
import re
import tokenize

from tests.helpers import commands, pages

FOLDERS = ("dppo_jax", "tests", "experiments", "configs", "notebooks")
FILES = {
  str(path.relative_to(commands.ROOT)): path.read_text(encoding="utf-8")
  for folder in FOLDERS
  for path in sorted((commands.ROOT / folder).rglob("*.py"))
  if path != pathlib.Path(__file__)
}

OPENINGS = re.compile(
  r"(?:What|How|Whether|Where|Which|Who|Whom|Of|By|As|When|That|If)\b"
)
RIDDLES = (
  "that there (?:is|are)|what there (?:is|are)|ones? that|of those|likewise"
  "|as of|whoever|whatever|whichever|nobody|somebody|anybody|at hand"
  "|slip of the pen|nobody's guess"
)
# Words with a common synonym, as regular expressions.
REPLACED = (
  "anew|foretell|foretells|foretold|mend|mends|mended|tells?|told|news"
  "|go on|goes on|went on|goes by|on the spot|by chance|flaws?|sound"
  "|beliefs?|beside|promises?|promised|refuses?|refused|quick|quicker"
  "|quickest|quickly|soon(?! as)|sooner|slopes?|alike ones|sits? out"
)
PHRASES = re.compile(rf"\b(?:{RIDDLES}|{REPLACED})\b", re.IGNORECASE)
BACK = re.compile(
  r"\b(?:that of|those of|of which|as many|of these|likewise|for which)\b",
  re.IGNORECASE,
)
ENTRY = re.compile(r"^ +[\w`*, ]+: (?:of|as|at|from|by|in) .*", re.MULTILINE)
NAMES = frozenset("found made got told said news rest own".split())

# Names in stored results, as (file or folder, phrase). Entries may be removed,
# not added.
ALLOWED = {("experiments/09_when_it_pays/", "by chance")}


def _texts(source: str) -> list[str]:
  """Returns names of functions, and adjacent comments or literals joined."""
  runs = [x.replace("_", " ") for x in re.findall(r"def (\w+)", source)]
  last = None
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    kind = tokenize.tok_name[token.type]
    if kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
      if kind != last:
        runs.append("")
      runs[-1] += " " + token.string
    if kind not in ("NL", "INDENT", "DEDENT"):
      last = kind
  words = (" ".join(re.sub(r"[\"'#]", " ", run).split()) for run in runs)
  return [text for text in words if " " in text]


def _phrases() -> set[tuple[str, str]]:
  """Returns every phrase to avoid with the file that contains it."""
  texts = {name: _texts(source) for name, source in FILES.items()}
  for page in pages.pages():
    name = str(page.relative_to(commands.ROOT))
    texts[name] = [" ".join(page.read_text(encoding="utf-8").split())]
  return {
    (name, phrase.lower())
    for name, parts in texts.items()
    for text in parts
    for phrase in PHRASES.findall(text)
  }


def _is_allowed(name: str, phrase: str) -> bool:
  return any(name.startswith(x) and phrase == y for x, y in ALLOWED)


def test_docstrings_open_with_a_verb_or_a_noun():
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  openings = {
    (name, text.partition("\n")[0])
    for name, source in FILES.items()
    for node in ast.walk(ast.parse(source))
    if isinstance(node, kinds) and (text := ast.get_docstring(node))
    if OPENINGS.match(text)
  }
  assert not openings


def test_arguments_and_attributes_are_noun_phrases():
  """Checks the packages named here; the list may only grow."""
  parts = "algo|analysis|config|eval|models|models/attention|planning|rollout"
  entries = {
    (name, entry)
    for name, source in FILES.items()
    if re.fullmatch(rf"dppo_jax/(?:{parts})/\w+\.py", name)
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.ClassDef | ast.FunctionDef)
    for entry in ENTRY.findall(ast.get_docstring(node) or "")
  }
  assert not entries


def test_texts_have_no_riddles_and_use_the_words_of_the_field():
  assert not {x for x in _phrases() if not _is_allowed(*x)}


def test_texts_seldom_refer_back():
  """At most once in 1,000 words of docstrings and comments, and of pages."""
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
  texts = {"package": [], "pages": []}
  for name, source in FILES.items():
    if name.startswith("dppo_jax/"):
      nodes = (x for x in ast.walk(ast.parse(source)) if isinstance(x, kinds))
      texts["package"] += [ast.get_docstring(x) or "" for x in nodes]
      texts["package"] += re.findall(r"#(.*)", source)
  texts["pages"] = [pages.prose(page) for page in pages.pages()]
  for name, parts in texts.items():
    text = " ".join(" ".join(parts).split())
    assert 1000 * len(BACK.findall(text)) <= len(text.split()), name


def test_exceptions_are_few_and_needed():
  assert len(ALLOWED) <= 10
  phrases = _phrases()
  needed = {
    (place, phrase)
    for place, phrase in ALLOWED
    if any(x.startswith(place) and y == phrase for x, y in phrases)
  }
  assert needed == ALLOWED


def test_variables_are_named_after_their_content():
  names = set()
  for name, source in FILES.items():
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.arg) and node.arg in NAMES:
        names.add((name, node.lineno, node.arg))
      if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        if node.id in NAMES:
          names.add((name, node.lineno, node.id))
  assert not names
