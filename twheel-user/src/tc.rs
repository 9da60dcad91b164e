//! Traffic control over netlink, as far as twheel needs it: the clsact qdisc and its filters.
//!
//! Of other programs' qdiscs and filters, only the headers and the kind are parsed, so that unusual
//! options of theirs cannot make listing fail.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use anyhow::{Context, Result};
use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL,
    NLM_F_REPLACE, NetlinkDeserializable, NetlinkHeader, NetlinkPayload, NetlinkSerializable, Nla,
    NlasIterator, ParseableParametrized,
};
use netlink_packet_route::tc::{
    TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage,
    TcOption,
};
use netlink_sys::constants::NETLINK_ROUTE;

use crate::netlink::ask_all;

/// The qdisc that holds filters for both directions, and nothing else.
pub const CLSACT: &str = "clsact";

/// Length of the header before the attributes (`struct tcmsg`).
const HEADER: usize = 20;
/// `TCA_KIND`, `TCA_OPTIONS`, `TCA_CHAIN`.
const KIND: u16 = 1;
const OPTIONS: u16 = 2;
const CHAIN: u16 = 11;
/// `TCA_BPF_OPS_LEN`, `TCA_BPF_OPS`: a program in classic BPF, which need not be loaded first.
const BPF_OPS_LEN: u16 = 4;
const BPF_OPS: u16 = 5;

/// A direction in which a clsact qdisc filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Incoming packets.
    In,
    /// Outgoing packets.
    Out,
}

impl Way {
    fn parent(self) -> TcHandle {
        let minor = match self {
            Self::In => TcHandle::MIN_INGRESS,
            Self::Out => TcHandle::MIN_EGRESS,
        };
        TcHandle {
            minor,
            ..TcHandle::CLSACT
        }
    }
}

/// The position of a filter for all protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterId {
    /// The interface's number.
    pub index: u32,
    /// The direction.
    pub way: Way,
    /// The filter with the lowest priority number comes first.
    pub priority: u16,
    /// Distinguishes filters of the same priority.
    pub handle: u32,
}

/// A filter as the kernel lists it; each priority is also listed by itself, with the handle 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Its position.
    pub place: FilterId,
    /// Packets meet the filters of chain 0; they meet other chains only if a filter sends them
    /// there.
    pub chain: u32,
    /// The name that its creator gave it, if it is a BPF filter.
    pub name: Option<String>,
    /// The id of its program, if it is a BPF filter.
    pub program: Option<u32>,
}

/// What a filter is to run.
#[derive(Clone, Copy, Debug)]
pub enum Code<'a> {
    /// A loaded program of type `SCHED_CLS`, whose return value is the verdict.
    Program(BorrowedFd<'a>),
    /// One instruction of classic BPF that lets packets pass: used to try whether the kernel has
    /// such filters.
    Trial,
}

/// `TCA_INGRESS_BLOCK`, `TCA_EGRESS_BLOCK`, `include/uapi/linux/rtnetlink.h`.
const INGRESS_BLOCK: u16 = 13;
const EGRESS_BLOCK: u16 = 14;

/// An interface's qdisc for filters of incoming packets, or of both directions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qdisc {
    /// `clsact`, or `ingress`.
    pub kind: String,
    /// For incoming and for outgoing packets: the filters are those of a block, which other
    /// interfaces may share.
    shares: [bool; 2],
}

impl Qdisc {
    /// Whether the filters of this direction are those of a block, which other interfaces may
    /// share.
    pub fn shares(&self, way: Way) -> bool {
        self.shares[way as usize]
    }
}

/// An interface's qdisc for filters.
///
/// # Errors
///
/// The kernel does not list qdiscs.
pub fn qdisc(index: u32) -> Result<Option<Qdisc>> {
    // The kernel lists the qdiscs of all interfaces.
    let all = dump(libc::RTM_GETQDISC, TcHeader::default()).context("cannot list the qdiscs")?;
    let found = all.iter().find(|message| {
        message.header.index == index as i32 && message.header.parent == TcHandle::CLSACT
    });
    Ok(found.and_then(|message| {
        let has = |block| message.attributes.iter().any(|it| it.kind() == block);
        Some(Qdisc {
            kind: kind(message)?.to_owned(),
            shares: [has(INGRESS_BLOCK), has(EGRESS_BLOCK)],
        })
    }))
}

/// Adds a clsact qdisc.
///
/// # Errors
///
/// `EEXIST`: there is one already, or one for incoming packets alone. `ENOENT`: the kernel has no
/// clsact.
pub fn add_clsact(index: u32) -> io::Result<()> {
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    change(libc::RTM_NEWQDISC, flags, of_clsact(index))
}

/// Removes a clsact qdisc, with all its filters.
///
/// # Errors
///
/// There is no such qdisc.
pub fn remove_clsact(index: u32) -> io::Result<()> {
    change(libc::RTM_DELQDISC, 0, of_clsact(index))
}

fn of_clsact(index: u32) -> TcMessage {
    let header = TcHeader {
        index: index as i32,
        handle: TcHandle {
            minor: 0,
            ..TcHandle::CLSACT
        },
        parent: TcHandle::CLSACT,
        ..TcHeader::default()
    };
    TcMessage::from_parts(header, vec![TcAttribute::Kind(CLSACT.to_owned())])
}

/// The filters of a clsact qdisc, in the order in which packets meet them; none if the qdisc or the
/// interface does not exist.
///
/// # Errors
///
/// The kernel does not list filters.
pub fn filters(index: u32, way: Way) -> Result<Vec<Filter>> {
    let header = TcHeader {
        index: index as i32,
        parent: way.parent(),
        ..TcHeader::default()
    };
    let all = dump(libc::RTM_GETTFILTER, header).context("cannot list the filters")?;
    Ok(all.iter().map(|it| describe(it, way)).collect())
}

fn describe(message: &TcMessage, way: Way) -> Filter {
    let mut filter = Filter {
        place: FilterId {
            index: message.header.index as u32,
            way,
            priority: (message.header.info >> 16) as u16,
            handle: message.header.handle.into(),
        },
        chain: 0,
        name: None,
        program: None,
    };
    for attribute in &message.attributes {
        match attribute {
            TcAttribute::Chain(chain) => filter.chain = *chain,
            TcAttribute::Options(options) => {
                filter.name = options.iter().find_map(|option| match option {
                    TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name.clone()),
                    _ => None,
                });
                filter.program = options.iter().find_map(|option| match option {
                    TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    filter
}

/// Adds a filter. Its return value is the verdict on the packet (`direct-action`). If that is
/// `TC_ACT_UNSPEC`, the kernel goes on with the next filter; after the last one, the packet passes.
///
/// # Errors
///
/// `EEXIST`: there is already a filter at this place.
pub fn add_filter(place: FilterId, name: &str, code: Code<'_>) -> io::Result<()> {
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    change(libc::RTM_NEWTFILTER, flags, of_filter(place, name, code))
}

/// Replaces the program of a filter, atomically between two packets.
///
/// # Errors
///
/// `ENOENT`: there is no filter at this place.
pub fn replace_filter(place: FilterId, name: &str, code: Code<'_>) -> io::Result<()> {
    // Without NLM_F_CREATE: a filter that was removed meanwhile is not made anew, as its place may
    // be another's by now.
    let message = of_filter(place, name, code);
    change(libc::RTM_NEWTFILTER, NLM_F_REPLACE, message)
}

/// Removes a filter.
///
/// # Errors
///
/// `ENOENT`, `EINVAL`, `ENODEV`: the filter, the qdisc or the interface does not exist.
pub fn remove_filter(place: FilterId) -> io::Result<()> {
    let kind = vec![TcAttribute::Kind(TcFilterBpf::KIND.to_owned())];
    let message = TcMessage::from_parts(header_of(place), kind);
    change(libc::RTM_DELTFILTER, 0, message)
}

fn header_of(place: FilterId) -> TcHeader {
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    TcHeader {
        index: place.index as i32,
        handle: place.handle.into(),
        parent: place.way.parent(),
        info: u32::from(place.priority) << 16 | u32::from(protocol),
        ..TcHeader::default()
    }
}

fn of_filter(place: FilterId, name: &str, code: Code<'_>) -> TcMessage {
    let other = |kind, value: &[u8]| {
        TcOption::Bpf(TcFilterBpfOption::Other(DefaultNla::new(
            kind,
            value.to_vec(),
        )))
    };
    let mut options = match code {
        Code::Program(program) => vec![TcOption::Bpf(TcFilterBpfOption::ProgFd(
            program.as_raw_fd().unsigned_abs(),
        ))],
        // BPF_RET | BPF_K, of -1: TC_ACT_UNSPEC.
        Code::Trial => vec![
            other(BPF_OPS_LEN, &1u16.to_ne_bytes()),
            other(
                BPF_OPS,
                &[&6u16.to_ne_bytes()[..], &[0, 0], &[0xff; 4]].concat(),
            ),
        ],
    };
    options.extend([
        TcOption::Bpf(TcFilterBpfOption::ProgName(name.to_owned())),
        TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
    ]);
    let attributes = vec![
        TcAttribute::Kind(TcFilterBpf::KIND.to_owned()),
        TcAttribute::Options(options),
    ];
    TcMessage::from_parts(header_of(place), attributes)
}

/// A traffic control message of any type.
struct Message {
    number: u16,
    inner: TcMessage,
}

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.number
    }

    fn buffer_len(&self) -> usize {
        self.inner.buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        self.inner.emit(buffer);
    }
}

impl NetlinkDeserializable for Message {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let mut inner = TcMessage::from_parts(TcHeader::parse(payload)?, Vec::new());
        for attribute in NlasIterator::new(&payload[HEADER.min(payload.len())..]) {
            let attribute = attribute?;
            let is_bpf = kind(&inner) == Some(TcFilterBpf::KIND);
            let is_read = match attribute.kind() {
                KIND | CHAIN | INGRESS_BLOCK | EGRESS_BLOCK => true,
                OPTIONS => is_bpf,
                _ => false,
            };
            if is_read {
                let of = if is_bpf { TcFilterBpf::KIND } else { "" };
                // A filter that cannot be read, for example because its name is not UTF-8, is not
                // twheel's.
                inner
                    .attributes
                    .extend(TcAttribute::parse_with_param(&attribute, of));
            }
        }
        Ok(Self {
            number: header.message_type,
            inner,
        })
    }
}

impl From<Message> for NetlinkPayload<Message> {
    fn from(message: Message) -> Self {
        Self::InnerMessage(message)
    }
}

/// The kind of a qdisc or filter.
fn kind(message: &TcMessage) -> Option<&str> {
    message.attributes.iter().find_map(|it| match it {
        TcAttribute::Kind(kind) => Some(kind.as_str()),
        _ => None,
    })
}

/// Lists qdiscs or filters; none if the kernel has neither.
fn dump(number: u16, header: TcHeader) -> Result<Vec<TcMessage>> {
    let request = Message {
        number,
        inner: TcMessage::from_parts(header, Vec::new()),
    };
    match ask_all(NETLINK_ROUTE, request, NLM_F_DUMP) {
        Ok(all) => Ok(all.into_iter().map(|message| message.inner).collect()),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

fn change(number: u16, flags: u16, inner: TcMessage) -> io::Result<()> {
    let request = Message { number, inner };
    ask_all(NETLINK_ROUTE, request, NLM_F_ACK | flags).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message as the kernel sends it: header, kind, options.
    fn listed(kind: &str, options: &[u8]) -> Vec<u8> {
        let place = FilterId {
            index: 3,
            way: Way::Out,
            priority: 17,
            handle: 0x7477,
        };
        let mut bytes = vec![0; HEADER];
        header_of(place).emit(&mut bytes);
        for (number, value) in [
            (KIND, [kind.as_bytes(), &[0]].concat()),
            (OPTIONS, options.to_vec()),
        ] {
            let length = 4 + value.len();
            bytes.extend((length as u16).to_ne_bytes());
            bytes.extend(number.to_ne_bytes());
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Filter, DecodeError> {
        let header = NetlinkHeader::default();
        Message::deserialize(&header, bytes).map(|message| describe(&message.inner, Way::Out))
    }

    #[test]
    fn filters_are_read_and_those_of_other_kinds_are_only_placed() {
        // TCA_BPF_NAME.
        let named = read(&listed("bpf", b"\x09\x00\x07\x00name\0\0\0\0")).unwrap();
        assert_eq!(named.name.as_deref(), Some("name"));
        assert_eq!((named.place.priority, named.place.handle), (17, 0x7477));
        // A filter with options that the library cannot read is not twheel's.
        for kind in ["u32", "flower", "unheard-of"] {
            let other = read(&listed(kind, &[0xff; 7])).unwrap();
            assert_eq!((other.name, other.place), (None, named.place));
        }
        assert!(read(&[0; HEADER - 1]).is_err());
    }
}
