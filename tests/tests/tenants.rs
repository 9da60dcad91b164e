//! Two tenants who have the same addresses and ports: what is done to one is not done to the other.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    os::fd::OwnedFd,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::{PacketBuilder, TcpHeader};
use serde_json::Value;
use twheel_tests::{
    ctnetlink::Conntrack,
    netns::{Namespace, PATIENCE, require_root},
    pair::PORT,
    path,
    plane::{ACK, RST, SYN},
    running::{PolicyFile, Twheel},
};

const CONNECTIONS: u16 = 1000;
const FIRST: u16 = 20_000;
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const TENANTS: [usize; 2] = [0, 1];

/// A gateway, and how its two tenants are joined to it.
struct Lab {
    gateway: Namespace,
    _tenants: Vec<Namespace>,
    /// Of each tenant, the client's side and the gateway's.
    ends: [[OwnedFd; 2]; 2],
    /// Of each, the tags of its frames.
    tags: [&'static [u16]; 2],
}

impl Lab {
    /// In VLANs of one interface: `leg0`.
    fn vlans(tags: [&'static [u16]; 2]) -> Result<Self> {
        let gateway = Namespace::new("gateway")?;
        let tenant = joined(&gateway, "leg0")?;
        let end = || -> Result<[OwnedFd; 2]> {
            Ok([
                tenant.enter(|| path::open("eth", 0))?,
                gateway.enter(|| path::open("leg0", 0))?,
            ])
        };
        Ok(Self {
            ends: [end()?, end()?],
            gateway,
            _tenants: vec![tenant],
            tags,
        })
    }

    /// Each with an interface of its own: `leg0` and `leg1`.
    fn zones() -> Result<Self> {
        let gateway = Namespace::new("gateway")?;
        let tenants = ["leg0", "leg1"].map(|leg| joined(&gateway, leg));
        let [one, two] = tenants;
        let (one, two) = (one?, two?);
        let end = |tenant: &Namespace, leg: &str| -> Result<[OwnedFd; 2]> {
            Ok([
                tenant.enter(|| path::open("eth", 0))?,
                gateway.enter(|| path::open(leg, 0))?,
            ])
        };
        Ok(Self {
            ends: [end(&one, "leg0")?, end(&two, "leg1")?],
            gateway,
            _tenants: vec![one, two],
            tags: [&[], &[]],
        })
    }

    /// Sends a segment of a tenant's connection, from the client or from the gateway.
    fn send(&self, tenant: usize, port: u16, is_client: bool, segment: TcpHeader) -> Result<()> {
        let (from, to) = match is_client {
            true => ((CLIENT, port), (SERVER, PORT)),
            false => ((SERVER, PORT), (CLIENT, port)),
        };
        let packet = PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4(from.0.octets(), to.0.octets(), 64)
            .tcp_header(TcpHeader {
                source_port: from.1,
                destination_port: to.1,
                window_size: 1000,
                ..segment
            });
        let mut frame = Vec::new();
        packet.write(&mut frame, &[])?;
        for tag in self.tags[tenant].iter().rev() {
            let [high, low] = tag.to_be_bytes();
            frame.splice(12..12, [0x81, 0, high, low]);
        }
        path::send(&self.ends[tenant][usize::from(!is_client)], &frame)
    }

    /// Opens all connections. What comes in is met a little later than what goes out, so each step waits for the one before.
    fn open_all(&self, name: &str, [one, two]: [u64; 2]) -> Result<()> {
        let steps = [
            (true, segment(1000, 0, SYN), "syn_sent"),
            (false, segment(5000, 1001, SYN | ACK), "syn_recv"),
            (true, segment(1001, 5001, ACK), "established"),
        ];
        for (is_client, segment, state) in steps {
            for port in FIRST..FIRST + CONNECTIONS {
                for tenant in TENANTS {
                    self.send(tenant, port, is_client, segment.clone())?;
                }
            }
            self.await_states(
                name,
                &[(one, state, CONNECTIONS), (two, state, CONNECTIONS)],
            )?;
        }
        Ok(())
    }

    /// How many flows there are of each tenant in each state. `name`: what tells the tenants apart.
    fn states(&self, name: &str) -> Result<BTreeMap<(u64, String), u16>> {
        let ended = self
            .gateway
            .twheel_once(&["flows", "--json", "--iface", "leg0"])?;
        ensure!(ended.code() == Some(0), "{}", ended.stderr);
        let mut states = BTreeMap::new();
        for line in &ended.lines {
            let flow: Value = serde_json::from_str(&line.text)?;
            let state = flow["state"].as_str().context("no state")?.to_owned();
            let tenant = flow[name].as_u64().unwrap_or(0);
            *states.entry((tenant, state)).or_default() += 1;
        }
        Ok(states)
    }

    fn await_states(&self, name: &str, wanted: &[(u64, &str, u16)]) -> Result<()> {
        let wanted: BTreeMap<_, _> = wanted
            .iter()
            .map(|(tenant, state, count)| ((*tenant, (*state).to_owned()), *count))
            .collect();
        let until = Instant::now() + PATIENCE;
        loop {
            let states = self.states(name)?;
            if states == wanted {
                return Ok(());
            }
            ensure!(Instant::now() < until, "{states:?}, not {wanted:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// One tenant's connections are reset and end; then the other's are deleted.
    fn one_and_then_the_other(
        &self,
        options: &[&str],
        name: &str,
        tenants: [u64; 2],
    ) -> Result<()> {
        let mut args = vec!["--iface", "leg0", "--json", "--timeout", "1h,close=2s"];
        args.extend(options);
        let twheel = Twheel::start(&self.gateway, &args)?;
        for leg in options
            .iter()
            .filter(|it| it.starts_with("leg") && !it.contains('='))
        {
            twheel.await_stderr(&format!("{leg}: attached"))?;
        }
        self.open_all(name, tenants)?;
        let [one, two] = tenants;
        let (open, all) = ("established", CONNECTIONS);
        self.await_states(name, &[(one, open, all), (two, open, all)])?;
        for port in FIRST..FIRST + CONNECTIONS {
            self.send(0, port, true, segment(1001, 5001, RST | ACK))?;
        }
        self.await_states(name, &[(one, "close", all), (two, open, all)])?;
        self.await_states(name, &[(two, open, all)])?;
        for _ in 0..CONNECTIONS {
            let line = twheel.line(PATIENCE)?.context("too few have ended")?;
            let end: Value = serde_json::from_str(&line.text)?;
            ensure!(end["reason"] == "reset" && end[name] == one, "{end}");
        }
        // A filter asks for either tag.
        let field = name.trim_start_matches("inner_");
        for (tenant, left) in [(one, &[(two, open, all)][..]), (two, &[])] {
            let filter = format!("{field} == {tenant}");
            self.gateway
                .twheel_once(&["delete", "--iface", "leg0", &filter])?;
            self.await_states(name, left)?;
        }
        ensure!(twheel.stop()?.code() == Some(0));
        Ok(())
    }
}

fn joined(gateway: &Namespace, leg: &str) -> Result<Namespace> {
    let tenant = Namespace::new("tenant")?;
    tenant.ip(&format!(
        "link add eth type veth peer name {leg} netns {}",
        gateway.name()
    ))?;
    tenant.ip("link set eth up")?;
    gateway.ip(&format!("link set {leg} up"))?;
    Ok(tenant)
}

fn segment(sequence_number: u32, acknowledgment_number: u32, flags: u8) -> TcpHeader {
    TcpHeader {
        sequence_number,
        acknowledgment_number,
        syn: flags & SYN != 0,
        ack: flags & ACK != 0,
        rst: flags & RST != 0,
        ..TcpHeader::default()
    }
}

#[test]
fn in_two_vlans() -> Result<()> {
    require_root();
    for hook in ["xdp", "tcx"] {
        let lab = Lab::vlans([&[10], &[20]])?;
        lab.one_and_then_the_other(&["--hook", hook], "vlan", [10, 20])?;
    }
    Ok(())
}

#[test]
fn in_one_vlan_with_two_inside() -> Result<()> {
    require_root();
    let lab = Lab::vlans([&[7, 10], &[7, 20]])?;
    lab.one_and_then_the_other(&[], "inner_vlan", [10, 20])
}

#[test]
fn in_two_zones() -> Result<()> {
    require_root();
    for hook in ["xdp", "tcx"] {
        let lab = Lab::zones()?;
        let options = [
            "--hook",
            hook,
            "--iface",
            "leg1",
            "--zone",
            "leg0=7",
            "--zone",
            "leg1=65535",
        ];
        lab.one_and_then_the_other(&options, "zone", [7, 65_535])?;
    }
    Ok(())
}

/// Rules that name a VLAN or a zone each: from the start, and loaded later.
fn each_has_its_rules(lab: &Lab, options: &[&str], key: &str, tenants: [u64; 2]) -> Result<()> {
    let policy = |[one, two]: [u64; 2]| {
        format!(
            "rule = [ {{ name = 'one', {key} = {one} }}, {{ name = 'two', {key} = [{two}] }},\n\
             {{ name = 'none', {key} = [0, 77] }} ]\n"
        )
    };
    let file = PolicyFile::new(key, &policy(tenants))?;
    let mut args = vec!["--iface", "leg0", "--policy", file.path()];
    args.extend(options);
    let twheel = Twheel::start(&lab.gateway, &args)?;
    if options.contains(&"leg1") {
        twheel.await_stderr("leg1: attached")?;
    }
    let await_rules = |port: u16, wanted: [&str; 2]| -> Result<()> {
        for tenant in TENANTS {
            lab.send(tenant, port, true, segment(1000, 0, SYN))?;
        }
        let filter = format!("sport == {port}");
        let flows = ["flows", "--json", "--iface", "leg0", &filter];
        let until = Instant::now() + PATIENCE;
        loop {
            let ended = lab.gateway.twheel_once(&flows)?;
            ensure!(ended.code() == Some(0), "{}", ended.stderr);
            let mut met = BTreeMap::new();
            for line in &ended.lines {
                let flow: Value = serde_json::from_str(&line.text)?;
                let rule = flow["rule"].as_str().unwrap_or("").to_owned();
                met.insert(flow[key].as_u64().unwrap_or(0), rule);
            }
            if met.len() == 2 {
                let found = tenants.map(|tenant| met[&tenant].clone());
                ensure!(found == wanted, "{key}: {found:?}, not {wanted:?}");
                return Ok(());
            }
            ensure!(Instant::now() < until, "{met:?}");
            thread::sleep(Duration::from_millis(50));
        }
    };
    await_rules(FIRST, ["one", "two"])?;
    file.write(&policy([tenants[1], 78]))?;
    let load = ["policy", "load", file.path(), "--iface", "leg0"];
    let ended = lab.gateway.twheel_once(&load)?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    await_rules(FIRST + 1, ["", "one"])?;
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

#[test]
fn rules_by_vlan_and_by_zone() -> Result<()> {
    require_root();
    each_has_its_rules(&Lab::vlans([&[10], &[20]])?, &[], "vlan", [10, 20])?;
    let zones = [
        "--iface",
        "leg1",
        "--zone",
        "leg0=7",
        "--zone",
        "leg1=65535",
    ];
    each_has_its_rules(&Lab::zones()?, &zones, "zone", [7, 65_535])
}

#[test]
fn a_run_that_ignores_vlans_refuses_rules_by_vlan() -> Result<()> {
    require_root();
    let lab = Lab::vlans([&[10], &[20]])?;
    let file = PolicyFile::new("ignore", "[[rule]]\nname = 'a'\nvlan = 10\n")?;
    let args = ["--iface", "leg0", "--vlan", "ignore"];
    let refused = |ended: twheel_tests::running::Ended| {
        let wanted = format!("{}:1:1: rule `a` has vlan, but this run", file.path());
        ensure!(ended.code() == Some(2), "{}", ended.stderr);
        ensure!(ended.stderr.contains(&wanted), "{}", ended.stderr);
        Ok(())
    };
    let with_policy = [&["run"][..], &args, &["--policy", file.path()]].concat();
    refused(lab.gateway.twheel_once(&with_policy)?)?;
    let twheel = Twheel::start(&lab.gateway, &args)?;
    let load = ["policy", "load", file.path(), "--iface", "leg0"];
    refused(lab.gateway.twheel_once(&load)?)?;
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}

/// The connections of the VLAN that falls silent are refused from then on.
#[test]
fn the_connections_of_the_other_vlan_go_on() -> Result<()> {
    require_root();
    for hook in ["xdp", "tcx"] {
        let lab = Lab::vlans([&[10], &[20]])?;
        let args = [
            "--iface",
            "leg0",
            "--hook",
            hook,
            "--json",
            "--timeout",
            "1h,established=4s",
            "--reap",
            "enforce=drop",
            "--i-know-this-drops-traffic",
            "--reap-max-share",
            "100",
        ];
        let twheel = Twheel::start(&lab.gateway, &args)?;
        lab.open_all("vlan", [10, 20])?;
        let send = |tenant: usize| {
            (FIRST..FIRST + CONNECTIONS)
                .try_for_each(|port| lab.send(tenant, port, true, segment(1001, 5001, ACK)))
        };
        let until = Instant::now() + PATIENCE;
        let mut ended = 0;
        let mut sent = Instant::now();
        while ended < CONNECTIONS {
            ensure!(Instant::now() < until, "{ended} of {CONNECTIONS}");
            if let Some(line) = twheel.line(Duration::from_millis(100))? {
                let event: Value = serde_json::from_str(&line.text)?;
                ensure!(event["vlan"] == 10, "{event}");
                ended += u16::from(event["event"] == "reap" && event["outcome"] == "done");
            }
            if sent.elapsed() > Duration::from_millis(500) {
                send(1)?;
                sent = Instant::now();
            }
        }
        TENANTS.into_iter().try_for_each(send)?;
        lab.await_states("vlan", &[(20, "established", CONNECTIONS)])?;
        let dropped = lab.gateway.counter("enforced_dropped")?;
        ensure!(dropped == u64::from(CONNECTIONS), "{hook}: {dropped}");
        ensure!(twheel.stop()?.code() == Some(0));
    }
    Ok(())
}

/// conntrack has both tenants' entries, in zones. Those of the tenant that falls silent are deleted.
#[test]
fn the_conntrack_entry_of_the_other_zone_stays() -> Result<()> {
    require_root();
    let lab = Lab::zones()?;
    let gateway = &lab.gateway;
    gateway.enter(|| {
        let settings = [
            ("netfilter/nf_conntrack_timestamp", "1"),
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/conf/default/rp_filter", "0"),
        ];
        for (setting, value) in settings {
            fs::write(format!("/proc/sys/net/{setting}"), value)?;
        }
        Ok(())
    })?;
    gateway.nft(
        "table inet lab {
            chain raw { type filter hook prerouting priority raw;
                iifname leg0 ct zone set 7; iifname leg1 ct zone set 8; }
            chain input { type filter hook input priority filter; ct state invalid counter; }
            chain output { type filter hook output priority filter;
                icmp type destination-unreachable drop; }
        }",
    )?;
    let conntrack = Conntrack::open(gateway)?;
    let sockets: Vec<UdpSocket> = lab
        ._tenants
        .iter()
        .zip(["leg0", "leg1"])
        .map(|(tenant, leg)| {
            gateway.add_address(IpAddr::from(SERVER), 24, leg)?;
            tenant.add_address(IpAddr::from(CLIENT), 24, "eth")?;
            tenant.enter(|| Ok(UdpSocket::bind((CLIENT, 9000))?))
        })
        .collect::<Result<_>>()?;
    // A datagram of each flow. Nobody answers, and nobody says so.
    let ports = FIRST..FIRST + CONNECTIONS;
    let send = |tenant: usize| -> Result<()> {
        ports.clone().try_for_each(|port| {
            sockets[tenant].send_to(b"hello", (SERVER, port))?;
            Ok(())
        })
    };
    let twheel = Twheel::start(
        gateway,
        &[
            "--iface",
            "leg0",
            "--iface",
            "leg1",
            "--zone",
            "leg0=7",
            "--zone",
            "leg1=8",
            "--proto",
            "udp",
            "--timeout",
            "udp=2s",
            "--reap",
            "conntrack",
            "--reap-max-share",
            "100",
            "--json",
        ],
    )?;
    twheel.await_stderr("leg1: attached")?;
    // Entries of each zone.
    let zones = || -> Result<[usize; 2]> {
        let entries = conntrack.dump()?;
        let of = |zone| {
            let is_of = |port| ports.contains(&port);
            let in_zone = entries.iter().filter(|it| it.zone == zone);
            in_zone
                .filter(|it| it.proto == "udp" && is_of(it.dst.port()))
                .count()
        };
        Ok([of(7), of(8)])
    };
    let all = usize::from(CONNECTIONS);
    TENANTS.into_iter().try_for_each(send)?;
    ensure!(zones()? == [all, all], "{:?}", zones()?);
    // The second tenant goes on.
    let until = Instant::now() + PATIENCE;
    let mut reaped = Vec::new();
    let mut sent = Instant::now();
    while reaped.len() < 2 * all {
        ensure!(Instant::now() < until, "{} of {all}", reaped.len());
        if let Some(line) = twheel.line(Duration::from_millis(100))? {
            reaped.push(serde_json::from_str::<Value>(&line.text)?);
        }
        if sent.elapsed() > Duration::from_millis(500) {
            send(1)?;
            sent = Instant::now();
        }
    }
    for event in &reaped {
        ensure!(event["zone"] == 7 && event["iface"] == "leg0", "{event}");
        ensure!(
            event["event"] != "reap" || event["outcome"] == "done",
            "{event}"
        );
    }
    let done = reaped.iter().filter(|it| it["event"] == "reap").count();
    ensure!(done == all, "{done}");
    ensure!(zones()? == [0, all], "{:?}", zones()?);
    send(1)?;
    let more = twheel.line(Duration::from_millis(500))?;
    ensure!(more.is_none(), "{:?}", more.map(|line| line.text));
    ensure!(twheel.stop()?.code() == Some(0));
    Ok(())
}
