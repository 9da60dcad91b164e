//! `include/twheel_client.h`, which says what each function does.
#![expect(missing_docs, reason = "they are in the header")]

use std::{
    ffi::{CStr, OsStr, c_char, c_int},
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::ffi::OsStrExt,
    },
    ptr,
    time::{Duration, Instant},
};

use twheel_client::{Action, LONGEST, Offload, Options, Timer, channel};

/// `struct twheel_event`.
#[repr(C)]
pub struct Event {
    pub timer: u64,
    pub tag: u64,
    pub what: u32,
    pub idle_ms: u32,
    pub error: i32,
    pub reserved: u32,
}

/// # Safety
///
/// `path` is NULL or a string that ends with a NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn twheel_open(path: *const c_char) -> *mut Offload {
    let path = match path.is_null() {
        true => channel::default_path(),
        // SAFETY: the caller passes a string that ends with a NUL.
        false => OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()).into(),
    };
    match Offload::at(path) {
        Ok(offload) => Box::into_raw(Box::new(offload)),
        Err(error) => {
            // SAFETY: the place of this thread's error number, which lives as long as the thread.
            unsafe { *libc::__errno_location() = error.raw_os_error().unwrap_or(libc::EIO) };
            ptr::null_mut()
        }
    }
}

/// # Safety
///
/// `handle` is from [`twheel_open`], and not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn twheel_close(handle: *mut Offload) {
    if !handle.is_null() {
        // SAFETY: it was made by `Box::into_raw`, and is dropped once.
        drop(unsafe { Box::from_raw(handle) });
    }
}

/// # Safety
///
/// `handle` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn twheel_fd(handle: *const Offload) -> c_int {
    // SAFETY: an open handle is a live `Offload`, which `twheel_open` has made.
    unsafe { &*handle }.ready().as_raw_fd()
}

/// # Safety
///
/// `handle` is open, `socket` is open during the call, and `timer` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn twheel_start(
    handle: *mut Offload,
    socket: c_int,
    timeout_ms: u32,
    life: u8,
    action: u8,
    tag: u64,
    timer: *mut u64,
) -> c_int {
    let Some(action) = Action::from_raw(action) else {
        return -libc::EINVAL;
    };
    if socket < 0 {
        return -libc::EBADF;
    }
    let options = Options {
        life,
        action,
        ..Options::new(Duration::from_millis(timeout_ms.into()))
    };
    // SAFETY: an open handle is a live `Offload`; the socket stays open during the call.
    let (offload, socket) = unsafe { (&*handle, BorrowedFd::borrow_raw(socket)) };
    match offload.watch(&socket, options, tag) {
        Ok(Timer(started)) => {
            if !timer.is_null() {
                // SAFETY: the caller passes NULL or a place for a number.
                unsafe { timer.write(started) };
            }
            0
        }
        Err(error) => -error.raw_os_error().unwrap_or(libc::EINVAL),
    }
}

/// # Safety
///
/// `handle` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn twheel_restart(
    handle: *mut Offload,
    timer: u64,
    timeout_ms: u32,
) -> c_int {
    let timeout = (timeout_ms != 0).then_some(Duration::from_millis(timeout_ms.into()));
    if timeout.is_some_and(|timeout| timeout > LONGEST) {
        return -libc::EINVAL;
    }
    // SAFETY: an open handle is a live `Offload`, which `twheel_open` has made.
    match unsafe { &*handle }.restart(Timer(timer), timeout) {
        true => 0,
        false => -libc::ENOENT,
    }
}

/// # Safety
///
/// `handle` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn twheel_stop(handle: *mut Offload, timer: u64) -> c_int {
    // SAFETY: an open handle is a live `Offload`, which `twheel_open` has made.
    match unsafe { &*handle }.stop(Timer(timer)) {
        true => 0,
        false => -libc::ENOENT,
    }
}

/// # Safety
///
/// `handle` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn twheel_is_offloaded(handle: *const Offload, timer: u64) -> c_int {
    // SAFETY: an open handle is a live `Offload`, which `twheel_open` has made.
    match unsafe { &*handle }.is_offloaded(Timer(timer)) {
        Some(offloaded) => offloaded.into(),
        None => -libc::ENOENT,
    }
}

/// # Safety
///
/// `handle` is open, and `event` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn twheel_next(
    handle: *mut Offload,
    event: *mut Event,
    wait_ms: c_int,
) -> c_int {
    // SAFETY: an open handle is a live `Offload`, which `twheel_open` has made.
    let offload = unsafe { &*handle };
    let wait = u64::try_from(wait_ms).ok().map(Duration::from_millis);
    let end = wait.map(|wait| Instant::now() + wait);
    loop {
        if let Some(done) = offload.next() {
            let (what, idle_ms, error) = match done.ended {
                Ok(ended) => (ended.outcome as u32, ended.idle.as_millis() as u32, 0),
                Err(error) => (0, 0, error),
            };
            let (timer, tag, reserved) = (done.timer, done.tag, 0);
            // SAFETY: the caller passes a place for an event.
            unsafe {
                event.write(Event {
                    timer,
                    tag,
                    what,
                    idle_ms,
                    error,
                    reserved,
                });
            }
            return 1;
        }
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return 0;
        }
        // Rounded up: else it would ask again and again within the last millisecond.
        let left = left.map_or(-1, |left| left.as_micros().div_ceil(1_000) as c_int);
        let mut ready = libc::pollfd {
            fd: offload.ready().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor, which outlives the call.
        if unsafe { libc::poll(&raw mut ready, 1, left) } < 0 {
            return -std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO);
        }
    }
}
