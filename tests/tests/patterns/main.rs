//! Interfaces by pattern: existing ones, new ones and ones that disappear.
//!
//! In the long run (`TWHEEL_LONG`) a thousand of them come and go.

mod attach;
mod commands;

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::{Namespace, PATIENCE},
    running::Twheel,
};

const PORT: u16 = 7878;

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// A host with interfaces, and a host with their other ends.
struct Lab {
    host: Namespace,
    elsewhere: Namespace,
}

impl Lab {
    fn new(interfaces: &[&str]) -> Result<Self> {
        let lab = Self {
            host: Namespace::new("host")?,
            elsewhere: Namespace::new("else")?,
        };
        for interface in interfaces {
            lab.add(interface)?;
        }
        Ok(lab)
    }

    fn add(&self, interface: &str) -> Result<()> {
        let elsewhere = self.elsewhere.name();
        let peer = format!("type veth peer name {interface} netns {elsewhere}");
        self.host.ip(&format!("link add {interface} {peer}"))?;
        Ok(())
    }

    fn remove(&self, interface: &str) -> Result<()> {
        self.host.ip(&format!("link del {interface}"))?;
        Ok(())
    }

    /// Gives both ends of an interface addresses, which its number determines, and brings them up.
    fn bring_up(&self, interface: &str, number: u8) -> Result<()> {
        for (end, last) in [(&self.host, 1), (&self.elsewhere, 2)] {
            let address = Ipv4Addr::new(10, 79, number, last);
            end.add_address(address.into(), 24, interface)?;
            end.ip(&format!("link set {interface} up"))?;
        }
        Ok(())
    }

    /// Connects from the other end and sends something. Returns the client's endpoint.
    fn connect(&self, listener: &TcpListener, number: u8) -> Result<SocketAddr> {
        let address = SocketAddr::from(([10, 79, number, 1], PORT));
        let client = self
            .elsewhere
            .enter(|| TcpStream::connect_timeout(&address, PATIENCE).context("cannot connect"))?;
        let (_server, name) = listener.accept()?;
        drop(client);
        Ok(name)
    }

    fn listen(&self) -> Result<TcpListener> {
        self.host
            .enter(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).context("cannot listen"))
    }

    /// The interfaces that have BPF links or filters.
    fn attached(&self) -> Result<BTreeSet<String>> {
        attached(&self.host)
    }

    fn await_attached(&self, wanted: &[&str]) -> Result<()> {
        let wanted: BTreeSet<_> = wanted.iter().map(|it| (*it).to_owned()).collect();
        await_that(|| {
            let attached = self.attached()?;
            Ok((attached == wanted, format!("{attached:?}, not {wanted:?}")))
        })
    }

    fn check_clean(&self, interfaces: &[&str]) -> Result<()> {
        for interface in interfaces {
            self.host.check_clean(interface)?;
        }
        Ok(())
    }
}

fn attached(host: &Namespace) -> Result<BTreeSet<String>> {
    let pins = host.pins()?;
    let names = pins.iter().filter_map(|pin| pin.file_name()?.to_str());
    let links = names.filter_map(|name| name.split_once('@'));
    Ok(links.map(|(_, name)| name.replace("%2E", ".")).collect())
}

/// Waits until the condition holds.
fn await_that(is_so: impl Fn() -> Result<(bool, String)>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let (is, what) = is_so()?;
        if is {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{what}");
        thread::sleep(millis(5));
    }
}

fn stop(twheel: Twheel) -> Result<String> {
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    Ok(ended.stderr)
}

/// A counter, by interface.
fn counted(host: &Namespace, iface: &str, counter: &str) -> Result<Vec<(String, u64)>> {
    let ended = host.twheel_once(&["stats", "--json", "--iface", iface])?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    for line in &ended.lines {
        let value: serde_json::Value = serde_json::from_str(&line.text)?;
        if value["counter"] == counter {
            let interfaces = value["interfaces"].as_object().context("no interfaces")?;
            let number = |value: &serde_json::Value| value.as_u64().unwrap_or_default();
            return Ok(interfaces
                .iter()
                .map(|(name, value)| (name.clone(), number(value)))
                .collect());
        }
    }
    anyhow::bail!("no {counter}")
}

/// Waits until all BPF links of an interface are pinned.
fn await_links(host: &Namespace, interface: &str) -> Result<()> {
    let instance = host.instances()?.pop().context("no instance")?;
    let end = Instant::now() + PATIENCE;
    for hook in ["egress", "xdp"] {
        let pin = instance.join(format!("{hook}@{interface}"));
        while !pin.exists() {
            ensure!(Instant::now() < end, "no {}", pin.display());
            thread::sleep(millis(1));
        }
    }
    Ok(())
}
