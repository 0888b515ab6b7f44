#!/usr/bin/env bash
# All benchmarks, into a folder: run.sh FOLDER [--quick]
# Writes a JSON file of each, and one results.md.
set -euo pipefail
if [ "$#" -lt 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 FOLDER [--quick] [--repeats N]" >&2
    exit 2
fi
folder="$1"
shift
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
# shellcheck source=scripts/env.sh
source "$here/../env.sh"
: >"$folder/results.md"
for name in copies reads cost overhead peers pairs; do
    echo "== $name" >&2
    python "$here/$name.py" "$@" --json "$folder/$name.json" >>"$folder/results.md"
done
echo "results: $folder" >&2
