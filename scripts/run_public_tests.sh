#!/usr/bin/env bash
# Checks and times an engine against the model in /target, or else target/.
#
#   scripts/run_public_tests.sh [ENGINE] [flags of both evaluators, e.g. --device cpu]
#
# ENGINE is workspace/engine.py unless named; evaluator/baseline_engine.py is there to try it at once.
# PYTHON names the interpreter (default: .venv/bin/python, or else python3).
set -euo pipefail

ENGINE=workspace/engine.py
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  ENGINE=$1
  shift
  if [ -f "$ENGINE" ]; then ENGINE=$(realpath "$ENGINE"); fi # as seen from where this was called
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
