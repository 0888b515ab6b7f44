# shellcheck shell=bash
# Sourced by the other scripts: sets up .venv/ at the repository's root, and activates it. With
# PYTHON=python3.12 (a name or a path), the environment is .venv-3.12/ instead; with
# MIXKV_SGLANG=0.5.22, it is .venv-0.5.22/, with that release of SGLang instead of the newest
# supported one; with both, .venv-0.5.22-3.12/. MIXKV_DEVICE=cuda makes .venv-cuda/ with a transport
# for GPU memory. MIXKV_DEVICE=check makes .venv-check/ with the packages of scripts/gpu-check.sh.
#
# The first run installs the engine, a transport, the dependencies of the demo and the tests, and
# the Debian packages that they need. Later runs only check whether pyproject.toml has changed since
# the environment was made. Packages come from the indexes that uv and pip are configured to use;
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

# Print the path of the first of these interpreters that runs and is new enough.
mixkv_first_of() {
    local candidate
    for candidate in "$@"; do
        "$candidate" -c 'import sys; sys.version_info >= (3, 11) or sys.exit(1); print(sys.executable)' \
            2>/dev/null && return
    done
    return 1
}

# Print the interpreter for the environment, by default the oldest that is new enough. pyenv may have
# the one that PYTHON names even if its shim of that name fails because the version is not selected;
# uv keeps its own interpreters outside of PATH.
mixkv_python() {
    local named=(python3.11 python3.12 python3.13 python3)
    if [ -n "${PYTHON:-}" ]; then
        named=("$PYTHON")
        ! command -v pyenv >/dev/null || named+=("$(pyenv root)"/versions/*/bin/"$PYTHON")
        ! command -v uv >/dev/null || named+=("$(uv python find -q --managed-python \
            --no-python-downloads "${PYTHON#python}" 2>/dev/null || true)")
    fi
    mixkv_first_of "${named[@]}" && return
    [ -z "${PYTHON:-}" ] || mixkv_fail \
        "PYTHON=$PYTHON: there is no Python 3.11 or newer of that name here ($("$PYTHON" --version \
        2>&1 | head -n 1)). Nothing was set up or tested with it: install it, or unset PYTHON."
    mixkv_fail "Python 3.11 or newer is required; found: $(python3 --version 2>&1 || true)." \
        "Install it (Debian 12: apt-get install python3 python3-venv) or set PYTHON."
}

# Print the environment's folder. Each combination of MIXKV_SGLANG and PYTHON has one.
mixkv_venv() {
    local venv="$MIXKV_ROOT/.venv${MIXKV_DEVICE:+-$MIXKV_DEVICE}${MIXKV_SGLANG:+-$MIXKV_SGLANG}" python
    if [ -n "${PYTHON:-}" ]; then
        python="$(mixkv_python)" || exit 1
        venv+="-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    fi
    echo "$venv"
}

# Install Debian packages as root or through sudo; otherwise, fail and name them.
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

# Install the Debian packages that the wheels need: libraries that Mooncake is linked against, and
# on a GPU a compiler and Python's headers, with which Triton builds launchers of SGLang's kernels.
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

# Check the driver: the wheels are built for CUDA 13.
mixkv_driver() {
    local version
    version="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null)" || mixkv_fail \
        "nvidia-smi finds no GPU: install NVIDIA's driver, r580 or later, or give the GPU to this container."
    [ "${version%%.*}" -ge 580 ] || mixkv_fail "CUDA 13 needs NVIDIA's driver r580 or later: found $version."
}

# Make an empty environment, with uv if this machine has it.
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

# Install this package with its extras, with uv if it can be installed, otherwise with pip.
mixkv_install() {
    local python="$MIXKV_VENV/bin/python" uv
    uv="$(command -v uv || true)"
    [ -n "$uv" ] || ! "$python" -m pip install -q uv || uv="$MIXKV_VENV/bin/uv"
    echo "installing ${MIXKV_WHAT[*]#-e}: up to 10 GB, the first time takes minutes"
    # Compile now: with PYTHONDONTWRITEBYTECODE, each server would compile 7,000 modules again.
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
        mixkv_first_of "$MIXKV_VENV/bin/python" >/dev/null || mixkv_create
        mixkv_install
        printf '%s\n' "$wanted" >"$stamp"
    fi
}

# The setup runs in a process of its own, since a failed step might not end a shell that sources
# this file: an interactive shell has no `set -e`, and bash ignores `set -e` in a condition.
if [ "$0" = "${BASH_SOURCE[0]}" ]; then
    set -euo pipefail
    MIXKV_VENV="$(mixkv_venv)"
    mixkv_environment
    exit
fi
MIXKV_VENV="$(mixkv_venv)" || return 1
case " $* " in
    *" --help "* | *" -h "*) # install nothing; without an environment, print the script's head
        [ -e "$MIXKV_VENV/.mixkv-stamp" ] || { sed -n '/^# /!q;s/^# //p' <(tail -n +2 "$0") && exit; } ;;
    *) PYTHON="${PYTHON:-}" MIXKV_SGLANG="${MIXKV_SGLANG:-}" MIXKV_DEVICE="${MIXKV_DEVICE:-}" \
        bash "${BASH_SOURCE[0]}" || return 1 ;;
esac
export PATH="$MIXKV_VENV/bin:$PATH"
