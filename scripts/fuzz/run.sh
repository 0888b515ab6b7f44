#!/usr/bin/env bash
# Fuzz what reads a peer's bytes: run.sh FOLDER [--runs N] [--unguided]
#   --runs N    inputs of each target, 1,000,000 unless given
#   --unguided  without libFuzzer, which not every system has: mutations alone
# FOLDER gets a log and a corpus of each target, and findings if there are any. Ends with status 1
# at the first finding.
set -euo pipefail
usage() {
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
}
[ "$#" -ge 1 ] && [ "${1#-}" = "$1" ] || usage
folder="$1" runs=1000000 guided=1
shift
while [ "$#" -gt 0 ]; do
    case "$1" in
        --runs) runs="${2:-}" && shift 2 ;;
        --unguided) guided="" && shift ;;
        *) usage ;;
    esac
done
[[ "$runs" =~ ^[0-9]+$ ]] || usage
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
# shellcheck source=scripts/env.sh
source "$here/../env.sh"
for target in message row endpoint; do
    started="$SECONDS"
    if ! python "$here/fuzz.py" "$target" --runs "$runs" ${guided:+--folder "$folder"} \
        </dev/null >"$folder/$target.log" 2>&1; then
        tail -40 "$folder/$target.log"
        echo "$target: a finding, see $folder" >&2
        exit 1
    fi
    echo "$target: $runs inputs in $((SECONDS - started)) s, no finding"
done
