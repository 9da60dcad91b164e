//! A gateway that translates addresses.

use anyhow::Result;

use crate::netns::{Namespace, ip};

/// A client, a gateway that translates its source and the server's address, and a server.
pub struct Gateway {
    /// 10.0.0.2, behind the gateway.
    pub client: Namespace,
    /// Its interfaces are `lan` (10.0.0.1) and `wan` (192.0.2.1).
    pub gateway: Namespace,
    /// 192.0.2.2, which the client knows as 203.0.113.9.
    pub server: Namespace,
}

impl Gateway {
    /// Makes it.
    pub fn new() -> Result<Self> {
        let lab = Self {
            client: Namespace::new("client")?,
            gateway: Namespace::new("gateway")?,
            server: Namespace::new("server")?,
        };
        for (host, interface, address, there) in [
            (&lab.client, "lan", "10.0.0.2", "10.0.0.1"),
            (&lab.server, "wan", "192.0.2.2", "192.0.2.1"),
        ] {
            ip(&format!(
                "link add eth0 netns {} type veth peer name {interface} netns {}",
                host.name(),
                lab.gateway.name()
            ))?;
            host.add_address(address.parse()?, 24, "eth0")?;
            host.ip("link set eth0 up")?;
            lab.gateway.add_address(there.parse()?, 24, interface)?;
            lab.gateway.ip(&format!("link set {interface} up"))?;
        }
        lab.client.ip("route add default via 10.0.0.1")?;
        lab.gateway.nft(
            "table ip t {\n\
             chain in {\ntype nat hook prerouting priority -100\n\
             ip daddr 203.0.113.9 dnat to 192.0.2.2\n}\n\
             chain out {\ntype nat hook postrouting priority 100\n\
             oifname \"wan\" masquerade\n}\n}\n",
        )?;
        lab.gateway
            .enter(|| Ok(std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?))?;
        Ok(lab)
    }
}
