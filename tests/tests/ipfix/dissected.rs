//! Messages as tshark and the crate `netflow_parser` read them.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use etherparse::PacketBuilder;
use twheel_tests::netns::require_root;

use crate::{
    agree,
    collectors::is_installed,
    flows::{Lab, Record},
    listener::{Fields, Message, Session, number, the_number},
};

/// The most that a message over UDP may have.
const MOST: usize = 1400;
/// The number for documentation (RFC 5612).
const PEN: &str = "32473";

/// A capture of these messages.
fn capture(messages: &[Message], path: &Path) -> Result<()> {
    let mut bytes = Vec::new();
    // The header of a pcap file of IP packets (LINKTYPE_RAW).
    for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 1 << 18, 101] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    for message in messages {
        let mut packet = Vec::new();
        PacketBuilder::ipv4([192, 0, 2, 1], [192, 0, 2, 2], 64)
            .udp(40_000, 4739)
            .write(&mut packet, message)?;
        let length = packet.len() as u32;
        for word in [1_800_000_000, 0, length, length] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&packet);
    }
    Ok(fs::write(path, bytes)?)
}

fn tshark(capture: &Path, args: &[&str]) -> Result<String> {
    let mut command = Command::new("tshark");
    command
        .arg("-r")
        .arg(capture)
        .args(["-d", "udp.port==4739,cflow"]);
    let output = command.args(args).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// What a record says, as the crate `netflow_parser` reads it.
pub fn record(fields: &Fields) -> Result<Record> {
    let iana = |name: &str| number(fields, &format!("IANA({name})"));
    let the = |name: &str| the_number(fields, &format!("IANA({name})"));
    let reverse = |name: &str| number(fields, &format!("ReverseInformationElement({name})"));
    let address = |side: &str| -> Result<IpAddr> {
        let bytes = |family| fields.get(&format!("IANA({side}{family}address)"));
        match (bytes("Ipv4"), bytes("Ipv6")) {
            (Some(bytes), None) => Ok(Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[..])?).into()),
            (None, Some(bytes)) => Ok(Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[..])?).into()),
            _ => anyhow::bail!("no address in {fields:?}"),
        }
    };
    let port = |name| iana(name).unwrap_or(0) as u16;
    Ok(Record {
        ends: [
            (address("Source")?, port("SourceTransportPort")),
            (address("Destination")?, port("DestinationTransportPort")),
        ],
        proto: the("ProtocolIdentifier")? as u8,
        start: the("FlowStartMilliseconds")?,
        end: the("FlowEndMilliseconds")?,
        packets: the("PacketDeltaCount")?,
        bytes: the("OctetDeltaCount")?,
        reverse: (
            reverse("ReversePacketDeltaCount").unwrap_or(0),
            reverse("ReverseOctetDeltaCount").unwrap_or(0),
        ),
        end_reason: the("FlowEndReason")? as u8,
        vlan: iana("VlanId").unwrap_or(0) as u16,
    })
}

#[test]
fn others_decode_every_field_and_complain_of_none() -> Result<()> {
    require_root();
    let lab = Lab::new("ipfix-dissected")?;
    for (name, biflow, options) in [
        ("uniflow", false, &[][..]),
        ("private", false, &["--pen", PEN, "--domain", "7"]),
        ("biflow", true, &["--biflow"]),
        (
            "small",
            true,
            &["--biflow", "--pen", PEN, "--message-size", "640"],
        ),
    ] {
        let sent = lab.exporter().messages(name, options);
        let messages = sent.with_context(|| name.to_owned())?;
        assert!(messages.iter().all(|it| it.len() <= MOST));
        let session = Session::parse(&messages, 0).with_context(|| name.to_owned())?;
        let read = session.flows.iter().map(record);
        let mut read = read.collect::<Result<Vec<_>>>()?;
        read.sort();
        let sent = lab.records(biflow)?;
        agree(&read, &sent);
        of_the_exporter(&session)?;
        for flow in &session.flows {
            assert_eq!(flow["IANA(InterfaceName)"], b"server0");
            let direction = the_number(flow, "IANA(FlowDirection)")?;
            assert_eq!(direction + 1, the_number(flow, "IANA(BiflowDirection)")?);
        }
        if options.contains(&PEN) {
            private(&lab, &session)?;
        }
        if is_installed("tshark") {
            let file = lab.directory.0.join(format!("{name}.pcap"));
            capture(&messages, &file)?;
            content(&file, &session)?;
        }
    }
    Ok(())
}

/// tshark warns of nothing, and has read the same numbers.
fn content(capture: &Path, session: &Session) -> Result<()> {
    let experts = tshark(capture, &["-q", "-z", "expert,note"])?;
    assert!(experts.trim().is_empty(), "{experts}");
    let malformed = tshark(capture, &["-Y", "_ws.malformed || cflow.flowset_malformed"]);
    assert_eq!(malformed.unwrap_or_default(), "");
    for (field, name) in [
        ("cflow.flow_end_reason", "IANA(FlowEndReason)"),
        ("cflow.biflow_direction", "IANA(BiflowDirection)"),
        ("cflow.protocol", "IANA(ProtocolIdentifier)"),
        ("cflow.srcport", "IANA(SourceTransportPort)"),
        ("cflow.octets", "IANA(OctetDeltaCount)"),
        ("cflow.packets", "IANA(PacketDeltaCount)"),
        ("cflow.vlanid", "IANA(VlanId)"),
    ] {
        let read = tshark(capture, &["-T", "fields", "-e", field])?;
        let mut read: Vec<u64> = read
            .split([',', '\n'])
            .filter(|it| !it.is_empty())
            .map(str::parse)
            .collect::<Result<_, _>>()
            .with_context(|| format!("{field}: {read}"))?;
        // tshark has one name for an element and its reverse.
        let reverse = name.replace("IANA(", "ReverseInformationElement(Reverse");
        let mut sent: Vec<_> = session
            .flows
            .iter()
            .flat_map(|it| [number(it, name), number(it, &reverse)])
            .flatten()
            .collect();
        read.sort();
        sent.sort();
        assert_eq!(read, sent, "{field}");
    }
    Ok(())
}

fn of_the_exporter(session: &Session) -> Result<()> {
    let [first, ..] = &session.statistics[..] else {
        anyhow::bail!("no statistics");
    };
    for (name, value) in [
        ("ExportedMessageTotalCount", 0),
        ("ExportedFlowRecordTotalCount", 0),
        ("ExportedOctetTotalCount", 0),
        ("NotSentFlowTotalCount", 0),
    ] {
        assert_eq!(
            the_number(first, &format!("IANA({name})"))?,
            value,
            "{name}"
        );
    }
    let name = String::from_utf8_lossy(&first["IANA(ObservationDomainName)"]);
    assert!(name.starts_with("server0@"), "{name}");
    assert!(the_number(first, "IANA(ExportingProcessId)")? > 0);
    Ok(())
}

/// The private elements are those of the events.
fn private(lab: &Lab, session: &Session) -> Result<()> {
    let name =
        |number| format!("Enterprise {{ enterprise_number: {PEN}, field_number: {number} }}");
    let ends: BTreeMap<_, _> = lab
        .ends
        .iter()
        .map(|end| (end["seq"].as_u64(), end))
        .collect();
    for flow in &session.flows {
        let end = ends.get(&number(flow, &name(2))).context("no such event")?;
        let text = |number| String::from_utf8_lossy(&flow[&name(number)]).into_owned();
        assert_eq!(text(3), end["state"]);
        assert_eq!(text(4), end["reason"]);
        assert!(!flow.contains_key(&name(5)), "no rule was met");
        assert_eq!(the_number(flow, &name(6))?, 0);
        let id: String = flow[&name(1)]
            .iter()
            .map(|it| format!("{it:02x}"))
            .collect();
        let flow_id = end["flow_id"].as_str().context("no id")?.replace('-', "");
        assert_eq!(id, flow_id);
        let short = the_number(flow, "IANA(FlowId)")?;
        assert_eq!(format!("{short:016x}"), flow_id[..16]);
    }
    Ok(())
}
