#!/usr/bin/env bash
# Two workers of a real Ray Train, with Ray in a folder of its own. Exit status 3: Ray could not be downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.venv-ray
if ! cmp -s requirements/ray.txt "$folder/done"; then
  rm -rf "$folder"
  .venv/bin/pip install -qq --disable-pip-version-check --no-deps --target "$folder" -r requirements/ray.txt || {
    echo "Ray cannot be had: RAY TRAIN WAS NOT TESTED" >&2
    exit 3
  }
  cp requirements/ray.txt "$folder/done"
fi
PYTHONPATH=$PWD:$PWD/$folder RAY_TRAIN_V2_ENABLED=1 \
  timeout --kill-after=60 "${EVENKEEL_SECONDS:-900}" .venv/bin/python -m pytest -q -p no:xdist tests/examples/check_ray.py "$@"
