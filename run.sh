#!/usr/bin/env bash
# Writes workspace/engine.py, with a log, ledger and report beside it, for the model in /target or target/.
# Flags are those of `penstock forge`, e.g. `bash run.sh --budget 2m`.
# PENSTOCK_LLM_BASE_URL and PENSTOCK_LLM_MODEL add a language model to the loop, on any server of the OpenAI API;
# PENSTOCK_API_KEY is its key, if it needs one.
# PYTHON names the interpreter (default: .venv/bin/python if it exists, otherwise python3).
set -euo pipefail
if [ -n "${PYTHON:-}" ] && [ -x "$PYTHON" ]; then PYTHON=$(realpath -s "$PYTHON"); fi
cd "$(dirname "$0")"

if [ -z "${PYTHON:-}" ]; then
  PYTHON=.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi

TARGET=target
if [ -f /target/model_config.json ]; then TARGET=/target; fi
if [ ! -f "$TARGET/weights/model.pt" ]; then
  # If this fails, forge reports the reason in results.log.
  "$PYTHON" scripts/generate_toy_weights.py --config "$TARGET/model_config.json" --output "$TARGET/weights" || true
fi

exec "$PYTHON" -P penstock/child_python.py penstock forge --config "$TARGET/model_config.json" --weights "$TARGET/weights" \
  --out workspace/engine.py --budget 10m "$@"
