#!/usr/bin/env bash
# Checks and times everything that needs a CUDA device, within 235 seconds, and writes a table.
#     bash benchmarks/gpu_check.sh [--dry] [OUTPUT.md]
# --dry runs all of it on the CPU, in a tiny form, to see that it reaches its end.
# PYTHON names an interpreter with torch, the repository's .venv by default. WHEELS names a folder with wheels of what
# that interpreter lacks; nothing is downloaded. Ends with 1 if any part failed or took too long.
set -uo pipefail
cd "$(dirname "$0")/.."
dry=()
patience=1
if [ "${1:-}" = --dry ]; then
  shift
  dry=(--dry)
  patience=8
  export SPEEDTRONIC_GPU_TESTS=cpu
fi
output=${1:-gpu_check.md}
python=${PYTHON:-.venv/bin/python}
device=cuda
[ ${#dry[@]} -eq 0 ] || device=cpu
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${WHEELS:-}" ]; then
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "$WHEELS"/*.whl || exit 1
  PYTHONPATH="$PYTHONPATH:$packages"
fi

# All files with tests that are marked gpu.
tests=(
  tests/trainer/test_cuda.py tests/test_precision.py tests/optimizers/test_muon.py
  tests/optimizers/test_newton_schulz.py tests/distributed/test_schema.py tests/checkpoint/test_staging.py
)
optimizer=(muon cautious --rounds 5)
checkpoint=(checkpoint --rounds 3)
steps=20
if [ ${#dry[@]} -ne 0 ]; then
  steps=1
  optimizer=(muon --quick)
  checkpoint=(checkpoint --quick)
fi

: > "$output"
failed=0
summary=$'\n| part | result | seconds |\n|---|---|---|'
part() { # name, most seconds, command
  local name=$1 limit=$(($2 * patience)) began=$SECONDS status result
  shift 2
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$output"
  status=${PIPESTATUS[0]}
  case $status in
    0) result=passed ;;
    124 | 137) result="stopped after $limit s" ;;
    *) result="failed ($status)" ;;
  esac
  [ "$status" -eq 0 ] || failed=1
  summary+=$'\n'"| $name | $result | $((SECONDS - began)) |"
}

part tests 75 "$python" -m pytest -q -m gpu -p no:cacheprovider "${tests[@]}"
part speed 70 "$python" benchmarks/gpu_check.py speed "${dry[@]}"
part attention 10 "$python" benchmarks/gpu_check.py attention "${dry[@]}"
part launches 15 "$python" benchmarks/gpu_check.py launches --steps 5 "${dry[@]}"
part optimizers 30 "$python" -m speedtronic bench --device "$device" --only "${optimizer[@]}"
part checkpoints 15 "$python" -m speedtronic bench --device "$device" --only "${checkpoint[@]}"
part ranks 15 "$python" benchmarks/ranks.py --device "$device" --rounds 3 --steps "$steps"
echo "$summary" | tee -a "$output"
exit "$failed"
