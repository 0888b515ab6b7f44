#!/usr/bin/env bash
# Fuzz every parser of network input: run.sh FOLDER [--runs N] [--pure]
#   --runs N  inputs over all targets, 10,000,000 unless given
#   --pure    only the targets that need no SGLang
# FOLDER gets a corpus a target, a log, and findings if there are any. Ends with the coverage of
# the parsers' lines, and with status 1 at the first finding.
set -euo pipefail
usage() {
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
}
[ "$#" -ge 1 ] && [ "${1#-}" = "$1" ] || usage
folder="$1" runs=10000000 targets="--all"
shift
while [ "$#" -gt 0 ]; do
    case "$1" in
        --runs) runs="${2:-}" && shift 2 ;;
        --pure) targets="--pure" && shift ;;
        *) usage ;;
    esac
done
[[ "$runs" =~ ^[0-9]+$ ]] || usage
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
# shellcheck source=scripts/env.sh
source "$here/../env.sh"
python "$here/fuzz.py" shares $targets --runs "$runs" | while read -r target share; do
    started="$SECONDS"
    if ! python "$here/fuzz.py" fuzz "$target" --runs "$share" --folder "$folder" \
        </dev/null >"$folder/$target.log" 2>&1; then
        tail -40 "$folder/$target.log"
        echo "$target: a finding, see $folder" >&2
        exit 1
    fi
    sed -n "s/^stat::number_of_executed_units: */$target inputs: /p
            s/^stat::peak_rss_mb: */$target peak MB: /p" "$folder/$target.log"
    echo "$target seconds: $((SECONDS - started))"
done
python "$here/fuzz.py" coverage $targets --folder "$folder"
