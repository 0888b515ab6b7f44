# shellcheck shell=bash
# Sourced after env.sh by scripts that can use Prometheus: mixkv_prometheus puts `prometheus` and
# `promtool` from Debian's package into the environment. The package is unpacked, not installed: no
# service is started, and none of its web libraries are needed.

mixkv_prometheus() {
    ! command -v prometheus >/dev/null || ! command -v promtool >/dev/null || return 0
    if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
        echo "no prometheus and promtool in PATH: tests that need them are skipped" >&2
        return
    fi
    local folder
    folder="$(mktemp -d)"
    echo "unpacking Debian's prometheus into ${MIXKV_VENV##*/}/bin"
    if (cd "$folder" && mixkv_download prometheus && dpkg-deb -x prometheus_*.deb .); then
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
