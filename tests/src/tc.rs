//! A host's traffic control, queried with `tc`.

use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    netns::{Namespace, PATIENCE, program},
    pair::{Family, Pair},
};

/// Runs `tc` on a host.
pub fn tc(host: &Namespace, args: &str) -> Result<String> {
    let mut command = host.command(program("tc"))?;
    let output = command.args(args.split_ascii_whitespace()).output()?;
    ensure!(
        output.status.success(),
        "`tc {args}`: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Packets meet the lowest first.
    pub priority: u64,
    /// As `tc` prints it.
    pub handle: String,
    /// Empty if it has no name.
    pub name: String,
    /// Its program's id, or 0.
    pub program: u64,
}

impl Filter {
    /// Whether it is twheel's.
    pub fn is_ours(&self) -> bool {
        self.name.starts_with("twheel:")
    }

    /// Its priority, handle and name.
    pub fn place(&self) -> (u64, &str, &str) {
        (self.priority, &self.handle, &self.name)
    }
}

/// The filters for outgoing packets of an interface, in order.
pub fn filters(host: &Namespace, interface: &str) -> Result<Vec<Filter>> {
    filters_of(host, interface, "egress")
}

/// The filters for one direction, `ingress` or `egress`.
pub fn filters_of(host: &Namespace, interface: &str, way: &str) -> Result<Vec<Filter>> {
    let listed = tc(host, &format!("-j filter show dev {interface} {way}"))?;
    let listed: Vec<Value> = serde_json::from_str(&listed)?;
    // `tc` also lists each priority by itself.
    let listed = listed.iter().filter(|it| it["options"].is_object());
    let read = |it: &Value| Filter {
        priority: it["pref"].as_u64().unwrap_or_default(),
        handle: it["options"]["handle"].as_str().unwrap_or("").to_owned(),
        name: it["options"]["bpf_name"].as_str().unwrap_or("").to_owned(),
        program: it["options"]["prog"]["id"].as_u64().unwrap_or_default(),
    };
    Ok(listed.map(read).collect())
}

/// Whether an interface has a clsact qdisc.
pub fn has_qdisc(host: &Namespace, interface: &str) -> Result<bool> {
    Ok(tc(host, &format!("qdisc show dev {interface}"))?.contains("clsact"))
}

/// Adds a filter in classic BPF that drops datagrams from a port and returns `TC_ACT_UNSPEC` for
/// others.
pub fn drop_from(host: &Namespace, interface: &str, priority: u16, port: u16) -> Result<()> {
    let code = format!(
        "9,40 0 0 12,21 0 6 2048,48 0 0 23,21 0 4 17,177 0 0 14,72 0 0 14,21 0 1 {port},6 0 0 2,6 0 0 4294967295"
    );
    let mut command = host.command(program("tc"))?;
    let args = format!("filter add dev {interface} egress prio {priority} bpf da bytecode");
    let command = command.args(args.split(' ')).arg(code);
    ensure!(command.status()?.success(), "`tc {args}` fails");
    Ok(())
}

/// Whether a datagram from the server's port arrives before one that is sent later from an open
/// port.
pub fn passes(pair: &Pair, port: u16) -> Result<bool> {
    let bind = |host: &Namespace, address: SocketAddr| {
        host.enter(|| UdpSocket::bind(address).context("cannot bind"))
    };
    let client = bind(&pair.client, (Family::V4.client(), 0).into())?;
    client.set_read_timeout(Some(PATIENCE))?;
    for port in [port, 5999] {
        let server = bind(&pair.server, (Family::V4.server(), port).into())?;
        // If a filter drops it, the sender may get an error.
        let _ = server.send_to(b"!", client.local_addr()?);
    }
    let (_, first) = client.recv_from(&mut [0])?;
    Ok(first.port() == port)
}
