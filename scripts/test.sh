#!/usr/bin/env bash
# All tests on a bare machine: set up what is missing, run the rings, quickest first, then a part
# of them on the release of SGLang before.
# --full adds the long ones; other options go to pytest, and leave the second run out.
# PYTHON=python3.12 runs them on that version, in .venv-3.12/, and fails where this machine does
# not have it; MIXKV_SGLANG=0.5.22 on that release of SGLang, in .venv-0.5.22/.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=scripts/prometheus.sh
source "$MIXKV_ROOT/scripts/prometheus.sh"
mixkv_prometheus
cd "$MIXKV_ROOT"

BEFORE=0.5.22
PART="test_seams or are_as_listed or another_sglang or test_hybrid_target or test_dtypes"
PART="$PART or test_page_sizes or old-P2-D1"
PART="$PART or test_release or test_decode_apart or test_plan or test_works_with"

status=0
python -m pytest tests/pure tests/docs tests/sim tests/protocol tests/e2e "$@" || status=$?
if [ -z "${MIXKV_SGLANG:-}${PYTHON:-}" ] && { [ "$*" = "" ] || [ "$*" = --full ]; }; then
    MIXKV_SGLANG="$BEFORE" bash scripts/test.sh -k "$PART" || status=$?
fi
exit "$status"
