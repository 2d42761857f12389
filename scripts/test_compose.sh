#!/usr/bin/env bash
# Everything of deploy/ for real, in parts with a time limit each: what needs no engine, an engine, the images, the stack.
#
# EVENKEEL_ENGINE is a command that gives what follows it a Docker engine; unset: the Docker at hand. Exit status 3: there
# is no engine, or what the images are made of could not be downloaded in time; what needs neither has passed.
# EVENKEEL_SECONDS bounds all parts together.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
log=$(mktemp); trap 'rm -f "$log"' EXIT
if [ -n "${EVENKEEL_ENGINE:-}" ]; then export EVENKEEL_COMPOSE_OFFLINE="${EVENKEEL_COMPOSE_OFFLINE:-1}"; fi
command -v promtool >/dev/null || { echo "promtool is missing: install Debian's package prometheus" >&2; exit 1; }

end=${EVENKEEL_SECONDS:-100000}
part() {  # SECONDS TITLE COMMAND …
  local limit=$1 title=$2 start=$SECONDS status=0; shift 2
  [ $((end - start)) -ge "$limit" ] || limit=$((end > start ? end - start : 1))
  echo "--- $title (at most $limit s)"
  timeout --kill-after=60 "$limit" "$@" || status=$?
  [ $status -ne 137 ] || status=124
  echo "--- $title: $((SECONDS - start)) s, exit status $status$([ $status -ne 124 ] || echo ", out of time")"
  return $status
}
untested() {
  echo "$1: THE IMAGES AND THE STACK WERE NOT TESTED." >&2
  exit 3
}

part 600 "rules, metrics, manifests" "$python" -m pytest -q -p no:cacheprovider "$@" \
  tests/deploy/check_prometheus.py tests/deploy/check_kubernetes.py

# Twice, since it may download; what it makes stays for the other parts.
# shellcheck disable=SC2086
have_engine() {
  part 480 "engine" ${EVENKEEL_ENGINE:-} sh -c "docker version --format '{{.Server.Version}}' && docker compose version" \
    >"$log" 2>&1
}
have_engine || have_engine || { cat "$log"; untested "no Docker engine is to be had"; }
cat "$log"

status=0
# shellcheck disable=SC2086
part 1200 "images" ${EVENKEEL_ENGINE:-} "$python" -m tests.deploy.images || status=$?
[ $status -ne 124 ] || untested "the images were not built in time"
[ $status -ne 3 ] || untested "what the images are made of could not be downloaded"
[ $status -eq 0 ] || exit $status

# shellcheck disable=SC2086
part 1200 "stack" ${EVENKEEL_ENGINE:-} "$python" -m pytest -q -p no:cacheprovider -rP --durations=8 --durations-min=5 \
  "$@" tests/deploy/check_stack.py tests/deploy/check_secure.py
