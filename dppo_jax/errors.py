"""The exception that ends a run in one line."""


class UserError(ValueError):
  """Invalid input: an option, a file, a checkpoint or user code.

  `main` prints its message without a traceback, unlike for other exceptions.
  """
