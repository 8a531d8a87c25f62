#!/usr/bin/env bash
# Checks and times everything that needs a CUDA device, in under four minutes, and writes a table.
#     bash benchmarks/gpu_check.sh [OUTPUT.md]
# PYTHON names an interpreter with torch and the package's dependencies; the repository's .venv by default.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-gpu_check.md}
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"

"$python" -m pytest -m gpu -p no:cacheprovider || echo "the GPU tests failed" >&2
"$python" benchmarks/gpu_check.py | tee "$output"
"$python" benchmarks/optimizer_step.py --device cuda --rounds 5 | tee -a "$output"
