#!/bin/sh
# Installs, runs, upgrades and removes twheel's packages in a root of a distribution.
# Called in namespaces of its own (mount, network, PID): root.sh deb|rpm ROOT SUITE
#
# In the root, /packages has first.deb and later.deb, first.rpm and later.rpm. `rpm` is this machine's,
# for the root's database.
set -eu
kind=$1 root=$2 suite=$3

fail() {
    echo "$suite, $kind: $*" >&2
    exit 1
}

step() {
    echo "$suite, $kind: $*"
}

inside="chroot $root /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C"

inside() {
    $inside "$@"
}

package() {
    case $kind-$1 in
    deb-first | deb-later) inside dpkg --install "/packages/$1.deb" ;;
    deb-purge) inside dpkg --purge twheel ;;
    # It knows nothing of what Debian has installed.
    rpm-first) rpm --root "$root" --nodeps --install "$root/packages/first.rpm" ;;
    rpm-later) rpm --root "$root" --nodeps --upgrade "$root/packages/later.rpm" ;;
    rpm-purge) rpm --root "$root" --erase twheel ;;
    esac
}

# rpm leaves directories that other packages own elsewhere, such as a shell's for completions.
what=
if [ "$kind" = rpm ]; then what='! -type d'; fi

# What is in the root, except what the package managers keep for themselves.
files() {
    (cd "$root" && find . -xdev -path ./packages -prune -o -path ./var/lib/dpkg -prune -o -path ./var/lib/rpm -prune \
        -o -path ./root/.rpmdb -prune \
        -o -path ./var/log -prune -o -path './etc/*-' -prune -o -path ./etc/.pwd.lock -prune -o -path ./tmp -prune -o $what -print) | sort
    # Of purged packages, no user stays.
    cut -d: -f1 "$root/etc/passwd" "$root/etc/group" | sort
}

# Waits until a command succeeds.
await() {
    for _ in $(seq 300); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    cat "$root/tmp/run.err" >&2
    fail "never: $*"
}

# Starts what the unit starts.
start() {
    : >"$root/tmp/run.err"
    line=$(sed -n 's/^ExecStart=//p' "$root/usr/lib/systemd/system/twheel@.service" | sed 's/%I/vb/g')
    # Not by a function, for which the shell would wait with a process of its own.
    $inside $line >/dev/null 2>"$root/tmp/run.err" &
    running=$!
    await grep -q "vb: attached" "$root/tmp/run.err"
}

stop() {
    kill -TERM "$running"
    wait "$running" || fail "twheel run has ended with $?: $(cat "$root/tmp/run.err")"
}

tracked() {
    test "$(inside twheel flows --iface vb --json 'dport == 9000' | wc -l)" = 1
}

# Its `/` must be a mount point: `twheel doctor` mounts below it, privately.
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t bpf bpf "$root/sys/fs/bpf"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/run"
mount --bind /dev "$root/dev"
ip link set lo up
ip link add vb type veth peer name vc
ip address add 10.9.0.1/24 dev vb
ip link set vb up
ip link set vc up

files >"$root/tmp/before"
step "installing"
package first
inside twheel version --verbose
test "$(inside id -Gn twheel-export)" = "twheel-export twheel" || fail "the user of exporters is not in its group"
for file in usr/share/man/man1/twheel-run.1.gz usr/share/bash-completion/completions/twheel etc/twheel/twheel.toml \
    etc/twheel/policy.toml usr/share/twheel/prometheus/twheel-fleet.rules.yml; do
    test -s "$root/$file" || fail "no $file"
done
if grep -q target "$root/usr/share/bash-completion/completions/twheel"; then fail "completions name a directory of the build"; fi

step "the units, by the root's systemd"
for unit in twheel@vb.service twheel-export@vb.service; do
    inside systemd-analyze verify --man=no "$unit" >"$root/tmp/verify" 2>&1 || fail "$(cat "$root/tmp/verify")"
    if grep twheel "$root/tmp/verify"; then fail "systemd-analyze verify has complaints"; fi
done

step "twheel doctor"
inside twheel config check /etc/twheel/twheel.toml
inside twheel doctor --iface vb --config /etc/twheel/twheel.toml

step "twheel run, as the unit runs it"
echo 'proto = ["tcp", "udp"]' >"$root/etc/twheel/vb.toml"
start
# A datagram that leaves by vb, to a neighbour that does not answer.
ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev vb
bash -c 'echo hello >/dev/udp/10.9.0.2/9000'
await tracked

step "upgrading"
before=$(inside twheel flows --iface vb --json 'dport == 9000')
stop
package later
test -s "$root/etc/twheel/vb.toml" || fail "the upgrade has removed a file of the user's"
start
tracked || fail "the upgrade has lost the flow $before"
stop
test -n "$(ls "$root/sys/fs/bpf/twheel"/v*)" || fail "nothing is pinned, though --keep is in the unit's line"

step "removing"
package purge
test ! -e "$root/sys/fs/bpf/twheel" || fail "pins are left: $(find "$root/sys/fs/bpf/twheel")"
if [ "$kind" = rpm ]; then
    # rpm keeps what packages do not own, and has no purge.
    rm -r "$root/etc/twheel" "$root/var/lib/twheel"
    files | grep -v '^twheel' >"$root/tmp/after"
else
    files >"$root/tmp/after"
fi
diff "$root/tmp/before" "$root/tmp/after" >&2 || fail "the above was not there before, or is gone"
step "nothing is left"
