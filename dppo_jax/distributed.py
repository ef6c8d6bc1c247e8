"""Several processes, each with its own devices, that run as one program.

All processes take the same steps with the same keys. Each reads what its own
devices hold and shares the results, such as rewards, with `gather`. Process 0
alone prints and writes logs; each writes its part of a checkpoint.

Does not import jax before it is used, so that `analysis` starts without it.
"""

import atexit
import collections
from collections.abc import Callable, Iterator
import contextlib
import functools
import glob
import importlib.util
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
import numpy as np

from dppo_jax import errors
from dppo_jax.errors import UserError

if TYPE_CHECKING:
  import jax
  from jaxtyping import PyTree

_CONNECT_SECONDS = 300  # in which all processes have to connect
_TWICE = "two processes have --process_id="
_lines: list[socket.socket] = []  # to process 0, or from it to all others
# What JAX says of a process that has ended.
_OF_LOSS = re.compile("Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|heartbeat")


def initialize(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Joins the other processes of this run, if any, before any use of a device.

  On the hosts of a TPU slice JAX finds the others by itself. Elsewhere all
  arguments are required; `num_processes=1` alone always means a single process.

  Args:
    coordinator: `HOST:PORT` of process 0, as the others reach it.
    process_id: id of this process, from 0.
  """
  import jax

  flags = (coordinator, num_processes, process_id)
  if num_processes == 1 or _is_joined():
    return
  if flags != (None, None, None):
    others = f"all processes at --coordinator={coordinator}"
    # Under Slurm, JAX would give each process a single GPU.
    options: dict[str, Any] = {"cluster_detection_method": "deactivate"}
  elif _has_tpu():
    others, options = "the other hosts of this TPU slice", {}
  else:
    return
  # JAX's handler of SIGTERM would replace ours.
  jax.config.update("jax_enable_preemption_service", False)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # While it waits, JAX ignores Ctrl-C; in the end it prints a C++ stack trace.
  handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
  wait = f"waiting at most {_CONNECT_SECONDS} s for {others}"
  print(wait, file=sys.stderr, flush=True)
  late = (
    f"{others} did not connect within {_CONNECT_SECONDS} s: check the address, "
    "and that each process id is used exactly once"
  )
  try:
    with errors.limited(_CONNECT_SECONDS, late):
      if (
        coordinator
        and ":" in coordinator
        and process_id is not None
        and num_processes is not None
        and process_id in range(num_processes)
      ):
        _watch_others(coordinator, num_processes, process_id)
      jax.distributed.initialize(
        *flags,
        initialization_timeout=2 * _CONNECT_SECONDS,
        shutdown_timeout_seconds=60,  # for the others to exit
        **options,
      )
  except Exception as error:  # of the network or of JAX
    kind = UserError if isinstance(error, ValueError) else errors.Unreachable
    raise kind(
      f"cannot connect {others} ({errors.first_line(error)}): check "
      "--coordinator=HOST:PORT, --num_processes and --process_id, or pass "
      "--num_processes=1 to run a single process"
    ) from error
  finally:
    signal.signal(signal.SIGINT, handler)
  counts = collections.Counter(x.process_index for x in jax.devices())
  if len(set(counts.values())) > 1:
    listed = ", ".join(f"{n} in process {i}" for i, n in counts.items())
    raise UserError(
      f"all processes need the same number of devices, but there are {listed}"
    )


def _watch_others(coordinator: str, count: int, index: int) -> None:
  """Ends this process, with a line, once another one is killed.

  JAX does so after up to two minutes and with a C++ stack trace, as for a
  process id that is used twice. Process 0 keeps a connection to each other.

  Raises:
    UserError: for such an id.
  """
  host, _, port = re.sub(r"[\[\]]", "", coordinator).rpartition(":")
  lines = [_connect(host, port, index)] if index else _accept(port, count)
  _lines.extend(lines)
  for line in _lines:
    line.settimeout(None)
    atexit.register(_leave, line)
    threading.Thread(target=_watch, args=[line], daemon=True).start()


def _leave(line: socket.socket) -> None:
  with contextlib.suppress(OSError):
    line.sendall(b".")


def _watch(line: socket.socket) -> None:
  with contextlib.suppress(OSError):
    if line.recv(1):
      return
  end_with_others()


def end_with_others(reason: str = "") -> None:
  """Ends all processes, since another one cannot be reached.

  Process 0 ends last: without its server, JAX aborts the others.
  """
  for line in _lines:
    with contextlib.suppress(OSError):
      line.shutdown(socket.SHUT_RDWR)
  time.sleep(index() == 0)
  errors.give_up(
    f"another process has ended or cannot be reached{reason}: see its last "
    "output; re-run the command to resume"
  )


def _accept(port: str, count: int) -> list[socket.socket]:
  """Returns a connection to each other process once all have sent their id."""
  lines: dict[bytes, socket.socket] = {}
  is_dual = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if is_dual else socket.AF_INET
  with socket.create_server(
    ("", int(port)), family=family, dualstack_ipv6=is_dual
  ) as server:
    while len(lines) < count - 1:
      line, _ = server.accept()
      line.settimeout(10)
      with contextlib.suppress(OSError):  # of another program
        name = line.recv(20)
        # Of two with one name, the earlier may have been killed.
        if name in lines and not select.select([lines[name]], [], [], 0)[0]:
          for x in (*lines.values(), line):
            x.sendall(name)
          raise UserError(_TWICE + name.decode())
        if name.isdigit():
          lines[name] = line
  for line in lines.values():
    line.sendall(b"go")
  return [*lines.values()]


def _connect(host: str, port: str, index: int) -> socket.socket:
  """Returns a connection to process 0, once all others have one."""
  while True:
    with contextlib.suppress(OSError):
      line = socket.create_connection((host, int(port)), timeout=10)
      line.sendall(str(index).encode())
      line.settimeout(_CONNECT_SECONDS)
      answer = line.recv(20)
      if answer == b"go":
        return line
      if answer.isdigit():
        raise UserError(_TWICE + answer.decode())
    time.sleep(0.1)


def _has_tpu() -> bool:
  has_chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
  is_used = "tpu" in (os.environ.get("JAX_PLATFORMS") or "tpu")
  return bool(has_chips and is_used and importlib.util.find_spec("libtpu"))


def _is_joined() -> bool:
  jax = sys.modules.get("jax")
  return jax is not None and jax.distributed.is_initialized()


def count() -> int:
  """Number of processes."""
  return sys.modules["jax"].process_count() if _is_joined() else 1


def index() -> int:
  """Id of this process, from 0."""
  return sys.modules["jax"].process_index() if _is_joined() else 0


def is_first() -> bool:
  """True in the process that writes files and prints."""
  return index() == 0


def num_cores() -> int:
  """Number of cores that this process may use."""
  has_affinity = hasattr(os, "sched_getaffinity")
  return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def gather(value: Any) -> list[Any]:
  """Returns the value (JSON) of each process to all of them."""
  if count() == 1:
    return [value]
  from jax.experimental import multihost_utils

  text = json.dumps(value).encode()
  largest = max(multihost_utils.process_allgather(np.int32(len(text))))
  # A power of two, since each width is compiled. JSON may end in spaces.
  width = 1 << max(12, int(largest - 1).bit_length())
  padded = np.frombuffer(text.ljust(width), np.uint8)
  messages = multihost_utils.process_allgather(padded)
  return [json.loads(x.tobytes()) for x in messages]


@contextlib.contextmanager
def sharing_errors() -> Iterator[None]:
  """Raises the error of one process in all of them, which wait for each other.

  Other processes raise an error of the same class if it is one of `errors`,
  else a RuntimeError. It names the process. The body must not wait for another
  process, which may fail before it gets there.
  """
  if count() == 1:
    yield
    return
  error = None
  try:
    yield
  except Exception as own:
    error = own
  name = type(error).__name__
  raised = gather(error and [name, str(error) or repr(error)])
  if error:
    raise error
  for number, other in enumerate(raised):
    if other:
      kind = getattr(errors, other[0], RuntimeError)
      raise kind(f"process {number}: {other[1]}")


def on_first_process(function: Callable[..., Any]) -> Callable[..., Any]:
  """Makes process 0 alone call `function`; all get its result (JSON) or error.

  All processes have to call it.
  """

  @functools.wraps(function)
  def call(*args, **kwargs):
    with sharing_errors():
      result = function(*args, **kwargs) if is_first() else None
    return gather(result)[0]

  return call


def has_lost_another(error: BaseException) -> bool:
  """True if the error says that another process cannot be reached any more."""
  import jax

  return (
    count() > 1
    and isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    and bool(_OF_LOSS.search(str(error)))
  )


def to_host(tree: "PyTree") -> "PyTree":
  """NumPy arrays; 0 in place of values that only other processes hold."""
  import jax

  def read(x: "jax.Array | np.ndarray") -> np.ndarray:
    if not isinstance(x, jax.Array) or x.is_fully_replicated:
      return np.asarray(x)
    values = np.zeros(x.shape, x.dtype)
    for shard in {str(x.index): x for x in x.addressable_shards}.values():
      values[shard.index] = shard.data
    return values

  return jax.device_get(tree) if count() == 1 else jax.tree.map(read, tree)


def owners(x: "jax.Array | np.ndarray") -> Int[np.ndarray, "N"]:
  """A process that can read each row of `x`.

  Rows that several processes can read, such as NumPy's, are divided among them.
  """
  num_rows = x.shape[0]
  rows = np.zeros(num_rows, np.int32)
  readers = {(0, num_rows): set(range(count()))}
  if not isinstance(x, np.ndarray):
    readers = collections.defaultdict(set)
    for device, place in x.sharding.devices_indices_map(x.shape).items():
      readers[place[0].indices(num_rows)[:2]].add(device.process_index)
  for (begin, end), processes in readers.items():
    nth = np.arange(end - begin) * len(processes) // max(end - begin, 1)
    rows[begin:end] = np.array(sorted(processes))[nth]
  return rows
