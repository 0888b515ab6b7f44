# shellcheck shell=bash
# Sourced by prefill.sh, decode.sh and router.sh: turns variables into SGLang's own flags.
#
# Servers (prefill.sh, decode.sh)
#   MODEL             target, a folder or a hub name                               (required)
#   DRAFT             drafter, a folder or a hub name         (required with EAGLE3, DFLASH)
#   TP                --tp-size                                                           8
#   DP                --attn-dp-size (DP-attention groups), if above 1                    1
#                     SGLang 0.5.21 lacks it: add --dp 8 --enable-dp-attention instead
#   PP                --pp-size                                                           1
#   HOST, PORT        where the server listens                       0.0.0.0, 30000 / 30001
#   BOOTSTRAP_PORT    prefill: --disaggregation-bootstrap-port                         8998
#   NNODES            nodes of this server; above 1 it needs the two below                1
#   NODE_RANK         0 on the first node, 1 on the second, ...
#   DIST_INIT_ADDR    ADDRESS:PORT of the first node, the same on all
#   PAGE_SIZE         --page-size; the same on both sides                    SGLang's choice
#   MEM_FRACTION      --mem-fraction-static                                  SGLang's choice
#   BACKEND           --disaggregation-transfer-backend: mooncake or nixl          mooncake
#   IB_DEVICE         --disaggregation-ib-device                             SGLang's choice
#   SPEC_ALGORITHM    --speculative-algorithm; empty: no speculation                  EAGLE3
#   SPEC_STEPS        --speculative-num-steps                                             3
#   SPEC_TOPK         --speculative-eagle-topk                                            1
#   SPEC_DRAFT_TOKENS --speculative-num-draft-tokens                                      4
#   SPEC_BLOCK        with DFLASH and DSPARK, instead of these three:
#                     --speculative-dflash-block-size or -dspark-       the drafter's choice
#   TRUST_REMOTE_CODE 1: --trust-remote-code (Kimi-K2 needs it)                           0
#   MIXKV             1: --enable-mixkv; 0: stock                                         1
#   LAUNCHER          the command in front of the flags    python -m sglang.launch_server
#   SGLANG_ENABLE_MIXKV, SGLANG_PLUGINS: checked before the server starts
#
# Router (router.sh)
#   PREFILL           space-separated URL or URL,BOOTSTRAP_PORT   http://127.0.0.1:30000,8998
#   DECODE            space-separated URLs                             http://127.0.0.1:30001
#   HOST, PORT        where the router listens                                0.0.0.0, 8000
#   ROUTER            the command in front      python -m sglang_router.launch_router
#
# Arguments go to the command unchanged, after these flags; --dry-run prints the command instead.

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Fail unless these variables are set.
need() {
    local name
    for name in "$@"; do
        [ -n "${!name:-}" ] || fail "$name is not set; scripts/launch/common.sh lists the variables"
    done
}

# Fail if one of these variables is set, but not to a whole number.
numbers() {
    local name
    for name in "$@"; do
        case "${!name:-0}" in *[!0-9]*) fail "$name: expected a whole number, got '${!name}'" ;; esac
    done
}

# Append a flag and its value to the array COMMAND unless the value is empty.
option() {
    [ -z "$2" ] || COMMAND+=("$1" "$2")
}

# Append a flag to COMMAND if a variable's value is 1.
switch() {
    case "$2" in
        1) COMMAND+=("$1") ;;
        0) ;;
        *) fail "$1: expected 1 or 0, got '$2'" ;;
    esac
}

# Fail if SGLANG_PLUGINS is set without the plugin. With only SGLANG_ENABLE_MIXKV set, the server
# would start as stock, and the plugin could not report it.
loaded() {
    local plugins=",${SGLANG_PLUGINS:-mixkv}," enabled="${SGLANG_ENABLE_MIXKV:-0}"
    case "${plugins// /}" in *,mixkv,*) return 0 ;; esac
    case "${MIXKV:-1},${enabled,,}" in
        0,0 | 0,false | 0,no | 0,n | 0,off) ;;
        *) fail "SGLANG_PLUGINS=$SGLANG_PLUGINS leaves out mixkv: add it, or start without mixkv" ;;
    esac
}

speculation() {
    local algorithm="${SPEC_ALGORITHM-EAGLE3}"
    [ -n "$algorithm" ] || return 0
    case "$algorithm" in EAGLE3 | DFLASH) need DRAFT ;; esac
    option --speculative-algorithm "$algorithm"
    option --speculative-draft-model-path "${DRAFT:-}"
    case "$algorithm" in
        DFLASH | DSPARK)
            option "--speculative-${algorithm,,}-block-size" "${SPEC_BLOCK:-}"
            [ "${DP:-1}" = 1 ] || COMMAND+=(--enable-dp-lm-head) # SGLang requires it
            return 0
            ;;
    esac
    option --speculative-num-steps "${SPEC_STEPS:-3}"
    option --speculative-eagle-topk "${SPEC_TOPK:-1}"
    option --speculative-num-draft-tokens "${SPEC_DRAFT_TOKENS:-4}"
}

parallelism() {
    option --tp-size "${TP:-8}"
    [ "${DP:-1}" -le 1 ] || COMMAND+=(--attn-dp-size "$DP")
    [ "${PP:-1}" -le 1 ] || COMMAND+=(--pp-size "$PP")
    if [ "${NNODES:-1}" -gt 1 ]; then
        need NODE_RANK DIST_INIT_ADDR
        COMMAND+=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --dist-init-addr "$DIST_INIT_ADDR")
    fi
}

# Make the COMMAND of a server from its mode and its default port.
server_command() {
    need MODEL
    numbers TP DP PP NNODES NODE_RANK PORT BOOTSTRAP_PORT PAGE_SIZE
    numbers SPEC_STEPS SPEC_TOPK SPEC_DRAFT_TOKENS SPEC_BLOCK
    loaded
    read -r -a COMMAND <<<"${LAUNCHER:-python -m sglang.launch_server}"
    COMMAND+=(--model-path "$MODEL")
    switch --trust-remote-code "${TRUST_REMOTE_CODE:-0}"
    COMMAND+=(--host "${HOST:-0.0.0.0}" --port "${PORT:-$2}")
    parallelism
    option --page-size "${PAGE_SIZE:-}"
    option --mem-fraction-static "${MEM_FRACTION:-}"
    COMMAND+=(--disaggregation-mode "$1")
    COMMAND+=(--disaggregation-transfer-backend "${BACKEND:-mooncake}")
    if [ "$1" = prefill ]; then
        option --disaggregation-bootstrap-port "${BOOTSTRAP_PORT:-8998}"
    fi
    option --disaggregation-ib-device "${IB_DEVICE:-}"
    speculation
    switch --enable-mixkv "${MIXKV:-1}"
}

# Run COMMAND with further arguments, or print it, quoted for a shell, if one is --dry-run.
run() {
    local argument dry=0
    for argument in "$@"; do
        case "$argument" in --dry-run) dry=1 ;; *) COMMAND+=("$argument") ;; esac
    done
    [ "$dry" = 1 ] || exec "${COMMAND[@]}"
    printf '%q ' "${COMMAND[@]}"
    echo
}
