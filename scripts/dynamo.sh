# shellcheck shell=bash
# Sourced after env.sh by scripts that can use NVIDIA Dynamo: mixkv_dynamo unpacks a release into
# the environment's dynamo/VERSION, for use on a PYTHONPATH. Dynamo's pins (SGLang, NIXL and about
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
