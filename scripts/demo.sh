#!/usr/bin/env bash
# Set up the environment if it is missing, and run the demo. Options go to the demo (--help).
set -euo pipefail
case "$*" in
    *"--device cuda"* | *"--device=cuda"*) export MIXKV_DEVICE=cuda ;;
esac
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python -m mixkv_demo "$@"
