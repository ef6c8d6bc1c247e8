"""Several processes on this machine, to try out what a pod or cluster does.

    python experiments/launch/localhost.py --processes=2 --devices=2 \
      --config=configs/arithmetic.py --config.mesh.data=-1

Each process gets simulated CPU devices, the address of the first one and all
flags that this program does not know. Ctrl-C and SIGTERM are passed on to all.
The exit code is that of the first process that fails, which stops the others.
"""

import argparse
from collections.abc import Sequence
import os
import signal
import socket
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 15  # from a failure until the other processes are killed


def start(
  command: Sequence[str], num_processes: int, num_devices: int, **options
) -> list[subprocess.Popen]:
  """Starts several processes of one program.

  Args:
    command: command line of the program.
    num_processes: number of processes.
    num_devices: simulated devices of each process.
    options: options of `subprocess.Popen`.
  """
  port = _free_port()
  env = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(num_devices),
  }
  return [
    subprocess.Popen(
      [
        *command,
        f"--coordinator=localhost:{port}",
        f"--num_processes={num_processes}",
        f"--process_id={index}",
      ],
      env=env,
      # Its own process group, so that Ctrl-C reaches it only from here.
      start_new_session=True,
      **options,
    )
    for index in range(num_processes)
  ]


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


def _prefix_lines(index: int, process: subprocess.Popen) -> None:
  for line in process.stdout:
    if line.startswith("[Gloo]"):  # a message of the transport
      continue
    print(f"[process {index}] {line}", end="", flush=True)


def main() -> int:
  """Starts the processes, waits for all and returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--processes", type=int, default=2)
  parser.add_argument("--devices", type=int, default=2, help="per process")
  options, argv = parser.parse_known_args()
  processes = start(
    [sys.executable, "-m", "dppo_jax.main", *argv],
    options.processes,
    options.devices,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )

  def pass_on(number, frame):
    for process in processes:
      if process.poll() is None:
        process.send_signal(number)

  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, pass_on)
  readers = [
    threading.Thread(target=_prefix_lines, args=pair)
    for pair in enumerate(processes)
  ]
  for reader in readers:
    reader.start()
  code, deadline = 0, None
  while running := [x for x in processes if x.poll() is None]:
    code = code or next((x.returncode for x in processes if x.returncode), 0)
    if code and deadline is None:
      deadline = time.monotonic() + GRACE_SECONDS
    if deadline and time.monotonic() > deadline:
      for process in running:
        process.kill()
    time.sleep(0.1)
  for reader in readers:
    reader.join()
  return code or next((x.returncode for x in processes if x.returncode), 0)


if __name__ == "__main__":
  sys.exit(main())
