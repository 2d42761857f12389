#!/usr/bin/env bash
# Runs the benchmarks that need no GPU. Arguments go to each: --quick for short versions.
set -euo pipefail
cd "$(dirname "$0")/.."
for name in partitioning rounds redistribution bucketize giants users; do
  echo "== $name"
  .venv/bin/python -m "benchmarks.$name" "$@"
done
