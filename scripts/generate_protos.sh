#!/usr/bin/env bash
# Generates the stubs of evenkeel/protocol from protos/ with the oldest grpcio that Evenkeel supports.
#   scripts/generate_protos.sh [OUT_DIR]      default: the repository's root
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root}
venv=$root/.venv-protos
if [ ! -e "$venv/done" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q -r "$root/requirements/protos.txt"
  touch "$venv/done"
fi
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
# Compiled under the path evenkeel/protocol/ so that the stubs import each other by the package's own name.
mkdir -p "$work/in/evenkeel/protocol" "$work/out"
cp "$root"/protos/evenkeel/balancer/v2/*.proto "$work/in/evenkeel/protocol/"
PATH="$venv/bin:$PATH" "$venv/bin/python" -W ignore -m grpc_tools.protoc -I "$work/in" --python_out="$work/out" --pyi_out="$work/out" \
  --grpc_python_out="$work/out" "$work"/in/evenkeel/protocol/*.proto
mkdir -p "$out/evenkeel/protocol"
cp "$work"/out/evenkeel/protocol/*_pb2* "$out/evenkeel/protocol/"
