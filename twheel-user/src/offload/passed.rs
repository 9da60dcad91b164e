//! Reads which sockets a program has passed, while they are still in its packet. A BPF program follows
//! the kernel's pointers from the connection to the first packet that waits there, and from that to
//! the sockets. So twheel needs no descriptors for them, and no system calls for each; nor does it
//! wait for a socket that is locked.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
};

use anyhow::{Context as _, Result};
use aya_obj::generated::{BPF_PSEUDO_MAP_VALUE, bpf_func_id, bpf_prog_type};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socket, socketpair,
};
use twheel_client::protocol::SOCKETS;
use zerocopy::IntoBytes as _;

use super::rights::Passed;
use crate::{
    bpf::{self, Code, instruction},
    btf::Btf,
    mapped::ReadOnly,
};

/// The loaded program.
pub struct SocketReader {
    program: OwnedFd,
    shape: Shape,
    /// What it writes: a report for each passed file.
    reports: ReadOnly,
    /// Where the kernel has the network namespace that is watched, …
    namespace: u64,
    /// … for as long as a socket of it is open.
    _own: OwnedFd,
}

/// Offsets in the kernel's structures, bytes.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// From a thread to its table of files.
    files: i32,
    fdt: i32,
    fd: i32,
    /// From a file to its socket.
    f_op: i32,
    private_data: i32,
    kind: i32,
    sk: i32,
    /// From a Unix socket to the files of its first packet.
    queue: i32,
    next: i32,
    passed: i32,
    count: i32,
    first: i32,
    /// Of a socket.
    protocol: i32,
    common: Common,
}

/// Offsets in a `struct sock_common`, with which a `struct sock` begins. All that is needed is in its
/// first [`bytes`](Self::bytes).
#[derive(Clone, Copy, Debug)]
struct Common {
    family: usize,
    state: usize,
    local: usize,
    remote: usize,
    local_v6: usize,
    remote_v6: usize,
    local_port: usize,
    remote_port: usize,
    namespace: usize,
    cookie: usize,
    bytes: usize,
}

const WORD: usize = size_of::<u64>();
/// Most bytes of a `struct sock_common`.
const MOST: usize = 192;
/// Bytes of a report before the `struct sock_common`, which it has twice: the socket's type and its
/// protocol. All of them are 0 if the file is no socket.
const HEAD: usize = WORD;

impl SocketReader {
    /// Loads the program, for sockets of this thread's network namespace.
    ///
    /// # Errors
    ///
    /// The kernel cannot run it, or is another than expected.
    pub fn open() -> Result<Self> {
        let btf = Btf::of_kernel().context("the kernel does not tell its BTF")?;
        let shape = Shape::of(&btf).context("the kernel's sockets have another shape")?;
        let bytes = SOCKETS * shape.common.report();
        let memory = bpf::make_memory("twheel_reports", bytes as u32);
        let memory = memory.context("the kernel refuses a map")?;
        let code = Code {
            kind: bpf_prog_type::BPF_PROG_TYPE_RAW_TRACEPOINT,
            attach: 0,
            flags: 0,
            instructions: &code(&shape, memory.as_fd()),
        };
        let program =
            bpf::load("twheel_sockets", &code).context("the kernel refuses the program")?;
        let flags = SockFlag::SOCK_CLOEXEC;
        let own = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
        let mut reader = Self {
            program,
            shape,
            reports: ReadOnly::new(memory, 0, bytes).context("cannot map a map")?,
            namespace: 0,
            _own: own,
        };
        reader.namespace = reader
            .own_namespace()
            .context("its own socket is missing")?;
        Ok(reader)
    }

    /// Passes its own socket to itself, and reads it. `None`: it finds something else.
    fn own_namespace(&self) -> Option<u64> {
        let (from, to) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .ok()?;
        let descriptors = [self._own.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&descriptors)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(from.as_raw_fd(), &[], &rights, flags, None).ok()?;
        let count = self.run(to.as_fd())?;
        let report = self.report(0);
        let report = Report(&report, &self.shape.common);
        (count == 1 && report.is_tcp()).then(|| report.namespace())
    }

    /// Reads what was passed with the first packet that waits at a Unix socket: those files that are
    /// established TCP connections of the namespace, and whose cookie somebody has asked for
    /// (`SO_COOKIE`), in the order in which they were passed; `None` for each other. It takes none of
    /// them from the packet. `None`: they cannot be read.
    ///
    /// The packet must be known to wait there, and nobody else may receive it meanwhile.
    pub fn read(&self, connection: BorrowedFd<'_>) -> Option<Vec<Option<Passed>>> {
        let count = self.run(connection)?;
        let read = |at| {
            let report = self.report(at);
            let report = Report(&report, &self.shape.common);
            let is_here = report.is_tcp() && report.namespace() == self.namespace;
            is_here.then(|| report.passed())?
        };
        Some((0..count).map(read).collect())
    }

    /// Has the program report. Returns how many files there are.
    fn run(&self, connection: BorrowedFd<'_>) -> Option<usize> {
        let descriptor = connection.as_raw_fd().unsigned_abs();
        let count = bpf::run(self.program.as_fd(), &[descriptor.into()]);
        let count = count.inspect_err(|error| log::debug!("cannot read passed sockets: {error}"));
        let count = count.ok()? as usize;
        (count <= SOCKETS).then_some(count)
    }

    fn report(&self, at: usize) -> [u64; (HEAD + 2 * MOST) / WORD] {
        let words = self.shape.common.report() / WORD;
        let mut report = [0; _];
        for (to, word) in report[..words].iter_mut().zip(at * words..) {
            *to = self.reports.load(word);
        }
        report
    }
}

/// What the program writes for a file.
struct Report<'a>(&'a [u64], &'a Common);

impl Report<'_> {
    fn is_tcp(&self) -> bool {
        let [kind, protocol] = [0, 2].map(|at| u16::from_ne_bytes(self.bytes(at)));
        (i32::from(kind), i32::from(protocol)) == (libc::SOCK_STREAM, libc::IPPROTO_TCP)
    }

    /// The address of its network namespace in the kernel.
    fn namespace(&self) -> u64 {
        u64::from_ne_bytes(self.bytes(HEAD + self.1.namespace))
    }

    /// `None`: it is not established, nobody has asked for its cookie, or it changes.
    fn passed(&self) -> Option<Passed> {
        /// `TCP_ESTABLISHED` of `include/net/tcp_states.h`.
        const ESTABLISHED: u8 = 1;
        let Self(words, common) = *self;
        // Its owner may connect it elsewhere meanwhile. Read twice with the same result, it is of one
        // connection, unless both readings were interrupted at the same place for as long as that
        // takes.
        let bytes = common.bytes / WORD;
        let (once, again) = words[HEAD / WORD..].split_at(bytes);
        if once != &again[..bytes] {
            return None;
        }
        let [state] = self.bytes(HEAD + common.state);
        let (local, remote) = match u16::from_ne_bytes(self.bytes(HEAD + common.family)).into() {
            libc::AF_INET => (self.v4(HEAD + common.local), self.v4(HEAD + common.remote)),
            libc::AF_INET6 => (
                self.v6(HEAD + common.local_v6),
                self.v6(HEAD + common.remote_v6),
            ),
            _ => return None,
        };
        let local_port = u16::from_ne_bytes(self.bytes(HEAD + common.local_port));
        let remote_port = u16::from_be_bytes(self.bytes(HEAD + common.remote_port));
        let cookie = u64::from_ne_bytes(self.bytes(HEAD + common.cookie));
        let is_whole = state == ESTABLISHED
            && ![local, remote].iter().any(IpAddr::is_unspecified)
            && ![local_port, remote_port].contains(&0);
        (is_whole && cookie != 0).then(|| Passed {
            local: SocketAddr::new(local, local_port),
            remote: SocketAddr::new(remote, remote_port),
            cookie,
        })
    }

    fn v4(&self, at: usize) -> IpAddr {
        Ipv4Addr::from(self.bytes::<4>(at)).into()
    }

    fn v6(&self, at: usize) -> IpAddr {
        IpAddr::from(Ipv6Addr::from(self.bytes::<16>(at))).to_canonical()
    }

    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        *self.0.as_bytes()[at..]
            .first_chunk()
            .expect("a report is as long")
    }
}

impl Shape {
    /// Of the running kernel; `None` if it is another than this file expects.
    fn of(btf: &Btf) -> Option<Self> {
        // A `struct sock` begins with its `struct sock_common`.
        if btf.offset("sock", "__sk_common") != Some(0) {
            return None;
        }
        let of = |structure, member| i32::try_from(btf.offset(structure, member)?).ok();
        Some(Self {
            files: of("task_struct", "files")?,
            fdt: of("files_struct", "fdt")?,
            fd: of("fdtable", "fd")?,
            f_op: of("file", "f_op")?,
            private_data: of("file", "private_data")?,
            kind: of("socket", "type")?,
            sk: of("socket", "sk")?,
            queue: of("sock", "sk_receive_queue")?,
            next: of("sk_buff_head", "next")?,
            // `UNIXCB` of `include/net/af_unix.h`.
            passed: of("sk_buff", "cb")? + of("unix_skb_parms", "fp")?,
            count: of("scm_fp_list", "count")?,
            first: of("scm_fp_list", "fp")?,
            protocol: of("sock", "sk_protocol")?,
            common: Common::of(btf)?,
        })
    }
}

impl Common {
    fn of(btf: &Btf) -> Option<Self> {
        let member = |name| btf.offset("sock_common", name).map(|it| it as usize);
        let mut common = Self {
            family: member("skc_family")?,
            state: member("skc_state")?,
            local: member("skc_rcv_saddr")?,
            remote: member("skc_daddr")?,
            local_v6: member("skc_v6_rcv_saddr")?,
            remote_v6: member("skc_v6_daddr")?,
            local_port: member("skc_num")?,
            remote_port: member("skc_dport")?,
            namespace: member("skc_net")?,
            cookie: member("skc_cookie")?,
            bytes: 0,
        };
        let ends = [
            common.family + size_of::<u16>(),
            common.state + size_of::<u8>(),
            common.local.max(common.remote) + size_of::<Ipv4Addr>(),
            common.local_v6.max(common.remote_v6) + size_of::<Ipv6Addr>(),
            common.local_port.max(common.remote_port) + size_of::<u16>(),
            common.namespace.max(common.cookie) + WORD,
        ];
        common.bytes = ends.into_iter().max()?.next_multiple_of(WORD);
        (common.bytes <= MOST).then_some(common)
    }

    /// Bytes of a report.
    fn report(&self) -> usize {
        HEAD + 2 * self.bytes
    }
}

/// Where jumps go, before it is known where that is.
const FAIL: i16 = i16::MAX;
const NONE: i16 = i16::MAX - 1;
const DONE: i16 = i16::MAX - 2;
const NEXT: i16 = i16::MAX - 3;

/// The program. Its argument is the descriptor of a Unix socket; it returns the number of files, or
/// -1 if it cannot read them. It runs as for a raw tracepoint, within RCU: so the table of files does
/// not go away meanwhile.
fn code(shape: &Shape, reports: BorrowedFd<'_>) -> Vec<u64> {
    use bpf_func_id::{BPF_FUNC_get_current_task, BPF_FUNC_probe_read_kernel};
    // Places on the stack.
    const POINTER: i16 = -8;
    const OPERATIONS: i16 = -16;
    const COUNT: i16 = -24;
    let call = |function: bpf_func_id| instruction(0x85, 0, 0, 0, function as i32);
    // Reads so many bytes, from what a register points to, to where another does.
    let copy = |to: (u8, i32), bytes: usize, from: (u8, i32)| {
        [
            instruction(0xbf, 1, to.0, 0, 0),
            instruction(0x07, 1, 0, 0, to.1),
            instruction(0xb7, 2, 0, 0, bytes as i32),
            instruction(0xbf, 3, from.0, 0, 0),
            instruction(0x07, 3, 0, 0, from.1),
            call(BPF_FUNC_probe_read_kernel),
            instruction(0x55, 0, 0, FAIL, 0),
        ]
    };
    let load = |register: u8, at: i16| instruction(0x79, register, 10, at, 0);
    // r7 = the pointer at r7 + offset
    let follow = |offset: i32| {
        let mut all = copy((10, POINTER.into()), WORD, (7, offset)).to_vec();
        all.push(load(7, POINTER));
        all
    };
    let mut all = vec![
        // r9 = 8 * descriptor
        instruction(0x79, 9, 1, 0, 0),
        instruction(0x67, 9, 0, 0, 3),
        // r7 = this thread
        call(BPF_FUNC_get_current_task),
        instruction(0xbf, 7, 0, 0, 0),
    ];
    for offset in [shape.files, shape.fdt, shape.fd] {
        all.extend(follow(offset));
    }
    // r7 = the descriptor's file
    all.push(instruction(0x0f, 7, 9, 0, 0));
    all.extend(follow(0));
    // The operations of sockets' files
    all.extend(copy((10, OPERATIONS.into()), WORD, (7, shape.f_op)));
    // r7 = its first packet, which is the end of the queue if there is none
    all.extend(follow(shape.private_data));
    all.extend(follow(shape.sk));
    all.extend([
        instruction(0xbf, 8, 7, 0, 0),
        instruction(0x07, 8, 0, 0, shape.queue),
    ]);
    all.extend(follow(shape.queue + shape.next));
    all.push(instruction(0x1d, 7, 8, NONE, 0));
    // r8 = its files
    all.extend(follow(shape.passed));
    all.extend([
        instruction(0x15, 7, 0, NONE, 0),
        instruction(0xbf, 8, 7, 0, 0),
        instruction(0x7a, 10, 0, COUNT, 0),
    ]);
    all.extend(copy((10, COUNT.into()), size_of::<u16>(), (8, shape.count)));
    // r9 = the number of a file
    all.push(instruction(0xb7, 9, 0, 0, 0));
    let again = all.len();
    all.extend([
        load(1, COUNT),
        instruction(0x3d, 9, 1, DONE, 0),
        instruction(0x35, 9, 0, DONE, SOCKETS as i32),
        // r6 = its report
        instruction(0xbf, 6, 9, 0, 0),
        instruction(0x27, 6, 0, 0, shape.common.report() as i32),
        instruction(0x18, 1, BPF_PSEUDO_MAP_VALUE as u8, 0, reports.as_raw_fd()),
        0,
        instruction(0x0f, 6, 1, 0, 0),
        instruction(0x7a, 6, 0, 0, 0),
        // r7 = the file
        instruction(0xbf, 7, 9, 0, 0),
        instruction(0x67, 7, 0, 0, 3),
        instruction(0x0f, 7, 8, 0, 0),
    ]);
    all.extend(follow(shape.first));
    all.extend(copy((10, POINTER.into()), WORD, (7, shape.f_op)));
    all.extend([
        load(1, POINTER),
        load(2, OPERATIONS),
        instruction(0x5d, 1, 2, NEXT, 0),
    ]);
    // r7 = its `struct socket`, then its `struct sock`
    all.extend(follow(shape.private_data));
    all.extend(copy((6, 0), size_of::<u16>(), (7, shape.kind)));
    all.extend(follow(shape.sk));
    all.extend(copy((6, 2), size_of::<u16>(), (7, shape.protocol)));
    let bytes = shape.common.bytes;
    for at in [HEAD, HEAD + bytes] {
        all.extend(copy((6, at as i32), bytes, (7, 0)));
    }
    let next = all.len();
    all.push(instruction(0x07, 9, 0, 0, 1));
    let back = again as i64 - all.len() as i64 - 1;
    all.push(instruction(0x05, 0, 0, back as i16, 0));
    let done = all.len();
    let end = instruction(0x95, 0, 0, 0, 0);
    all.extend([load(0, COUNT), end]);
    all.extend([instruction(0xb7, 0, 0, 0, 0), end]);
    all.extend([instruction(0xb7, 0, 0, 0, -1), end]);
    let places = [
        (NEXT, next),
        (DONE, done),
        (NONE, done + 2),
        (FAIL, done + 4),
    ];
    for (at, it) in all.iter_mut().enumerate() {
        let place = places.iter().find(|(name, _)| (*it >> 16) as i16 == *name);
        if let Some((_, place)) = place {
            *it = *it & !0xffff_0000 | u64::from((place - at - 1) as u16) << 16;
        }
    }
    all
}
