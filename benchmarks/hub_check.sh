#!/usr/bin/env bash
# Checks what DumbDiLoCo needs of a real storage bucket on the Hugging Face Hub, and of a real repository, with your own
# account. It makes a few small objects under a prefix of its own, and removes them; a repository is made and kept.
#
#   export AWS_ACCESS_KEY_ID=HFAK… AWS_SECRET_ACCESS_KEY=…    # huggingface.co/settings/tokens, Generate S3 credentials
#   bash benchmarks/hub_check.sh hf://buckets/NAMESPACE/BUCKET
#   HF_TOKEN=hf_… bash benchmarks/hub_check.sh hf://NAMESPACE/REPOSITORY
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -ne 1 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 2
fi
exec "${PYTHON:-.venv/bin/python}" benchmarks/hub_check.py "$1/check-$(date +%s)"
