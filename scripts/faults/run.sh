#!/usr/bin/env bash
# Inject every fault for real, into results/faults.md and .json: run.sh [--soak]
# --soak adds the soaks: 2,000 requests with random faults, 1,000 that each meet one, twice each.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/env.sh
source "$here/../env.sh"
folder="$MIXKV_ROOT/results"
mkdir -p "$folder"
python "$here/table.py" --json "$folder/faults.json" | tee "$folder/faults.md"
if [ "${1:-}" = --soak ]; then
    python "$here/soak.py" --requests 2000 --seed 2 --json "$folder/soak.json" |
        tee "$folder/soak.md"
    python "$here/soak.py" --requests 1000 --seed 3 --faulty 1 --json "$folder/soak-faulty.json" |
        tee "$folder/soak-faulty.md"
fi
