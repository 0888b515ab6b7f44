# shellcheck shell=bash
# Sourced by the other scripts: makes .venv/ at the repository's root ready, and activates it.
# With PYTHON=python3.12 (a name or a path) it is .venv-3.12/ instead, beside the first one; with
# MIXKV_SGLANG=0.5.22 it is .venv-0.5.22/, with that release of SGLang in the place of the newest
# supported one; with both .venv-0.5.22-3.12/. MIXKV_DEVICE=cuda makes .venv-cuda/, whose transport
# reads GPU memory, and MIXKV_DEVICE=check .venv-check/, with what scripts/gpu-check.sh imports.
#
# The first time this installs the engine, a transport, the demo's and the tests' dependencies,
# and what they need of Debian. Later it only looks whether pyproject.toml is still the one that
# the environment was made from. Packages come from wherever uv and pip are configured to look;
# without uv, SGLang 0.5.22 needs NVIDIA's index.

MIXKV_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
MIXKV_EXTRAS="${MIXKV_DEVICE:-cpu},nixl,demo,test"
MIXKV_WHAT=(-e "${MIXKV_ROOT}[sglang,${MIXKV_EXTRAS}]")
[ -z "${MIXKV_SGLANG:-}" ] || MIXKV_WHAT=(-e "${MIXKV_ROOT}[${MIXKV_EXTRAS}]" "sglang==$MIXKV_SGLANG")
case "${MIXKV_DEVICE:-}" in check) MIXKV_WHAT=(torch==2.14.1 msgspec numpy pyzmq) ;; esac # SGLang's torch

mixkv_fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

mixkv_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Path of the first of these interpreters that runs and is new enough.
mixkv_first_of() {
    local candidate
    for candidate in "$@"; do
        mixkv_is_new_enough "$candidate" || continue
        "$candidate" -c 'import sys; print(sys.executable)'
        return
    done
    return 1
}

# The interpreter that PYTHON names. pyenv may have it although its shim of that name only says
# that the version is not selected; uv keeps its own outside of PATH.
mixkv_asked_python() {
    local others=()
    ! command -v pyenv >/dev/null || others+=("$(pyenv root)"/versions/*/bin/"$PYTHON")
    ! command -v uv >/dev/null || others+=("$(uv python find -q --managed-python \
        --no-python-downloads "${PYTHON#python}" 2>/dev/null || true)")
    mixkv_first_of "$PYTHON" "${others[@]}" || mixkv_fail \
        "PYTHON=$PYTHON: no Python 3.11 or newer of that name runs here ($("$PYTHON" --version \
        2>&1 | head -n 1)). Nothing was set up or tested with it: install it, or unset PYTHON."
}

# The interpreter to build the environment from.
mixkv_python() {
    if [ -n "${PYTHON:-}" ]; then
        mixkv_asked_python
    else
        mixkv_first_of python3.11 python3.12 python3.13 python3 || mixkv_fail \
            "Python 3.11 or newer is required; found: $(python3 --version 2>&1 || true)." \
            "Install it (Debian 12: apt-get install python3 python3-venv) or set PYTHON."
    fi
}

# Where the environment goes: one of its own for each version that MIXKV_SGLANG and PYTHON ask for.
mixkv_venv() {
    local venv="$MIXKV_ROOT/.venv${MIXKV_DEVICE:+-$MIXKV_DEVICE}${MIXKV_SGLANG:+-$MIXKV_SGLANG}" python
    if [ -n "${PYTHON:-}" ]; then
        python="$(mixkv_asked_python)" || exit 1
        venv+="-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    fi
    echo "$venv"
}

# Install Debian packages as root or through sudo; say what to install otherwise.
mixkv_apt() {
    local sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo -n)
    if ! command -v apt-get >/dev/null || ! "${sudo[@]}" true 2>/dev/null; then
        mixkv_fail "please install these system packages first: $*"
    fi
    echo "installing system packages: $*"
    "${sudo[@]}" apt-get update -qq </dev/null
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" </dev/null
}

# What the wheels need of Debian: libraries that Mooncake is linked against, and on a GPU a compiler
# and Python's headers, with which Triton builds the launchers of SGLang's kernels.
mixkv_system_packages() {
    local known missing=() one needs=(libibverbs.so.1=libibverbs1 librdmacm.so.1=librdmacm1
        libnuma.so.1=libnuma1 libcurl.so.4=libcurl4)
    if [ "${MIXKV_DEVICE:-}" = cuda ]; then
        needs+=(libmlx5.so.1=ibverbs-providers)
        command -v g++ >/dev/null || missing+=(g++)
        one="$(mixkv_python)" || exit 1
        one="$("$one" -c 'import os, sys, sysconfig as config
if not os.path.exists(config.get_config_var("INCLUDEPY") + "/Python.h"):
    print("python%d.%d-dev" % sys.version_info[:2])')"
        [ -z "$one" ] || missing+=("$one")
    fi
    known="$(PATH="$PATH:/usr/sbin:/sbin" ldconfig -p)"
    for one in "${needs[@]}"; do
        case "$known" in *"${one%=*} "*) ;; *) missing+=("${one#*=}") ;; esac
    done
    [ "${#missing[@]}" = 0 ] || mixkv_apt "${missing[@]}"
}

# The wheels are built for CUDA 13.
mixkv_driver() {
    local version
    version="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null)" || mixkv_fail \
        "nvidia-smi finds no GPU: install NVIDIA's driver, r580 or later, or give the GPU to this container."
    [ "${version%%.*}" -ge 580 ] || mixkv_fail "CUDA 13 needs NVIDIA's driver r580 or later: found $version."
}

# An empty environment, with uv on this machine or without.
mixkv_create() {
    local python
    python="$(mixkv_python)" || exit 1
    echo "creating ${MIXKV_VENV##*/} with $("$python" --version)"
    rm -rf "$MIXKV_VENV"
    if ! command -v uv >/dev/null || ! uv venv -q --seed --python "$python" "$MIXKV_VENV"; then
        "$python" -m ensurepip --version >/dev/null 2>&1 || mixkv_apt python3-venv
        "$python" -m venv --clear "$MIXKV_VENV"
    fi
}

# Install this package with its extras: with uv where there is one, else with pip.
mixkv_install() {
    local python="$MIXKV_VENV/bin/python" uv
    uv="$(command -v uv || true)"
    [ -n "$uv" ] || ! "$python" -m pip install -q uv || uv="$MIXKV_VENV/bin/uv"
    echo "installing ${MIXKV_WHAT[*]#-e}: up to 10 GB, the first time takes minutes"
    # Compiled now: with PYTHONDONTWRITEBYTECODE each server would compile 7,000 modules again.
    if [ -n "$uv" ] && "$uv" pip install -q --compile-bytecode --python "$python" \
        --override "$MIXKV_ROOT/scripts/overrides.txt" "${MIXKV_WHAT[@]}"; then
        return
    fi
    "$python" -m ensurepip --upgrade >/dev/null 2>&1 || true
    "$python" -m pip install -q "${MIXKV_WHAT[@]}"
}

mixkv_environment() {
    local stamp="$MIXKV_VENV/.mixkv-stamp" wanted
    wanted="$(cat "$MIXKV_ROOT"/{pyproject.toml,scripts/{env.sh,overrides.txt}} | sha256sum)"
    case "${MIXKV_DEVICE:-}" in cuda | check) mixkv_driver ;; esac
    [ "${MIXKV_DEVICE:-}" = check ] || mixkv_system_packages
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        rm -f "$stamp"
        mixkv_is_new_enough "$MIXKV_VENV/bin/python" || mixkv_create
        mixkv_install
        printf '%s\n' "$wanted" >"$stamp"
    fi
}

# In a process of its own a step that fails ends it. Where this is sourced it might not: a shell
# that a person types into has no `set -e`, and bash ignores it in a condition.
if [ "$0" = "${BASH_SOURCE[0]}" ]; then
    set -euo pipefail
    MIXKV_VENV="$(mixkv_venv)"
    mixkv_environment
    exit
fi
MIXKV_VENV="$(mixkv_venv)" || return 1
case " $* " in
    *" --help "* | *" -h "*) # nothing is installed for it: without an environment, the script's head
        [ -e "$MIXKV_VENV/.mixkv-stamp" ] || { sed -n '/^# /!q;s/^# //p' <(tail -n +2 "$0") && exit; } ;;
    *) PYTHON="${PYTHON:-}" MIXKV_SGLANG="${MIXKV_SGLANG:-}" MIXKV_DEVICE="${MIXKV_DEVICE:-}" \
        bash "${BASH_SOURCE[0]}" || return 1 ;;
esac
export PATH="$MIXKV_VENV/bin:$PATH"
