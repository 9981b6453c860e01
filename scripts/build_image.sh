#!/usr/bin/env bash
# Builds the image of Dockerfile, or of the file in $FILE, and writes it to image.tar.gz.
#
#   scripts/build_image.sh [MODEL_FOLDER]
#
# With MODEL_FOLDER, the image contains its weights at /opt/ml/model; without, mount them there.
# BUILD_ARGS has arguments for docker build. The script prints the size; the limit is 20 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FILE=${FILE:-Dockerfile}
IMAGE=${IMAGE:-penstock}
OUTPUT=${OUTPUT:-image.tar.gz}
MODEL=${1:-}
MOST_BYTES=20000000000

command -v docker >/dev/null || {
  printf 'error: docker is not installed\n  It builds the image.\n  Install it, or build on another machine.\n' >&2
  exit 1
}
# shellcheck disable=SC2086 # several arguments
docker build ${BUILD_ARGS:-} -f "$FILE" -t "$IMAGE" .
if [ -n "$MODEL" ]; then
  printf 'FROM %s\nCOPY --chown=10001 . /opt/ml/model\n' "$IMAGE" |
    docker build -t "$IMAGE" -f - "$MODEL"
fi
bytes=$(docker image inspect --format '{{.Size}}' "$IMAGE")
printf 'The image %s has %s bytes.\n' "$IMAGE" "$bytes"
if [ "$bytes" -ge "$MOST_BYTES" ]; then
  printf 'error: the image is too large\n  It must stay below %s bytes.\n' "$MOST_BYTES" >&2
  exit 1
fi
docker save "$IMAGE" | gzip >"$OUTPUT"
printf 'Written to %s.\n' "$OUTPUT"
