"""Several processes, each with devices of its own, that run as one program.

All of them take the same steps with the same keys. Each reads what its own
devices hold; what one has learned from it, such as rewards, `gather` tells the
others. Process 0 alone writes files and prints.

Where there is one process nothing here costs anything.
"""

from collections.abc import Callable, Iterator
import contextlib
import glob
import importlib.util
import json
import os
import re
from typing import Any

import jax
from jax.experimental import multihost_utils
from jaxtyping import Int, PyTree
import numpy as np

from dppo_jax.run import signals

_HEAD = 8  # bytes that say how long a message is
_SHORTEST = 4096  # bytes that are sent at least: most messages are no longer
# Until the others of a process that ended by itself end too.
_SHUTDOWN_SECONDS = 60


def initialize(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Makes this process one of several, if it is; before any use of a device.

  On the hosts of a TPU slice and in the tasks of a Slurm step JAX finds the
  others by itself. Elsewhere all arguments have to be given; 1 for
  `num_processes` alone stands for no others, wherever that is.

  Args:
    coordinator: `HOST:PORT` of process 0, as the others reach it.
    process_id: of this one, from 0.
  Raises:
    ValueError: for arguments that do not go together, or where the others
      cannot be found.
  """
  given = {
    "coordinator": coordinator,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  missing = [f"--{name}" for name, value in given.items() if value is None]
  if num_processes == 1 or jax.distributed.is_initialized():
    return
  if len(missing) == len(given):
    options = _found()
    if options is None:
      return
  elif missing:
    raise ValueError(
      f"{' and '.join(missing)} missing: --coordinator, --num_processes and "
      "--process_id are given together or, on TPU and Slurm, not at all"
    )
  else:
    _check(coordinator, num_processes, process_id)
    options = {"coordinator_address": coordinator} | given
    del options["coordinator"]
  # Its handler of SIGTERM would be in the way of ours.
  jax.config.update("jax_enable_preemption_service", False)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(
      **options, shutdown_timeout_seconds=_SHUTDOWN_SECONDS
    )
  except Exception as error:  # of the network, of JAX or of a cluster's files
    raise ValueError(
      "the other processes cannot be found "
      f"({str(error).strip().partition(chr(10))[0]}): give --coordinator, "
      "--num_processes and --process_id or, where there are no others, "
      "--num_processes=1"
    ) from error


def _check(coordinator: str, num_processes: int, process_id: int) -> None:
  if not re.fullmatch(r"\S+:\d{1,5}", coordinator):
    raise ValueError(
      f"--coordinator={coordinator} is not HOST:PORT, such as 10.0.0.1:8476"
    )
  if num_processes < 1:
    raise ValueError(f"--num_processes={num_processes} is not at least 1")
  if not 0 <= process_id < num_processes:
    raise ValueError(
      f"--process_id={process_id} is not in 0..{num_processes - 1}, as "
      f"--num_processes={num_processes} has it"
    )


def _found() -> dict[str, Any] | None:
  """What JAX has to be told where it finds the others; None if there are none.

  Source: jax/_src/clusters/slurm_cluster.py and cloud_tpu_cluster.py of JAX
  0.10.2; SLURM_* in the manual page of srun.
  """
  if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
    # JAX gives each task one GPU; the only task of a node is to have them all.
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if re.fullmatch(r"1(\(x\d+\))?", per_node):
      num_gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
      return {"local_device_ids": [*range(num_gpus)]}
    return {}
  has_chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
  is_used = "tpu" in (os.environ.get("JAX_PLATFORMS") or "tpu")
  if not (has_chips and is_used and importlib.util.find_spec("libtpu")):
    return None
  # Kubernetes names the hosts; elsewhere a server knows them, if there is one.
  names = {"TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"}
  has_server = "TPU_SKIP_MDS_QUERY" not in os.environ
  return {} if has_server or names & os.environ.keys() else None


def count() -> int:
  """How many processes there are."""
  return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
  """Which of them this is, from 0."""
  return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
  """Whether it is the one that writes files and prints."""
  return index() == 0


def gather(value: Any) -> list[Any]:
  """The value of each process, in all of them; they wait for each other.

  Args:
    value: JSON.
  """
  if count() == 1:
    return [value]
  data = json.dumps(value).encode()
  message = len(data).to_bytes(_HEAD, "little") + data
  width = _SHORTEST
  while True:
    padded = np.zeros(width, np.uint8)
    part = np.frombuffer(message[:width], np.uint8)
    padded[: len(part)] = part
    found = [x.tobytes() for x in multihost_utils.process_allgather(padded)]
    sizes = [_HEAD + int.from_bytes(x[:_HEAD], "little") for x in found]
    if max(sizes) <= width:
      break
    # A power of two, since each width compiles.
    width = 1 << (max(sizes) - 1).bit_length()
  return [json.loads(x[_HEAD:n]) for x, n in zip(found, sizes, strict=True)]


@contextlib.contextmanager
def sharing_errors() -> Iterator[None]:
  """Raises in every process what was raised in one, and waits for all.

  A process that failed alone would leave the others waiting for it. Inside
  none may wait for another: one that fails would not be there.

  Raises:
    RuntimeError: where another process failed; it says which and why.
  """
  if count() == 1:
    yield
    return
  error = None
  try:
    yield
  except Exception as raised:
    error = raised
  texts = gather(error and (str(error) or repr(error)))
  if error:
    raise error
  for number, text in enumerate(texts):
    if text is not None:
      raise RuntimeError(f"process {number}: {text}")


def has_lost_another(error: Exception) -> bool:
  """Whether it says that another process cannot be reached any more."""
  return (
    count() > 1
    and isinstance(error, jax.errors.JaxRuntimeError)
    and bool(re.search("Gloo|UNAVAILABLE|heartbeat", str(error)))
  )


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
  """Turns the first SIGTERM or Ctrl-C into a wish to stop, which all learn of.

  Yields:
    Whether any process has the wish; they wait for each other.
  """
  with signals.stop_signal() as is_stopping:
    yield lambda: any(gather(is_stopping()))


def to_host(tree: PyTree) -> PyTree:
  """Arrays as NumPy has them; 0 where only others hold a value."""
  if count() == 1:
    return jax.device_get(tree)
  return jax.tree.map(_to_host, tree)


def _to_host(x: jax.Array | np.ndarray) -> np.ndarray:
  if not isinstance(x, jax.Array) or x.is_fully_replicated:
    return np.asarray(x)
  values = np.zeros(x.shape, x.dtype)
  parts = {str(shard.index): shard for shard in x.addressable_shards}
  for shard in parts.values():
    values[shard.index] = shard.data
  return values


def owners(x: jax.Array | np.ndarray) -> Int[np.ndarray, "N"]:
  """The process that is to look at each row of `x`: one that can read it.

  Rows that several can read are divided among these; NumPy's all can.
  """
  num_rows = x.shape[0]
  found = np.zeros(num_rows, np.int32)
  if count() == 1:
    return found
  readers = {(0, num_rows): set(range(count()))}
  if not isinstance(x, np.ndarray):
    readers = {}
    for device, where in x.sharding.devices_indices_map(x.shape).items():
      part = where[0].indices(num_rows)[:2]
      readers.setdefault(part, set()).add(device.process_index)
  for (begin, end), some in readers.items():
    shares = np.arange(end - begin) * len(some) // max(end - begin, 1)
    found[begin:end] = np.array(sorted(some))[shares]
  return found
