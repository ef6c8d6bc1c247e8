"""Child processes that call reward functions, restarted at need.

A child (child.py) serves one call at a time. It is killed when it does not
answer in time, and replaced when it was killed, died or filled its memory. What
a failed call costs is decided in grader.py.
"""

from collections.abc import Mapping, Sequence
import contextlib
import errno
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from dppo_jax.rewards.functions import Arguments, Mark, RewardSpec

START_SECONDS = 120.0  # to import math-verify, which takes half a second
CHILD = pathlib.Path(__file__).with_name("child.py")
CHILD_ENV = {
  "JAX_PLATFORMS": "cpu",  # should a function ever import JAX
  "CUDA_VISIBLE_DEVICES": "",
  "OPENBLAS_NUM_THREADS": "1",  # each takes some of a child's address space
  "SYMPY_CACHE_SIZE": "100",  # 1000 numbers of a million digits fill a child
}


class Fault(Exception):
  """A call that gave no values.

  Attributes:
    kind: `timeouts`, `crashes` or `errors`.
    text: what the function did, a verb phrase; a traceback may follow it on
      lines of its own.
  """

  def __init__(self, kind: str, text: str):
    super().__init__(kind, text)
    self.kind, self.text = kind, text


class Worker:
  """A child process that calls reward functions, one call at a time.

  Attributes:
    takes: the arguments of each function by its reference, once a child has
      loaded them.
  """

  def __init__(self, references: Sequence[str], timeout_seconds: float):
    """Starts nothing."""
    self.takes: dict[str, Arguments] = {}
    self._references = references
    self._timeout_seconds = timeout_seconds
    self._process: subprocess.Popen | None = None
    self._is_closed = False
    self._lock = threading.Lock()  # between a kill and a reaping

  def call(self, reference: str, batch: Mapping[str, Sequence]) -> list[Mark]:
    """Calls a function with what it takes of `batch`; a mark per completion.

    Raises:
      Fault: if it gives none.
      ValueError: if the batch is not JSON, or no function can be loaded.
      RuntimeError: if no child can start.
    """
    is_fresh = self._process is None
    if is_fresh:
      self.start()
    wanted = _wanted(self.takes[reference], batch)
    request = {
      "reference": reference,
      "arguments": {name: batch[name] for name in wanted},
      "num": len(batch["completions"]),
    }
    try:
      reply = self._exchange(_to_line(request), self._timeout_seconds)
    except TimeoutError:
      self.stop()
      limit = f"{self._timeout_seconds:g} s"
      raise Fault("timeouts", f"gave no answer within {limit}") from None
    except (OSError, EOFError):
      status = self.stop()
      if not is_fresh:  # it may have died since the call before this one
        return self.call(reference, batch)
      if status == errno.ENOMEM:
        raise Fault("crashes", "filled the memory of its process") from None
      by = f"signal {-status}" if status < 0 else f"exit status {status}"
      raise Fault("crashes", f"ended its process ({by})") from None
    if "error" in reply:
      raise Fault("errors", f"{reply['error']}\n{reply['traceback']}")
    return reply["marks"]

  def start(self) -> None:
    """Starts a child, if there is none, that loads the functions.

    One that takes too long is replaced once: by then the files that it reads
    are likely to be in memory.

    Raises:
      ValueError: in one line, if a function cannot be loaded.
      RuntimeError: likewise, if the child dies or is not ready, the second one
        too, in `START_SECONDS`.
    """
    if self._process:
      return
    if self._is_closed:
      raise RuntimeError("the grader is closed")
    try:
      reply = self._first_reply()
    except TimeoutError:
      reply = self._first_reply(is_last=True)
    if "refused" in reply:
      self.stop()
      raise ValueError(reply["refused"])
    self.takes = {name: Arguments(*x) for name, x in reply["takes"].items()}

  def _first_reply(self, is_last: bool = False) -> dict:
    """What a new child says once it has loaded the functions, or cannot.

    Raises:
      TimeoutError: if it takes too long and is not the last to be tried.
      RuntimeError: if it does not get there.
    """
    self._socket, theirs = socket.socketpair()
    self._stderr = tempfile.TemporaryFile()
    with theirs:
      # A file as a script: a child of multiprocessing imports dppo_jax.main,
      # and with it JAX. -P hides its neighbour math.py from imports.
      self._process = subprocess.Popen(
        [sys.executable, "-P", CHILD],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=self._stderr,
        env=os.environ | CHILD_ENV,
        start_new_session=True,  # Ctrl-C is for the parent
      )
    request = {
      "path": [os.path.abspath(x) for x in sys.path],  # "" is this directory
      "references": self._references,
      "timeout_seconds": self._timeout_seconds,
    }
    self._loading = "Python"
    try:
      return self._exchange(_to_line(request), START_SECONDS)
    except (OSError, EOFError) as error:
      self._stderr.seek(0)
      lines = self._stderr.read()[-2000:].decode(errors="replace").split("\n")
      is_slow = isinstance(error, TimeoutError)
      self.stop()
      if is_slow and not is_last:
        raise
      what = f"was not ready in {START_SECONDS:g} s" if is_slow else "died"
      last = next((x for x in reversed(lines) if x.strip()), "nothing")
      raise RuntimeError(
        f"config.reward.functions: a grader process {what} while it loaded "
        f"{self._loading}; the last that it said: {last.strip()}"
      ) from None

  def stop(self) -> int:
    """Ends the child, if there is one, and what it started; its exit status."""
    self.kill()
    with self._lock:
      if not self._process:
        return 0
      status = self._process.wait()
      self._process = None
    self._socket.close()
    self._stderr.close()
    return status

  def kill(self) -> None:
    """Kills the child, if there is one; a call under way then ends."""
    with self._lock:
      # Nobody has reaped it, so that the number is still its own.
      if self._process:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(self._process.pid, signal.SIGKILL)

  def close(self) -> None:
    """Kills the child, and starts no other."""
    self._is_closed = True
    self.kill()

  def _exchange(self, line: bytes, seconds: float) -> dict:
    """Sends a line and receives one, after those that tell what is loaded.

    Raises:
      TimeoutError: if that takes more than `seconds`.
      OSError, EOFError: if the child has ended.
    """
    deadline = time.monotonic() + seconds
    self._socket.settimeout(seconds)
    self._socket.sendall(line)
    replies = bytearray()
    while True:
      self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
      received = self._socket.recv(1 << 16)
      if not received:
        raise EOFError
      replies += received
      if replies.endswith(b"\n"):
        reply = json.loads(replies.splitlines()[-1])
        if "loading" not in reply:
          return reply
        self._loading = reply["loading"]


def check_columns(
  spec: RewardSpec, takes: Arguments, columns: Mapping[str, Sequence[Any]]
) -> None:
  """Passes over columns that a function can be called with.

  Raises:
    ValueError: if it requires another, or takes one that is not JSON.
  """
  known = {"prompts", "completions", "answers", *columns}
  missing = [name for name in takes.required if name not in known]
  if missing:
    raise ValueError(
      f"config.reward.functions: {spec.name!r} requires {missing[0]!r}, which "
      f"is none of {', '.join(sorted(known))}: the data has no such column"
    )
  _to_line({"arguments": {x: columns[x] for x in _wanted(takes, columns)}})


def _wanted(takes: Arguments, batch: Mapping[str, Sequence]) -> list[str]:
  return [name for name in batch if takes.has_kwargs or name in takes.named]


def _to_line(request: dict) -> bytes:
  try:
    return json.dumps(request).encode() + b"\n"
  except (TypeError, ValueError):
    for name, values in request["arguments"].items():
      for value in values:
        try:
          json.dumps(value)
        except (TypeError, ValueError) as error:
          raise ValueError(
            f"the data column {name!r} holds what a reward function cannot be "
            f"sent ({error}): remove it, or turn it into text or numbers"
          ) from None
    raise
