//! Where the BPF file system is, and the commands of `bpf(2)` that aya has no function for.

use std::{
    ffi::CString,
    io, mem,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{
    BPF_F_MMAPABLE, bpf_attr, bpf_cmd, bpf_link_info, bpf_link_type, bpf_map_type, bpf_prog_info,
    bpf_prog_type,
};

/// The BPF file system.
pub const BPFFS: &str = "/sys/fs/bpf";

/// Calls the kernel. Returns the result, which for some commands is a file descriptor.
///
/// # Safety
///
/// The attribute is filled for this command, and its pointers are valid during the call.
pub unsafe fn call(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i32> {
    // SAFETY: the size passed is the attribute's; the caller guarantees the rest.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as libc::c_long,
            &raw mut *attr,
            size_of::<bpf_attr>(),
        )
    };
    match result {
        -1 => Err(io::Error::last_os_error()),
        // Descriptors and 0 fit into an `i32`.
        result => Ok(result as i32),
    }
}

/// Opens a pin.
///
/// # Errors
///
/// The pin does not exist, or the caller may not open it.
pub fn open(pin: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_4.pathname = path.as_ptr().addr() as u64;
    // SAFETY: the attribute is filled for this command, and the path outlives the call.
    let fd = unsafe { call(bpf_cmd::BPF_OBJ_GET, &mut attr) }?;
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Detaches a BPF link. Returns once its program sees no more packets.
///
/// # Errors
///
/// The BPF link cannot be detached.
pub fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.link_detach.link_fd = link.as_raw_fd().unsigned_abs();
    // SAFETY: the attribute is filled for this command, and has no pointers.
    unsafe { call(bpf_cmd::BPF_LINK_DETACH, &mut attr) }.map(drop)
}

/// The number of the interface that a BPF link is attached to by XDP or TCX; 0: that interface no
/// longer exists.
///
/// # Errors
///
/// It is no such BPF link.
pub fn interface_of(link: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: all-zero bytes are a valid `bpf_link_info`.
    let mut info: bpf_link_info = unsafe { mem::zeroed() };
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.info.bpf_fd = link.as_raw_fd().unsigned_abs();
    attr.info.info_len = size_of::<bpf_link_info>() as u32;
    attr.info.info = (&raw mut info).addr() as u64;
    // SAFETY: the attribute is filled for this command; it points to as many bytes as it says,
    // which outlive the call.
    unsafe { call(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    const XDP: u32 = bpf_link_type::BPF_LINK_TYPE_XDP as u32;
    const TCX: u32 = bpf_link_type::BPF_LINK_TYPE_TCX as u32;
    match info.type_ {
        // SAFETY: the kernel has filled in what belongs to this type, and any bits are a valid
        // number.
        XDP => Ok(unsafe { info.__bindgen_anon_1.xdp.ifindex }),
        // SAFETY: as above.
        TCX => Ok(unsafe { info.__bindgen_anon_1.tcx.ifindex }),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// The ids of the maps that a program uses, at most 64 (`MAX_USED_MAPS` in `linux/bpf.h`).
///
/// # Errors
///
/// It is not a program, or the kernel has refused.
pub fn maps_of(program: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut maps = vec![0_u32; 64];
    // SAFETY: all-zero bytes are a valid `bpf_prog_info`: it asks for nothing.
    let mut info: bpf_prog_info = unsafe { mem::zeroed() };
    info.nr_map_ids = maps.len() as u32;
    info.map_ids = maps.as_mut_ptr().addr() as u64;
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.info.bpf_fd = program.as_raw_fd() as u32;
    attr.info.info_len = size_of_val(&info) as u32;
    attr.info.info = (&raw mut info).addr() as u64;
    // SAFETY: the attribute is filled for this command; it points to as many bytes as it says, and
    // these to as many ids as they say. Both outlive the call.
    unsafe { call(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    maps.truncate(info.nr_map_ids as usize);
    Ok(maps)
}

/// The first characters of a name, as many as the kernel keeps.
fn short(name: &str) -> [libc::c_char; 16] {
    let mut short = [0; 16];
    for (to, from) in short.iter_mut().take(15).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    short
}

/// Pins an object.
///
/// # Errors
///
/// The pin exists already, or cannot be made.
pub fn pin(object: BorrowedFd<'_>, pin: &Path) -> io::Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_4.pathname = path.as_ptr().addr() as u64;
    attr.__bindgen_anon_4.bpf_fd = object.as_raw_fd().unsigned_abs();
    // SAFETY: the attribute is filled for this command, and the path outlives the call.
    unsafe { call(bpf_cmd::BPF_OBJ_PIN, &mut attr) }.map(drop)
}

/// Makes a map of programs with one entry.
///
/// # Errors
///
/// The kernel refuses the map.
pub fn make_program_array(name: &str) -> io::Result<OwnedFd> {
    make_array(name, bpf_map_type::BPF_MAP_TYPE_PROG_ARRAY, 4, 0)
}

/// Makes an array with one entry of so many bytes, which can be mapped.
///
/// # Errors
///
/// The kernel refuses the map.
pub fn make_memory(name: &str, bytes: u32) -> io::Result<OwnedFd> {
    make_array(
        name,
        bpf_map_type::BPF_MAP_TYPE_ARRAY,
        bytes,
        BPF_F_MMAPABLE,
    )
}

/// Makes a map with one entry, of so many bytes.
fn make_array(name: &str, kind: bpf_map_type, bytes: u32, flags: u32) -> io::Result<OwnedFd> {
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_1.map_type = kind as u32;
    attr.__bindgen_anon_1.key_size = 4;
    attr.__bindgen_anon_1.value_size = bytes;
    attr.__bindgen_anon_1.max_entries = 1;
    attr.__bindgen_anon_1.map_flags = flags;
    attr.__bindgen_anon_1.map_name = short(name);
    // SAFETY: the attribute is filled for this command, and has no pointers.
    let fd = unsafe { call(bpf_cmd::BPF_MAP_CREATE, &mut attr) }?;
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts a program into a map of programs.
///
/// # Errors
///
/// The kernel refuses the program: it is not compatible with the programs that call through this
/// map.
pub fn set_program(map: BorrowedFd<'_>, index: u32, program: BorrowedFd<'_>) -> io::Result<()> {
    let value = program.as_raw_fd().unsigned_abs();
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_2.map_fd = map.as_raw_fd().unsigned_abs();
    attr.__bindgen_anon_2.key = (&raw const index).addr() as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = (&raw const value).addr() as u64;
    // SAFETY: the attribute is filled for this command; it points to a key and a value of four
    // bytes each, which outlive the call.
    unsafe { call(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr) }.map(drop)
}

/// A program to load.
pub struct Code<'a> {
    /// What it is run for.
    pub kind: bpf_prog_type,
    /// `expected_attach_type`.
    pub attach: u32,
    /// `prog_flags`.
    pub flags: u32,
    /// Its [`instruction`]s.
    pub instructions: &'a [u64],
}

/// An instruction (`Documentation/bpf/standardization/instruction-set.rst`; this machine is
/// little-endian).
pub fn instruction(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> u64 {
    u64::from(code)
        | u64::from(src << 4 | dst) << 8
        | u64::from(off as u16) << 16
        | u64::from(imm as u32) << 32
}

/// Loads a program.
///
/// # Errors
///
/// The kernel refuses the program.
pub fn load(name: &str, code: &Code<'_>) -> io::Result<OwnedFd> {
    let license = c"Dual MIT/GPL";
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_3.prog_type = code.kind as u32;
    attr.__bindgen_anon_3.insn_cnt = code.instructions.len() as u32;
    attr.__bindgen_anon_3.insns = code.instructions.as_ptr().addr() as u64;
    attr.__bindgen_anon_3.license = license.as_ptr().addr() as u64;
    attr.__bindgen_anon_3.prog_flags = code.flags;
    attr.__bindgen_anon_3.prog_name = short(name);
    attr.__bindgen_anon_3.expected_attach_type = code.attach;
    // SAFETY: the attribute is filled for this command; it points to as many instructions as it
    // says and to a string that ends in a zero byte, and both outlive the call.
    let fd = unsafe { call(bpf_cmd::BPF_PROG_LOAD, &mut attr) }?;
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Runs a program that was loaded for raw tracepoints, once, in this thread. Returns what it returns.
///
/// # Errors
///
/// The kernel refuses that.
pub fn run(program: BorrowedFd<'_>, arguments: &[u64]) -> io::Result<u32> {
    // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.test.prog_fd = program.as_raw_fd().unsigned_abs();
    attr.test.ctx_in = arguments.as_ptr().addr() as u64;
    attr.test.ctx_size_in = size_of_val(arguments) as u32;
    // SAFETY: the attribute is filled for this command; it points to as many bytes as it says,
    // which outlive the call.
    unsafe { call(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr) }?;
    // SAFETY: the kernel has filled it in, and any bits are a valid number.
    Ok(unsafe { attr.test.retval })
}
