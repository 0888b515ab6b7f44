#!/usr/bin/env bash
# Start a prefill server, or one node of it. Variables: common.sh. Examples: docs/deploy.md.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
server_command prefill 30000
run "$@"
