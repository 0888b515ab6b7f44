# shellcheck shell=bash
# Sourced after env.sh by what can use NVIDIA Dynamo: mixkv_dynamo unpacks a release of it into
# dynamo/VERSION of the environment, for a PYTHONPATH of its own. Its pins (SGLang, NIXL and some
# twenty more) are left out: it runs with what the environment has.

mixkv_dynamo() {
    local version="$1" folder="$MIXKV_VENV/dynamo/$1"
    [ ! -d "$folder" ] || return 0
    echo "unpacking Dynamo $version into ${folder#"$MIXKV_ROOT"/}"
    rm -rf "$folder.part"
    if python -m pip install -q --no-deps --no-compile --target "$folder.part" \
        "ai-dynamo==$version" "ai-dynamo-runtime==$version" "redis>=6.2,<9" "blake3>=1,<2"; then
        mv "$folder.part" "$folder"
    else
        echo "Dynamo $version could not be had: what needs it is skipped" >&2
        rm -rf "$folder.part"
    fi
}
