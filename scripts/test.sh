#!/usr/bin/env bash
# Run all tests on a bare machine: set up the environment, run the tests, then some of them on the
# oldest supported release of SGLang. Meanwhile, if there are two cores, a second process runs the
# tests with rings and servers: failures are printed at once, and its output after the other's.
# --full adds the long tests, and more tests on every older release. Other options go to pytest, and
# skip the older releases. The last lines name the supported Pythons that were not tested.
# PYTHON=python3.12 runs the tests on that version, in .venv-3.12/, and fails if this machine does not
# have it; MIXKV_SGLANG=0.5.22 runs them on that release of SGLang, in .venv-0.5.22/.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=scripts/optional.sh
source "$MIXKV_ROOT/scripts/optional.sh"
mixkv_prometheus
DYNAMO=1.6.1
[ "${MIXKV_SGLANG:-}" != 0.5.22 ] || DYNAMO=1.7.0.dev20261026 # pins SGLang 0.5.22
case "$*" in
    "" | --full* | *dynamo*) mixkv_dynamo "$DYNAMO" ;;
esac
cd "$MIXKV_ROOT"

OLDEST=0.5.21
OLDER="0.5.21 0.5.22"
PART="test_seams or test_startup or (test_targets and hybrid) or test_dtypes or test_page_sizes"
PART="$PART or P2-D1 or test_plan or test_early_sends or test_peers"
RING="$PART or test_matrix or test_faults or test_stock or test_bootstrap"
SERVERS=" P2-D1 or P1-D2 or nixl-P2-D1 or nixl-P1-D2 or test_dynamo "

# The rings set the environment of SGLang's CPU engine for their whole process, so they run apart.
NONE_SELECTED=5
status=0
trap 'wait; exit 130' INT # pytest exits on Ctrl-C, but bash would go on
parts=("tests/pure tests/docs tests/sim tests/gpu" "tests/protocol tests/e2e")
if [ "$*" = "" ] && [ "$(nproc)" -gt 1 ]; then
    # No installation may rewrite the package's metadata while servers start.
    [ -n "${MIXKV_SGLANG:-}${PYTHON:-}" ] || MIXKV_SGLANG="$OLDEST" bash scripts/env.sh || true
    log="$(mktemp)"
    echo "meanwhile, with their output at the end: ${parts[1]}"
    # shellcheck disable=SC2086
    python -m pytest ${parts[1]} >"$log" </dev/null &
    meanwhile=$!
    trap 'kill -INT $(jobs -p) 2>/dev/null || true; wait; rm "$log"' EXIT
    unset "parts[1]"
fi
for part in "${parts[@]}"; do
    if [[ "$*" =~ ^-k\ (test_[a-z0-9_]+)$ ]]; then # collecting all modules takes half a minute
        # shellcheck disable=SC2086
        part="$(find $part -name "*${BASH_REMATCH[1]}*.py"
            grep -rl "${BASH_REMATCH[1]}" --include='test_*.py' $part || true)"
        [ -n "$part" ] || continue
    fi
    # shellcheck disable=SC2086
    python -m pytest $part "$@" || { code=$?; [ "$code" = "$NONE_SELECTED" ] || status=$code; }
done
case "${MIXKV_SGLANG:-}${PYTHON:-}:$*" in
    :) MIXKV_SGLANG="$OLDEST" bash scripts/test.sh -k "$PART" || status=$? ;;
    :--full)
        for release in $OLDER; do
            MIXKV_SGLANG="$release" bash scripts/test.sh -k "$RING" || status=$?
            MIXKV_SGLANG="$release" bash scripts/test.sh --full -k "$SERVERS" || status=$?
        done
        ;;
esac
if [ -n "${meanwhile:-}" ]; then
    printf '\n%s\n' "meanwhile: tests/protocol tests/e2e"
    tail -n +1 -f --pid="$meanwhile" "$log"
    wait "$meanwhile" || status=$?
fi
if [ -z "${MIXKV_SGLANG:-}${PYTHON:-}" ] && { [ "$*" = "" ] || [ "$*" = --full ]; }; then
    ran="$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    classifier='.*"Programming Language :: Python :: \(3\.[0-9]*\)".*'
    sed -n "s/$classifier/\1/p" pyproject.toml | while read -r version; do
        [ "$version" = "$ran" ] || printf '\n%s\n%s\n' \
            "NOT TESTED: Python $version. All tests ran on $ran, since another environment takes 10 GB, and" \
            "its tests as long again. To run them: PYTHON=python$version bash scripts/test.sh"
    done
fi
exit "$status"
