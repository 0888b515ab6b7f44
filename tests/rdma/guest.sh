# shellcheck shell=bash
# Runs in the guests of rdma.sh. As /init, under busybox, it mounts the root, and runs itself there
# under bash. The kernel's command line sets `mixkv`, the run's folder, and `mixkv_host`, 1 or 2.
# There are three soft-RoCE devices. Two of them, 10.9.0.1 and 10.9.0.2, are connected by a slow wire;
# the third, 10.9.1.1 or 10.9.1.2, is connected to the other guest, if there is one.
if [ -e /busybox ]; then
    b=/busybox && $b mkdir -p proc sys dev host rw new
    $b mount -t proc proc proc && $b mount -t sysfs sys sys && $b mount -t devtmpfs dev dev
    for module in $($b cat /order); do $b insmod "/modules/$module"; done
    $b mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root host
    $b mount -t tmpfs tmpfs rw && $b mkdir rw/upper rw/work
    $b mount -t overlay -o lowerdir=/host,upperdir=/rw/upper,workdir=/rw/work overlay new
    for folder in proc sys dev; do $b mount --bind "/$folder" "new/$folder"; done
    $b mkdir -p new/dev/shm && for it in dev/shm tmp run; do $b mount -t tmpfs tmpfs "new/$it"; done
    $b chroot new /bin/bash "${mixkv:?}/guest" </dev/null >/dev/ttyS1 2>&1; $b poweroff -f
fi
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
stty -F /dev/ttyS1 raw && echo mixkv-up && ulimit -l unlimited && ip link set lo up
eval "set -- $(cat "$mixkv/arguments")" && cd "$1" && venv="$2" made="$3" && shift 3
for module in crc32_generic crc32c_generic veth sch_tbf sch_netem virtio_net rdma_rxe ib_uverbs rdma_ucm; do
    modprobe -d "$made/kernel" "$module" # rxe needs the first module for its CRC-32
done
ip link add wire0 mtu 4500 type veth peer name wire1 mtu 4500
for n in 0 1; do # packets between the two devices go over the wire, although both addresses are local
    from="10.9.0.$((n + 1))" to="10.9.0.$((2 - n))" wire="wire$n"
    sysctl -qw "net.ipv4.conf.$wire.accept_local=1" "net.ipv4.conf.$wire.rp_filter=0"
    ip address add "$from/24" dev "$wire" && ip link set "$wire" up
    ip rule add pref 10 iif "$wire" lookup local && ip rule add pref 20 from "$from" to "$to" lookup "10$n"
    ip route add "$to" dev "$wire" table "10$n"
done
ip rule add pref 30 lookup local && ip rule del pref 0
ip address add "10.9.1.${mixkv_host:?}/24" dev eth0 && ip link set eth0 mtu 4500 up
for pair in rxe0:wire0 rxe1:wire1 rxe2:eth0; do
    rdma link add "${pair%:*}" type rxe netdev "${pair#*:}"
    tc qdisc add dev "${pair#*:}" root handle 1: tbf rate 64mbit burst 100kb limit 100mb
done
export MIXKV_RDMA_GUEST=1 MIXKV_STRETCH=6 LD_PRELOAD="$made/retries.so" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
if [ "$mixkv_host" = 2 ]; then # give this guest a different clock
    date -s '1 week'
    PYTHONPATH="$PWD:$PWD/tests" exec "$venv/bin/python" -m rdma.far
fi
"$venv/bin/python" "$@" -p pytest_timeout --color=no
echo "mixkv-exit $?"
