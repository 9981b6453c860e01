#!/usr/bin/env bash
# Checks and times workspace/engine.py (or the engine named first) against the model in /target, or else target/.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=.venv/bin/python
[ -x "$PYTHON" ] || PYTHON=python3

TARGET=target
if [ -f /target/model_config.json ]; then TARGET=/target; fi
if [ ! -f "$TARGET/weights/model.pt" ]; then
  "$PYTHON" scripts/generate_toy_weights.py --config "$TARGET/model_config.json" --output "$TARGET/weights"
fi

WORDS=(--engine "${1:-workspace/engine.py}" --config "$TARGET/model_config.json" --weights "$TARGET/weights")
"$PYTHON" evaluator/test_correctness.py "${WORDS[@]}"
"$PYTHON" evaluator/benchmark_throughput.py "${WORDS[@]}"
