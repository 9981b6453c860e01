. experiments/setup.sh
date
timeout 60 python -m pytest tests/test_kernel_delta_net_blocks.py tests/test_kernel_prefill_attention.py tests/test_kernel_fp8.py -m gpu -q -x -k "codes or ragged or every_tile or full_size_rows or checkpoints or deterministic_rows or rounded" 2>&1 | tail -15
date
timeout 60 python experiments/prefill/prefill.py 2>&1 | tail -80
date
for q in "--quantization fp8" ""; do
timeout 60 python -m penstock.cli bench prefill -m Qwen3.5-35B-A3B --random-weights --alike-experts $q --batch 1,8 --context 1024 --repeats 12 --json $OUT/prefill${q:+_fp8}.json 2>&1 | tail -8
date
done
