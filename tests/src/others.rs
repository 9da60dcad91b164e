//! Programs that are not twheel's, on an interface: with a short name and no object file.

use std::{
    ffi::CString,
    fs, io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use anyhow::{Context, Result};
use aya_obj::generated::{bpf_attach_type, bpf_attr, bpf_cmd, bpf_prog_type};
use nix::net::if_::if_nametoindex;
use twheel::bpf;

use crate::netns::Namespace;

/// Offset of the source port of a datagram in an Ethernet frame with IPv4 without options.
pub const FROM: i32 = 34;
/// Offset of the destination port.
pub const TO: i32 = 36;
/// Length in bytes of the datagrams that [`Other::xdp`] drops.
pub const DROPPED: usize = 200;

/// A loaded program.
pub struct Other {
    program: OwnedFd,
    /// Its program id.
    pub id: u32,
}

/// An instruction: code, `dst` and `src << 4`, offset, immediate.
type Instruction = (u8, u8, i16, i32);

impl Other {
    /// A classifier that drops datagrams with a port, and leaves all other packets to the next
    /// program.
    pub fn classifier(name: &str, at: i32, port: u16) -> Result<Self> {
        // r0 = TCX_DROP
        Self::verdict(name, at, port, &[(0xb7, 0, 0, 2)])
    }

    /// A classifier that redirects datagrams with a port to another interface, as Cilium does for
    /// its pods.
    pub fn redirect(name: &str, at: i32, port: u16, to: u32) -> Result<Self> {
        let code = [
            (0xb7, 1, 0, to as i32),
            (0xb7, 2, 0, 0),
            // bpf_redirect
            (0x85, 0, 0, 23),
        ];
        Self::verdict(name, at, port, &code)
    }

    fn verdict(name: &str, at: i32, port: u16, then: &[Instruction]) -> Result<Self> {
        let beyond = then.len() as i16 + 1;
        let begin = [
            // r6 = r1: the packet loads below need the context there
            (0xbf, 0x16, 0, 0),
            // IPv4
            (0x28, 0, 0, 12),
            (0x55, 0, 4 + beyond, 0x800),
            // UDP
            (0x30, 0, 0, 23),
            (0x55, 0, 2 + beyond, 17),
            (0x28, 0, 0, at),
            (0x55, 0, beyond, port.into()),
        ];
        let end = [
            (0x95, 0, 0, 0),
            // TCX_NEXT
            (0xb7, 0, 0, -1),
            (0x95, 0, 0, 0),
        ];
        let code = [&begin[..], then, &end].concat();
        Self::load(name, bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS, &code)
    }

    /// An XDP program that drops frames with datagrams of [`DROPPED`] bytes, recognised by their
    /// length, and passes all others.
    pub fn xdp(name: &str) -> Result<Self> {
        let code = [
            // data_end - data
            (0x61, 0x12, 4, 0),
            (0x61, 0x13, 0, 0),
            (0x1f, 0x32, 0, 0),
            (0x55, 0x02, 2, 14 + 20 + 8 + DROPPED as i32),
            // XDP_DROP
            (0xb7, 0, 0, 1),
            (0x95, 0, 0, 0),
            // XDP_PASS
            (0xb7, 0, 0, 2),
            (0x95, 0, 0, 0),
        ];
        Self::load(name, bpf_prog_type::BPF_PROG_TYPE_XDP, &code)
    }

    fn load(name: &str, kind: bpf_prog_type, code: &[Instruction]) -> Result<Self> {
        let mut bytes = Vec::new();
        for (operation, registers, offset, number) in code {
            bytes.extend([*operation, *registers]);
            bytes.extend(offset.to_ne_bytes());
            bytes.extend(number.to_ne_bytes());
        }
        let licence = CString::new("GPL")?;
        // SAFETY: all-zero bytes are a valid `bpf_attr`.
        let mut attr: bpf_attr = unsafe { mem::zeroed() };
        // SAFETY: no other member of the union is used.
        let load = unsafe { &mut attr.__bindgen_anon_3 };
        load.prog_type = kind as u32;
        load.insns = bytes.as_ptr().addr() as u64;
        load.insn_cnt = code.len() as u32;
        load.license = licence.as_ptr().addr() as u64;
        for (to, from) in load.prog_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        let program = call(bpf_cmd::BPF_PROG_LOAD, &mut attr).context("cannot load a program")?;
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", program.as_raw_fd()))?;
        let id = info.lines().find_map(|line| line.strip_prefix("prog_id:"));
        let id = id.context("no id")?.trim().parse()?;
        Ok(Self { program, id })
    }

    /// Attaches it by TCX, after all others. It is detached when the returned descriptor is
    /// dropped.
    pub fn tcx(&self, host: &Namespace, interface: &str, way: bpf_attach_type) -> Result<OwnedFd> {
        self.attach(host, interface, way, 0)
    }

    /// Attaches it by XDP, in native or generic mode.
    pub fn attach_xdp(&self, host: &Namespace, interface: &str, native: bool) -> Result<OwnedFd> {
        // XDP_FLAGS_DRV_MODE, XDP_FLAGS_SKB_MODE
        let flags = if native { 4 } else { 2 };
        self.attach(host, interface, bpf_attach_type::BPF_XDP, flags)
    }

    fn attach(
        &self,
        host: &Namespace,
        interface: &str,
        way: bpf_attach_type,
        flags: u32,
    ) -> Result<OwnedFd> {
        host.enter(|| {
            // SAFETY: all-zero bytes are a valid `bpf_attr`.
            let mut attr: bpf_attr = unsafe { mem::zeroed() };
            attr.link_create.__bindgen_anon_1.prog_fd = self.program.as_raw_fd().unsigned_abs();
            attr.link_create.__bindgen_anon_2.target_ifindex = if_nametoindex(interface)?;
            attr.link_create.attach_type = way as u32;
            attr.link_create.flags = flags;
            call(bpf_cmd::BPF_LINK_CREATE, &mut attr)
                .with_context(|| format!("cannot attach to {interface}"))
        })
    }

    /// The program's descriptor, for a filter.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }
}

fn call(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: the attribute is filled for this command, and what it points to outlives the call.
    let fd = unsafe { bpf::call(command, attr) }?;
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
