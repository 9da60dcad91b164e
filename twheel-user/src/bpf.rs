//! Where the BPF file system is, and commands of `bpf(2)` for which aya has no function.

use std::{
    ffi::CString,
    io, mem,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{bpf_attr, bpf_cmd, bpf_map_type, bpf_prog_type};

/// The BPF file system.
pub const BPFFS: &str = "/sys/fs/bpf";

/// Calls the kernel. Returns what it returns, if that is no error: a descriptor, for some commands.
///
/// # Safety
///
/// The attribute is one of this command, and its pointers are valid during the call.
pub unsafe fn call(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i32> {
    // SAFETY: the attribute is as long as is said, and otherwise the caller's promise.
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
        // Descriptors and 0 fit.
        result => Ok(result as i32),
    }
}

/// Opens what is pinned.
///
/// # Errors
///
/// There is no such pin, or it may not be opened.
pub fn open(pin: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    // SAFETY: all bytes of the attribute are then valid, and no more is set than of this command.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_4.pathname = path.as_ptr().addr() as u64;
    // SAFETY: the attribute is one of this command, and the path outlives the call.
    let fd = unsafe { call(bpf_cmd::BPF_OBJ_GET, &mut attr) }?;
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Detaches a link, and is back when it sees no packet any more.
///
/// # Errors
///
/// It is no link that can be detached.
pub fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: all bytes of the attribute are then valid, and no more is set than of this command.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.link_detach.link_fd = link.as_raw_fd().unsigned_abs();
    // SAFETY: the attribute is one of this command, and has no pointers.
    unsafe { call(bpf_cmd::BPF_LINK_DETACH, &mut attr) }.map(drop)
}

/// The first characters of a name, as the kernel keeps it.
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
/// There is something of that name, or it cannot be made.
pub fn pin(object: BorrowedFd<'_>, pin: &Path) -> io::Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    // SAFETY: all bytes of the attribute are then valid, and no more is set than of this command.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_4.pathname = path.as_ptr().addr() as u64;
    attr.__bindgen_anon_4.bpf_fd = object.as_raw_fd().unsigned_abs();
    // SAFETY: the attribute is one of this command, and the path outlives the call.
    unsafe { call(bpf_cmd::BPF_OBJ_PIN, &mut attr) }.map(drop)
}

/// Makes a map with room for one program.
///
/// # Errors
///
/// The kernel refuses it.
pub fn make_program_array(name: &str) -> io::Result<OwnedFd> {
    // SAFETY: all bytes of the attribute are then valid, and no more is set than of this command.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_1.map_type = bpf_map_type::BPF_MAP_TYPE_PROG_ARRAY as u32;
    attr.__bindgen_anon_1.key_size = 4;
    attr.__bindgen_anon_1.value_size = 4;
    attr.__bindgen_anon_1.max_entries = 1;
    attr.__bindgen_anon_1.map_name = short(name);
    // SAFETY: the attribute is one of this command, and has no pointers.
    let fd = unsafe { call(bpf_cmd::BPF_MAP_CREATE, &mut attr) }?;
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts a program into a map of programs.
///
/// # Errors
///
/// The kernel refuses it: it is not like those whose calls the map serves.
pub fn set_program(map: BorrowedFd<'_>, index: u32, program: BorrowedFd<'_>) -> io::Result<()> {
    let value = program.as_raw_fd().unsigned_abs();
    // SAFETY: all bytes of the attribute are then valid, and no more is set than of this command.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_2.map_fd = map.as_raw_fd().unsigned_abs();
    attr.__bindgen_anon_2.key = (&raw const index).addr() as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = (&raw const value).addr() as u64;
    // SAFETY: the attribute is one of this command, and points to a key and a value of four bytes, which outlive the call.
    unsafe { call(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr) }.map(drop)
}

/// Loads a program.
///
/// # Errors
///
/// The kernel refuses it.
pub fn load(
    name: &str,
    kind: bpf_prog_type,
    attach: u32,
    flags: u32,
    code: &[u64],
) -> io::Result<OwnedFd> {
    let license = c"Dual MIT/GPL";
    // SAFETY: all bytes of the attribute are then valid, and no more is set than of this command.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.__bindgen_anon_3.prog_type = kind as u32;
    attr.__bindgen_anon_3.insn_cnt = code.len() as u32;
    attr.__bindgen_anon_3.insns = code.as_ptr().addr() as u64;
    attr.__bindgen_anon_3.license = license.as_ptr().addr() as u64;
    attr.__bindgen_anon_3.prog_flags = flags;
    attr.__bindgen_anon_3.prog_name = short(name);
    attr.__bindgen_anon_3.expected_attach_type = attach;
    // SAFETY: the attribute is one of this command, and points to as many instructions as it says and to a string that ends, which
    // outlive the call.
    let fd = unsafe { call(bpf_cmd::BPF_PROG_LOAD, &mut attr) }?;
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
