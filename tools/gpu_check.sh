#!/usr/bin/env bash
# Checks kvtide on a GPU and prints a table: bash tools/gpu_check.sh [--rehearse]
#
# Needs a Python with torch, Triton, NumPy and attrs (PYTHON names it; python3 by default), no nox, no network, and nothing
# outside this checkout. Wheels of what is missing there, structlog say, may lie in the folder that KVTIDE_WHEELS names.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
path=$scratch
for source in packages/*/src integration/src; do
    path=$path:$PWD/$source
done
if [ -n "${KVTIDE_WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$scratch" "$KVTIDE_WHEELS"/*.whl
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 TRITON_CACHE_DIR=$scratch/triton
"$python" tools/gpu_check.py "$@"
