"""Whether a chat template ends, and within bounds, found out by trying it.

A template comes with a checkpoint and is a program: three nested loops, or text
times a number, take all time or all memory. So that of a run is tried on one
prompt at the start, in a process that may be killed. This file is also that
process's program; transformers is what it renders with.
"""

from collections.abc import Mapping, Sequence
import errno
import json
import os
import signal
import subprocess
import sys
from typing import Any

SECONDS = 10  # for one prompt, of which thousands take a second
START_SECONDS = 120.0  # to import transformers, which takes a second
MEMORY_BYTES = 2 << 30  # with what the libraries take
MAX_CHARS = 1_000_000  # of the prompt


def check(
  template: str,
  messages: Sequence[Mapping[str, str]],
  arguments: Mapping[str, Any],
) -> None:
  """Tries `template` on one prompt.

  A template that refuses the prompt passes: whoever renders it then hears why.

  Args:
    template: in Jinja.
    messages: the prompt.
    arguments: what else a template is given, by name.
  Raises:
    ValueError: a verb phrase that says in what way the template is out of
      bounds.
  """
  try:
    request = json.dumps([SECONDS, template, [*messages], {**arguments}])
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"gets what is no text, number, list or dict from "
      f"config.data.template_args ({error})"
    ) from error
  try:
    done = subprocess.run(
      # By its file and with -P, so that JAX stays out.
      [sys.executable, "-P", __file__],
      input=request,
      capture_output=True,
      check=False,
      text=True,
      timeout=START_SECONDS,
      env=os.environ
      | {"OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
    )
  except subprocess.TimeoutExpired:
    raise ValueError(
      f"is not tried out within {START_SECONDS:g} s, in which transformers is "
      "to be imported"
    ) from None
  status = done.returncode
  if status == -signal.SIGALRM:
    raise ValueError(f"takes more than {SECONDS} s for one prompt")
  if status == errno.ENOMEM:
    raise ValueError(f"takes more than {MEMORY_BYTES >> 30} GiB for one prompt")
  if status:
    said = (done.stderr.strip() or "nothing").splitlines()[-1]
    raise ValueError(f"ends the process that tries it ({status}): {said}")
  if int(done.stdout) > MAX_CHARS:
    raise ValueError(
      f"makes {int(done.stdout):,} characters of one short problem, of which "
      f"there may be {MAX_CHARS:,}"
    )


def main() -> None:
  """Renders the prompt on stdin and writes how long it is."""
  import contextlib
  import resource

  from transformers.utils import chat_template_utils

  seconds, template, messages, arguments = json.load(sys.stdin)
  # From here on: the libraries take what they take.
  signal.setitimer(signal.ITIMER_REAL, seconds)
  with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
  try:
    (prompt,), _ = chat_template_utils.render_jinja_template(
      conversations=[messages],
      chat_template=template,
      add_generation_prompt=True,
      **arguments,
    )
  except MemoryError:
    os._exit(errno.ENOMEM)
  except Exception:  # templates raise what they like
    prompt = ""
  print(len(prompt))


if __name__ == "__main__":
  main()
