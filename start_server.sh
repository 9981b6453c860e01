#!/usr/bin/env bash
# Starts a Penstock server in the background, waits until it is ready, and leaves it running.
#
#   ./start_server.sh [--model M] [--port P] [--gpus 0,1,...] [any other flag of `penstock serve`]
#
# Every GPU of the machine gets an engine, unless --gpus or --replicas is set. Thinking is off unless a request
# turns it on, or --enable-thinking (PENSTOCK_ENABLE_THINKING=1) does for all. Decoding is greedy unless a request
# sets a temperature, or --generation-config auto (PENSTOCK_GENERATION_CONFIG=auto) sets the checkpoint's. If the
# server is killed, it is restarted; ./stop_server.sh [--port P] stops it. Its log and pid are in run/.
# Ctrl-C while the script waits stops the server.
# Exit code: 0 if the server is ready; 1 if it failed to start (prints the end of its log) or already runs;
# 130 or 143 if a signal ended the wait.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

RUN_DIR=${RUN_DIR:-run}
RESTART_DELAY_S=0.2
SHORT_LIFE_S=10 # a server that exits sooner would fail again after a restart

fail() {
  printf 'error: %s\n' "$1" >&2
  shift
  printf '  %s\n' "$@" >&2
  exit 1
}

is_running() { # PIDFILE
  local pid
  pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && kill -0 -- "-$pid" 2>/dev/null
}

# Runs the server until it exits or is stopped; restarts it if it was killed.
supervise() { # PIDFILE COMMAND...
  local pidfile=$1 server='' stopping='' code started
  shift
  trap 'stopping=1; [ -z "$server" ] || kill -TERM "$server" 2>/dev/null' TERM
  trap '[ -z "$server" ] || kill -HUP "$server" 2>/dev/null' HUP
  while [ -z "$stopping" ]; do
    started=$SECONDS
    "$@" &
    server=$!
    while true; do # a signal ends `wait` before the server exits
      code=0
      wait "$server" || code=$?
      kill -0 "$server" 2>/dev/null || break
    done
    server=''
    if [ "$code" -eq 0 ] || { [ "$code" -le 128 ] && [ $((SECONDS - started)) -lt $SHORT_LIFE_S ]; }; then
      break
    fi
    [ -n "$stopping" ] || printf 'The server ended with code %s and is restarted.\n' "$code"
    sleep $RESTART_DELAY_S
  done
  rm -f "$pidfile"
  exit "$code"
}

# An interrupted wait must not leave a server running unnoticed.
stop_again() { # SIGNAL PORT
  trap - INT TERM
  printf '\nNot ready yet, and stopped again:\n' >&2
  RUN_DIR=$RUN_DIR ./stop_server.sh --port "$2" >&2
  exit $((128 + $(kill -l "$1")))
}

wait_until_ready() { # PIDFILE LOG PORT
  local pidfile=$1 log=$2 port=$3 shown='' line is_gone
  until grep -q '^ready ' "$log" 2>/dev/null; do
    is_gone=''
    is_running "$pidfile" || is_gone=1
    [ -z "$given_up" ] || stop_again "$given_up" "$port" # first: Ctrl-C also ends the commands of the check above
    if [ -n "$is_gone" ]; then
      printf 'error: The server did not come up. The end of %s:\n' "$log" >&2
      tail -n 20 "$log" | sed 's/^/  /' >&2
      exit 1
    fi
    line=$(tail -n 1 "$log" 2>/dev/null) || line=''
    if [ -n "$line" ] && [ "$line" != "$shown" ]; then
      printf '%s\n' "$line"
      shown=$line
    fi
    sleep 0.2 || true
  done
}

main() {
  local port=${PENSTOCK_PORT:-8000} has_place='' penstock=.venv/bin/penstock previous='' word
  for word in "$@"; do
    case "$previous" in --port) port=$word ;; esac
    case "$word" in
      -h | --help)
        sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
      --port=*) port=${word#--port=} ;;
      --gpus | --gpus=* | --device | --device=*) has_place=1 ;;
      --replicas | --replicas=* | --data-parallel-size | --data-parallel-size=*) has_place=1 ;;
    esac
    previous=$word
  done
  case "$port" in *[!0-9]* | '') fail "--port is '$port'" 'It must be a number.' ;; esac

  local pidfile=$RUN_DIR/server-$port.pid log=$RUN_DIR/server-$port.log
  if is_running "$pidfile"; then
    fail "A server already runs on port $port" "Its process is $(cat "$pidfile"), its log $log." \
      "Stop it with ./stop_server.sh --port $port, or start this one with another --port."
  fi
  [ -x "$penstock" ] || make --no-print-directory install

  if [ -z "$has_place" ] && command -v nvidia-smi >/dev/null; then
    local gpus
    gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -) || gpus=''
    [ -z "$gpus" ] || set -- "$@" --gpus "$gpus"
  fi
  export PENSTOCK_ENABLE_THINKING=${PENSTOCK_ENABLE_THINKING:-0} # flags override these
  export PENSTOCK_GENERATION_CONFIG=${PENSTOCK_GENERATION_CONFIG:-off}
  mkdir -p "$RUN_DIR"
  given_up='' # only recorded: a half-started server cannot be stopped yet
  trap 'given_up=INT' INT
  trap 'given_up=TERM' TERM
  # A session of its own: no terminal, and one process group that contains all its processes.
  setsid bash start_server.sh --supervise "$pidfile" "$penstock" serve "$@" --port "$port" \
    >"$log" 2>&1 </dev/null &
  local supervisor=$!
  # Waits until its process group exists, or it is gone: the group identifies it.
  until kill -0 -- "-$supervisor" 2>/dev/null || ! kill -0 "$supervisor" 2>/dev/null; do sleep 0.02 || true; done
  printf '%s\n' "$supervisor" >"$pidfile"
  wait_until_ready "$pidfile" "$log" "$port"
  printf 'Ready at %s  (log: %s, stop: ./stop_server.sh --port %s)\n' \
    "$(sed -n 's/^ready .* //p' "$log" | tail -n 1)" "$log" "$port"
}

if [ "${1:-}" = --supervise ]; then
  shift
  supervise "$@"
fi
main "$@"
