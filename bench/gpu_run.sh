#!/usr/bin/env bash
# Everything that has to be known of a GPU, in under 10 minutes, into one folder.
#
#   bash bench/gpu_run.sh OUT [WHEELS] [--small]
#
# OUT: where everything goes. WHEELS: a folder of wheels for packages that are not installed; no network is used.
# --small: a rehearsal with tiny sizes, on a CPU too. A step that fails is noted in OUT/steps.txt, and the next runs.
set -uo pipefail
[ $# -ge 1 ] || { echo "usage: bash bench/gpu_run.sh OUT [WHEELS] [--small]" >&2; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
shift
WHEELS=""
SMALL=""
for word in "$@"; do
    case "$word" in
    --small) SMALL=--small ;;
    *) WHEELS="$(cd "$word" && pwd)" || exit 2 ;;
    esac
done
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TRINFER_AUTOTUNE_CACHE="$OUT/autotune_cache" OMP_WAIT_POLICY=passive

missing() {
    "$PYTHON" -c "import $1" 2>/dev/null && return 1
    return 0
}
NEEDED=""
for package in pydantic pytest hypothesis; do
    if missing "$package"; then NEEDED="$NEEDED $package"; fi
done
if [ -n "$NEEDED" ]; then
    [ -n "$WHEELS" ] || { echo "missing packages:$NEEDED; give a folder of wheels" >&2; exit 2; }
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" --target "$OUT/packages" $NEEDED || exit 2
    export PYTHONPATH="$PYTHONPATH:$OUT/packages"
fi

: >"$OUT/steps.txt"
step() {
    local name="$1" limit="$2" begin status
    shift 2
    begin=$(date +%s)
    echo "== $name"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$OUT/$name.log" | tail -n 40
    status=${PIPESTATUS[0]}
    echo "$name $status $(($(date +%s) - begin))s" >>"$OUT/steps.txt"
}

# the search before the tests: what is worth most comes first
step calibrate 60 "$PYTHON" -m bench.gpu calibrate --out "$OUT" $SMALL
step tune 190 "$PYTHON" -m bench.gpu tune --out "$OUT" --budget 130 $SMALL
if [ -n "$SMALL" ]; then
    step peers 60 "$PYTHON" -m bench.peers --out "$OUT" --models smollm2 --dtypes fp32 --rounds 1
    step models 60 "$PYTHON" -m bench.gpu models --out "$OUT" --dtype fp32 --repeats 1 --small
else
    step peers 60 "$PYTHON" -m bench.peers --out "$OUT"
    step models 150 "$PYTHON" -m bench.gpu models --out "$OUT"
fi
step tests 120 "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/test_gpu.py
"$PYTHON" -m bench.gpu summary --out "$OUT"
rm -rf "$OUT/packages"
# 5: no test was for this machine
! awk '$2 != 0 && !($1 == "tests" && $2 == 5) { bad = 1 } END { exit !bad }' "$OUT/steps.txt"
