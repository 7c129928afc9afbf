#!/bin/bash
# Start one task per host with ssh, run the program here as the chief, and end the tasks.
#   PS="10.0.0.5:2222" WORKERS="10.0.0.6:2222 10.0.0.7:2222" ./with_ssh.sh python train.py
set -euo pipefail
json() { printf '"%s",' "$@" | sed 's/,$//'; }
CLUSTER="{\"ps\": [$(json $PS)], \"worker\": [$(json $WORKERS)]}"
: "${STRATAGEM_CLUSTER_KEY:=$(python -c 'import secrets; print(secrets.token_hex(32))')}"
export STRATAGEM_CLUSTER_KEY

started=()
trap 'kill "${started[@]}" 2>/dev/null || true' EXIT
start() { # job index address
  local host="${3%:*}"
  # The key is in a file, not in the command: other users can see command lines. -tt ends the task with the connection.
  ssh "$host" 'umask 077; cat > .stratagem.key' <<<"$STRATAGEM_CLUSTER_KEY"
  ssh -tt "$host" "STRATAGEM_CLUSTER_KEY_FILE=\$HOME/.stratagem.key exec stratagem server \
    --job $1 --index $2 --cluster '$CLUSTER'" </dev/null &
  started+=($!)
}
index=0; for address in $PS; do start ps $((index++)) "$address"; done
index=0; for address in $WORKERS; do start worker $((index++)) "$address"; done

TF_CONFIG="{\"cluster\": $CLUSTER}" "$@"
