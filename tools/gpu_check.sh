#!/usr/bin/env bash
# Checks kvtide on a GPU, in under ten minutes, and prints a table: bash tools/gpu_check.sh [--rehearse]
# Ends with 0 if nothing failed, 1 if something did, 2 where torch sees no GPU.
#
# Needs a Python with torch built for the GPU, Triton, NumPy and attrs: PYTHON names it, python3 by default. No nox, no network,
# no test tools, and nothing outside this checkout. Wheels of what is missing may lie in the folder that KVTIDE_WHEELS names.
set -euo pipefail
python=${PYTHON:-python3}
case $python in
    /*) ;;
    */*) python=$PWD/$python ;;
esac
wheels=${KVTIDE_WHEELS:+$(realpath "$KVTIDE_WHEELS")}
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
path=$scratch
for source in packages/*/src integration/src; do
    path=$path:$PWD/$source
done
if [ -n "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$scratch" "$wheels"/*.whl
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 TRITON_CACHE_DIR=$scratch/triton
# Streams that shared a queue of the hardware would be ordered by it, whatever waits are missing.
export CUDA_DEVICE_MAX_CONNECTIONS=32
if ! "$python" -c "import structlog" 2>"$scratch/why"; then
    # The packages log through it, and these checks read no log.
    cat >"$scratch/structlog.py" <<'STAND_IN'
class _Silent:
    def __getattr__(self, name):
        return lambda *arguments, **fields: None


def get_logger(*arguments, **fields):
    return _Silent()
STAND_IN
fi
"$python" tools/gpu_check.py "$@"
