#!/bin/bash
# A run on several nodes of a Slurm cluster, one process a node.
#
#   PYTHON=$PWD/.venv/bin/python sbatch --partition=P --account=A --nodes=2 \
#     experiments/launch/slurm.sh --config=configs/gsm8k.py \
#     --config.model.path=MODEL --config.mesh.data=-1 --workdir=/shared/RUN \
#     --config.data.train=train.jsonl --config.data.eval=test.jsonl
#
# in the directory of the clone, on a file system of all nodes, with `pip install
# -e '.[cuda]'` in .venv. --workdir is on such a file system too, or in a bucket:
# then install '.[cuda,gcs]', and let every node find the
# credentials: in the home directory, if the nodes share it, or by exporting
# GOOGLE_APPLICATION_CREDENTIALS. Options of
# sbatch come before slurm.sh. Without the data flags, every node downloads GSM8K.
#
# Ten minutes before the time limit every process gets SIGTERM, finishes its
# step, saves and exits with 130: then the job goes back into the queue and
# resumes, at most 20 times. It also does after a node's failure, by --requeue.
# An error, exit code 1 or 2, writes dppo-JOB.stop, and the job is not requeued.
# To stop it for good: touch dppo-JOB.stop && scancel --signal=TERM JOB
#
# Source: the manual pages of sbatch, srun and scontrol, slurm.schedmd.com.
#SBATCH --job-name=dppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# Since Slurm 22.05 srun does not take --cpus-per-task over from sbatch.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export COORDINATOR="$first:$((10000 + SLURM_JOB_ID % 20000))"

# If one process fails, srun ends the others and returns the highest code, so
# that a process notes an error itself. Each has its own SLURM_PROCID.
srun --kill-on-bad-exit=1 bash -c 'trap : TERM
"${PYTHON:-python}" -m dppo_jax.main \
  --coordinator="$COORDINATOR" --num_processes="$SLURM_NTASKS" \
  --process_id="$SLURM_PROCID" "$@"
code=$?
case $code in 1 | 2) touch "dppo-$SLURM_JOB_ID.stop" ;; esac
exit "$code"' main "$@"
code=$?
case $code in
  # Stopped, lost a process, or a process was killed.
  130 | 75 | 134 | 137 | 139 | 143)
    if [ ! -e "dppo-$SLURM_JOB_ID.stop" ] &&
      [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code"
