"""Exceptions that end a run: invalid input, or a callback's decision."""


class UserError(ValueError):
  """Invalid input: an option, a file, a checkpoint or user code.

  `main` prints its message without a traceback, unlike for other exceptions.
  """


class Unreachable(UserError):
  """A service or another process cannot be reached for now.

  The program exits with 75, so that a scheduler starts it again.
  """


def of_hub(error: Exception, text: str) -> UserError:
  """Returns the error of a hub that cannot be read.

  `Unreachable` unless the hub has answered with a rejection, its library is
  offline by choice, or this machine is at fault.
  """
  status = getattr(getattr(error, "response", None), "status_code", 0)
  is_rejected = 400 <= status < 500 and status not in (408, 429)
  is_offline = type(error).__name__ == "OfflineModeIsEnabled"
  is_connection = isinstance(error, ConnectionError | TimeoutError)
  is_local = isinstance(error, OSError) and error.errno and not is_connection
  is_final = is_rejected or is_offline or is_local
  return (UserError if is_final else Unreachable)(text)


class StopTraining(Exception):
  """Raised by a callback to end the run as if this step were its last.

  The state is evaluated and saved, the report is written, and the program exits
  with 0. The same command again continues the run.
  """
