#!/usr/bin/env bash
# Inject every fault for real and fill the table of docs/reliability.md: run.sh [--soak]
# --soak adds the soaks: 2,000 requests with random faults, 1,000 that each meet one, twice each.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/env.sh
source "$here/../env.sh"
document="$MIXKV_ROOT/docs/reliability.md"
python "$here/table.py" --into "$document"
if [ "${1:-}" = --soak ]; then
    python "$here/soak.py" --requests 2000 --seed 2 --into "$document"
    python "$here/soak.py" --requests 1000 --seed 3 --faulty 1 --into "$document"
fi
