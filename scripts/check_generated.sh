#!/usr/bin/env bash
# Fails when a committed file is not what it is generated from: stubs, pages, pictures, the API's document, dashboards.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
fresh=$(mktemp -d); trap 'rm -rf "$fresh"' EXIT
"$root/scripts/generate_protos.sh" "$fresh"
for file in "$fresh"/evenkeel/protocol/*_pb2*; do
  diff -u "$root/evenkeel/protocol/$(basename "$file")" "$file" || { echo "run 'make protos' and commit the result" >&2; exit 1; }
done
cd "$root"
for writer in write_reference draw_pictures write_openapi; do .venv/bin/python -m "scripts.$writer" --check; done
for folder in grafana prometheus; do .venv/bin/python "deploy/$folder/build.py" --check; done
