#!/usr/bin/env bash
# Two methods at three learning rates, one seed each, and their comparison.
#
#   experiments/examples/sweep.sh DIR [FLAGS of every run]
#
# A run that is complete is skipped, so the script may be interrupted and run
# again.
set -euo pipefail
folder=$1
shift

for method in grpo neyman; do
  for rate in 1e-6 2e-6 4e-6; do
    python -m dppo_jax.main --config=configs/arithmetic.py:$method \
      --config.optimizer.learning_rate=$rate \
      --workdir="$folder/$method-$rate" "$@"
  done
done
python -m dppo_jax.analysis.compare "$folder"/*-?e-6 --to="$folder/compared"
