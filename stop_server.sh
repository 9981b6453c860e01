#!/usr/bin/env bash
# Stops a server that ./start_server.sh has started. Running replies may finish; after a timeout it is killed.
#
#   ./stop_server.sh [--port P] [--timeout SECONDS]
#
# Exit code 0, also if no server runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

RUN_DIR=${RUN_DIR:-run}
PORT=${PENSTOCK_PORT:-8000}
TIMEOUT_S=35 # longer than the server lets running replies finish

while [ $# -gt 0 ]; do
  case "$1" in
    --port) PORT=${2:?--port needs a number} && shift 2 ;;
    --port=*) PORT=${1#--port=} && shift ;;
    --timeout) TIMEOUT_S=${2:?--timeout needs seconds} && shift 2 ;;
    --timeout=*) TIMEOUT_S=${1#--timeout=} && shift ;;
    -h | --help)
      sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *)
      printf 'error: stop_server.sh has no flag %s\n  It has --port and --timeout.\n' "$1" >&2
      exit 2
      ;;
  esac
done

PID_FILE=$RUN_DIR/server-$PORT.pid
pid=$(cat "$PID_FILE" 2>/dev/null || true)
# Supervisor and server share a process group, so the server is found even if the supervisor is gone.
if [ -z "$pid" ] || ! kill -0 -- "-$pid" 2>/dev/null; then
  rm -f "$PID_FILE"
  printf 'No server started here runs on port %s.\n' "$PORT"
  exit 0
fi

wait_until_gone() { # SECONDS
  local deadline=$((SECONDS + $1))
  while kill -0 -- "-$pid" 2>/dev/null; do
    [ $SECONDS -lt "$deadline" ] || return 1
    sleep 0.1
  done
}

ask_to_end() { # signals only one process: a second signal would end the server at once
  kill -TERM "$pid" 2>/dev/null || kill -TERM -- "-$pid"
}

ask_to_end
if ! wait_until_gone "$TIMEOUT_S"; then
  printf 'The server has not stopped after %s s: killing it.\n' "$TIMEOUT_S"
  ask_to_end
  wait_until_gone 3 || kill -KILL -- "-$pid"
fi
rm -f "$PID_FILE"
printf 'Stopped the server on port %s.\n' "$PORT"
