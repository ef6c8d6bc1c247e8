r"""The grammar of answers in rewards/README.md, by generation.

Each table has one production: forms of the same answer, of which `{}` is the
value. Pairs are compared in both directions.
"""

import itertools
import random
import time

import pytest

from dppo_jax.rewards import Grader, kinds, notation

DELIMITERS = [
  *["${}$", "$ {} $", "$${}$$", r"\({}\)", r"\( {} \)", r"\[{}\]", r"\[ {} \]"],
  *[r"\boxed{{{}}}", r"\fbox{{{}}}", r"$\boxed{{{}}}$", r"\[\boxed{{{}}}\]"],
  *["{{{}}}", "**{}**", "**${}$**", r"\({}\).", "${}$.", "{}.", "= {}"],
  *[r"\ensuremath{{{}}}", r"\left. {} \right.", r"{}\tag{{1}}"],
  r"\begin{{equation*}}{}\end{{equation*}}",
]
SPACES = [r"\,", r"\:", r"\;", r"\ ", r"\>", "~", r"\!", r"\quad ", r"\qquad "]
SPACES += [r"\thinspace ", r"\enspace ", r"\hspace{1cm}", "\n", "\u00a0"]
FONTS = [
  *[rf"\{x}{{{{{{}}}}}}" for x in ("mathbf", "boldsymbol", "bm", "mathsf")],
  *[rf"\{x}{{{{{{}}}}}}" for x in ("mathit", "mathtt", "pmb", "underline")],
  *[r"{{\bf {}}}", r"{{\it {}}}", r"{{\bfseries {}}}", r"\bf {}"],
  *[r"\textcolor{{red}}{{{}}}", r"{{\color{{red}} {}}}", r"\color{{red}}{}"],
  *[r"\mathbf{{\underline{{{}}}}}", r"\underline{{\underline{{{}}}}}"],
  *[r"\displaystyle {}", r"{{\large {}}}", r"\Large {}"],
]
TEXTS = [r"\text{{{}}}", r"\textbf{{{}}}", r"\mathrm{{{}}}", r"{{\rm {}}}"]
TEXTS += [r"\mbox{{{}}}", r"\emph{{{}}}", r"\texttt{{{}}}"]
UNITS = [
  *[
    "{} cm",
    r"{}\,cm",
    r"{}\ cm",
    "{}~cm",
    r"{}\text{{ cm}}",
    r"{}\,{{\rm cm}}",
  ],
  *[r"{}\;\mathrm{{cm}}", r"{}\mathrm{{~cm}}", r"{}\textit{{ cm}}", "{} cm²"],
  *["{} cm^2", r"{}\text{{ cm}}^{{2}}", r"{}\,\text{{cm}}^3.", "{} km/h"],
  *[r"{}\ km/h", r"{}\ \text{{m}}/\text{{s}}", r"{}\ \text{{m}}/\text{{s}}^2"],
  *["{} m/s²", r"{}\ \mathrm{{m}}/\mathrm{{s}}^{{2}}", r"{}\ \mathrm{{m/s}}"],
  *[r"{}\ \mathrm{{km\,h^{{-1}}}}", r"{}\frac{{\text{{m}}}}{{\text{{s}}}}"],
  *[r"{}\,\text{{kg}}\cdot\text{{m}}^{{-3}}", r"{}\,\mu\text{{m}}"],
  *["{} square units", "{} sq. units", "{} units^2", "{} minutes", "{} min"],
  *[r"{}\text{{ apples}}", r"{}\quad\text{{cm}}", r"{}\ \mathsf{{cm}}"],
  *[r"{}^\circ", "{}°", r"{}^{{\circ}}", r"{}\degree", r"{}^\circ C", "{} °C"],
  *["{}℃", r"{}^\circ\text{{C}}", r"{}^{{\circ}}\mathrm{{F}}"],
  *[r"\${}", r"\$ {}", r"\text{{\$}}{}", "€{}", "{} €", "₹{}", "₽{}", "{}₩"],
  *["￥{}", r"US\${}", "USD {}", "{} USD", r"\text{{Rs. }}{}", "Rs. {}"],
  *[
    "{}元",
    "{} 元",
    r"{}\text{{元}}",
    "{}个",
    "{}平方厘米",
    "{}千克",
    "{}円",
    "{}명",
  ],
  *["{} руб.", "{} руб", r"{}\text{{ руб.}}", "{} см", "{} см²", "{} км/ч"],
  *["${}$ cm", r"\({}\) cm", r"\({} \text{{ cm}}\)", r"{} \text{{ years old}}"],
]
LABELS = [
  *["({})", "{}", "{})", "{}.", "{}:", "[{}]", "({}).", r"\left({}\right)"],
  *[rf"\text{{{{{x}}}}}" for x in ("{}", "({})", "{}.", "{})", "{}:", "{}. ")],
  *[r"\textbf{{({})}}", r"\mathbf{{{}}}", r"\mathrm{{({})}}", r"{{\bf {}}}"],
  *["**{}**", "**({})**", "**{}.**", r"\boldsymbol{{({})}}", r"$\text{{{}}}$"],
]
CHOICES = [
  *[
    "({}) {}",
    "{}. {}",
    "{}) {}",
    "{}: {}",
    "({}): {}",
    "[{}] {}",
    r"({})\ {}",
  ],
  *[r"{}.\ {}", r"({})\quad {}", r"{})~{}", r"\text{{{}. }}{}", "**{}. {}**"],
  *[r"\text{{{}.}}\ {}", r"\text{{{}}}. {}", r"\text{{({}) }}{}", "**{}.** {}"],
  *[r"\textbf{{({})}}{}", r"\textbf{{{}:}}\ {}", r"\mathbf{{({})}}\;{}"],
  *[r"{{\bf ({})}} {}", r"$\text{{({})}}$ ${}$", r"{}. \({}\)", "**({})** {}"],
]
NUMBERS = {
  "12": [
    "12.0",
    "+12",
    r"\dfrac{24}{2}",
    "１２",
    r"3 \cdot 4",
    r"12{,}0",
    "1.2e1",
  ],
  "1234567": [
    *["1,234,567", "1 234 567", r"1\,234\,567", r"1{,}234{,}567", "1'234'567"],
    *["1~234~567", r"1,\!234,\!567", r"1\;234\;567", "1\u202f234\u202f567"],
  ],
  "0.5": [
    *[".5", "0{,}5", r"0\text{,}5", "0{.}5", r"\frac12", r"\cfrac{1}{2}", "½"],
    *[r"50\ \%", r"50\,\%", r"50 \text{ percent}", r"50\text{\%}", r"0{,}50"],
  ],
  "-3.25": ["–3.25", "−3{,}25", r"-\!3.25", r"-\frac{13}{4}", r"\text{-}3.25"],
  "36000": [
    *["x=36,000", "N=36{,}000", r"\text{36,000}", r"36\cdot 1,000", "+36,000"],
    *["72,000/2", "6,000+30,000", r"x=\$36,000", r"\frac{72,000}{2}"],
  ],
  r"36000\pi": [r"36,000\pi", r"36{,}000\pi", r"6,000\cdot6\pi\text{ cm}^3"],
  r"1000\sqrt3": [r"1{,}000\sqrt3", r"1,000\sqrt{3}"],
  "-1200": [r"-\$1,200", "-£1,200", r"-\$1{,}200", r"-\$1,200.00", "- 1,200"],
  "500000": [
    *[r"5\text{ hundred thousand}", "5 hundred thousand dollars", "50万"]
  ],
  "30000000": ["3千万"],
  r"2\sqrt{3}": [r"2\sqrt3", r"2\,\sqrt{3}", "2√3", r"\sqrt{12}"],
  "180000": ["18万", "180 тыс.", r"180\text{ thousand}", "18万元"],
}
MATRIX = r"\begin{pmatrix}1\\2\end{pmatrix}"
FORMS = {
  "(0,1)": [
    *[r"\left(0,1\right)", r"\bigl(0,1\bigr)", r"\Bigg( 0,\,1 \Bigg)", "(0;1)"],
    *["]0,1[", "]0;1[", r"x\in(0,1)", r"x \in \left(0,1\right)", "（0，1）"],
    *[r"\langle 0,1\rangle", r"\{x \mid 0<x<1\}", r"\left]0,1\right["],
  ],
  "[0,1)": [r"\bigl[0,1\bigr)", "[0;1)", "[0,1[", r"x\in[0,1)", "x∈[0,1)"],
  r"(1,2)\cup(3,4)": ["(1;2)∪(3;4)", r"]1,2[\cup]3,4[", r"(3,4)\bigcup(1,2)"],
  r"(-\infty,2]": [r"(-\infty; 2]", "]-∞,2]", r"\left(-\infty,2\right]"],
  r"\{1,2,3\}": [r"\lbrace 1,2,3\rbrace", r"\bigl\{3,\ 1,\ 2\bigr\}"],
  r"\emptyset": [r"\varnothing", "∅", r"\{\}", r"\{ \}"],
  "2<x<5": ["5>x>2", r"2 \lt x \lt 5", r"5 \gt x \gt 2", r"\{x : 2<x<5\}"],
  r"2\le x<5": [r"5>x\ge 2", r"5 > x \geqslant 2", "5>x≥2", r"2\leqq x<5"],
  "0<a<b<1": ["1>b>a>0"],
  r"x\ne 3": [r"x\neq3", "x≠3", r"x \not= 3"],
  "1:2:3": ["2:4:6", r"1 : 2 : 3", r"1\colon 2\colon 3", "x:y:z=1:2:3"],
  r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}": [
    *[
      r"\frac{1\pm\sqrt5}{2}",
      r"\frac{1±\sqrt{5}}{2}",
      r"\frac{1\mp\sqrt5}{2}",
    ],
    *[
      r"\frac12\left(1\pm\sqrt5\right)",
      r"\left\{\frac{1\pm\sqrt5}{2}\right\}",
    ],
    *[r"x=\frac{1\pm\sqrt5}{2}", r"\frac12\pm\frac{\sqrt5}{2}"],
  ],
  r"(0,2),(0,-2)": [r"(0,\pm2)"],
  f"A={MATRIX}": [
    *[r"A = \begin{bmatrix} 1 \\[4pt] 2 \end{bmatrix}", MATRIX],
    *[r"A=\left(\begin{array}{c}1\\[1ex]2\end{array}\right)"],
    *[r"A=\begin{pmatrix}1\cr2\end{pmatrix}", rf"\mathbf{{A}}={MATRIX}"],
  ],
  "(1000,5)": ["(1{,}000,5)", r"\left(1{,}000,\ 5\right)"],
  "1000,2000": [
    *["1{,}000, 2{,}000", r"1,000\text{ and }2,000", "1,000 or 2,000"]
  ],
  "1000<x<2000": ["1{,}000<x<2{,}000", "1,000<x<2,000", "2,000>x>1,000"],
  r"x\ge1000": [r"x \ge 1,000", r"1,000\le x"],
  **{"-1": ["i^2", r"e^{i\pi}"], "2i": ["(1+i)^2", r"\frac{-2}{i}", "z=2i"]},
  **{r"\frac{1}{1+i}": [r"\frac{1-i}{2}"], "0": [r"\sum_{k=0}^3 i^k"]},
  r"e^{i\pi/3}": [r"\frac12+\frac{\sqrt3}{2}i", r"\frac{1+i\sqrt3}{2}"],
  r"\sum_{i=1}^n i": [r"\frac{n(n+1)}{2}", r"\sum_{j=1}^n j"],
  **{"-2": [r"\sqrt[3]{-8}"], r"-\sqrt[3]{2}": [r"\sqrt[3]{-2}"]},
  "A, C, E": [
    *[r"\text{A,C,E}", r"\text{E, A, C}", r"\text{A, C, and E}"],
    *[r"A, C\text{ and }E", r"\text{A, C}, \text{E}", r"\textbf{A, C, E}"],
  ],
  "A and C": [r"\text{A and C}", r"A\text{ and }C", "A, C"],
  "30": [r"\text{30 cm}", r"\text{30 minutes}", r"\text{30}"],
  r"\text{June 20}": ["June 20", r"\textbf{June 20}"],
  r"\text{2:30 PM}": [r"2:30\text{ PM}", r"2:30\text{ p.m.}", "2:30"],
  r"6:00\text{ p.m.}": [r"6:00\text{ PM}", r"\text{6:00 PM}", "6:00"],
  r"25\%, 50\%": ["25,50", r"50\%, 25\%", "0.25, 0.5", r"25\%, 50 \%"],
  r"x=5\%": ["5", "0.05", r"5\%", "x=0.05"],
  "f''(x)": [r"f^{\prime\prime}(x)", r"f^{''}(x)", r"f''\left(x\right)"],
  "f'(x)": ["f\u2032(x)", "f\u2019(x)"],
  "i<5": ["5>i"],
  r"\frac{dy}{dx}": [r"\frac{d y}{d x}", r"\frac{\mathrm{d}y}{\mathrm{d}x}"],
  **{"6x": ["f'(x)=6x", "y'=6x"], "A^T": ["A^{T}"]},
  "ABC": [r"\text{ABC}", r"\mathbf{ABC}", "**ABC**"],
  r"\arctan 2": [
    *[r"\operatorname{arctan} 2", r"\mathrm{arctan}(2)", "arctan 2"],
    *[r"\operatorname{arctg}2", r"\text{arctan}\left(2\right)", r"\tan^{-1}2"],
  ],
  r"\operatorname{lcm}(4,6)": ["12", r"\text{lcm}(4,6)"],
  "3+2i": [r"3+2\mathrm{i}", r"3+2\,i", r"3+2\text{i}", r"3+2\mathbf{i}"],
  "e^2": [r"\mathrm{e}^2", r"{\rm e}^2"],
  r"\text{Friday}": [
    "Friday",
    r"\textbf{Friday}",
    "**Friday**",
    r"\text{ friday}.",
  ],
  "5, 6": [
    *[r"5 \text{ and } 6", r"5\text{ cm}, 6\text{ cm}", "5元, 6元", "5、6"],
    *["$5$, $6$", r"\mathbf{5,6}", r"5,\quad 6", r"x=5,\ x=6"],
  ],
  "x=5": ["5", r"\[x=5\]", r"x = 5\,\text{cm}", r"\mathbf{x=5}", r"x\!=\!5"],
}
DIFFERENT = {
  "12": [
    *[
      "1 2",
      r"1\text{ }2",
      r"1\text{}2",
      r"1\,2",
      r"1\quad 2",
      "{1}{2}",
      "1'2",
    ],
    *[
      r"\mathbf{1}\mathbf{2}",
      r"1\text{2}",
      r"{\bf 1}{\bf 2}",
      "$1$$2$",
      "1$2",
    ],
    *[r"\(1\)\(2\)", "1€2", "1{,}2", "1{.}2", "1:2", "A. 13", "(A) 12 B. 13"],
    *[r"12\text{ or }13", r"12\text{ cm or 13 cm}", "12元或13元", "12 или 13"],
    *["不是12", r"\text{not }12", "120", "12万", "12 тыс.", "12 млн", "12x"],
    *[
      "[1,2]",
      r"12\pm1",
      r"\sqrt{12}",
      "12!",
      "-12",
      r"\overline{12}",
      "12/13",
    ],
  ],
  "1:2:3": [
    *["1:3:2", "3:2:1", "1:2", "1:2:3:4", "(1,2,3)", "1,2,3", r"\{1,2,3\}"],
    *[r"\frac16", "1/2/3", "(2,3)", r"(\frac16,\frac13,\frac12)", "0:2:3"],
  ],
  "1:2:3:4": ["1:2:4:3", r"\frac{1}{24}"],
  **{"0": ["T-t", "S-s"], "1": [r"\frac{M}{m}", r"\frac{R}{r}"]},
  **{"2x": ["x+X", "2X"], "X": ["x"], "e": ["E"], "x_a": ["x_A"]},
  **{
    r"\Delta": [r"\delta"],
    "x_1": ["X_1"],
    r"\overline{AB}": [r"\overline{ab}"],
  },
  "B": [
    *["A. 12", "A) 12", "A: 12", r"\text{A. }12", "A.", "A)", "**A**", "(A) B"],
    *["A. B", "A, B", r"A\text{ or }B", "(B)(A)", "B. 12 A. 13", "BA", "b"],
  ],
  "0.5": ["5", "0{,}05", "0{,}5, 1", "-0{,}5", r"5\%", "(0,5)", "0 5", "0:5"],
  "1.5": ["1{,}500", "1{,}5{,}0", "15"],
  "2<x<5": [
    *["5<x<2", "2>x>5", r"5\ge x\ge 2", r"5>x\ge2", "5>y>2", "6>x>2", "x<5"],
    *["5>x", r"\{x : 2<x<6\}", r"5>x>2\text{ or }x>7"],
  ],
  "(0,1)": [
    *[
      "[0,1]",
      "[0,1)",
      "]0,1]",
      "[0,1[",
      r"\{0,1\}",
      "(1,0)",
      "(0.1)",
      "[0;1]",
    ],
    *[r"x\in[0,1]", r"\{x \mid 0<x\le1\}"],
  ],
  r"\frac{1\pm\sqrt5}{2}": [r"\frac{1+\sqrt5}{2}", r"1\pm\sqrt5"],
  "2": [r"\pm2", "2:1:1", "(A) 3"],
  f"A={MATRIX}": [
    *[f"B={MATRIX}", r"A=\begin{pmatrix}2\\1\end{pmatrix}", "A=1", "A"],
    *[r"A=\begin{pmatrix}1&2\end{pmatrix}", f"a={MATRIX}"],
  ],
  MATRIX: [r"\begin{pmatrix}1\\[2pt]3\end{pmatrix}", "(2,1)"],
  r"\arctan 2": [r"\arctan 3", r"\operatorname{arccot} 2", r"\tan 2"],
  r"\emptyset": ["0", r"\{0\}", r"\{\emptyset\}"],
  "36": [
    *["36x", r"37\,cm", r"36\text{ cm }4\text{ mm}", "36元5角", "36 m 5"],
    *[r"36\ cm\ 5\ mm", r"36^\circ C + 1", r"36\text{ million}", "36億"],
    *[r"\frac{36\text{ cm}}{2}", r"5\text{ h }36\text{ min}", "36 - F"],
  ],
  "5": ["3+2\\text{i}", "5千克 6", "5 pi", r"5\mathrm{e}"],
  "5000": ["5千克"],
  "36,000": ["36", "(36,000)", "36,000,0", r"36,000\pi", "36,0", "360,00"],
  r"36,000\pi": ["36,000e", "36,000", "36", r"36,0\pi", r"\{0,36\}"],
  **{"5,000x": ["5,000y", "5x"], "x=1,000": ["x=1,000000", "x=1", "x=1,0"]},
  **{"-1200": [r"\$1,200", r"-\$1,2", "-200"], "(1,200)": ["1200", "(1200)"]},
  r"x<1\text{ or }x>2": [
    *[r"x<1\text{ and }x>2", "x<1 and x>2", "1<x<2", "x<1"]
  ],
  **{"A and B": ["A or B"], r"\text{Al and Bo}": [r"\text{Al or Bo}"]},
  **{"y=2x": ["y'=2x", "y''=2x"], "f(x)": ["f'(x)"], "f'(x)": ["f''(x)"]},
  **{"A": ["A^T", "A'", "A^{T}"], "A^2": ["A^TA"], "x": ["x'"]},
  r"\frac{\partial f}{\partial x}": [r"\frac{\partial f}{\partial y}", "0"],
  r"\frac{df}{dx}": [r"\frac{df}{dy}", r"\frac{dg}{dx}", r"\frac{d^2f}{dx^2}"],
  **{"i": ["1", "-i", "-1", "x"], "1+i": ["1-i", "2", r"\sqrt2"]},
  **{r"\sum_{i=1}^n i": [r"\sum_{i=1}^n i^2", "i"], "i^2": ["1", "i"]},
  "A, C": [r"\text{A, D}", "AC", r"\text{AC}", r"\text{A, C, E}", "A"],
  "30": [r"\text{31 cm}", r"\text{30 or 31}", r"\text{not 30}"],
  **{r"\text{June 20}": ["June 21", "July 20", "20"], "3": ["Day 3", "3!!"]},
  r"6:00\text{ p.m.}": [r"6:00\text{ AM}", r"7:00\text{ p.m.}"],
  "500": [r"5\text{ hundred thousand}", r"5\text{ hundredths}"],
  **{"720": ["3!!"], "15": ["5!!"]},
  "12 ": [r"12\text{ dozen}", r"\text{12 dozen}"],
  "25,50": [r"25\%, 60\%", r"0.25\%, 0.5\%", "0.25, 0.5", r"25\%"],
  **{r"x=5\%": ["x=500", r"y=5\%", r"x=6\%"], r"25\%": [r"25\%+1"]},
  **{"ABC": ["CBA", r"\text{ACB}", "AB"], "HTH": ["HHT", r"\text{THH}"]},
}


def filled(forms: list[str], *values: str) -> list[tuple[str, str]]:
  """Returns pairs of each value and its forms."""
  return [(value, form.format(value)) for value in values for form in forms]


def both(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
  return [*dict.fromkeys(x for pair in pairs for x in (pair, pair[::-1]))]


def listed(table: dict[str, list[str]]) -> list[tuple[str, str]]:
  return [(value, form) for value, forms in table.items() for form in forms]


SPACED = [x.replace("{", "{{").replace("}", "}}") for x in SPACES]
SPACED = [form for x in SPACED for form in (f"{{}}{x}", f"{x}{{}}")]
WHOLE = ["12", "-0.5", r"\frac{1}{2}", "x=5", "(1,2)", r"\{1,2\}", "1,2"]
LETTERED = [
  (part, form.format("B", value))
  for form in CHOICES
  for value in ("12", r"\frac{1}{2}", "(1,2)")
  for part in ("B", value)
]
EQUAL = {
  "delimiters": filled(DELIMITERS, *WHOLE, r"x\in(0,1)"),
  "spaces": filled(SPACED, *WHOLE),
  "fonts": filled(FONTS, *WHOLE) + filled(TEXTS, "12", "-0.5"),
  "units": filled(UNITS, "18", "12.5", r"\frac{1}{2}", r"3\sqrt{2}"),
  "labels": filled(LABELS, "B", "E"),
  "choices": LETTERED,
  "numbers": listed(NUMBERS),
  "forms": listed(FORMS),
}


@pytest.fixture(scope="module")
def math():
  with Grader("math", timeout_seconds=60) as grader:
    yield grader


def differences(math: Grader, pairs: list[tuple[str, str]], value: float):
  """Returns the pairs (gold answer, answer) that earn another value."""
  golds, answers = zip(*pairs, strict=True)
  # In a box of its own, an answer would lose the box around it.
  texts = [rf"\boxed{{{x.replace('boxed', 'ensuremath')}}}" for x in answers]
  earned = math.grade(golds, texts, golds).rewards
  return [x for x, y in zip(pairs, earned, strict=True) if y != value]


@pytest.mark.parametrize("kind", EQUAL)
def test_forms_of_an_answer_are_equal(math, kind):
  assert differences(math, both(EQUAL[kind]), 1.0) == []


def test_other_answers_are_not(math):
  assert differences(math, both(listed(DIFFERENT)), 0.0) == []


def composed(value: str, draw: random.Random) -> str:
  """Returns a delimited, perhaps labelled number of a unit in some font."""
  font, unit, space, around = map(
    draw.choice, (FONTS, UNITS, SPACED, DELIMITERS)
  )
  answer = draw.choice([unit, "{}"]).format(
    draw.choice([font, "{}"]).format(value)
  )
  if draw.random() < 0.3:
    answer = draw.choice(CHOICES).format("C", answer)
  answer = draw.choice([space, "{}"]).format(answer)
  if "**" in answer:  # once
    return answer
  return around.format(answer).replace("..", ".")


def test_compositions_have_the_value_of_their_number(math):
  draw = random.Random(0)
  values = [draw.choice([*NUMBERS, "7", r"\frac{3}{4}"]) for _ in range(400)]
  pairs = [(value, composed(value, draw)) for value in values]
  assert differences(math, pairs, 1.0) == []
  others = [("41", x) for _, x in pairs]
  assert differences(math, others, 0.0) == []


def test_any_composition_is_graded_in_time(math):
  """Nonsense of the same pieces: nothing raises, hangs or equals 41."""
  draw = random.Random(1)
  tables = DELIMITERS, SPACED, FONTS, TEXTS, UNITS, LABELS
  forms = [form for table in tables for form in table] + [*listed_forms()]
  texts = []
  for _ in range(400):
    text = draw.choice(["{}", "7"])
    for _ in range(draw.randrange(1, 6)):
      text = draw.choice(forms).replace(
        "{}", text.replace("$", "")
      ) + draw.choice(["", " ", "{", "}", r"\text{", ",", "5", r"\left"])
    texts.append((r"\frac{41}{1}", text.replace("{{", "{").replace("}}", "}")))
  golds, answers = zip(*texts, strict=True)
  graded = math.grade(golds, [rf"\boxed{{{x}}}" for x in answers], golds)
  assert not graded.counts["timeouts"] and not graded.counts["crashes"]
  assert not graded.correct.any()


def listed_forms() -> list[str]:
  tables = NUMBERS, FORMS, DIFFERENT
  return [*itertools.chain(*(y for x in tables for y in x.values()))]


PIECES_THAT_REPEAT = [
  *[
    "元",
    "元 ",
    "cm ",
    "5 cm, ",
    r"\text{a}",
    r"\text{a} ",
    "1:2",
    ">x",
    "(1,",
  ],
  *[r"\pm 1", "]1,2[", "[1;2[", r"\frac{\text{m}}{", "1e5", "1 1/2 ", "/cm"],
  *[r"\quad ", "|x|<", r"\{x|", "=1:", r"\cdot cm", r"\mu", "sq. ", "A. "],
  *["5%,", "dx ", "a and ", r"\text{a or ", "^T", "'", r"\sqrt[3]{-"],
]


@pytest.mark.parametrize("piece", PIECES_THAT_REPEAT)
def test_rules_of_a_long_answer_end(piece):
  """Exponential time would be years."""
  start = time.perf_counter()
  for text in (f"5{piece * 1000}"[:990], f"x={piece * 1000}"[:990]):
    kinds.choice(text)
    notation.without_units(text)
    notation.is_readable(notation.in_plain_forms(text))
    kinds.differ_in_kind(text, f"{text}1")
  assert time.perf_counter() - start < 30
