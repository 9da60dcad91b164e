//! A path with delay between two hosts: a third host in the middle, where this program forwards
//! each frame, since the kernel may lack netem.

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
    /// The delay of each frame.
    pub delay: Duration,
    /// One frame in this many is overtaken by those behind it.
    pub overtaken: u64,
    /// The additional delay of these frames.
    pub longer: Duration,
}

/// Two hosts and the path between them. Their interfaces have the names that [`crate::pair::Pair`]
/// gives.
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
    /// Makes the hosts and the path.
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
            // Frames must be as on a wire: whole segments with their checksums.
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

/// Turns off the offloads that leave segmentation and checksums to the other end (`ethtool -K`).
fn whole_frames(interface: &str) -> Result<()> {
    // Transmit checksums, scatter/gather, TSO, GSO: `linux/ethtool.h`.
    const ALL: [u32; 4] = [0x17, 0x19, 0x1f, 0x24];
    ALL.into_iter()
        .try_for_each(|command| offload(interface, command, false))
}

/// Sets an offload of an interface in this namespace, by its number in `linux/ethtool.h`.
pub fn offload(interface: &str, command: u32, on: bool) -> Result<()> {
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    // SAFETY: the call returns a new descriptor, and nothing else owns it.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        ensure!(fd >= 0, "no socket");
        OwnedFd::from_raw_fd(fd)
    };
    let mut value = [command, on.into()];
    // SAFETY: all-zero bytes are a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
    // SAFETY: the request and what it points to outlive the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    ensure!(
        result == 0,
        "cannot set {interface}'s offloads: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}

/// How many frames have arrived at this socket of [`open`] since the last call, including those
/// that were dropped because its buffer was full.
pub fn arrived(socket: &OwnedFd) -> Result<u64> {
    let mut stats = libc::tpacket_stats {
        tp_packets: 0,
        tp_drops: 0,
    };
    let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
    // SAFETY: the option's value has that type and length, and outlives the call.
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

/// Sends a frame on a socket of [`open`], as soon as the other end has room for it.
pub fn send(socket: &OwnedFd, frame: &[u8]) -> Result<()> {
    loop {
        // SAFETY: the frame is as long as its slice says.
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

/// A socket for the frames of a protocol, `ETH_P_…`, that arrive at an interface of this namespace.
pub fn open(interface: &str, protocol: u16) -> Result<OwnedFd> {
    let protocol = protocol.to_be();
    let name = CString::new(interface)?;
    // SAFETY: plain calls with local buffers; nothing else owns the descriptor.
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

/// Forwards frames until `stop` is set.
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
        // SAFETY: the array has two elements, as passed.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, 1) };
        for (from, end) in ends.iter().enumerate() {
            loop {
                // SAFETY: the buffer is as long as passed.
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
