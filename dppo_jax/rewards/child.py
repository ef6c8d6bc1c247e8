"""The program of a worker process: calls reward functions on request.

It speaks JSON, a line each way, over the socket that is its stdin: first what
to load, then one call after another. It is run as a file, with `-P`, so that
neither JAX nor this folder's math.py gets in; it ends with its socket, so it
does not outlive the trainer.
"""

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import traceback

MEMORY_BYTES = 4 << 30  # address space
MAX_CHARS = 4000  # of a traceback


def main() -> None:
  import resource

  # What functions read and print has nothing to do with the protocol. Before
  # the start is over, prints go to stderr, to explain a failure.
  channel = socket.socket(fileno=os.dup(0))
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(2, 1)
  with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
  logging.disable()  # math-verify warns that it keeps no time: the parent does
  requests = channel.makefile("rb")
  start = json.loads(requests.readline())
  sys.path[:] = start["path"]

  from dppo_jax import user_code
  from dppo_jax.rewards import (
    functions,
    math_answers,
  )

  loaded = {}
  for name in start["references"]:
    channel.sendall(_line({"loading": name}))  # should it never end
    try:
      loaded[name] = functions.load(name)
    except ValueError as error:
      channel.sendall(_line({"refused": str(error)}))
      return
    if name == "math":
      math_answers.warm_up()
  os.dup2(null, 1)  # from here on nobody reads what is printed
  os.dup2(null, 2)
  takes = {name: functions.arguments(f) for name, f in loaded.items()}
  channel.sendall(_line({"takes": takes}))
  for line in requests:
    request = json.loads(line)
    # The parent's deadline comes first; this ends an orphan that hangs, also
    # one whose function has set a handler of its own.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * start["timeout_seconds"] + 1)
    try:
      marks = functions.call(
        loaded[request["reference"]], request["arguments"], request["num"]
      )
      reply = {"marks": marks}
    except MemoryError:  # the next call is to find all of the memory free
      os._exit(errno.ENOMEM)
    except BaseException as error:  # also sys.exit()
      is_ours = isinstance(error, functions.BadValues)
      what = str(error) if is_ours else f"raised {user_code.one_line(error)}"
      reply = {
        "error": what[:MAX_CHARS],
        "traceback": traceback.format_exc()[-MAX_CHARS:],
      }
    signal.setitimer(signal.ITIMER_REAL, 0)
    channel.sendall(_line(reply))


def _line(reply: dict) -> bytes:
  return json.dumps(reply).encode() + b"\n"


if __name__ == "__main__":
  main()
