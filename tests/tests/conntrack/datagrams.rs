//! UDP and ICMP.

use std::{
    collections::BTreeMap,
    fs,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, socket,
};
use twheel_common::state::State::{self, *};
use twheel_holdup::Watch;
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Family, Pair, SERVER},
    running::Twheel,
};

use crate::{
    ends::{is_on_time, seconds},
    lab::{PATIENCE, SCHEDULING, TICK, set, start_conntrack},
};

/// Timeouts in seconds, by conntrack's names, for protocols other than TCP.
const DATAGRAM_TIMEOUTS: [(&str, u64); 4] = [
    ("udp_timeout", 3),
    ("udp_timeout_stream", 5),
    ("icmp_timeout", 2),
    ("icmpv6_timeout", 2),
];

/// A UDP socket, or a socket for pings, which the kernel treats alike.
fn datagrams(host: &Namespace, address: SocketAddr, proto: SockProtocol) -> Result<UdpSocket> {
    host.enter(|| {
        let family = if address.is_ipv4() {
            AddressFamily::Inet
        } else {
            AddressFamily::Inet6
        };
        let fd = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, proto)?;
        bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
        let socket = UdpSocket::from(fd);
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(socket)
    })
}

/// How each flow is to end, by its protocol and its client's endpoint.
type Datagrams = BTreeMap<(String, SocketAddr), (&'static str, State)>;

/// Sends a datagram and waits until the other end receives it.
fn pass(from: &UdpSocket, to: &UdpSocket) -> Result<()> {
    from.send_to(b"?", to.local_addr()?)?;
    to.recv(&mut [0; 8])?;
    Ok(())
}

#[test]
fn datagrams_end_when_they_do_to_conntrack() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    // The group that may send pings.
    pair.client
        .enter(|| fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0").context("no pings"))?;
    let watch = Watch::start();
    let conntrack = start_conntrack(&pair)?;
    pair.server.enter(|| {
        DATAGRAM_TIMEOUTS.iter().try_for_each(|(name, seconds)| {
            set(&format!("netfilter/nf_conntrack_{name}"), *seconds)
        })
    })?;
    let arguments = [
        "--iface",
        SERVER,
        "--egress",
        "on",
        "--timeout",
        "inherit",
        "--json",
    ];
    let twheel = Twheel::start(
        &pair.server,
        &[&arguments[..], &["--proto", "tcp,udp,icmp"]].concat(),
    )?;
    let mut expected = Datagrams::new();
    let mut expect = |proto: &str, of: &UdpSocket, what, state| -> Result<()> {
        let twice = expected.insert((proto.to_owned(), of.local_addr()?), (what, state));
        assert!(twice.is_none(), "two are {proto} of {of:?}");
        Ok(())
    };
    let mut lasting = Vec::new();
    let mut late = Vec::new();
    for family in [Family::V4, Family::V6] {
        let [client, server] = [family.client(), family.server()];
        let answers = datagrams(&pair.server, SocketAddr::new(server, 53), SockProtocol::Udp)?;
        let ask = || datagrams(&pair.client, SocketAddr::new(client, 0), SockProtocol::Udp);

        let asks = ask()?;
        pass(&asks, &answers)?;
        expect("udp", &asks, "never answered", Udp)?;

        let asks = ask()?;
        pass(&asks, &answers)?;
        pass(&answers, &asks)?;
        pass(&asks, &answers)?;
        expect("udp", &asks, "over before it was a stream", Udp)?;

        let asks = ask()?;
        pass(&asks, &answers)?;
        pass(&answers, &asks)?;
        expect("udp", &asks, "a stream", UdpStream)?;
        lasting.push((asks, answers.try_clone()?));

        let asks = ask()?;
        pass(&asks, &answers)?;
        expect("udp", &asks, "answered late", Udp)?;
        late.push((asks, answers));

        let (proto, name, echo) = match family {
            Family::V4 => (SockProtocol::Icmp, "icmp", 8),
            Family::V6 => (SockProtocol::IcmpV6, "icmpv6", 128),
        };
        let ping = datagrams(&pair.client, SocketAddr::new(client, 0), proto)?;
        ping.send_to(&[echo, 0, 0, 0, 0, 0, 0, 1], SocketAddr::new(server, 0))?;
        ping.recv(&mut [0; 8])?;
        expect(name, &ping, "a ping", Icmp)?;
    }
    // More than two seconds after the flows began.
    thread::sleep(Duration::from_millis(2_300));
    for (asks, answers) in &lasting {
        pass(asks, answers)?;
    }
    for (asks, answers) in &late {
        pass(answers, asks)?;
    }
    let last = Instant::now() + Duration::from_secs(5) + TICK + 2 * SCHEDULING;
    let mut ours = twheel.expiries_until(last)?;
    // A busy machine may read some later; when they ended is compared below.
    ours.extend(twheel.ends(expected.len().saturating_sub(ours.len()))?);
    // Reading an entry that is due makes conntrack remove it.
    conntrack.dump()?;
    let mut theirs: BTreeMap<_, _> = conntrack
        .destroyed()?
        .into_iter()
        .map(|entry| ((entry.proto.to_owned(), entry.src), entry))
        .collect();
    let held_up = watch.stop();
    for expiry in ours {
        let name = (expiry.proto.clone(), expiry.src);
        let Some((what, state)) = expected.remove(&name) else {
            // IPv6 neighbour discovery uses ICMPv6, too, but no queries.
            bail!("unexpected flow: {expiry:?}");
        };
        ensure!(
            (&*expiry.reason, &*expiry.state) == ("idle", state.name()),
            "{what}: {expiry:?}"
        );
        let entry = theirs.remove(&name);
        let entry = entry.with_context(|| format!("{what}: conntrack has no {name:?}"))?;
        ensure!(entry.dst == expiry.dst, "{what}: {entry:?}, {expiry:?}");
        let lived = seconds(entry.stop.context("no end")?, entry.start);
        let later = expiry.age.as_secs_f64() - lived;
        ensure!(
            is_on_time(later, held_up),
            "{what}: twheel's flow ends {later:.3} s later"
        );
    }
    ensure!(expected.is_empty(), "not reported: {expected:?}");
    ensure!(theirs.is_empty(), "conntrack alone reports {theirs:?}");
    Ok(())
}
