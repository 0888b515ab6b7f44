#!/usr/bin/env bash
# Inject every fault for real, over Mooncake: run.sh [--soak]
# --soak adds the soaks, over Mooncake and NIXL: 2,000 requests with random faults, 500 that each
# meet one, in both directions.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
cd "$MIXKV_ROOT"
python -m pytest -v --full tests/protocol/test_faults.py -k mooncake
if [ "${1:-}" = --soak ]; then
    python -m pytest -v --full tests/protocol/test_soak.py
fi
