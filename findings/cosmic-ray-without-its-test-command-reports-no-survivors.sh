#!/usr/bin/env bash
# cosmic-ray 8.7.0
#
# Behaviour: with a test command that does not exist, baseline and exec succeed, each mutant counts
# as incompetent, and the survival rate is 0. `cr-rate --fail-over 0` therefore passes, as after a
# perfect run.
# Guess: the baseline, whose purpose is to run the tests without a mutant, fails.
# Seen: baseline 0, exec 0, rate 0.00, cr-rate --fail-over 0 exits with 0; with the command "false":
# baseline 1.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
bin="$work/venv/bin"
"$bin/pip" install -q cosmic-ray==8.7.0 || exit 77
cd "$work"
echo 'def sizes(heads): return heads // 2 + 1' >layout.py
config() {
    printf '[cosmic-ray]\nmodule-path = "layout.py"\ntimeout = 10.0\nexcluded-modules = []\n' >cr.toml
    printf 'test-command = "%s"\n[cosmic-ray.distributor]\nname = "local"\n' "$1" >>cr.toml
    rm -f session.sqlite
    "$bin/cosmic-ray" init cr.toml session.sqlite >log 2>&1
}
code() { "$@" >>log 2>&1 && echo 0 || echo $?; }
config false
failing="$(code "$bin/cosmic-ray" baseline cr.toml)"
config no-such-test-command
baseline="$(code "$bin/cosmic-ray" baseline cr.toml)"
exec="$(code "$bin/cosmic-ray" exec cr.toml session.sqlite)"
rate="$("$bin/cr-rate" session.sqlite)"
over="$(code "$bin/cr-rate" session.sqlite --fail-over 0)"
seen="baseline $baseline, exec $exec, rate $rate, --fail-over 0: $over; with \"false\" baseline $failing"
echo "$seen"
[ "$seen" = 'baseline 0, exec 0, rate 0.00, --fail-over 0: 0; with "false" baseline 1' ] || {
    cat log
    echo "changed: cosmic-ray detects a test command that does not exist, or counts differently" >&2
    exit 1
}
