//! A path between two hosts that takes its time: a third one in the middle, which passes frames on by hand, since the
//! kernel may lack netem.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    ffi::CString,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    netns::Namespace,
    pair::{CLIENT, Family, SERVER},
};

/// What the path does to frames.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// How long each takes.
    pub delay: Duration,
    /// Every so many are overtaken by those behind them.
    pub overtaken: u64,
    /// How much longer these take.
    pub longer: Duration,
}

/// Two hosts and a path. Their interfaces are those of [`crate::pair::Pair`].
pub struct Path {
    forwarder: Option<JoinHandle<Result<()>>>,
    stop: Arc<AtomicBool>,
    /// Has the interface [`CLIENT`].
    pub client: Namespace,
    /// Has the interface [`SERVER`].
    pub server: Namespace,
    _middle: Namespace,
}

impl Path {
    /// Makes it.
    pub fn new(manner: Manner) -> Result<Self> {
        let (client, server, middle) = (
            Namespace::new("client")?,
            Namespace::new("server")?,
            Namespace::new("middle")?,
        );
        for (host, interface, end, number) in
            [(&client, CLIENT, "left", 1), (&server, SERVER, "right", 2)]
        {
            host.ip(&format!(
                "link add {interface} type veth peer name {end} netns {}",
                middle.name()
            ))?;
            host.ip(&format!("link set {interface} up"))?;
            middle.enter(|| {
                std::fs::write(format!("/proc/sys/net/ipv6/conf/{end}/disable_ipv6"), "1")
                    .context("no sysctl")
            })?;
            middle.ip(&format!("link set {end} up"))?;
            for (family, length) in [(Family::V4, 24), (Family::V6, 64)] {
                let address = if number == 1 {
                    family.client()
                } else {
                    family.server()
                };
                host.add_address(address, length, interface)?;
            }
            // Frames as they are on a wire: whole segments with their checksums.
            host.enter(|| whole_frames(interface))?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let all = libc::ETH_P_ALL as u16;
        let ends = middle.enter(|| Ok([open("left", all)?, open("right", all)?]))?;
        let forwarder = thread::spawn({
            let stop = stop.clone();
            move || forward(&ends, manner, &stop)
        });
        Ok(Self {
            forwarder: Some(forwarder),
            stop,
            client,
            server,
            _middle: middle,
        })
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(forwarder) = self.forwarder.take() {
            match forwarder.join() {
                Ok(Ok(())) => {}
                other => eprintln!("the path broke: {other:?}"),
            }
        }
    }
}

/// Turns off what leaves segmentation and checksums to the other end (`ethtool -K`).
fn whole_frames(interface: &str) -> Result<()> {
    // Transmit checksums, scatter/gather, TSO, GSO: `linux/ethtool.h`.
    const ALL: [u32; 4] = [0x17, 0x19, 0x1f, 0x24];
    ALL.into_iter()
        .try_for_each(|command| offload(interface, command, false))
}

/// Sets one of the offloads of an interface of this namespace, by its number in `linux/ethtool.h`.
pub fn offload(interface: &str, command: u32, on: bool) -> Result<()> {
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    // SAFETY: a descriptor that nobody else has.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        ensure!(fd >= 0, "no socket");
        OwnedFd::from_raw_fd(fd)
    };
    let mut value = [command, on.into()];
    // SAFETY: all zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
    // SAFETY: the request and what it points to live as long as the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    ensure!(
        result == 0,
        "cannot set {interface}'s offloads: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}

/// How many frames this socket of [`open`] has had since it was last asked, those included for which it had no room.
pub fn arrived(socket: &OwnedFd) -> Result<u64> {
    let mut stats = libc::tpacket_stats {
        tp_packets: 0,
        tp_drops: 0,
    };
    let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
    // SAFETY: the option's value is of that type and that long, and alive.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut stats).cast(),
            &raw mut length,
        )
    };
    ensure!(result == 0, "{}", std::io::Error::last_os_error());
    Ok(stats.tp_packets.into())
}

/// Sends a frame by a socket of [`open`], as soon as the other end has room for it.
pub fn send(socket: &OwnedFd, frame: &[u8]) -> Result<()> {
    loop {
        // SAFETY: the frame is as long as it says.
        let sent = unsafe { libc::send(socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent == frame.len() as isize {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        ensure!(
            matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN)),
            "a frame was not sent: {error}"
        );
        thread::yield_now();
    }
}

/// The frames of a protocol, `ETH_P_…`, that come in on an interface of this namespace.
pub fn open(interface: &str, protocol: u16) -> Result<OwnedFd> {
    let protocol = protocol.to_be();
    let name = CString::new(interface)?;
    // SAFETY: plain calls with buffers of their own; the descriptor is nobody else's.
    unsafe {
        let fd = libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            protocol.into(),
        );
        ensure!(fd >= 0, "no packet socket");
        let fd = OwnedFd::from_raw_fd(fd);
        let one = 1i32;
        let set = |option| {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_PACKET,
                option,
                (&raw const one).cast(),
                size_of::<i32>() as libc::socklen_t,
            )
        };
        ensure!(
            set(libc::PACKET_IGNORE_OUTGOING) == 0,
            "cannot leave out what goes out"
        );
        let size = 8 << 20;
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            (&raw const size).cast(),
            size_of::<i32>() as libc::socklen_t,
        );
        let mut address: libc::sockaddr_ll = std::mem::zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = libc::if_nametoindex(name.as_ptr()) as i32;
        let bound = libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        );
        ensure!(bound == 0, "cannot bind to {interface}");
        Ok(fd)
    }
}

/// Passes frames on until it is told to stop.
fn forward(ends: &[OwnedFd; 2], manner: Manner, stop: &AtomicBool) -> Result<()> {
    let mut under_way = BinaryHeap::new();
    let mut buffer = vec![0u8; 1 << 16];
    let mut number = 0u64;
    while !stop.load(Relaxed) {
        let mut polled = ends.each_ref().map(|end| libc::pollfd {
            fd: end.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: an array of so many.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, 1) };
        for (from, end) in ends.iter().enumerate() {
            loop {
                // SAFETY: the buffer is as long as it says.
                let length = unsafe {
                    libc::recv(end.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0)
                };
                let Ok(length) = usize::try_from(length) else {
                    break;
                };
                number += 1;
                let mut due = Instant::now() + manner.delay;
                if number.is_multiple_of(manner.overtaken) {
                    due += manner.longer;
                }
                under_way.push(Reverse((due, number, 1 - from, buffer[..length].to_vec())));
            }
        }
        while under_way
            .peek()
            .is_some_and(|Reverse((due, ..))| *due <= Instant::now())
        {
            let Some(Reverse((_, _, to, frame))) = under_way.pop() else {
                break;
            };
            send(&ends[to], &frame)?;
        }
    }
    Ok(())
}
