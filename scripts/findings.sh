#!/usr/bin/env bash
# Run the scripts in findings/, or those named, one after the other. Print a line for each: whether
# released software still behaves as described (same), has changed, or cannot run here. Status 1 if
# one has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../findings"
[ $# -gt 0 ] || set -- *.sh
output="$(mktemp)"
trap 'rm -f "$output"' EXIT
status=0
for name in "$@"; do
    name="$(basename "$name" .sh)"
    [ -f "$name.sh" ] || { echo "error: no findings/$name.sh" >&2 && exit 2; }
    code=0
    bash "$name.sh" >"$output" 2>&1 </dev/null || code=$?
    why="$(grep '^changed: ' "$output" || tail -n 1 "$output")"
    case "$code" in
        0) echo "same             $name" ;;
        77) echo "cannot run here  $name: $why" ;;
        *) echo "changed          $name: ${why#changed: }" && status=1 ;;
    esac
done
exit "$status"
