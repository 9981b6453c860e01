#!/usr/bin/env bash
# Tests and benchmarks an engine with the model in /target, or in target/ if there is none.
#
#   scripts/run_public_tests.sh [ENGINE] [flags for both evaluators, e.g. --device cpu]
#
# ENGINE defaults to workspace/engine.py; evaluator/baseline_engine.py is an example to start with.
# PYTHON is the interpreter (default: .venv/bin/python if it exists, otherwise python3).
set -euo pipefail

ENGINE=workspace/engine.py
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  ENGINE=$1
  shift
  if [ -f "$ENGINE" ]; then ENGINE=$(realpath "$ENGINE"); fi # relative to the caller's folder
fi
if [ -n "${PYTHON:-}" ] && [ -x "$PYTHON" ]; then PYTHON=$(realpath -s "$PYTHON"); fi
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi

TARGET=target
if [ -f /target/model_config.json ]; then TARGET=/target; fi
if [ ! -f "$TARGET/weights/model.pt" ]; then
  "$PYTHON" scripts/generate_toy_weights.py --config "$TARGET/model_config.json" --output "$TARGET/weights"
fi

WORDS=(--engine "$ENGINE" --model-config "$TARGET/model_config.json" --weight-dir "$TARGET/weights" "$@")
"$PYTHON" evaluator/test_correctness.py "${WORDS[@]}"
"$PYTHON" evaluator/benchmark_throughput.py "${WORDS[@]}"
