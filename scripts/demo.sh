#!/usr/bin/env bash
# Run the demo on a bare machine, after setting up what is missing. Options are passed on (--help).
set -euo pipefail
case "$*" in
    *"--device cuda"* | *"--device=cuda"*) export MIXKV_DEVICE=cuda ;;
esac
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python -m mixkv_demo "$@"
