#!/bin/busybox sh
# The first and only program of the machine. Lines that begin with "vm: " are read outside.
export PATH=/bin:/busybox
export TWHEEL_BIN=/bin/twheel TWHEEL_BPF_OBJECT=/twheel.bpf.o TWHEEL_HOTPLUG=1 RUST_BACKTRACE=0
/bin/busybox mkdir -p /busybox
/bin/busybox --install -s /busybox
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t bpf bpf /sys/fs/bpf
/bin/ip link set lo up
# The kernel has started one processor: see the module that boots it.
for cpu in /sys/devices/system/cpu/cpu[1-9]*/online; do
    echo 1 >"$cpu"
done
failed=0

# busybox's shell prefers its own.
ip() {
    /bin/ip "$@"
}
tc() {
    /bin/tc "$@"
}

# Shows the ends of the verifier's logs that twheel has kept, once.
verifier() {
    for log in /tmp/twheel-*.log; do
        if [ -e "$log" ]; then
            echo "the end of $log:"
            tail -n 30 "$log"
            rm "$log"
        fi
    done
}

# Runs a check by name, and tells how it ended and how long it took.
check() {
    local name=$1 result start
    shift
    echo "vm: begin $name"
    start=$(cut -d. -f1 /proc/uptime)
    if "$@"; then
        result=pass
    else
        result=fail
        failed=1
        verifier
    fi
    echo "vm: $result $name $(($(cut -d. -f1 /proc/uptime) - start))"
}

# Picks the interface: one end of a veth pair, or `lo` where the kernel's modules are missing.
interface() {
    if ip link add vm0 type veth peer name vm1 2>/dev/null; then
        ip link set vm0 up
        ip link set vm1 up
        interface=vm0
        mode=native
    else
        interface=lo
        mode=generic
    fi
}

# Passes on what doctor finds, under a name.
doctor() {
    local name=$1 code
    shift
    twheel doctor --json --iface "$interface" "$@" >/tmp/doctor 2>/tmp/doctor.err
    code=$?
    sed "s/^/vm: doctor $name /" /tmp/doctor
    cat /tmp/doctor.err
    return $code
}

# Lists what twheel has left in the kernel: pins, programs, what is attached.
left() {
    find /sys/fs/bpf/twheel ! -type d 2>/dev/null
    bpftool prog show | grep 'name twheel_'
    ip -d link show | grep xdp
    tc qdisc show | grep clsact
    tc filter show dev "$interface" egress | grep bpf
}

# Nothing is left, or nothing soon: the kernel frees programs a little later.
clean() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        [ -z "$(left)" ] && return 0
        sleep 0.5
    done
    echo "left behind:"
    left
    return 1
}

# Starts a run with options, and waits until it is attached.
start() {
    : >/tmp/run
    twheel run --iface "$interface" --mode "$mode" --history off "$@" >/tmp/run 2>&1 &
    pid=$!
    until grep -q ': attached' /tmp/run; do
        if ! kill -0 $pid 2>/dev/null; then
            cat /tmp/run
            return 1
        fi
        sleep 0.2
    done
}

# A run with options attaches, ends well and leaves nothing.
attaches() {
    start "$@" || return 1
    kill -INT $pid
    wait $pid
    local code=$?
    if [ $code != 0 ]; then
        echo "the run ended with $code:"
        cat /tmp/run
        return 1
    fi
    clean
}

# What a killed run leaves is seen by `left`, and goes with `detach`.
detaches() {
    start --keep "$@" || return 1
    kill -KILL $pid
    wait $pid
    local parts="/sys/fs/bpf/twheel name.twheel_ xdp"
    if grep -q 'clsact filter' /tmp/run; then
        parts="$parts clsact bpf"
    fi
    for part in $parts; do
        if ! left | grep -q "$part"; then
            echo "a killed run leaves nothing of $part:"
            left
            return 1
        fi
    done
    twheel detach --iface "$interface" && clean
}

# Refused, in words that match a pattern, with the exit code for a host that lacks something.
refused() {
    # One that is not refused would go on.
    timeout -s INT 60 twheel run --iface lo --mode generic --history off >/tmp/run 2>&1
    local code=$?
    cat /tmp/run
    [ $code = 4 ] && grep -qE "$1" /tmp/run || return 1
    twheel doctor
    [ $? = 4 ] && clean
}

# At least so many tests of a binary pass, and none fails.
tests() {
    local binary=$1 least=$2 code passed
    shift 2
    set -o pipefail
    "$binary" --test-threads=1 "$@" 2>&1 | tee /tmp/tests
    code=$?
    set +o pipefail
    passed=$(sed -n 's/^test result: ok\. \([0-9]*\) passed.*/\1/p' /tmp/tests)
    [ $code = 0 ] && [ "${passed:-0}" -ge "$least" ] && ! grep 'skipped: ' /tmp/tests
}

# More than one processor runs.
processors() {
    [ "$(nproc)" -gt 1 ]
}

# The kernel itself has no complaint.
content() {
    ! dmesg | grep -E 'WARNING:|BUG:|Oops|rcu: INFO'
}

echo "vm: kernel $(uname -r) $(uname -v)"
interface
echo "vm: interface $interface"
check processors processors
