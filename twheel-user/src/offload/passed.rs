//! Reads many passed sockets at once. A BPF program runs for each file that this process holds open
//! (`bpf_iter_task_file`, for one process since Linux 6.1), and reports the TCP sockets in a range of
//! descriptors. It does not wait for a socket that is locked.

use std::{
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    process,
    sync::{Mutex, PoisonError, atomic::Ordering},
};

use anyhow::{Context as _, Result, ensure};
use aya_obj::generated::{BPF_PSEUDO_MAP_VALUE, bpf_attach_type, bpf_func_id, bpf_prog_type};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::{
    rights::{self, Passed},
    turns::Turns,
    watched::Watched,
};
use crate::{
    bpf::{self, Code, instruction},
    btf::Btf,
    mapped::Mapped,
};

/// Sockets of a packet from which on they are read at once.
const MANY: usize = 16;
/// For as many files of this process the program takes less time than system calls do for a socket.
const FILES: usize = 16;

const ONE_BY_ONE: &str = "passed sockets are read one by one";

/// How passed sockets are read.
pub(super) struct Sockets {
    watched: Watched,
    /// `None`: the kernel lacks what is needed.
    reader: Option<SocketReader>,
    /// Who goes through all files, and who closes some.
    pub(super) turns: Turns,
}

impl Sockets {
    /// For sockets of what is watched, in this thread's network namespace.
    pub(super) fn new(watched: Watched) -> Self {
        let reader = SocketReader::open(watched.namespace);
        Self {
            watched,
            reader: reader
                .inspect_err(|error| log::warn!("{ONE_BY_ONE}, which takes longer: {error:#}"))
                .ok(),
            turns: Turns::default(),
        }
    }

    /// Reads each of these sockets of a user.
    pub(super) fn read(&self, uid: u32, sockets: &[OwnedFd]) -> Vec<Result<Passed, i32>> {
        let read = self.read_at_once(uid, sockets).unwrap_or_default();
        let look = |it: &OwnedFd| {
            let found = read.binary_search_by_key(&it.as_raw_fd(), |(descriptor, _)| *descriptor);
            found.map(|at| read[at].1).or_else(|_| {
                let is_established = |ends| self.watched.is_established(ends);
                rights::passed(it.as_fd(), self.watched.namespace, is_established)
            })
        };
        sockets.iter().map(look).collect()
    }

    /// Those that could be read at once, by their descriptors.
    fn read_at_once(&self, uid: u32, sockets: &[OwnedFd]) -> Option<Vec<(RawFd, Passed)>> {
        // The kernel gives out the lowest numbers that are free.
        let files = sockets.iter().map(AsRawFd::as_raw_fd).max()? as usize;
        if sockets.len() < MANY || files > sockets.len() * FILES {
            return None;
        }
        let reader = self.reader.as_ref()?;
        let _turn = self.turns.look(uid)?;
        let read = reader.read(sockets);
        read.inspect_err(|error| log::debug!("{ONE_BY_ONE}: {error:#}"))
            .ok()
    }
}

/// The loaded program.
pub struct SocketReader {
    /// The BPF link by which it runs for the files of this process.
    iterator: OwnedFd,
    shape: Shape,
    /// The descriptors that are read: the least, and from bit 32 on the greatest. Who reads has it
    /// locked.
    range: Mutex<Mapped>,
    /// Where the kernel has the network namespace that is watched, …
    namespace: u64,
    /// … for as long as a socket of it is open.
    _own: OwnedFd,
}

/// Offsets in the kernel's structures, bytes. All that is needed of a `struct sock` is in its first
/// [`bytes`](Self::bytes).
#[derive(Clone, Copy, Debug)]
struct Shape {
    family: usize,
    state: usize,
    local: usize,
    remote: usize,
    local_v6: usize,
    remote_v6: usize,
    local_port: usize,
    remote_port: usize,
    namespace: usize,
    bytes: usize,
    /// `type` and `sk` of a `struct socket`.
    kind: i16,
    sock: i16,
}

/// Most bytes of a `struct sock`: the program reads them twice onto its stack, which has 512.
const MOST: usize = 192;
/// Bytes of a report before those of the `struct sock`: descriptor and cookie.
const HEAD: usize = 16;

impl SocketReader {
    /// Loads the program. `namespace`: the cookie of this thread's network namespace.
    ///
    /// # Errors
    ///
    /// The kernel cannot run it, or is another than expected.
    pub fn open(namespace: u64) -> Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let own = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
        let found = rights::namespace_of(own.as_fd()).map_err(io::Error::from_raw_os_error)?;
        ensure!(found == namespace, "this thread is in another namespace");
        let btf = Btf::of_kernel().context("cannot read the kernel's BTF")?;
        // Before it can, it goes through the files of all processes.
        let can_choose = btf.offset("bpf_iter_aux_info", "task").is_some();
        ensure!(
            can_choose,
            "the kernel cannot go through the files of one process"
        );
        let shape = Shape::of(&btf).context("the kernel's sockets have another shape")?;
        let range = bpf::make_word("twheel_range").context("the kernel refuses a map")?;
        let function = btf.function("bpf_iter_task_file");
        let code = Code {
            kind: bpf_prog_type::BPF_PROG_TYPE_TRACING,
            attach: bpf_attach_type::BPF_TRACE_ITER as u32,
            function: function.context("the kernel has no iterator over files")?,
            flags: 0,
            instructions: &code(&shape, range.as_fd()),
        };
        let program =
            bpf::load("twheel_sockets", &code).context("the kernel refuses the program")?;
        let iterator = bpf::iterator_of(program.as_fd(), process::id())
            .context("the kernel refuses to go through this process's files")?;
        let range = Mapped::new(range, WORD).context("cannot map a map")?;
        let descriptor = own.as_raw_fd();
        let mut reader = Self {
            iterator,
            shape,
            range: Mutex::new(range),
            namespace: 0,
            _own: own,
        };
        let bytes = reader.reports(descriptor, descriptor)?;
        let mut reports = bytes.chunks_exact(reader.size());
        let report = reports.next().context("its own socket is missing")?;
        reader.namespace = Report(report, &shape).namespace();
        Ok(reader)
    }

    /// Reads those of these sockets that are established TCP connections of the namespace. Returns
    /// them with their descriptors, in the order of the descriptors. One that is just being connected
    /// may be missing.
    ///
    /// # Errors
    ///
    /// The program cannot be run.
    pub fn read(&self, sockets: &[OwnedFd]) -> Result<Vec<(RawFd, Passed)>> {
        let mut wanted: Vec<_> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
        wanted.sort_unstable();
        let (Some(first), Some(last)) = (wanted.first(), wanted.last()) else {
            return Ok(Vec::new());
        };
        let bytes = self.reports(*first, *last)?;
        let all = bytes.chunks_exact(self.size());
        Ok(all
            .map(|it| Report(it, &self.shape))
            .filter(|it| wanted.binary_search(&it.descriptor()).is_ok())
            .filter(|it| it.namespace() == self.namespace)
            .filter_map(|it| Some((it.descriptor(), it.passed()?)))
            .collect())
    }

    /// The reports about these descriptors, and those between.
    fn reports(&self, first: RawFd, last: RawFd) -> Result<Vec<u8>> {
        let range = self.range.lock().unwrap_or_else(PoisonError::into_inner);
        let both = u64::from(last as u32) << 32 | u64::from(first as u32);
        range.word(0).store(both, Ordering::SeqCst);
        // As much as the kernel returns at a time (`bpf_seq_read` in `kernel/bpf/bpf_iter.c`).
        let mut bytes = Vec::with_capacity(8 * 4_096);
        bpf::iterate(self.iterator.as_fd())?.read_to_end(&mut bytes)?;
        ensure!(
            bytes.len() % self.size() == 0,
            "{} bytes of reports",
            bytes.len()
        );
        Ok(bytes)
    }

    /// Bytes of a report.
    fn size(&self) -> usize {
        HEAD + self.shape.bytes
    }
}

/// What the program writes for a TCP socket.
struct Report<'a>(&'a [u8], &'a Shape);

impl Report<'_> {
    fn descriptor(&self) -> RawFd {
        i32::from_ne_bytes(self.bytes(0))
    }

    /// The address of its network namespace in the kernel.
    fn namespace(&self) -> u64 {
        u64::from_ne_bytes(self.of_socket(self.1.namespace))
    }

    /// `None`: it is not established.
    fn passed(&self) -> Option<Passed> {
        /// `TCP_ESTABLISHED` of `include/net/tcp_states.h`.
        const ESTABLISHED: u8 = 1;
        let Self(_, shape) = *self;
        let [state] = self.of_socket(shape.state);
        let (local, remote) = match u16::from_ne_bytes(self.of_socket(shape.family)).into() {
            libc::AF_INET => (self.v4(shape.local), self.v4(shape.remote)),
            libc::AF_INET6 => (self.v6(shape.local_v6), self.v6(shape.remote_v6)),
            _ => return None,
        };
        let local_port = u16::from_ne_bytes(self.of_socket(shape.local_port));
        let remote_port = u16::from_be_bytes(self.of_socket(shape.remote_port));
        let is_whole = state == ESTABLISHED
            && ![local, remote].iter().any(IpAddr::is_unspecified)
            && ![local_port, remote_port].contains(&0);
        is_whole.then(|| Passed {
            local: SocketAddr::new(local, local_port),
            remote: SocketAddr::new(remote, remote_port),
            cookie: u64::from_ne_bytes(self.bytes(8)),
        })
    }

    fn v4(&self, at: usize) -> IpAddr {
        Ipv4Addr::from(self.of_socket::<4>(at)).into()
    }

    fn v6(&self, at: usize) -> IpAddr {
        IpAddr::from(Ipv6Addr::from(self.of_socket::<16>(at))).to_canonical()
    }

    fn of_socket<const N: usize>(&self, at: usize) -> [u8; N] {
        self.bytes(HEAD + at)
    }

    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        *self.0[at..].first_chunk().expect("a report is as long")
    }
}

impl Shape {
    /// Of the running kernel; `None` if it is another than this file expects.
    fn of(btf: &Btf) -> Option<Self> {
        // A `struct sock` begins with its `struct sock_common`.
        if btf.offset("sock", "__sk_common") != Some(0) {
            return None;
        }
        let member = |name| btf.offset("sock_common", name).map(|it| it as usize);
        let of_socket = |name| i16::try_from(btf.offset("socket", name)?).ok();
        let mut shape = Self {
            family: member("skc_family")?,
            state: member("skc_state")?,
            local: member("skc_rcv_saddr")?,
            remote: member("skc_daddr")?,
            local_v6: member("skc_v6_rcv_saddr")?,
            remote_v6: member("skc_v6_daddr")?,
            local_port: member("skc_num")?,
            remote_port: member("skc_dport")?,
            namespace: member("skc_net")?,
            bytes: 0,
            kind: of_socket("type")?,
            sock: of_socket("sk")?,
        };
        let ends = [
            shape.family + size_of::<u16>(),
            shape.state + size_of::<u8>(),
            shape.local.max(shape.remote) + size_of::<Ipv4Addr>(),
            shape.local_v6.max(shape.remote_v6) + size_of::<Ipv6Addr>(),
            shape.local_port.max(shape.remote_port) + size_of::<u16>(),
            shape.namespace + size_of::<u64>(),
        ];
        shape.bytes = ends.into_iter().max()?.next_multiple_of(WORD);
        (shape.bytes <= MOST).then_some(shape)
    }
}

const WORD: usize = size_of::<u64>();

/// The program. It gets a `struct bpf_iter__task_file`, which has `meta` at 0, `fd` at 16 and `file` at
/// 24 (`kernel/bpf/task_iter.c`).
fn code(shape: &Shape, range: BorrowedFd<'_>) -> Vec<u64> {
    use bpf_func_id::{
        BPF_FUNC_get_socket_cookie, BPF_FUNC_probe_read_kernel, BPF_FUNC_seq_write,
        BPF_FUNC_skc_to_tcp_sock, BPF_FUNC_sock_from_file,
    };
    /// Of jumps to the end, before it is known where that is.
    const END: i16 = i16::MAX;
    let call = |function: bpf_func_id| instruction(0x85, 0, 0, 0, function as i32);
    let size = (HEAD + shape.bytes) as i32;
    // Places on the stack: the report, and below it the same `struct sock`, read once more.
    let (report, again) = (-size as i16, -size as i16 - shape.bytes as i16);
    let read = |to: i16| {
        [
            instruction(0xbf, 1, 10, 0, 0),
            instruction(0x07, 1, 0, 0, to.into()),
            instruction(0xb7, 2, 0, 0, shape.bytes as i32),
            instruction(0xbf, 3, 7, 0, 0),
            call(BPF_FUNC_probe_read_kernel),
            instruction(0x55, 0, 0, END, 0),
        ]
    };
    let mut all = vec![
        // r6 = context
        instruction(0xbf, 6, 1, 0, 0),
        // The descriptor is in the range, at the address r2: most others are not.
        instruction(0x18, 2, BPF_PSEUDO_MAP_VALUE as u8, 0, range.as_raw_fd()),
        0,
        instruction(0x61, 1, 6, 16, 0),
        instruction(0x61, 3, 2, 0, 0),
        instruction(0xad, 1, 3, END, 0),
        instruction(0x61, 3, 2, 4, 0),
        instruction(0x2d, 1, 3, END, 0),
        // r7 = the file's socket
        instruction(0x79, 1, 6, 24, 0),
        instruction(0x15, 1, 0, END, 0),
        call(BPF_FUNC_sock_from_file),
        instruction(0x15, 0, 0, END, 0),
        instruction(0xbf, 7, 0, 0, 0),
        // A raw socket may have TCP's number.
        instruction(0x69, 1, 7, shape.kind, 0),
        instruction(0x55, 1, 0, END, libc::SOCK_STREAM),
        // r7 = its `struct sock`, if it is of TCP
        instruction(0x79, 7, 7, shape.sock, 0),
        instruction(0x15, 7, 0, END, 0),
        instruction(0xbf, 1, 7, 0, 0),
        call(BPF_FUNC_skc_to_tcp_sock),
        instruction(0x15, 0, 0, END, 0),
    ];
    all.extend(read(report + HEAD as i16));
    // The owner may connect it elsewhere meanwhile. Read twice with the same result, it is of one
    // connection, unless both readings were interrupted at the same place for as long as that takes.
    all.extend(read(again));
    for at in (0..shape.bytes as i16).step_by(WORD) {
        all.extend([
            instruction(0x79, 1, 10, report + HEAD as i16 + at, 0),
            instruction(0x79, 2, 10, again + at, 0),
            instruction(0x5d, 1, 2, END, 0),
        ]);
    }
    all.extend([
        instruction(0xbf, 1, 7, 0, 0),
        call(BPF_FUNC_get_socket_cookie),
        instruction(0x7b, 10, 0, report + 8, 0),
        instruction(0x61, 1, 6, 16, 0),
        instruction(0x7b, 10, 1, report, 0),
        // seq_write(meta->seq, …)
        instruction(0x79, 1, 6, 0, 0),
        instruction(0x79, 1, 1, 0, 0),
        instruction(0xbf, 2, 10, 0, 0),
        instruction(0x07, 2, 0, 0, report.into()),
        instruction(0xb7, 3, 0, 0, size),
        call(BPF_FUNC_seq_write),
    ]);
    let end = all.len() as i16;
    for (at, it) in all.iter_mut().enumerate() {
        if (*it >> 16) as i16 == END {
            *it = *it & !0xffff_0000 | u64::from((end - at as i16 - 1) as u16) << 16;
        }
    }
    all.extend([instruction(0xb7, 0, 0, 0, 0), instruction(0x95, 0, 0, 0, 0)]);
    all
}
