#!/usr/bin/env bash
# Check and time the plugin's kernels on this GPU. Needs NVIDIA's driver, but not SGLang.
# Exit status: 0 all lines are correct; 1 lines that begin with !! are wrong; 2 the check cannot run here.
# Options: --help. TRITON_INTERPRET=1 runs the kernels on the CPU, to test the check itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "${TRITON_INTERPRET:-0}" = 1 ] || export MIXKV_DEVICE=check
# shellcheck source=scripts/env.sh
venv="$(source scripts/env.sh >&2 && echo "$MIXKV_VENV")" || exit 2
[ -n "$venv" ] || exit 0 # env.sh has printed the help
PYTHONPATH="$PWD:$PWD/tests" exec "$venv/bin/python" -m gpu.check "$@"
