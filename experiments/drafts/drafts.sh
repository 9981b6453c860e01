# Steps of the models. Run in turns with the old commit: `bash experiments/drafts/drafts.sh`, from the root.
set -x
: ${OUT:=.}
NAME=${1:-new}
STEP="python -m penstock bench step --random-weights --context 1536 --batch 1,2,4 --drafts 3 --acceptance .85,.75,.65"
time $STEP -m Qwen3.5-35B-A3B --quantization fp8 --json $OUT/fp8_$NAME.json
time $STEP -m Qwen3.5-35B-A3B --quantization int4 --json $OUT/int4_$NAME.json
time $STEP -m Qwen3.5-4B --quantization int4 --json $OUT/int4_4b_$NAME.json
