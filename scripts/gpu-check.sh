#!/usr/bin/env bash
# Are the plugin's kernels right on this GPU, and how fast? It needs NVIDIA's driver and no SGLang.
# Exit status: 0 all is right; 1 a line that begins with !! is wrong; 2 it cannot be found out here.
# Options: --help. TRITON_INTERPRET=1 runs the kernels on the CPU, to see that the check itself works.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "${TRITON_INTERPRET:-0}" = 1 ] || export MIXKV_DEVICE=check
# shellcheck source=scripts/env.sh
venv="$(source scripts/env.sh >&2 && echo "$MIXKV_VENV")" || exit 2
PYTHONPATH="$PWD:$PWD/tests" exec "$venv/bin/python" -m gpu.check "$@"
