"""The scripts and manifests of experiments/launch."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.helpers import commands

LAUNCH = commands.ROOT / "experiments/launch"


@pytest.mark.parametrize("name", ["slurm.sh", "tpu_pod.sh"])
def test_launch_scripts_are_bash(name):
  subprocess.run(["bash", "-n", LAUNCH / name], check=True)


@pytest.mark.parametrize(
  "codes, is_requeued",
  [
    ((0, 0), False),
    ((130, 130), True),
    ((75, 143), True),
    ((1, 143), False),  # srun ends the other process of one with an error
    ((2, 0), False),
  ],
)
def test_slurm_requeues_what_was_stopped_and_no_error(
  tmp_path, codes, is_requeued
):
  programs = {
    "scontrol": '[ "$1" = requeue ] && touch requeued; echo host',
    # Two processes, and the highest of their codes.
    "srun": """shift; code=0
for i in 0 1; do
  SLURM_PROCID=$i "$@"; x=$?
  if [ $x -gt $code ]; then code=$x; fi
done
exit $code""",
    "python": f"x=({codes[0]} {codes[1]}); exit ${{x[$SLURM_PROCID]}}",
  }
  for name, text in programs.items():
    (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
    (tmp_path / name).chmod(0o700)
  path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
  job = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
  done = subprocess.run(
    ["bash", LAUNCH / "slurm.sh"],
    cwd=tmp_path,
    env=os.environ | job,
    check=False,
  )
  assert done.returncode == max(codes)
  assert (tmp_path / "requeued").exists() == is_requeued


def test_skypilot_launch_passes_the_three_flags():
  task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
  assert task["num_nodes"] > 1
  flags = re.findall(r"--(coordinator|num_processes|process_id)=", task["run"])
  assert flags == ["coordinator", "num_processes", "process_id"]


def test_gke_restarts_what_was_stopped_or_lost_a_process_and_no_error():
  text = (LAUNCH / "gke.yaml").read_text()
  for name, value in {"HOSTS": "4", "CHIPS": "4"}.items():
    text = text.replace(f"&{name.lower()} {name}", f"&{name.lower()} {value}")
  jobset = yaml.safe_load(text)
  (job,) = jobset["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  assert spec["parallelism"] == spec["completions"]
  (rule,) = spec["podFailurePolicy"]["rules"]
  codes = rule["onExitCodes"]
  assert rule["action"] == "FailJob"
  assert codes["operator"] == "In"
  assert 1 in codes["values"]
  assert not {os.EX_TEMPFAIL, 130, 134, 137, 143} & set(codes["values"])
  (container,) = spec["template"]["spec"]["containers"]
  assert codes["containerName"] == container["name"]


def test_exit_code_is_that_of_a_failing_process():
  done = subprocess.run(
    [sys.executable, LAUNCH / "localhost.py", "--processes=2", "--nonsense"],
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 1
  assert "[process 1] error:" in done.stdout
