"""Exceptions that end a run: invalid input, or a callback's decision."""


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
