"""Exceptions that end a run, and what to say of errors of disks and servers."""

from collections.abc import Iterator
import contextlib
import errno
import os
import re
import sys
import threading

_ending = threading.Lock()
_OF_DISKS = set(
  "EACCES EPERM EROFS ENOTDIR EISDIR ENOSPC EDQUOT EFBIG EIO EMFILE "
  "ENAMETOOLONG EEXIST ENOTEMPTY".split()
)
# TensorStore: "...: No space left on device [os_error_code=..."
_OS_ERROR = re.compile(r"([^:]+) \[os_error_code")
_DENIED = re.compile("Forbidden: |PERMISSION_DENIED|UNAUTHENTICATED|NOT_FOUND")
# The hub's library is offline by choice, or rejects names without asking.
_REJECTED = "OfflineModeIsEnabled", "HFValidationError"


class UserError(ValueError):
  """Invalid input: an option, a file, a checkpoint or user code.

  `main` prints its message without a traceback, unlike for other exceptions.
  """


class Unreachable(UserError):
  """A service or another process cannot be reached for now.

  The program exits with 75, so that a scheduler starts it again.
  """


class StopTraining(Exception):
  """Raised by a callback to end the run as if this step were its last.

  The state is evaluated and saved, the report is written, and the program exits
  with 0. The same command again continues the run.
  """


def of_disk(error: Exception) -> str:
  """Returns the reason of an error of a local disk; "" for other errors."""
  if match := _OS_ERROR.search(str(error)):
    return match[1].strip()
  if isinstance(error, OSError):
    name = errno.errorcode.get(error.errno or 0)
    return str(error.strerror) if name in _OF_DISKS else ""
  return ""


def of_server(error: Exception, text: str) -> UserError:
  """Returns the error of a hub or bucket that cannot be used, with a text.

  `Unreachable` unless the server or its library has rejected the request, or
  this machine is at fault.
  """
  response = getattr(error, "response", None)
  status = getattr(response, "status_code", getattr(error, "code", 0))
  # Not a subclass: a library has one for a file that it may get later. And a
  # server may forget an upload whose last answer was lost.
  is_missing = type(error) in (FileNotFoundError, PermissionError)
  is_missing &= "uploadType" not in str(error)
  is_final = (
    is_missing
    or status in (400, 401, 403, 404)
    or type(error).__name__ in _REJECTED
    or _DENIED.search(str(error))
    or of_disk(error)
  )
  return (UserError if is_final else Unreachable)(text)


def first_line(error: Exception) -> str:
  """Returns the first line of the message, after the type of the error."""
  kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
  return f"{kind}{str(error).strip()}".partition("\n")[0]


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
  """Turns an error of a file system into a UserError that names the path."""
  try:
    yield
  except Exception as error:
    reason = of_disk(error)
    if not (reason or isinstance(error, OSError)):
      raise
    raise UserError(
      f"{path} cannot be written: {reason or error}. Fix this, then re-run the "
      "command to resume"
    ) from error


def give_up(text: str) -> None:
  """Prints an error and ends the process at once; it may be tried again."""
  _ending.acquire()  # so that one of several threads prints
  print(f"error: {text}", file=sys.stderr, flush=True)
  os._exit(os.EX_TEMPFAIL)


@contextlib.contextmanager
def limited(seconds: float, text: str) -> Iterator[None]:
  """Gives up if the body takes longer: libraries cannot be interrupted."""
  timer = threading.Timer(seconds, give_up, [text])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()
