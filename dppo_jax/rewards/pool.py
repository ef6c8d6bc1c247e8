"""Worker processes that call reward functions and may be killed.

The trainer's half is `Worker`, the process's half `serve`; they exchange JSON.
A worker that misses its deadline, dies or fills its memory is replaced.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import errno
import json
import logging
import multiprocessing
from multiprocessing import connection
import os
import resource
import signal
import subprocess
import sys
import traceback

from dppo_jax.errors import UserError
from dppo_jax.files import user_code
from dppo_jax.rewards import functions

LOAD_SECONDS = 600.0  # for a process to load a function: usually 0.5 s
START_ATTEMPTS = 3
MEMORY_BYTES = 4 << 30  # address space of a process
MAX_CHARS = 4000  # of an error message or a traceback
IS_WORKER = "DPPO_JAX_REWARD_WORKER"
ENVIRONMENT = {
  IS_WORKER: "1",
  "JAX_PLATFORMS": "cpu",  # if a function imports JAX
  "CUDA_VISIBLE_DEVICES": "",
  "OPENBLAS_NUM_THREADS": "1",  # each takes some of the address space
  "SYMPY_CACHE_SIZE": "100",  # 1000 numbers of a million digits fill a process
}
# multiprocessing would import the trainer's main module, and with it JAX.
_PROGRAM = """import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options.pop("path")
from dppo_jax.rewards import pool
pool.serve(**options)"""


class Fault(Exception):
  """A call that returned no values: (kind, text).

  The kind is `timeouts`, `crashes` or `errors`. The text is a verb phrase about
  the function, with the lines of a traceback for `errors`.
  """


class Worker:
  """A process that executes one call at a time; `start` starts it."""

  def __init__(self, references: Sequence[str], timeout_seconds: float):
    self._required: list[tuple[str, str]] = []
    self._references = references
    self._timeout_seconds = timeout_seconds
    self._process: subprocess.Popen | None = None
    self._is_closed = False

  def call(
    self, reference: str, batch: Mapping[str, Sequence]
  ) -> list[functions.Mark]:
    """Calls a function with its arguments; returns a mark per completion.

    Raises:
      Fault: if the call fails.
      UserError: if no process can start or load the functions.
    """
    is_fresh = self._process is None
    self.start()
    try:
      _send(self._pipe, {"reference": reference, "batch": batch})
      reply = self._receive(self._timeout_seconds)
    except TimeoutError:
      self.stop()
      text = f"gave no answer within {self._timeout_seconds:g} s"
      raise Fault("timeouts", text) from None
    except (OSError, EOFError):
      status = self.stop()
      if not is_fresh:  # it may have died before this call
        return self.call(reference, batch)
      cause = f"signal {-status}" if status < 0 else f"exit status {status}"
      text = f"ended its process ({cause})"
      if status == errno.ENOMEM:
        text = "filled the memory of its process"
      raise Fault("crashes", text) from None
    if "error" in reply:
      raise Fault("errors", reply["error"])
    return reply["marks"]

  def start(self) -> list[tuple[str, str]]:
    """Starts the process if there is none; it loads the functions.

    Returns:
      Pairs of a function's reference and the name of a required argument.
    Raises:
      UserError: if a function cannot be loaded, or after `START_ATTEMPTS`
        processes that died, or if one takes longer than `LOAD_SECONDS`.
    """
    if self._process:
      return self._required
    for _ in range(START_ATTEMPTS):
      if self._is_closed:
        raise RuntimeError("the grader is closed")
      self._launch()
      name = self._references[0]
      try:
        while "loading" in (reply := self._receive(LOAD_SECONDS)):
          name = reply["loading"]
        break
      except TimeoutError:
        self.stop()
        raise UserError(
          f"config.reward.functions: {name} did not load within "
          f"{LOAD_SECONDS:g} s: load it in Python to see why"
        ) from None
      except (OSError, EOFError):
        self.stop()
    else:
      raise UserError(
        f"config.reward.functions: a worker process died while it loaded {name}"
        f" ({START_ATTEMPTS} attempts): load it in Python to see why"
      )
    if "error" in reply:
      self.stop()
      line, _, details = reply["error"].partition("\n")
      cause = RuntimeError(details)
      raise UserError(line) from cause
    self._required = reply["required"]
    return self._required

  def _launch(self) -> None:
    if IS_WORKER in os.environ:  # or each process would start more of them
      raise UserError(
        "a reward function's file starts a run while it is imported: "
        'put that below `if __name__ == "__main__":`'
      )
    self._pipe, theirs = multiprocessing.Pipe()
    options = {
      "path": [os.path.abspath(x) for x in sys.path],  # "" is this directory
      "descriptor": theirs.fileno(),
      "references": self._references,
      "timeout_seconds": self._timeout_seconds,
    }
    with theirs:
      self._process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, json.dumps(options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env=os.environ | ENVIRONMENT,
        start_new_session=True,  # Ctrl-C is for the trainer
      )

  def _receive(self, seconds: float) -> dict:
    if not self._pipe.poll(seconds):
      raise TimeoutError
    return json.loads(self._pipe.recv_bytes())

  def stop(self) -> int:
    """Ends the process and its process group; returns its exit status."""
    self._kill()
    if not self._process:
      return 0
    status = self._process.wait()
    self._process = None
    self._pipe.close()
    return status

  def close(self) -> None:
    """Ends a call that another thread waits for, and allows no other."""
    self._is_closed = True
    self._kill()

  def _kill(self) -> None:
    process = self._process  # another thread may stop it
    if process and process.returncode is None:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def serve(
  descriptor: int, references: Sequence[str], timeout_seconds: float
) -> None:
  """Loads functions and calls them on request until the trainer ends."""
  pipe = connection.Connection(descriptor)
  os.set_inheritable(descriptor, False)
  with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
  logging.disable()  # math-verify warns that it has no deadline of its own
  loaded = {}
  try:
    for reference in references:
      _send(pipe, {"loading": reference})
      with _alarm(LOAD_SECONDS):
        loaded[reference] = functions.load(reference)
  except Exception as error:
    return _send(pipe, {"error": explain(error, str(error))})
  required = [
    (reference, name)
    for reference, function in loaded.items()
    for name in functions.required_arguments(function)
  ]
  _send(pipe, {"required": required})
  with contextlib.suppress(EOFError, OSError):
    while request := json.loads(pipe.recv_bytes()):
      with _alarm(timeout_seconds):
        reply = _reply(loaded, **request)
      _send(pipe, reply)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
  """Ends an orphan that hangs; the trainer's own deadline comes first."""
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
  yield
  signal.setitimer(signal.ITIMER_REAL, 0)


def _reply(loaded: dict, reference: str, batch: dict) -> dict:
  try:
    return {"marks": functions.call(loaded[reference], batch)}
  except MemoryError:  # the next call gets a process with free memory
    os._exit(errno.ENOMEM)
  except BaseException as error:  # also sys.exit()
    return {"error": explain(error)}


def explain(error: BaseException, line: str = "") -> str:
  """Returns a line, by default "raised ...", and below it the traceback."""
  line = line or f"raised {user_code.one_line(error)}"
  lines = "".join(traceback.format_exception(error))
  return f"{line[:MAX_CHARS]}\n{lines[-MAX_CHARS:]}"


def _send(pipe: connection.Connection, message: dict) -> None:
  pipe.send_bytes(json.dumps(message, default=str).encode())
