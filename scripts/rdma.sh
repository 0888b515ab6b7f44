#!/usr/bin/env bash
# Run tests/rdma/ over RDMA verbs on any Debian machine: Debian's kernel, which has soft-RoCE, boots
# in QEMU with this machine's file system as its root, under an overlay in memory. The kernel is
# unpacked into .rdma/ once, and not installed. Options go to pytest, and the exit status is that of
# pytest. It runs test_smoke.py, or with --full all tests, with a second guest. --here: use this
# machine's own RDMA devices instead of a guest, and change nothing on it. Variables: QEMU: the
# binary; RDMA_LIMIT_S: the guest's time limit (124). Status 77: no QEMU or kernel.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$MIXKV_ROOT"
MADE="$MIXKV_ROOT/.rdma/made" QEMU="${QEMU:-qemu-system-x86_64}" LIMIT_S="${RDMA_LIMIT_S:-7200}"
FULL="$(printf '%s\n' "$@" | grep -x -e --full || true)" TESTS=(-m pytest -p no:cacheprovider tests/rdma)
[ -n "$FULL" ] || TESTS[-1]=tests/rdma/test_smoke.py
# An emulated guest reads this machine's time stamp counter. On a busy machine, the guest would
# measure a wrong rate of that counter, and one guest's clock ran 2.6 times too fast.
KHZ="$(awk '/bogomips/ {print int($3 * 500); exit}' /proc/cpuinfo)"
KERNEL="console=ttyS0 panic=-1 no_timer_check tsc=reliable tsc_early_khz=$KHZ"

cannot() {
    echo "rdma: $*; no test was run" >&2
    exit 77
}

# Make .rdma/made: the unpacked kernel, an initrd whose /init mounts the root, and retries.so.
make_guest() {
    local kernel version module PATH="$PATH:/usr/sbin:/sbin"
    (mixkv_apt qemu-system-x86 busybox-static kmod cpio gcc libc6-dev libibverbs-dev \
        ibverbs-providers iproute2) >"$WORK/log" 2>&1 || cannot "$(tail -n 1 "$WORK/log")"
    kernel="$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')"
    mkdir -p "$WORK/made/root/modules" && cd "$WORK/made"
    (apt-get download -qq "${kernel%%$'\n'*}" && dpkg-deb -x ./*.deb kernel &&
        rm ./*.deb) >"$WORK/log" 2>&1 || cannot "Debian's kernel is not available: $(tail -n 1 "$WORK/log")"
    version="$(basename kernel/lib/modules/*)" && depmod -b kernel "$version"
    for module in virtio_pci 9p 9pnet_virtio overlay; do
        modprobe -d "$PWD/kernel" -S "$version" --show-depends "$module"
    done | awk '/^insmod/ && !seen[$2]++ {print $2}' >root/paths
    xargs cp -t root/modules <root/paths && sed 's|.*/||' root/paths >root/order
    cp "$(command -v busybox)" root
    printf '%s\n' '#!/busybox sh' "$(cat "$MIXKV_ROOT/tests/rdma/guest.sh")" >root/init
    (chmod +x root/init && cd root && find . | cpio -o -H newc 2>/dev/null | gzip -1) >initrd.gz
    gcc -shared -fPIC -o retries.so "$MIXKV_ROOT/tests/rdma/retries.c" -Wl,--no-as-needed -libverbs
    cd "$MIXKV_ROOT" && rm -rf "$MADE" && mv "$WORK/made" "$MADE"
}

# Start guest 1 or 2 on an accelerator. Datagrams connect the two guests. A test restarts guest 2.
start() {
    local once=(-no-reboot) to="remote.type=unix,remote.path=net$((3 - $1))"
    [ "$1" = 1 ] || once=()
    (cd "$WORK" && exec setpriv --pdeathsig KILL "$QEMU" -accel "$2" -cpu max -smp 2 -m 4G \
        -kernel "$MADE"/kernel/boot/vmlinuz-* -initrd "$MADE/initrd.gz" -display none -monitor none \
        -append "$KERNEL mixkv=$WORK mixkv_host=$1" \
        -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
        -device virtio-9p-pci,fsdev=root,mount_tag=root -serial "file:console$1" \
        -netdev "dgram,id=net,local.type=unix,local.path=net$1,$to" \
        -device "virtio-net-pci,netdev=net,host_mtu=4500,mac=52:54:00:00:00:0$1,romfile=" \
        -serial "file:output$1" "${once[@]}" </dev/null >"log$1" 2>&1) &
    GUESTS+=("$!")
}

end() {
    [ "${#GUESTS[@]}" = 0 ] || kill -KILL "${GUESTS[@]}" 2>/dev/null || true
    wait "${GUESTS[@]}" 2>/dev/null || true
}

# Boot on an accelerator, and print the guest's output. Fails if the guest is not up in $2 seconds.
boot() {
    local shown=0 size until=$((SECONDS + $2))
    : >"$WORK/output1" && GUESTS=() && start 1 "$1"
    [ -z "$FULL" ] || start 2 "$1"
    while kill -0 "${GUESTS[0]}" 2>/dev/null; do
        [ "$SECONDS" -lt "$LIMIT_S" ] || { echo "rdma: ended after $LIMIT_S s" >&2 && exit 124; }
        [ $((SECONDS % 10)) != 0 ] || echo "rdma: $SECONDS s, on $1" >&2
        sleep 1
        size="$(stat -c %s "$WORK/output1")"
        head -c "$size" "$WORK/output1" | tail -c "+$((shown + 1))" | sed '/^mixkv-/d'
        shown="$size"
        [ "$size" -gt 0 ] || [ "$SECONDS" -lt "$until" ] || kill "${GUESTS[0]}" 2>/dev/null || true
    done
    end
    [ -s "$WORK/output1" ]
}

if [ "${1:-}" = --here ]; then
    [ -n "$(ls /sys/class/infiniband 2>/dev/null)" ] || cannot "this machine has no RDMA device"
    exec python "${TESTS[@]}" "${@:2}"
fi
case "$(pwd -P)/" in /tmp/* | /run/* | /dev/shm/*) # tests/rdma/guest.sh
    cannot "the guest has its own /tmp, /run and /dev/shm, and would not see $PWD: move the checkout" ;;
esac
mkdir -p .rdma && GUESTS=() WORK="$(mktemp -d "$MIXKV_ROOT/.rdma/run.XXXXXX")"
trap 'end; rm -rf "$WORK"' EXIT
tail -n +2 "$MADE/root/init" 2>/dev/null | cmp -s - tests/rdma/guest.sh || make_guest
command -v "$QEMU" >/dev/null || cannot "there is no $QEMU"
cp tests/rdma/guest.sh "$WORK/guest"
printf '%q ' "$MIXKV_ROOT" "$MIXKV_VENV" "$MADE" "${TESTS[@]}" "$@" >"$WORK/arguments"
{ [ -w /dev/kvm ] && [ ! -e .rdma/no-kvm ] && boot kvm 20; } ||
    { touch .rdma/no-kvm && boot tcg 120; } || boot tcg 300 || # on a busy machine, one boot may hang
    cannot "the guest did not boot: $(tail -n 1 "$WORK/console1")"
[ -z "$FULL" ] || sed 's/^/second guest: /' "$WORK/output2"
exit "$(sed -n 's/^mixkv-exit \([0-9]*\).*/\1/p' "$WORK/output1" | grep . || echo 1)"
