#!/usr/bin/env bash
# What an NVIDIA GPU shows of the plugin, part by part: gpu.sh [OPTION]... (--help says which).
# It runs under PYTHON (default python3) with what that has installed, and fetches nothing.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec "${PYTHON:-python3}" "$here/gpu/check.py" "$@"
