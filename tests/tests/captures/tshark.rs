//! Reads captures with tshark.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use twheel_tests::netns::tool;

use crate::flows::{Key, Packets, add, address};

/// The fields that tshark prints for each frame.
const FIELDS: [&str; 41] = [
    "frame.number",
    "frame.encap_type",
    "frame.cap_len",
    "frame.protocols",
    "eth.type",
    "vlan.id",
    "vlan.etype",
    "ieee8021ad.id",
    "ieee8021ad.svid",
    "ieee8021ad.cvid",
    "ip.src",
    "ip.dst",
    "ip.hdr_len",
    "ip.len",
    "ipv6.src",
    "ipv6.dst",
    "ipv6.plen",
    "ipv6.routing.type",
    "ipv6.routing.segleft",
    "ipv6.routing.src.addr",
    "ipv6.routing.mipv6.home_address",
    "ipv6.routing.rpl.full_address",
    "ipv6.routing.srh.addr",
    "ipv6.opt.mipv6.home_address",
    "tcp.srcport",
    "tcp.dstport",
    "tcp.flags",
    "tcp.hdr_len",
    "tcp.urgent_pointer",
    "udp.srcport",
    "udp.dstport",
    "udp.length",
    "udp.checksum",
    "icmp.type",
    "icmp.ident",
    "icmpv6.type",
    "icmpv6.echo.identifier",
    "ip.flags.mf",
    "ipv6.fraghdr.more",
    "_ws.short",
    "_ws.malformed",
];

/// A frame as tshark dissects it: for each field all values that it has found, in order.
pub struct Frame(BTreeMap<&'static str, Vec<String>>);

impl Frame {
    fn read(line: &str) -> Result<Self> {
        let columns: Vec<_> = line.split('\t').collect();
        ensure!(columns.len() == FIELDS.len(), "tshark says {line:?}");
        let values = columns.iter().map(|column| {
            let values = column.split('|').filter(|value| !value.is_empty());
            values.map(str::to_owned).collect()
        });
        Ok(Self(FIELDS.into_iter().zip(values).collect()))
    }

    pub fn text(&self, field: &str, at: usize) -> Option<&str> {
        Some(self.0.get(field)?.get(at)?)
    }

    /// All values that tshark has found for a field.
    pub fn all(&self, field: &str) -> &[String] {
        self.0.get(field).map_or(&[], Vec::as_slice)
    }

    /// A number, decimal or hexadecimal.
    pub fn number(&self, field: &str, at: usize) -> Option<usize> {
        let text = self.text(field, at)?;
        match text.strip_prefix("0x") {
            Some(hex) => usize::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        }
    }
}

/// A capture as tshark reads it.
pub struct Capture {
    pub frames: Vec<Frame>,
    pub conversations: Packets,
}

/// Reads a capture with tshark: its fields, and its conversation statistics. `None`: tshark cannot
/// read the file.
pub fn dissect(file: &Path) -> Result<Option<Capture>> {
    let mut command = Command::new(tool("tshark")?);
    // Ignores the user's own settings. Each fragment counts in its own frame, not in that of the
    // last fragment.
    command.env("WIRESHARK_CONFIG_DIR", "/nonexistent");
    command.args(["-n", "-o", "ip.defragment:FALSE"]);
    command.args(["-o", "ipv6.defragment:FALSE"]);
    command.arg("-r").arg(file).args(["-T", "fields"]);
    command.args(["-E", "occurrence=a", "-E", "aggregator=|"]);
    for field in FIELDS {
        command.args(["-e", field]);
    }
    let output = command
        .args(["-z", "conv,tcp", "-z", "conv,udp"])
        .stdin(Stdio::null())
        .output()
        .context("cannot run `tshark`: is it installed?")?;
    // If tshark cannot read the file to the end (status 2), it still reads the beginning, and only
    // that is replayed.
    let text = String::from_utf8_lossy(&output.stdout);
    let Some((frames, statistics)) = text.split_once("=====") else {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let of_the_file =
            stderr.contains("contains record data that") || stderr.contains("isn't a capture file");
        ensure!(of_the_file, "no statistics from tshark: {}", stderr.trim());
        return Ok(None);
    };
    Ok(Some(Capture {
        frames: frames.lines().map(Frame::read).collect::<Result<_>>()?,
        conversations: conversations(statistics)?,
    }))
}

/// Parses lines `ADDRESS:PORT <-> ADDRESS:PORT  FRAMES BYTES unit  FRAMES BYTES unit
/// …`; the numbers for `<-` come first. tshark may list a conversation several times under one
/// name: these are added up.
fn conversations(statistics: &str) -> Result<Packets> {
    let mut proto = "";
    let mut sum = Packets::new();
    for line in statistics.lines() {
        match line {
            "TCP Conversations" => proto = "tcp",
            "UDP Conversations" => proto = "udp",
            _ => {}
        }
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let [one, "<->", other, rest @ ..] = &words[..] else {
            continue;
        };
        let end = |text: &str| {
            let (ip, port) = text.rsplit_once(':')?;
            Some(SocketAddr::new(address(ip)?, port.parse().ok()?))
        };
        let ends = end(one).zip(end(other));
        let (one, other) = ends.with_context(|| format!("no ends: {line}"))?;
        // The unit is a word of its own, in `12 kB` as in `12 bytes`.
        let frames = |at: usize| rest.get(at).and_then(|word| word.parse().ok());
        let frames = frames(0).zip(frames(3));
        let (back, forth) = frames.with_context(|| format!("no frames: {line}"))?;
        add(&mut sum, Key::new(proto, one, other), forth);
        add(&mut sum, Key::new(proto, other, one), back);
    }
    Ok(sum)
}
