#!/bin/sh
# A unit of a Debian system that was just booted: installs twheel's package, and checks its unit under
# traffic. Lines that begin with "vm: " are read outside.
exec >/dev/console 2>&1
export LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
connections=8

say() {
    echo "vm: $*"
}

end() {
    say "ended $1"
    systemctl poweroff --force --force
    sleep infinity
}

fail() {
    systemctl status --no-pager --full twheel@vb
    journalctl --no-pager --lines 40
    say "fail $*"
    end 1
}

# Waits until a command succeeds.
await() {
    for _ in $(seq 200); do
        if "$@" >/dev/null 2>&1; then return; fi
        if systemctl --quiet is-failed twheel@vb; then fail "the unit has failed; never: $*"; fi
        sleep 0.2
    done
    fail "never: $*"
}

flows() {
    twheel flows --iface vb --json 'dport == 9000 and state == established' | sed -n 's/.*"flow_id":"\([^"]*\)".*/\1/p' | sort
}

# Whether so many connections are tracked.
tracked() {
    test "$(flows | wc -l)" = "$1"
}

# Whether the connections themselves are still there.
talk() {
    test "$(ip netns exec peer ss --no-header --tcp state established 'dport = :9000' | wc -l)" = "$connections"
}

pid() {
    systemctl show --property MainPID --value twheel@vb
}

# The unit runs as another process than before, with the same flows, of which none has ended.
same() {
    await systemctl is-active twheel@vb
    test "$(pid)" != "$process" || fail "$1 has started no new process"
    process=$(pid)
    talk || fail "the connections have ended by themselves"
    await tracked "$connections"
    test "$(flows)" = "$before" || fail "$1: other flows: $(flows); before: $before"
    ended=$(twheel expired --iface vb 'dport == 9000')
    test -z "$ended" || fail "$1: $ended"
    say "pass $1"
}

# The longest that a flow which was due has waited for a step, in microseconds. While the wheels are
# stepped that is a tick. Refused connections fall due all the time, at once.
waited() {
    last=$(twheel expired --iface vb --json 'dport == 9001' | sed -n 's/.*"idle_us":\([0-9]*\).*/\1/p' | sort -n | tail -n 1)
    test -n "$last" || fail "no refused connection has ended"
    echo "$last"
}

# Whether somebody listens at this port.
listens() {
    ss --listening --tcp --no-header "sport = :$1" | grep -q "$1"
}

# A program hands over a timeout to the unit, as confined as it is.
offloads() {
    busybox nc -l -p 9002 -e /bin/cat &
    server=$!
    await listens 9002
    sleep 120 | ip netns exec peer busybox nc 10.9.0.1 9002 >/dev/null &
    timeout 60 twheel idle --pid $server --timeout 2s --action shutdown >/tmp/idle || fail "twheel idle: $?"
    grep -q '^idle .*10.9.0.1:9002 -> 10.9.0.2:.* shut down$' /tmp/idle || fail "not idle: $(cat /tmp/idle)"
    say "pass offloads $1"
}

# What the unit may do, as the kernel knows it.
confined() {
    status=/proc/$process/status
    grep -E '^(Uid|Gid|CapBnd|CapEff|NoNewPrivs|Seccomp):' "$status"
    grep -q '^Seccomp:.2' "$status" || fail "no system call filter is in force"
    grep -q '^NoNewPrivs:.1' "$status" || fail "it may gain privileges"
    # CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF.
    grep -q '^CapBnd:.000000c000001000$' "$status" || fail "it may have other capabilities"
    if systemctl show --property SystemCallFilter --value twheel@vb | grep -qw mount; then fail "it may mount"; fi
    if nsenter --target "$process" --mount sh -c ': >/etc/twheel-was-here' 2>/dev/null; then fail "it may write to /etc"; fi
    say "pass confined"
}

say "kernel $(uname -r), process 1 is $(cat /proc/1/comm)"
for cpu in /sys/devices/system/cpu/cpu[1-9]*/online; do
    echo 1 >"$cpu"
done
ip netns add peer
ip link add vb type veth peer name vc netns peer
ip address add 10.9.0.1/24 dev vb
ip link set vb up
ip -n peer address add 10.9.0.2/24 dev vc
ip -n peer link set vc up

dpkg --install /packages/first.deb || fail "the package is not installed"
sed -i 's/^#offload/offload/' /etc/twheel/twheel.toml
systemctl enable --now twheel@vb || fail "the unit does not start"
await systemctl is-active twheel@vb
await twheel stats --iface vb
process=$(pid)
say "pass starts"
confined
offloads first

# Connections that talk all the time.
busybox nc -ll -p 9000 -e /bin/cat &
await listens 9000
for number in $(seq $connections); do
    while sleep 0.3; do echo hello; done | ip netns exec peer busybox nc 10.9.0.1 9000 >/dev/null &
    # One after another: of several at once the server may close some.
    await tracked "$number"
done
sleep 1
talk || fail "a connection has ended at once"
before=$(flows)
while sleep 0.1; do ip netns exec peer busybox nc -w 1 10.9.0.1 9001 </dev/null; done 2>/dev/null &
sleep 3
say "a step is at most $(waited) us late"
say "pass tracks"

systemctl restart twheel@vb || fail "it does not restart"
same restart
dpkg --install /packages/later.deb || fail "the package is not upgraded"
same upgrade
# What was due at the end of the time without a step is in the history by now.
sleep 1
late=$(waited)
say "restarts have made a step $late us late"
test "$late" -lt 800000 || fail "no step for a second"
say "pass stepped"
# Its end as by a fault: systemd starts it again.
kill -KILL "$process"
sleep 1.5
same kill
offloads again
systemctl reload twheel@vb || fail "it does not reload"
systemctl is-active twheel@vb || fail "a reload has ended it"
say "pass reload"

dpkg --purge twheel || fail "the package is not removed"
test ! -e /sys/fs/bpf/twheel || fail "pins are left: $(find /sys/fs/bpf/twheel)"
for left in /etc/twheel /var/lib/twheel /usr/bin/twheel /etc/systemd/system/multi-user.target.wants/twheel@vb.service; do
    test ! -e $left || fail "$left is left"
done
say "pass purge"
end 0
