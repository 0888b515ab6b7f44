#!/usr/bin/env bash
# tests/rdma/ over RDMA verbs, on any Debian machine: Debian's kernel, which has soft-RoCE, boots in
# QEMU with this machine's file system as its root, under an overlay in memory. The kernel is
# unpacked into .rdma/ once, and not installed. Options go to pytest, whose exit status this has.
#
#   --here         no guest, but this machine's own RDMA devices; nothing is changed on it
#   QEMU=name      another QEMU;  RDMA_LIMIT_S=3600: seconds after which the guest is ended (124)
#
# It exits with 77, and one sentence, where QEMU or the kernel cannot be had.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$MIXKV_ROOT"
CACHE="$MIXKV_ROOT/.rdma" QEMU="${QEMU:-qemu-system-x86_64}" LIMIT_S="${RDMA_LIMIT_S:-3600}"
TESTS=(-m pytest -p no:cacheprovider tests/rdma)

cannot() {
    echo "rdma: $*; no test was run" >&2
    exit 77
}

install_what_is_missing() {
    local missing=() pair
    for pair in busybox:busybox-static modprobe:kmod cpio:cpio gcc:gcc rdma:iproute2 \
        ibv_devinfo:ibverbs-utils qemu-system-x86_64:qemu-system-x86; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
    done
    [ -e /usr/include/infiniband/verbs.h ] || missing+=(libibverbs-dev libc6-dev)
    [ -e /etc/libibverbs.d/rxe.driver ] || missing+=(ibverbs-providers)
    [ "${#missing[@]}" = 0 ] || (mixkv_apt "${missing[@]}") >"$WORK/apt" 2>&1 ||
        cannot "these packages cannot be installed (${missing[*]}): $(tail -n 1 "$WORK/apt")"
}

# .rdma/kernel, the unpacked package, and .rdma/initrd.gz, whose /init mounts the root.
make_guest() {
    local name version made="$WORK/made" module
    name="$(apt-cache depends linux-image-amd64 2>/dev/null |
        sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)"
    mkdir -p "$made/root/modules"
    (cd "$made" && apt-get download -qq "${name:-linux-image-amd64}" && dpkg-deb -x ./*.deb kernel) \
        >"$WORK/apt" 2>&1 || cannot "Debian's kernel cannot be had: $(tail -n 1 "$WORK/apt")"
    rm -f "$made"/*.deb
    version="$(basename "$made"/kernel/lib/modules/*)"
    PATH="$PATH:/usr/sbin:/sbin"
    depmod -b "$made/kernel" "$version"
    cp "$(command -v busybox)" scripts/rdma_guest.sh "$made/root"
    for module in virtio_pci 9p 9pnet_virtio overlay virtio_net; do
        modprobe -d "$made/kernel" -S "$version" --show-depends "$module"
    done | awk '/^insmod/ && !seen[$2]++ {print $2}' | while read -r module; do
        cp "$module" "$made/root/modules"
        echo "${module##*/}" >>"$made/root/order"
    done
    printf '%s\n' '#!/busybox sh' 'exec /busybox sh /rdma_guest.sh' >"$made/root/init"
    chmod +x "$made/root/init"
    (cd "$made/root" && find . | cpio -o -H newc 2>/dev/null | gzip -1 >../initrd.gz)
    gcc -shared -fPIC -O1 -o "$made/retries.so" tests/rdma/retries.c \
        -Wl,--no-as-needed -libverbs -ldl
    rm -rf "$CACHE/made"
    mv "$made" "$CACHE/made"
}

# Boots on an accelerator, and shows what the guest writes. Fails where it has not come up in time.
boot() {
    local began=$SECONDS up_within="$2" shown=0 size
    : >"$WORK/output"
    setpriv --pdeathsig KILL "$QEMU" -accel "$1" -cpu max -smp 2 -m 4G -display none -no-reboot \
        -kernel "$CACHE"/made/kernel/boot/vmlinuz-* -initrd "$CACHE/made/initrd.gz" \
        -append "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable mixkv=$WORK" \
        -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
        -device virtio-9p-pci,fsdev=root,mount_tag=root -nic none -monitor none \
        -serial "file:$WORK/console" -serial "file:$WORK/output" </dev/null &
    GUEST=$!
    while kill -0 "$GUEST" 2>/dev/null; do
        sleep 1
        size="$(stat -c %s "$WORK/output")"
        tail -c "+$((shown + 1))" "$WORK/output" | head -c $((size - shown)) | grep -v '^mixkv-'
        shown=$size
        [ "$size" -gt 0 ] || [ $((SECONDS - began)) -lt "$up_within" ] || break
        [ "$SECONDS" -lt "$LIMIT_S" ] || { echo "rdma: ended after $LIMIT_S s" >&2 && exit 124; }
        [ $((SECONDS % 10)) != 0 ] || echo "rdma: $SECONDS s on $1" >&2
    done || true
    kill "$GUEST" 2>/dev/null || true
    wait "$GUEST" 2>/dev/null || true
    [ -s "$WORK/output" ]
}

if [ "${1:-}" = --here ]; then
    [ -n "$(ls /sys/class/infiniband 2>/dev/null)" ] || cannot "this machine has no RDMA device"
    exec python "${TESTS[@]}" "${@:2}"
fi
mkdir -p "$CACHE"
GUEST="" WORK="$(mktemp -d "$CACHE/run.XXXXXX")"
trap '[ -z "$GUEST" ] || kill -KILL "$GUEST" 2>/dev/null; rm -rf "$WORK"' EXIT
[ "$QEMU" != qemu-system-x86_64 ] || install_what_is_missing
command -v "$QEMU" >/dev/null || cannot "there is no $QEMU"
cmp -s scripts/rdma_guest.sh "$CACHE/made/root/rdma_guest.sh" || make_guest
cp scripts/rdma_guest.sh "$WORK/guest"
printf '%q ' "$MIXKV_ROOT" "$MIXKV_VENV" "$CACHE/made" "${TESTS[@]}" "$@" >"$WORK/arguments"
{ [ -w /dev/kvm ] && [ ! -e "$CACHE/made/no-kvm" ] && boot kvm 20; } ||
    { touch "$CACHE/made/no-kvm" && boot tcg 180; } || cannot "the guest did not boot"
exit "$(sed -n 's/^mixkv-exit \([0-9]*\).*/\1/p' "$WORK/output" | grep . || echo 1)"
