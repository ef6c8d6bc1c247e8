"""--mode=sample: completions of prompts, printed with log-probabilities."""

from collections.abc import Iterable, Iterator
import dataclasses
import pathlib
import re
import sys

import jax

from dppo_jax import config as configs
from dppo_jax import data, rewards
from dppo_jax.data import sources
from dppo_jax.data.sources import Source
from dppo_jax.errors import UserError
from dppo_jax.eval import eval_sets
from dppo_jax.evaluate import find_step, read_weights
from dppo_jax.metrics import progress
from dppo_jax.models import parameters
from dppo_jax.records import Rollout
from dppo_jax.run import compile_cache, preflight
from dppo_jax.run.description import warnings
from dppo_jax.run.setup import Run, read_problems, setup_run
from dppo_jax.step import programs
from dppo_jax.step.grade import Ungraded, grade

_SHORTEST = 64  # width of prompts, doubled for longer ones: each is compiled


def run(
  config: configs.Config,
  workdir: pathlib.Path,
  step: int | str | None = None,
  prompt: str | None = None,
) -> None:
  """Prints `eval.samples` completions of each prompt, or a greedy one.

  Args:
    config: has the model, if `workdir` has no checkpoint, and the options of
      sampling and grading.
    step: checkpoint step, or "best"; None for the latest.
    prompt: a text, `@FILE.txt` with a prompt on each line, `@SOURCE` as in
      config.data.eval, or `@` for config.data.eval. None reads lines from
      standard input.
  Raises:
    UserError: for an invalid config, checkpoint, source or prompt.
  """
  config, workdir = configs.absolute_paths(config), workdir.absolute()
  compile_cache.enable_compilation_cache()
  source = None if prompt is None else _source(config, prompt)
  if callable(source):  # the user's own lines
    config.data.eval_limit = 0
  step = find_step(config, workdir, step)
  with progress.Progress() as bar:
    with bar.task("reading the model"):
      run = setup_run(config, trains=False, evaluates=False)
    with jax.set_mesh(run.spec.mesh), run.make_grader() as grader:
      with bar.task("reading weights"):
        params, weights = read_weights(run, workdir, step)
      start = [f"weights: {weights}", _decoding(config), *warnings(run, config)]
      bar.say(progress.wrapped("\n".join(start)))
      sampler = _Sampler(config, run, params, grader, bar)
      if source is None:
        sampler.print_lines()
      else:
        sampler.print_completions(source, run.spec.root_key)


def _decoding(config: configs.Config) -> str:
  """Returns how completions are decoded, as text."""
  r, samples = config.rollout, config.eval.samples
  how = f"temperature {r.temperature:g}, top-p {r.top_p:g}"
  some = f"{samples} sample{'s' * (samples > 1)} of a prompt"
  how = f"{some}, {how}" if samples else "greedy"
  return f"{how}, at most {r.max_tokens:,} tokens"


def _source(config: configs.Config, prompt: str) -> Source:
  """Returns the source that --prompt names."""
  place = prompt.removeprefix("@")
  if place == prompt:
    return _source_of(config, [prompt])
  if place.endswith(".txt"):
    try:
      text = pathlib.Path(place).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
      raise UserError(f"--prompt: {place} cannot be read: {error}") from error
    if not text.strip():
      raise UserError(f"--prompt: {place} has no prompt")
    return _source_of(config, filter(str.strip, text.split("\n")))
  if not (place or config.data.eval):
    raise UserError("--prompt=@ takes config.data.eval, which is empty")
  return sources.absolute(place) or config.data.eval


def _source_of(config: configs.Config, prompts: Iterable[str]) -> Source:
  """Returns a source of rows that have a text in each problem column."""
  names = config.data.problem_key.split(",")
  rows = [dict.fromkeys(names, text) for text in prompts]

  def prompt():  # errors name it
    return rows

  return prompt


def _lines(is_typed: bool) -> Iterator[str]:
  """Yields lines of standard input, asking for them on a terminal."""
  while True:
    if is_typed:
      print("prompt (Ctrl-D ends): ", end="", flush=True)
    try:
      line = sys.stdin.readline()
    except UnicodeDecodeError as error:
      raise UserError(f"the input is not UTF-8: {error.reason}") from error
    if not line:
      return
    yield line.strip()


@dataclasses.dataclass
class _Sampler:
  """Weights and the programs that sample from them, by size of their input."""

  config: configs.Config
  run: Run
  params: parameters.Params
  grader: rewards.Grader
  bar: progress.Progress
  compiled: dict[tuple[int, int], jax.stages.Compiled] = dataclasses.field(
    default_factory=dict
  )

  def print_lines(self) -> None:
    """Prints completions of the prompt in each line of standard input."""
    run, is_typed = self.run, sys.stdin.isatty()
    for number, line in enumerate(_lines(is_typed)):
      if not line:
        continue
      # A repeated line has other randomness.
      key = jax.random.fold_in(run.spec.root_key, number)
      try:
        self.print_completions(_source_of(self.config, [line]), key)
      except UserError as error:
        if not is_typed:
          raise UserError(f"line {number + 1} of the input: {error}") from None
        self.bar.say(f"error: {error}")

  def print_completions(self, source: Source, key: jax.Array) -> None:
    """Prints completions of every prompt of a source."""
    run, spec = self.run, self.run.spec
    sets = read_problems(
      self.config, run.tokenizer, source, trains=False, needs_answers=False
    )[1]
    preflight.check_ids(spec.sampling, spec.model.vocab, [*sets.values()])
    # Of a power of two, so that few programs serve all prompts.
    width = max(x.tokens.shape[1] for x in sets.values())
    width = max(_SHORTEST, 1 << (width - 1).bit_length())
    sets = {name: x.padded(width) for name, x in sets.items()}
    run = run._replace(eval_sets=sets)
    roll_out = self._program(run, width)
    for name, problems in sets.items():
      if re.search("left out| of ", problems.report):
        self.bar.say(progress.wrapped(problems.report))
      for rollout in eval_sets.rollouts(run, name, roll_out, self.params, key):
        self._print_rollout(rollout, problems)

  def _program(self, run: Run, width: int) -> jax.stages.Compiled:
    size = eval_sets.batch_size(run), width
    if size not in self.compiled:
      program = eval_sets.program(run, run.eval_samples)
      with self.bar.task("compiling") as task:
        compiled = programs.compile_programs({"sample": program}, task)
      self.compiled[size] = compiled["sample"]
    return self.compiled[size]

  def _print_rollout(self, rollout: Rollout, problems: data.ProblemSet) -> None:
    """Prints the completions of a batch, graded if answers are known."""
    has_answers = any(problems.answers)
    grader = self.grader if has_answers else Ungraded()
    with self.bar.task("grading", is_brief=True):
      lines = grade(
        rollout,
        problems,
        self.run.tokenizer,
        grader,
        stop_strings=self.run.spec.stop_strings,
      ).samples
    text = ""
    for line in lines:
      if line["member"] == 0:
        text += f"\nprompt: {line['problem']}\n"
        text += f"answer: {line['answer']}\n" * bool(line["answer"])
      text += f"{_summary(line)}\n{line['completion']}\n"
    self.bar.say(text.removesuffix("\n"))
    for warning in self.grader.pop_warnings():
      self.bar.say(warning)


def _summary(line: dict) -> str:
  """Describes length, end, log-probability and grades of a completion."""
  num, logprob = line["tokens"], line["logprob"]
  end = "stop" if line["stopped"] else "length"
  grades = [f"{name} {x:g}" for name, x in line["rewards"].items()]
  return ", ".join(
    [
      f"[{line['member'] + 1}] {num} tokens, {end}",
      f"log-probability {logprob:.3f} ({logprob / num:.3f} per token)",
      *(grades if line["answer"] else ()),
    ]
  )
