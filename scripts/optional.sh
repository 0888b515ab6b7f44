# shellcheck shell=bash
# Sourced after env.sh: unpacks programs that some tests use into the environment, and installs
# nothing. Without a program, the tests that need it are skipped.

# Get `prometheus` and `promtool` from Debian's package, without its service and web libraries.
mixkv_prometheus() {
    ! type prometheus promtool >/dev/null 2>&1 || return 0
    local folder
    folder="$(mktemp -d)"
    echo "unpacking Debian's prometheus into ${MIXKV_VENV##*/}/bin"
    if type apt-get dpkg-deb >/dev/null 2>&1 &&
        (cd "$folder" && mixkv_download prometheus && dpkg-deb -x prometheus_*.deb .); then
        install "$folder"/usr/bin/prometheus "$folder"/usr/bin/promtool "$MIXKV_VENV/bin"
    else
        echo "prometheus could not be fetched: tests that need it are skipped" >&2
    fi
    rm -rf "$folder"
}

# Download a package's file; if apt's lists are missing, update them first (as root).
mixkv_download() {
    apt-get download -qq "$1" 2>/dev/null && return
    apt-get update -qq </dev/null || sudo -n apt-get update -qq </dev/null || return 1
    apt-get download -qq "$1"
}

# Get a release of NVIDIA Dynamo, for use on a PYTHONPATH. Dynamo's pins (SGLang, NIXL and about
# twenty more) are ignored: it runs with the environment's packages.
mixkv_dynamo() {
    local version="$1" folder="$MIXKV_VENV/dynamo/$1"
    [ ! -d "$folder" ] || return 0
    echo "unpacking Dynamo $version into ${folder#"$MIXKV_ROOT"/}"
    rm -rf "$folder.part"
    if python -m pip install -q --no-deps --no-compile --target "$folder.part" \
        "ai-dynamo==$version" "ai-dynamo-runtime==$version" "redis>=6.2,<9" "blake3>=1,<2"; then
        mv "$folder.part" "$folder"
    else
        echo "Dynamo $version could not be fetched: tests that need it are skipped" >&2
        rm -rf "$folder.part"
    fi
}
