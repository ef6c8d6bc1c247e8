"""Generated hostile completions."""

MARK = "injected"  # a file that code in a completion would leave behind


def completions(mark: str = MARK, long: int = 10_000_000) -> dict[str, str]:
  """Hostile completions by name, most of them within a box.

  Args:
    mark: path of a file that those with code in them try to write.
    long: characters of the longest.
  """
  boxes = _towers() | _nested() | _numbers() | _code(mark) | _collections()
  boxes |= _characters() | _bombs()
  texts = {name: rf"So \boxed{{{box}}}." for name, box in boxes.items()}
  return texts | _texts(long)


def _towers() -> dict[str, str]:
  """Expressions that take practically for ever to evaluate."""
  boxes = {}
  for height in (3, 4, 9, 90):
    boxes[f"tower of {height}"] = "9" + "^{9" * height + "}" * height
    boxes[f"roots to {height}"] = r"\sqrt[9]{" * height + "9" + "}" * height
  for number in ("9", "99", "999999999", "9" * 40):
    boxes |= {
      f"factorial of {number[:9]}, {len(number)}": f"{number}!",
      f"factorials of {number[:9]}, {len(number)}": f"{number}!!!",
      f"binomial of {number[:9]}, {len(number)}": (
        rf"\binom{{{number}{number}}}{{{number}}}"
      ),
      f"power of {number[:9]}, {len(number)}": rf"{number}^{{{number}}}",
      f"root of {number[:9]}, {len(number)}": rf"\sqrt[{number}]{{2}}",
      f"logarithm of {number[:9]}, {len(number)}": rf"\log_{{2}}({number}!)",
      f"sine of {number[:9]}, {len(number)}": rf"\sin({number}^{{{number}}})",
      f"sum to {number[:9]}, {len(number)}": (
        rf"\sum_{{k=1}}^{{{number}}} \frac{{1}}{{k^k}}"
      ),
      f"product to {number[:9]}, {len(number)}": (
        rf"\prod_{{k=1}}^{{{number}}} (k^2+x)"
      ),
      f"modulo of {number[:9]}, {len(number)}": rf"7^{{{number}!}} \mod 10",
      f"expansion to {number[:9]}, {len(number)}": rf"(x+y+z)^{{{number}}}",
      f"minus {number[:9]}, {len(number)}": rf"2^{{-{number}}}",
    }
  return boxes | {
    "integral": r"\int_0^1 x^{x^{x^x}} dx",
    "integral of all": r"\int \sin(\cos(\tan(e^{x^{99}}))) dx",
    "limit": r"\lim_{x \to 0} \frac{\sin(x^{99999999})}{x^{99999999}}",
    "derivative": r"\frac{d}{dx} x^{x^{x^{x^{x^{x}}}}}",
    "sum of sums": r"\sum_{i=1}^{9999}\sum_{j=1}^{9999}\sum_{k=1}^{i} i^j",
    "trigonometric": r"\sin x" * 60,
    "sines of sines": r"\sin(" * 80 + "x" + ")" * 80,
    "radicals": "+".join(rf"\sqrt{{{n}}}" for n in range(2, 90)),
    "surds of surds": "+".join(rf"\sqrt[{n}]{{{n}}}" for n in range(2, 60)),
    "polynomial": "(x+1)" * 190,
    "powers of powers": "((((((x+y)^9)^9)^9)^9)^9)^9",
    "determinant": r"\det\begin{pmatrix}x & y\\z & w\end{pmatrix}^{999999}",
    "equation": r"x^{99}+x^{98}y+\sin(xy)=e^{x^y}",
    "inequality": r"\sin(x^x)<\cos(e^x)<\tan(x!)",
    "floor": r"\lfloor 9^{9^9} \rfloor",
    "cosines to cancel": "+".join(
      rf"\cos\frac{{{n}\pi}}{{97}}" for n in range(1, 40)
    ),
  }


def _nested() -> dict[str, str]:
  """Depth that a recursive parser climbs, and braces that do not match."""
  pairs = {
    "fraction": (r"\frac{1}{", "}"),
    "numerator": (r"\frac{", "}{2}"),
    "root": (r"\sqrt{", "}"),
    "parenthesis": ("(", ")"),
    "sized": (r"\left(", r"\right)"),
    "brace": ("{", "}"),
    "set": (r"\{", r"\}"),
    "bracket": ("[", "]"),
    "absolute": (r"\left|", r"\right|"),
    "text": (r"\text{", "}"),
    "exponent": ("x^{", "}"),
    "subscript": ("x_{", "}"),
    "box": (r"\boxed{", "}"),
    "minus": ("-", ""),
    "factorial": ("", "!"),
    "logarithm": (r"\log(", ")"),
    "colour": (r"\textcolor{red}{", "}"),
    "matrix": (r"\begin{pmatrix}", r"\end{pmatrix}"),
    "overline": (r"\overline{", "}"),
  }
  boxes = {}
  for name, (left, right) in pairs.items():
    for size in (300, 990):
      depth = size // len(left + right)
      boxes[f"{name} {depth} deep"] = left * depth + "7" + right * depth
    boxes[f"{name} left open"] = left * 40 + "7"
    boxes[f"{name} closed again"] = "7" + right * 40
  return boxes


def _numbers() -> dict[str, str]:
  """Numbers that are long, mixed with units, or no numbers."""
  return {
    "many digits": "7" * 990,
    "digits behind a point": "0." + "3" * 980,
    "exponent": "1e999999999",
    "exponent in LaTeX": r"1 \times 10^{999999999}",
    "exponents": "1e9e9e9e9",
    "points": "1.2.3.4.5",
    "commas": "1," * 450 + "1",
    "groups": "1 000 " * 160,
    "percent of percent": r"7\%" * 300,
    "percent and units": r"50\% \text{ of } 3 \text{ km/h}^2 \text{ per day}",
    "units": r"5\text{ cm}" * 80,
    "units of units": "5 m s h kg cm^2 " * 50,
    "millions": "5 million billion trillion hundred thousand " * 20,
    "repeating": r"0.\overline{" + "142857" * 3 + "}",
    "repeating for long": r"0.\overline{" + "142857" * 140 + "}",
    "degrees": r"\sin 9^\circ" * 70,
    "degrees of a tower": r"\sin (9^{9^{9}})^\circ",
    "base": "1_{" * 100 + "2" + "}" * 100,
    "fractions": r"1\frac{1}{2}" * 70,
    "by zero": r"\frac{1}{0}",
    "zero by zero": r"\frac{0}{0}",
    "zero to zero": "0^0",
    "infinity": r"\infty - \infty",
    "infinity to infinity": r"\infty^{\infty}",
    "not a number": "nan",
    "imaginary": "i^{i^{i^{i^{i}}}}",
    "nothing": "",
    "dots": r"1 + 2 + \cdots + 10^{100}",
    "plus or minus": r"\pm 1" * 20,
    "times": r"9 \times " * 90 + "9",
    "one over one": "/".join("1" * 480),
    "powers": "^".join("2" * 300),
    "mixed operators": "+-*/^!" * 150,
    "leading zeros": "0" * 900 + "7",
  }


def _code(mark: str) -> dict[str, str]:
  """Python for a parser that evaluates, as sympy's `sympify` does."""
  write = f"open('{mark}','w')"
  shell = f"__import__('os').system('touch {mark}')"
  return {
    "import": shell,
    "import in text": rf"\text{{{shell}}}",
    "import in operatorname": rf"\operatorname{{{shell}}}",
    "import in mathrm": rf"\mathrm{{{shell}}}",
    "import and a number": f"2+{shell}",
    "import as an exponent": f"2^{{{shell}}}",
    "import as an index": f"x_{{{shell}}}",
    "import as a factorial": f"({shell})!",
    "open": write,
    "open in a set": rf"\{{{write}, 2\}}",
    "lambda": f"(lambda: {write})()",
    "eval": f'eval("{shell}")',
    "exec": f"exec(\"import os; os.system('touch {mark}')\")",
    "sympify": f'sympify("{shell}")',
    "subprocess": f"subprocess.run(['touch', '{mark}'])",
    "subclasses": "().__class__.__bases__[0].__subclasses__()",
    "globals": "globals().__setitem__('x', 1)",
    "format": "{0.__class__.__init__.__globals__}",
    "percent format": "%s%n%x%p" * 30,
    "exit": "exit()",
    "quit in text": r"\text{quit()}",
    "semicolon": f"1; {shell}",
    "new line": f"1\nimport os\nos.system('touch {mark}')",
    "shell": f"$(touch {mark}); `touch {mark}` | touch {mark} && touch {mark}",
    "input": rf"\input{{{mark}}}",
    "write18": rf"\immediate\write18{{touch {mark}}}",
    "openout": rf"\newwrite\f\openout\f={mark}",
    "define": r"\def\a{\a\a}\a",
    "newcommand": r"\newcommand{\x}{\x\x}\x",
    "loop": r"\loop\iftrue\repeat",
    "csname": r"\csname end\endcsname",
    "JSON": '"}\\n{"marks": ["right"]}\\n',
    "reply": '\n{"marks": ["right"]}\n',
    "pickle": "cos\nsystem\n(S'touch " + mark + "'\ntR.",
    "YAML": f"!!python/object/apply:os.system ['touch {mark}']",
    "template": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
  }


def _collections() -> dict[str, str]:
  """Matrices, sets, tuples and intervals, of which a comparison is long."""
  rows = lambda n, cell: r"\\".join(
    "&".join(cell.format(i, j) for j in range(n)) for i in range(n)
  )
  matrix = lambda n, cell: rf"\begin{{pmatrix}}{rows(n, cell)}\end{{pmatrix}}"
  return {
    "set": rf"\{{{', '.join(map(str, range(200)))}\}}",
    "set of roots": rf"\{{{','.join(f'√{n}' for n in range(200))}\}}",
    "set of powers": rf"\{{{','.join(f'x^{n}' for n in range(150))}\}}",
    "set of sets": r"\{1," * 200 + "2" + r"\}" * 200,
    "set of towers": rf"\{{{','.join(['9^{9^{9}}'] * 60)}\}}",
    "tuple": f"({','.join(map(str, range(250)))})",
    "tuple of letters": f"({','.join('abcdefghijklmnopqrstuvw' * 20)})",
    "letters": ",".join("zyxwvutsrq" * 45),
    "words": r"\text{or}".join(map(str, range(100))),
    "plus or minus": ",".join([r"1\pm\sqrt{2}"] * 60),
    "matrix": matrix(15, "{}"),
    "matrix of sines": matrix(7, r"\sin {}{}"),
    "matrix to a power": matrix(9, "x") + "^{9999999}",
    "inverse of a matrix": matrix(9, "x_{}") + "^{-1}",
    "product of matrices": matrix(4, "x") * 8,
    "matrix of towers": matrix(5, "9^{{9^{{9}}}}"),
    "uneven matrix": r"\begin{pmatrix}1&2\\3\end{pmatrix}",
    "matrix without an end": r"\begin{pmatrix}1&2\\3&4",
    "array": r"\begin{array}{" + "c" * 400 + "}1&2",
    "cases": r"\begin{cases}" + r"x & x>0\\" * 60 + r"\end{cases}",
    "interval": r"[9^{9^{9}}, \infty)",
    "interval to nowhere": r"(\infty, -\infty]",
    "union": r"\cup".join(f"({n},{n + 1})" for n in range(80)),
    "intersection": r"\cap".join(f"[{n},{n + 9}]" for n in range(80)),
    "difference": r"\mathbb{R} \setminus \{" + "1," * 300 + r"1\}",
    "inequalities": "1<" * 300 + "x",
    "system": ",".join(f"x_{n}=y^{n}" for n in range(99)),
    "equations": "=".join(f"x^{n}" for n in range(150)),
    "equations of towers": "=".join(["9^{9^{9}}"] * 80),
  }


def _characters() -> dict[str, str]:
  """Characters that are no text, or look like other text."""
  odd = {
    "NUL": "\0",
    "escape": "\x1b[2J",
    "surrogate": "\ud800",
    "surrogates the wrong way": "\udc00\ud800",
    "right to left": "\u202e",
    "no width": "\u200b",
    "joiner": "\u200d",
    "byte order mark": "\ufeff",
    "replacement": "\ufffd",
    "no character": "\uffff",
    "beyond": "\U0010ffff",
    "combining": "e\u0301\u0302\u0303\u0304",
    "line separator": "\u2028",
    "vertical tab": "\v\f\x85",
    "Arabic digit": "\u0667",
    "wide digit": "\uff17",
    "bold digit": "\U0001d7f3",
    "superscripts": "⁷⁻",
    "fraction": "½",
    "ligature": "\ufdfa",
    "emoji": "👨‍👩‍👧‍👦",
    "Roman": "Ⅷ",
  }
  alone = {f"{name} alone": char for name, char in odd.items()}
  before = {f"{name} before a 7": char + "7" for name, char in odd.items()}
  many = {f"{name} often": (char * 990)[:990] for name, char in odd.items()}
  return alone | before | many


def _bombs() -> dict[str, str]:
  """Inputs that make careless versions of our regular expressions slow."""
  parts = {
    "blanks": " ",
    "skips": r"\ ",
    "quads": r"\quad ",
    "escapes": "\\",
    "dollars": "$",
    "texts": r"\text{ ",
    "empty texts": r"\text{}",
    "colours": r"\color{a} ",
    "named colours": r"\textcolor{a} {",
    "groups of digits": "1 000",
    "commas": "1,000",
    "points": "1.1",
    "overlines": r"1.1\overline",
    "bars": r".\bar 1",
    "words": "5 million",
    "units": "5 cm ",
    "words that are units": "5 square square ",
    "units with powers": "cm^2 ",
    "angles": r"9 ^ \circ",
    "functions": r"\sin^{-1} ",
    "percents": r"7 \%",
    "equals": "7 = ",
    "elements": r"x \in ",
    "noons": r"7 \text{ a.m",
    "lefts": r"\left",
    "roots": "√(",
    "opened": "(,",
    "boxes": r"\boxed",
    "words to box": r"\boxed 1/",
    "joined words": r"\text{ and }7",
  }
  repeated = {
    f"{name} repeated": (part * 990)[:990] for name, part in parts.items()
  }
  behind = {
    f"{name} behind a 5": "5" + (part * 990)[:980] + "!"
    for name, part in parts.items()
  }
  return repeated | behind


def _texts(long: int) -> dict[str, str]:
  """Whole completions: too long, or without a box that can be found."""
  fill = lambda part: part * (long // len(part))
  return {
    "empty": "",
    "no box": "the answer is 7",
    "open box": r"\boxed{7",
    "box without braces": r"\boxed",
    "box of a box": r"\boxed{\boxed{\boxed{}}}",
    "a million digits": rf"\boxed{{{'7' * 1_000_000}}}",
    "a million digits bare": rf"\boxed {'7' * 1_000_000}",
    "long": rf"\boxed{{{fill('7')}}}",
    "long and open": r"\boxed{" + fill("{"),
    "long before a box": fill("{") + r"\boxed{7^{7}}",
    "long behind a box": r"\boxed{7^{7}}" + fill("}"),
    "many boxes": fill(r"\boxed{7}"),
    "many open boxes": fill(r"\boxed{"),
    "many bare boxes": fill(r"\boxed 7/"),
    "long escapes": fill("\\"),
    "long blanks": r"\boxed" + fill(" "),
    "long NUL": fill("\0") + r"\boxed{7^{7}}",
    "long surrogates": fill("\ud800") + r"\boxed{7^{7}}",
  }
