#!/usr/bin/env bash
# Measures vLLM with the harness: starts it, waits until it is ready, measures, and stops it.
#
#   MODEL=Qwen/Qwen3.5-35B-A3B GPUS=8 baseline/run_baseline.sh [--limit 200] [--num-requests 64]
#
# Variables: MODEL, GPUS (tensor parallel size), PORT, VLLM (the command), PYTHON (with Penstock), TOKENIZER (the
# model's folder, to count tokens again), DATA (GSM8K's test.jsonl), CONCURRENCY, OUT (where results go),
# READY_TIMEOUT_S.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-Qwen/Qwen3.5-35B-A3B}
GPUS=${GPUS:-8}
PORT=${PORT:-8100}
VLLM=${VLLM:-vllm}
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-baseline/results}
CONCURRENCY=${CONCURRENCY:-1,2,4,8,16,32,64}
READY_TIMEOUT_S=${READY_TIMEOUT_S:-1800}
limit=200
num_requests=64

while [ $# -gt 0 ]; do
  case "$1" in
    --limit) limit=$2; shift 2 ;;
    --num-requests) num_requests=$2; shift 2 ;;
    *) echo "error: run_baseline.sh has no flag $1; it has --limit N and --num-requests N" >&2; exit 2 ;;
  esac
done

command -v "$VLLM" >/dev/null || { echo "error: there is no command $VLLM; pip install vllm, or set VLLM" >&2; exit 1; }
mkdir -p "$OUT"
url=http://127.0.0.1:$PORT
log=$OUT/vllm.log
if curl -sf "$url/health" >/dev/null; then
  echo "error: something answers at $url already; set PORT" >&2
  exit 1
fi

"$VLLM" serve "$MODEL" --host 127.0.0.1 --port "$PORT" --tensor-parallel-size "$GPUS" --dtype bfloat16 \
  --max-model-len 8192 >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true' EXIT

echo "waiting for $VLLM at $url; its log is $log"
for ((waited = 0; ; waited++)); do
  curl -sf "$url/health" >/dev/null && break
  if ! kill -0 "$server" 2>/dev/null || [ "$waited" -ge "$READY_TIMEOUT_S" ]; then
    echo "error: $VLLM did not become ready; the end of its log:" >&2
    tail -n 20 "$log" >&2
    exit 1
  fi
  sleep 1
done

status=0
"$PYTHON" -m eval.check_server --base-url "$url" ${TOKENIZER:+--tokenizer "$TOKENIZER"} \
  --output "$OUT/measured-check.json" || echo "note: some promises are not kept, as listed; going on"
"$PYTHON" -m eval.correctness.run_correctness --base-url "$url" --limit "$limit" ${DATA:+--data "$DATA"} \
  --output "$OUT/measured-correctness.json" || status=1
"$PYTHON" -m eval.throughput.run_throughput --base-url "$url" --num-requests "$num_requests" \
  --concurrency "$CONCURRENCY" ${TOKENIZER:+--tokenizer "$TOKENIZER"} \
  --output "$OUT/measured-throughput.json" || status=1
"$PYTHON" -m eval.score --correctness "$OUT/measured-correctness.json" \
  --throughput "$OUT/measured-throughput.json" --output "$OUT/measured-score.json" || status=1
exit $status
