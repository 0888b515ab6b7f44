#!/usr/bin/env bash
# sglang-router 0.3.2 and smg 1.13.0
#
# Behaviour: the package sglang-router installs a command named smg, which starts sglang-router. If
# both packages are installed, the command is that of the package installed last, and removing
# either package removes the command for both. `pip check` reports nothing.
# Guess: the command smg belongs to the package smg, and pip refuses two packages that own the same
# file.
# Seen: smg installed last: smg.cli; sglang-router installed last: sglang_router.cli; pip check 0;
# without sglang-router: no smg, although the package smg is still installed.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
bin="$work/venv/bin"
"$bin/pip" install -q sglang-router==0.3.2 || exit 77
"$bin/pip" install -q smg==1.13.0 || exit 77
# The module that the command imports.
of_command() { sed -n 's/^from \([a-z_.]*\) import main$/\1/p' "$bin/smg" 2>/dev/null || echo "no smg"; }
first="$(of_command)"
"$bin/pip" install -q --no-deps --force-reinstall sglang-router==0.3.2 || exit 77
second="$(of_command)"
check=0
"$bin/pip" check >"$work/check" || check=$?
"$bin/pip" uninstall -q -y sglang-router
third="$(of_command)"
left="$("$bin/python" -c 'from importlib.metadata import version; print("smg", version("smg"))')"
seen="$first, $second, pip check $check, $third, $left"
echo "$seen"
[ "$seen" = "smg.cli, sglang_router.cli, pip check 0, no smg, smg 1.13.0" ] || {
    echo "changed: sglang-router and smg no longer share a command" >&2
    exit 1
}
