//! Commands of `bpf(2)` for which aya has no function.

use std::{
    ffi::CString,
    io, mem,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{bpf_attr, bpf_cmd};

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
