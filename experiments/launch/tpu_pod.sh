#!/bin/bash
# A run on a TPU slice of one or more hosts, by queued resources of Google Cloud.
#
#   export NAME=dppo ZONE=europe-west4-b TYPE=v5litepod-8 \
#     VERSION=v2-alpha-tpuv5-lite
#   ./tpu_pod.sh create         # waits in the queue
#   ./tpu_pod.sh setup          # copies the clone to every host, installs it
#   ./tpu_pod.sh run [NAME=VALUE] --config=configs/gsm8k.py \
#     --config.mesh.data=-1 --workdir=gs://BUCKET/my_run
#   ./tpu_pod.sh log [HOST]     # by default of the first, which alone prints
#   ./tpu_pod.sh status         # of the slice, and of the run on each host
#   ./tpu_pod.sh stop           # saves after the step; `run` again resumes
#   ./tpu_pod.sh delete
#
# SPOT=1 asks for spot capacity: when that is taken back, `delete`, `create`,
# `setup` and the same `run` resume from the latest checkpoint. CREATE_FLAGS has
# further flags of `create`, such as --labels=owner=me. tpu_vm.md starts with an
# empty project.
#
# Source: cloud.google.com/tpu/docs, "Manage queued resources", "Run JAX code on
# TPU slices"; the reference of `gcloud compute tpus`.
set -euo pipefail

: "${NAME:?the name of the slice}" "${ZONE:?its zone, such as europe-west4-b}"
CLONE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

on_hosts() { # on_hosts all|NUMBER COMMAND
  gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker="$1" \
    --command="$2"
}

state() {
  gcloud compute tpus queued-resources describe "$NAME" --zone="$ZONE" \
    --format='value(state.state)'
}

create() {
  : "${TYPE:?the accelerator type, such as v5litepod-16}"
  : "${VERSION:?the runtime version, such as v2-alpha-tpuv5-lite}"
  if ! state > /dev/null 2>&1; then # the slice was not requested yet
    gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" \
      --zone="$ZONE" --accelerator-type="$TYPE" --runtime-version="$VERSION" \
      ${SPOT:+--spot} ${CREATE_FLAGS:-}
  fi
  local now before=
  while true; do
    now=$(state)
    [ "$now" = "$before" ] || echo "$NAME: $now" >&2
    before=$now
    case $now in
      ACTIVE) break ;;
      FAILED | SUSPENDED)
        gcloud compute tpus queued-resources describe "$NAME" --zone="$ZONE" >&2
        echo "the request has failed: $0 delete" >&2
        exit 1
        ;;
    esac
    sleep 30
  done
}

setup() {
  git -C "$CLONE" ls-files -z --cached --others --exclude-standard |
    tar -C "$CLONE" --null -T - -czf /tmp/dppo_jax.tar.gz
  gcloud compute tpus tpu-vm scp /tmp/dppo_jax.tar.gz "$NAME":dppo_jax.tar.gz \
    --zone="$ZONE" --worker=all
  # The images have a Python that is too old.
  on_hosts all "mkdir -p dppo_jax && tar -C dppo_jax -xzf dppo_jax.tar.gz &&
    curl -LsSf https://astral.sh/uv/install.sh | sh &&
    .local/bin/uv venv --clear --python 3.12 dppo_jax/.venv &&
    .local/bin/uv pip install --python dppo_jax/.venv -e 'dppo_jax[tpu,gcs]'"
}

run() {
  local env=()
  while [[ ${1:-} == [A-Z]*=* ]]; do # of the environment, such as HF_TOKEN
    env+=("$(printf %q "$1")")
    shift
  done
  # Detached, so that the run outlives the connection.
  on_hosts all "if kill -0 \$(cat dppo.pid 2> /dev/null) 2> /dev/null; then
      echo 'a run is under way: wait until its log says that it has stopped' >&2
      exit 1
    fi
    cd dppo_jax &&
    (${env[*]:-} setsid nohup .venv/bin/python -m dppo_jax.main$(printf ' %q' "$@") \
      >> ~/dppo.log 2>&1 < /dev/null & echo \$! > ~/dppo.pid)"
}

case ${1:-} in
  create | setup) "$1" ;;
  run) shift && run "$@" ;;
  log) on_hosts "${2:-0}" "tail -n 50 -F dppo.log" ;;
  status)
    state
    on_hosts all "kill -0 \$(cat dppo.pid) && echo \$(hostname): running"
    ;;
  stop) on_hosts all "kill -TERM \$(cat dppo.pid)" ;;
  delete)
    gcloud compute tpus queued-resources delete "$NAME" --zone="$ZONE" \
      --force --quiet
    ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
    ;;
esac
