//! Commands of `bpf(2)` for which aya has no function.

use std::io;

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
