#!/usr/bin/env bash
# All tests on a bare machine: set up what is missing, run the rings, quickest first.
# --full adds the long ones; other options go to pytest. PYTHON=python3.12 runs them on that
# version, in .venv-3.12/, and fails where this machine does not have it; MIXKV_SGLANG=0.5.22 on
# that release of SGLang, in .venv-0.5.22/.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=scripts/prometheus.sh
source "$MIXKV_ROOT/scripts/prometheus.sh"
mixkv_prometheus
cd "$MIXKV_ROOT"
exec python -m pytest tests/pure tests/docs tests/protocol tests/e2e "$@"
