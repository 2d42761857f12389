#!/usr/bin/env bash
# All checks of routing, embeddings, placement and redistribution that need GPUs, in one go. Everything that they print is
# in checks.log of the folder, figures are beside it as JSON, and summary.json tells what passed. Steps that need more
# GPUs, or a library that is not there, are named as left out.
#   scripts/gpu_checks.sh [FOLDER]      default: $OUT, else out/gpu_checks
# PYTHON is the interpreter (python3), GPUS how many GPUs to use (all), ONLY="plans embeddings" takes these steps alone,
# QUICK=1 leaves out the full benchmark tables, LIMIT_S ends a step that takes longer (300).
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-out/gpu_checks}}
mkdir -p "$out" || exit 1
python=${PYTHON:-python3}
gpus=${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
[[ "$gpus" =~ ^[0-9]+$ ]] && [ "$gpus" -ge 1 ] || { echo "no GPU, or no torch in $python" >&2; exit 1; }
log=$out/checks.log
steps=$(mktemp)
trap 'rm -f "$steps"' EXIT
: >"$log"
has() { "$python" -c "import $1" >/dev/null 2>&1; }
wanted() { [ -z "${ONLY:-}" ] || [[ " $ONLY " == *" $1 "* ]]; }

step() { # NAME COMMAND...
  local name=$1 start rc own
  shift
  wanted "$name" || return 0
  own=$(mktemp)
  start=$(date +%s)
  timeout --kill-after=20 "${LIMIT_S:-300}" "$@" >"$own" 2>&1
  rc=$?
  printf '%s\t%s\t%s\n' "$name" "$rc" "$(($(date +%s) - start))" >>"$steps"
  { echo "===== $name: $*"; cat "$own"; } >>"$log"
  echo "== $name: $([ $rc = 0 ] && echo passed || echo "FAILED ($rc)"), $(($(date +%s) - start)) s"
  tail -n "$([ $rc = 0 ] && echo 4 || echo 15)" "$own"
  rm -f "$own"
}
left_out() { # NAME REASON
  wanted "$1" || return 0
  printf '%s\tleft out: %s\t0\n' "$1" "$2" >>"$steps"
  echo "== $1: left out, $2"
}
ranks=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m)

step routing "$python" -m tests.trainer_client.embedding.routing.cuda_checks
step copies "$python" -m tests.trainer_client.balancing.redistribution.cuda_checks
step nvrtc "$python" -m tests.trainer_client.embedding.routing.nvrtc_checks
for tool in memcheck racecheck; do
  if command -v compute-sanitizer >/dev/null; then
    for part in embedding.routing balancing.redistribution; do
      step "$tool-${part#*.}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$python" -m "tests.trainer_client.$part.cuda_checks" --few
    done
  else
    left_out "$tool" "compute-sanitizer is not there"
  fi
done
# FBGEMM joins where it is installed.
[ "${QUICK:-0}" = 1 ] && cases=(--case "long histories" --case wide) || cases=()
step bucketize "$python" -m benchmarks.bucketize --device cuda "${cases[@]}" --json "$out/bucketize.json"
if has torchrec && has fbgemm_gpu; then
  if has highspy; then
    [ "${QUICK:-0}" = 1 ] && cases=(--quick) || cases=(--tables 26 --share 0.2)  # of all cells, one that ends in time
    step plans "$python" -m benchmarks.placement_gpu "${cases[@]}" --json "$out/placement_gpu.json"
  else
    left_out plans "HiGHS (highspy) is not installed"
  fi
else
  left_out plans "TorchRec and FBGEMM are not installed"
fi
if [ "$gpus" -ge 2 ]; then
  step embeddings "${ranks[@]}" tests.trainer_client.embedding.tables.nccl_checks
  step devices "$python" -m torch.distributed.run --standalone --nproc-per-node 4 \
    -m tests.trainer_client.balancing.nccl_checks
  step bound "${ranks[@]}" tests.trainer_client.balancing.nccl_checks --bound
  step redistribution "$python" -m benchmarks.redistribution --ranks "$gpus" --check
  if has torchrec && has fbgemm_gpu; then
    step held "${ranks[@]}" tests.trainer_client.balancing.pipelines.held_checks --device cuda
    if has "hypothesis, attrs, pydantic, tensordict"; then
      step batches "${ranks[@]}" tests.trainer_client.balancing.redistribution.structures --programs 200 --cuda
    else
      left_out batches "hypothesis, attrs, pydantic and tensordict are not all installed"
    fi
  else
    for name in held batches; do left_out "$name" "TorchRec and FBGEMM are not installed"; done
  fi
else
  for name in embeddings devices bound redistribution held batches; do left_out "$name" "needs two GPUs"; done
fi
"$python" - "$steps" "$out/summary.json" "$gpus" <<'PY'
import json, pathlib, sys

lines, target, gpus = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
steps = {}
for line in lines.read_text().splitlines():
    name, rc, seconds = line.split("\t")
    result = "passed" if rc == "0" else rc if rc.startswith("left") else f"failed: {'time is up' if rc in ('124', '137') else rc}"
    steps[name] = {"result": result, "seconds": int(seconds)}
failed = [name for name, step in steps.items() if step["result"].startswith("failed")]
target.write_text(json.dumps({"gpus": gpus, "failed": failed, "steps": steps}, indent=1) + "\n")
print("failed:", ", ".join(failed) or "none")
sys.exit(bool(failed) or not steps)
PY
