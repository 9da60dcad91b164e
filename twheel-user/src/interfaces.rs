//! The interfaces of this network namespace, as the kernel describes them over netlink. None of
//! this needs privileges.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs, mem,
    os::fd::AsRawFd,
    path::Path,
};

use anyhow::{Context, Result};
use netlink_packet_core::{
    DecodeError, Emitable, NLM_F_ACK, NLM_F_DUMP, NlasIterator, ParseableParametrized, parse_u32,
    parse_u64,
};
use netlink_packet_generic::{
    GenlFamily, GenlHeader, GenlMessage,
    ctrl::{GenlCtrl, GenlCtrlCmd, nlas::GenlCtrlAttrs},
};
use netlink_packet_route::{
    AddressFamily as Family, RouteNetlinkMessage,
    link::{
        InfoBridge, InfoData, InfoVlan, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage,
        LinkXdp,
    },
};
use netlink_sys::constants::{NETLINK_GENERIC, NETLINK_ROUTE};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use twheel_common::config::Watched;

use crate::{
    failure::{Failure, Kind},
    netlink::ask_all,
};

/// `NETLINK_GENERIC`'s `netdev` family, `include/uapi/linux/netdev.h`; since Linux 6.3.
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
const NETDEV_XDP_ACT_BASIC: u64 = 1;
/// `ETHTOOL_GFLAGS` and `ETH_FLAG_RXVLAN`, `include/uapi/linux/ethtool.h`.
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETH_FLAG_RXVLAN: u32 = 1 << 8;
/// The link types (`ARPHRD_*`, `include/uapi/linux/if_arp.h`) that twheel reads, with what their
/// packets begin with.
const LAYERS: [(u16, LinkLayer); 10] = [
    (libc::ARPHRD_ETHER, LinkLayer::Ethernet),
    // With link-layer addresses of all zeros.
    (libc::ARPHRD_LOOPBACK, LinkLayer::Ethernet),
    // WireGuard, tun.
    (libc::ARPHRD_NONE, LinkLayer::Ip),
    (libc::ARPHRD_PPP, LinkLayer::Ip),
    // ipip.
    (libc::ARPHRD_TUNNEL, LinkLayer::Ip),
    (libc::ARPHRD_TUNNEL6, LinkLayer::Ip),
    (libc::ARPHRD_SIT, LinkLayer::Ip),
    (libc::ARPHRD_IPGRE, LinkLayer::Ip),
    (ARPHRD_IP6GRE, LinkLayer::Ip),
    (ARPHRD_RAWIP, LinkLayer::Ip),
];
const ARPHRD_RAWIP: u16 = 519;
const ARPHRD_IP6GRE: u16 = 823;

/// What the packets of an interface begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// An Ethernet header.
    Ethernet,
    /// The IP header.
    Ip,
}

impl LinkLayer {
    /// From the link type (`ARPHRD_*`). `None`: twheel does not read this type.
    pub fn from_type(link_type: u16) -> Option<Self> {
        let found = LAYERS.iter().find(|(number, _)| *number == link_type);
        found.map(|(_, layer)| *layer)
    }
}

/// What the packets of an interface begin with.
///
/// # Errors
///
/// [`Kind::Interface`]: there is no such interface, or twheel cannot read what its packets begin
/// with.
pub fn link_layer(interface: &str) -> Result<LinkLayer> {
    one(interface)?.layer()
}

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its number.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// In bytes.
    pub mtu: u32,
    /// The number of the bridge or bond that it is a port of.
    pub master: Option<u32>,
    /// The number of the interface that it is stacked on (as a VLAN or a macvlan is), or of the
    /// other end of a veth pair; `None` if that is in another network namespace.
    pub lower: Option<u32>,
    /// The identifier, if it is a VLAN device.
    pub vlan: Option<u16>,
    /// It is a bridge with VLAN filtering.
    pub filters_vlans: bool,
    /// It is a loopback interface: its packets stay on this host.
    pub loopback: bool,
    /// What its packets begin with; `None`: twheel does not read them.
    pub layer: Option<LinkLayer>,
    /// The link type, by name and number (`ARPHRD_*`).
    pub link_type: String,
    /// The driver, or the kind of virtual interface; `None` if the kernel does not tell.
    pub driver: Option<String>,
    /// Whether the driver supports XDP; `None` if the kernel does not tell.
    pub native: Option<bool>,
    /// The XDP programs that are attached: mode and program id.
    pub xdp: Vec<(&'static str, u32)>,
}

impl Interface {
    /// From a netlink message; `None` if it does not describe the interface itself.
    pub fn from_message(message: &LinkMessage) -> Option<Self> {
        // A bridge describes its ports in messages of its own family.
        let is_own = message.header.interface_family == Family::Unspec;
        is_own.then(|| describe(message, &HashMap::new()))
    }

    /// What its packets begin with, as flags for the programs: [`Watched::IS_IP`],
    /// [`Watched::IS_DECRYPTED`].
    pub fn flags(&self) -> u8 {
        let is_decrypted = matches!(self.driver.as_deref(), Some("vti" | "vti6" | "xfrm"));
        match (self.layer, is_decrypted) {
            (Some(LinkLayer::Ip), true) => Watched::IS_IP | Watched::IS_DECRYPTED,
            (Some(LinkLayer::Ip), false) => Watched::IS_IP,
            _ => 0,
        }
    }

    /// What its packets begin with.
    ///
    /// # Errors
    ///
    /// [`Kind::Interface`]: twheel cannot read it.
    pub fn layer(&self) -> Result<LinkLayer> {
        self.layer.ok_or_else(|| {
            let message = format!(
                "{} has type {}, which twheel does not support: give an interface whose packets \
                 begin with an Ethernet or IP header",
                self.name, self.link_type
            );
            Failure::new(Kind::Interface, message).into()
        })
    }

    /// Whether it is stacked on another interface. An end of a veth pair also names one, but is not
    /// stacked on it.
    fn is_upon(&self, other: u32) -> bool {
        const UPON: [&str; 6] = ["vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec"];
        let driver = self.driver.as_deref();
        self.lower == Some(other) && driver.is_some_and(|it| UPON.contains(&it))
    }

    /// Whether this interface is the other's bridge or bond, or is stacked on it.
    pub fn is_above(&self, other: &Self) -> bool {
        other.master == Some(self.index) || self.is_upon(other.index)
    }

    /// Whether it is a VLAN device.
    pub fn is_vlan(&self) -> bool {
        self.driver.as_deref() == Some("vlan")
    }
}

/// A change to an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The interface exists, with these properties.
    Is(Box<Interface>),
    /// The interface with this number no longer exists, or is in another network namespace.
    Gone(u32),
}

/// The interfaces of this network namespace as they were last reported. Kept so that they need not
/// all be queried whenever twheel attaches to one.
#[derive(Debug)]
pub struct Known(BTreeMap<u32, Interface>);

impl Known {
    /// Queries the interfaces as they are now.
    ///
    /// # Errors
    ///
    /// As [`all`].
    pub fn read() -> Result<Self> {
        let all = all()?.into_iter().map(|it| (it.index, it));
        Ok(Self(all.collect()))
    }

    /// Stores a reported change.
    pub fn note(&mut self, change: &Change) {
        match change {
            Change::Is(it) => self.0.insert(it.index, (**it).clone()),
            Change::Gone(index) => self.0.remove(index),
        };
    }

    /// An interface, by its number.
    pub fn get(&self, index: u32) -> Option<&Interface> {
        self.0.get(&index)
    }

    /// All interfaces, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = &Interface> {
        self.0.values()
    }

    /// Whether tagged frames pass an interface, as far as is known: a VLAN device or a bridge with
    /// VLAN filtering is above it, directly or with other interfaces in between.
    pub fn is_tagged(&self, interface: &Interface) -> bool {
        let (mut seen, mut next) = (HashSet::from([interface.index]), vec![interface]);
        while let Some(below) = next.pop() {
            for above in self.iter().filter(|it| it.is_above(below)) {
                if above.is_vlan() || above.filters_vlans {
                    return true;
                }
                if seen.insert(above.index) {
                    next.push(above);
                }
            }
        }
        false
    }

    /// Queries the interfaces that are now above this one.
    pub fn above(&self, below: &Interface) -> Vec<Interface> {
        let above = self.iter().filter(|it| it.is_above(below));
        above.filter_map(|it| by_index(it.index).ok()).collect()
    }
}

/// Queries an interface by its name.
///
/// # Errors
///
/// [`Kind::Interface`]: this network namespace has no interface of this name.
pub fn one(interface: &str) -> Result<Interface> {
    let mut message = LinkMessage::default();
    let name = LinkAttribute::IfName(interface.to_owned());
    message.attributes.push(name);
    let missing = || {
        let message =
            format!("there is no interface {interface}: `ip link` lists those that exist");
        Failure::new(Kind::Interface, message)
    };
    // The kernel rejects a request with an impossible name.
    if interface.is_empty() || interface.len() >= libc::IFNAMSIZ {
        return Err(missing().into());
    }
    // An interface may have alternative names, too.
    let found = query(message).with_context(missing)?;
    match found.name == interface {
        true => Ok(found),
        false => Err(missing().into()),
    }
}

/// Queries an interface by its number.
///
/// # Errors
///
/// There is no such interface.
pub fn by_index(index: u32) -> Result<Interface> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    query(message)
}

fn query(message: LinkMessage) -> Result<Interface> {
    let request = RouteNetlinkMessage::GetLink(message);
    let answers = ask_all(NETLINK_ROUTE, request, NLM_F_ACK)?;
    let link = answers.into_iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewLink(link) => Some(link),
        _ => None,
    });
    let link = link.context("the kernel did not describe the interface")?;
    let native = native(Some(link.header.index)).unwrap_or_default();
    Ok(describe(&link, &native))
}

/// Queries all interfaces.
///
/// # Errors
///
/// The kernel does not answer, or its answer cannot be read.
pub fn all() -> Result<Vec<Interface>> {
    let answers = ask_all(
        NETLINK_ROUTE,
        RouteNetlinkMessage::GetLink(LinkMessage::default()),
        NLM_F_DUMP,
    )
    .context("cannot list the interfaces")?;
    // Older kernels cannot tell.
    let native = native(None).unwrap_or_default();
    let found = answers.into_iter().filter_map(|answer| match answer {
        RouteNetlinkMessage::NewLink(link) => Some(describe(&link, &native)),
        _ => None,
    });
    Ok(found.collect())
}

fn describe(message: &LinkMessage, native: &HashMap<u32, bool>) -> Interface {
    let header = &message.header;
    let link_type = u16::from(header.link_layer_type);
    let mut interface = Interface {
        index: header.index,
        loopback: header.link_layer_type == LinkLayerType::Loopback,
        layer: LinkLayer::from_type(link_type),
        link_type: format!("{:?} ({link_type})", header.link_layer_type),
        native: native.get(&header.index).copied(),
        ..Interface::default()
    };
    let (mut bus, mut device) = (None, None);
    let mut is_elsewhere = false;
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
            LinkAttribute::Controller(index) => interface.master = Some(*index),
            LinkAttribute::Link(index) => interface.lower = Some(*index),
            LinkAttribute::LinkNetNsId(_) => is_elsewhere = true,
            LinkAttribute::LinkInfo(infos) => {
                interface.driver = infos.iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind.to_string()),
                    _ => None,
                });
                interface.vlan = infos.iter().find_map(|info| match info {
                    LinkInfo::Data(InfoData::Vlan(told)) => told.iter().find_map(|it| match it {
                        InfoVlan::Id(vlan) => Some(*vlan),
                        _ => None,
                    }),
                    _ => None,
                });
                interface.filters_vlans = infos.iter().any(|info| match info {
                    LinkInfo::Data(InfoData::Bridge(told)) => {
                        told.contains(&InfoBridge::VlanFiltering(true))
                    }
                    _ => false,
                });
            }
            LinkAttribute::ParentDevBusName(name) => bus = Some(name),
            LinkAttribute::ParentDevName(name) => device = Some(name),
            LinkAttribute::Xdp(attributes) => {
                let programs = attributes.iter().filter_map(|attribute| match *attribute {
                    LinkXdp::DrvProgId(id) => Some(("native", id)),
                    LinkXdp::SkbProgId(id) => Some(("generic", id)),
                    LinkXdp::HwProgId(id) => Some(("hardware", id)),
                    _ => None,
                });
                interface.xdp = programs.collect();
            }
            _ => {}
        }
    }
    // The number belongs to another network namespace, so it has no meaning here.
    if is_elsewhere {
        interface.lower = None;
    }
    // By the device, because /sys/class/net shows the interfaces of the namespace in which /sys was
    // mounted.
    if let (None, Some(bus), Some(device)) = (&interface.driver, bus, device) {
        let devices = Path::new("/sys/bus").join(bus).join("devices");
        interface.driver = fs::read_link(devices.join(device).join("driver"))
            .ok()
            .and_then(|driver| Some(driver.file_name()?.to_string_lossy().into_owned()));
    }
    interface
}

/// Whether a card takes the VLAN tag out of incoming frames (`rx-vlan-offload`). If the kernel does
/// not tell, `false`.
pub fn strips_vlan_tags(interface: &str) -> bool {
    /// `struct ethtool_value`.
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let ask = || -> nix::Result<u32> {
        let socket = socket(
            AddressFamily::Inet,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        let mut value = Value {
            command: ETHTOOL_GFLAGS,
            data: 0,
        };
        // SAFETY: all-zero bytes are a valid request.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        // The last byte stays 0.
        let room = request.ifr_name.len() - 1;
        for (to, from) in request.ifr_name[..room].iter_mut().zip(interface.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = (&raw mut value).cast();
        // SAFETY: the request is the one that this call takes, and points to a value that outlives
        // it.
        let result =
            unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
        nix::errno::Errno::result(result)?;
        Ok(value.data)
    };
    ask().is_ok_and(|flags| flags & ETH_FLAG_RXVLAN != 0)
}

/// Whether an interface's driver supports XDP, by interface number; for one interface, or for all.
fn native(index: Option<u32>) -> Result<HashMap<u32, bool>> {
    let controller = GenlCtrl {
        cmd: GenlCtrlCmd::GetFamily,
        nlas: vec![GenlCtrlAttrs::FamilyName(Netdev::family_name().to_owned())],
    };
    let families = ask_all(
        NETLINK_GENERIC,
        GenlMessage::from_payload(controller),
        NLM_F_ACK,
    )?;
    let family = families
        .iter()
        .flat_map(|answer| &answer.payload.nlas)
        .find_map(|attribute| match attribute {
            GenlCtrlAttrs::FamilyId(id) => Some(*id),
            _ => None,
        })
        .context("the kernel has no netlink family netdev")?;
    let asked = Netdev {
        index: index.unwrap_or_default(),
        ..Netdev::default()
    };
    let flag = match index {
        Some(_) => NLM_F_ACK,
        None => NLM_F_DUMP,
    };
    let mut request = GenlMessage::from_payload(asked);
    request.set_resolved_family_id(family);
    let answers = ask_all(NETLINK_GENERIC, request, flag)?;
    let devices = answers.into_iter().map(|answer| answer.payload);
    Ok(devices
        .map(|it| (it.index, it.features & NETDEV_XDP_ACT_BASIC != 0))
        .collect())
}

/// What the `netdev` family says of an interface. In a request, the interface's number, or 0 for
/// all.
#[derive(Clone, Debug, Default)]
struct Netdev {
    index: u32,
    features: u64,
}

impl GenlFamily for Netdev {
    fn family_name() -> &'static str {
        "netdev"
    }

    fn command(&self) -> u8 {
        NETDEV_CMD_DEV_GET
    }

    fn version(&self) -> u8 {
        1
    }
}

impl Emitable for Netdev {
    fn buffer_len(&self) -> usize {
        match self.index {
            0 => 0,
            _ => 8,
        }
    }

    fn emit(&self, bytes: &mut [u8]) {
        if self.index != 0 {
            let length = 8_u16.to_ne_bytes();
            let kind = NETDEV_A_DEV_IFINDEX.to_ne_bytes();
            bytes[..2].copy_from_slice(&length);
            bytes[2..4].copy_from_slice(&kind);
            bytes[4..8].copy_from_slice(&self.index.to_ne_bytes());
        }
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Netdev {
    fn parse_with_param(bytes: &[u8], _: GenlHeader) -> Result<Self, DecodeError> {
        let mut device = Self::default();
        for attribute in NlasIterator::new(bytes) {
            let attribute = attribute?;
            match attribute.kind() {
                NETDEV_A_DEV_IFINDEX => device.index = parse_u32(attribute.value())?,
                NETDEV_A_DEV_XDP_FEATURES => device.features = parse_u64(attribute.value())?,
                _ => {}
            }
        }
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_there_and_takes_no_native_program() {
        let all = all().unwrap();
        let lo = all.iter().find(|it| it.name == "lo").unwrap();
        assert!(lo.loopback, "{lo:?}");
        assert_eq!(lo.layer, Some(LinkLayer::Ethernet), "{lo:?}");
        assert_ne!(lo.native, Some(true), "{lo:?}");
        assert_eq!(link_layer("lo").unwrap(), LinkLayer::Ethernet);
        assert_eq!(one("lo").unwrap(), *lo);
        assert_eq!(by_index(lo.index).unwrap(), *lo);
        for name in ["", "no such", "a name that is too long"] {
            assert!(one(name).is_err(), "{name}");
        }
        assert!(by_index(u32::MAX >> 1).is_err());
        assert!(!strips_vlan_tags("no such interface"));
    }

    #[test]
    fn tags_pass_what_vlans_lie_on() {
        let link = |index, lower, master| Interface {
            index,
            lower,
            master,
            ..Interface::default()
        };
        let vlan = Interface {
            driver: Some("vlan".to_owned()),
            ..link(5, Some(4), None)
        };
        let bridge = Interface {
            filters_vlans: true,
            ..link(8, None, None)
        };
        // A member of a bond with a VLAN on it, a port of a VLAN-filtering bridge, and a port of a
        // plain bridge.
        let links = [
            link(2, None, Some(4)),
            link(4, None, None),
            vlan,
            link(7, None, Some(8)),
            bridge,
            link(9, None, Some(10)),
            link(10, None, None),
        ];
        let known = Known(links.iter().cloned().map(|it| (it.index, it)).collect());
        let tagged: Vec<_> = links.iter().filter(|it| known.is_tagged(it)).collect();
        let tagged: Vec<_> = tagged.iter().map(|it| it.index).collect();
        assert_eq!(tagged, [2, 4, 7]);
    }

    #[test]
    fn link_types_are_read_or_refused() {
        use LinkLayer::{Ethernet, Ip};
        for (link_type, layer) in [
            (1, Some(Ethernet)),
            (772, Some(Ethernet)),
            (65534, Some(Ip)),
            (512, Some(Ip)),
            (519, Some(Ip)),
            (768, Some(Ip)),
            (769, Some(Ip)),
            (776, Some(Ip)),
            (778, Some(Ip)),
            (823, Some(Ip)),
            // InfiniBand, CAN, IEEE 802.11, IEEE 802.15.4, netlink, 6LoWPAN.
            (32, None),
            (280, None),
            (801, None),
            (804, None),
            (824, None),
            (825, None),
        ] {
            assert_eq!(LinkLayer::from_type(link_type), layer, "{link_type}");
        }
    }
}
