# shellcheck shell=bash
# Sourced by the other scripts: makes .venv/ at the repository's root ready, and activates it.
#
# The first time this installs the engine, the CPU transport, the demo's and the tests'
# dependencies, and the system libraries that Mooncake needs. Later it only looks whether
# pyproject.toml is still the one that the environment was made from. Packages come from
# wherever uv and pip are configured to look.

MIXKV_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
MIXKV_VENV="$MIXKV_ROOT/.venv"
MIXKV_EXTRAS="sglang,cpu,demo,test"

mixkv_fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

mixkv_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# The interpreter to build the environment from; 3.11 is the one that is tested.
mixkv_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if mixkv_is_new_enough "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    mixkv_fail "Python 3.11 or newer is required; found: $(python3 --version 2>&1 || true)." \
        "Install it (Debian 12: apt-get install python3 python3-venv) or set PYTHON."
}

# Install Debian packages as root or through sudo; say what to install otherwise.
mixkv_apt() {
    local sudo=()
    if [ "$(id -u)" != 0 ]; then
        sudo=(sudo -n)
    fi
    if ! command -v apt-get >/dev/null || ! "${sudo[@]}" true 2>/dev/null; then
        mixkv_fail "please install these system packages first: $*"
    fi
    "${sudo[@]}" apt-get update -qq </dev/null
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" </dev/null
}

# The libraries that Mooncake's transfer engine is linked against.
mixkv_system_libraries() {
    local known missing=() name
    known="$(PATH="$PATH:/usr/sbin:/sbin" ldconfig -p)"
    for name in libibverbs librdmacm libnuma; do
        case "$known" in
            *"$name.so.1 "*) ;;
            *) missing+=("${name}1") ;;
        esac
    done
    if [ "${#missing[@]}" -gt 0 ]; then
        echo "installing system libraries: ${missing[*]}"
        mixkv_apt "${missing[@]}"
    fi
}

# An empty environment, with uv on this machine or without.
mixkv_create() {
    local python
    python="$(mixkv_python)" || exit 1
    echo "creating .venv with $("$python" --version)"
    rm -rf "$MIXKV_VENV"
    if command -v uv >/dev/null && uv venv -q --seed --python "$python" "$MIXKV_VENV"; then
        return
    fi
    rm -rf "$MIXKV_VENV"
    if ! "$python" -m ensurepip --version >/dev/null 2>&1; then
        mixkv_apt python3-venv
    fi
    "$python" -m venv "$MIXKV_VENV"
}

# Install this package with its extras: with uv where there is one, else with pip.
mixkv_install() {
    local python="$MIXKV_VENV/bin/python" uv what=(-e "${MIXKV_ROOT}[${MIXKV_EXTRAS}]")
    uv="$(command -v uv || true)"
    if [ -z "$uv" ] && "$python" -m pip install -q uv; then
        uv="$MIXKV_VENV/bin/uv"
    fi
    echo "installing sglang-mixkv[$MIXKV_EXTRAS]: some 10 GB, the first time takes minutes"
    if [ -n "$uv" ] && "$uv" pip install -q --python "$python" "${what[@]}"; then
        return
    fi
    "$python" -m ensurepip --upgrade >/dev/null 2>&1 || true
    "$python" -m pip install -q "${what[@]}"
}

mixkv_environment() {
    local stamp="$MIXKV_VENV/.mixkv-stamp" wanted
    wanted="$(cat "$MIXKV_ROOT/pyproject.toml" "$MIXKV_ROOT/scripts/env.sh" | sha256sum)"
    mixkv_system_libraries
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        mixkv_is_new_enough "$MIXKV_VENV/bin/python" || mixkv_create
        mixkv_install
        printf '%s\n' "$wanted" >"$stamp"
    fi
}

mixkv_environment
export PATH="$MIXKV_VENV/bin:$PATH"
