//! A kernel timer (`bpf_timer`) for each flow, which every packet moves.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::bpf_timer,
    btf_maps::HashMap,
    helpers::generated::{bpf_timer_init, bpf_timer_set_callback, bpf_timer_start},
    macros::{btf_map, map, xdp},
    maps::{Array, PerCpuArray},
    programs::XdpContext,
};
use twheel_common::flow::FlowKey;

use crate::packets::{parsed, run};

/// A flow: an entry of the same size as one of `FLOOR`.
#[repr(C)]
pub struct Timed {
    timer: bpf_timer,
    seen: u64,
    rest: [u64; 2],
}

/// The flows. The kernel finds the timer in a value by its BTF.
#[btf_map]
static TIMED: HashMap<FlowKey, Timed, 1> = HashMap::new();

/// What became of the timers.
#[repr(C)]
pub struct Timers {
    /// How long a flow may be idle, nanoseconds; set by userspace.
    timeout: u64,
    /// Timers that were made.
    made: u64,
    /// Timers that could not be made.
    failed: u64,
    /// The error of the last of those.
    errno: i64,
}

/// The bench runs packets on one CPU, so one value is enough.
#[map]
static TIMERS: Array<Timers> = Array::with_max_entries(1, 0);

/// Timers that fired.
#[map]
static FIRED: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

const BPF_NOEXIST: u64 = 1;
const CLOCK_MONOTONIC: u64 = 1;

/// Handles a packet: looks up its flow, stores the time and moves the timer; or enters the flow and
/// makes its timer. A timer that cannot be made is counted, and tried again with the next packet.
#[xdp]
pub fn peer_timer(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, now| {
        let (Some(segment), Some(timers)) = (parsed(frame), TIMERS.get_ptr_mut(0)) else {
            return false;
        };
        // SAFETY: a place in a map; the bench runs packets on one CPU.
        let timers = unsafe { &mut *timers };
        if let Some(flow) = TIMED.get_ptr_mut(segment.key) {
            // SAFETY: a pointer that the table gave is valid memory while the program runs.
            unsafe {
                (&raw mut (*flow).seen).write_volatile(now);
                if bpf_timer_start(&raw mut (*flow).timer, timers.timeout, 0) == 0 {
                    return true;
                }
            }
        } else {
            let flow = Timed {
                timer: bpf_timer { __opaque: [0; 2] },
                seen: now,
                rest: [0; 2],
            };
            if TIMED.insert(segment.key, &flow, BPF_NOEXIST).is_err() {
                return false;
            }
        }
        let Some(flow) = TIMED.get_ptr_mut(segment.key) else {
            return false;
        };
        // SAFETY: as above; the callback has the signature that a timer calls.
        let result = unsafe {
            let timer = &raw mut (*flow).timer;
            let map = (&raw const TIMED).cast_mut().cast();
            match bpf_timer_init(timer, map, CLOCK_MONOTONIC) {
                0 => match bpf_timer_set_callback(timer, fire as *mut c_void) {
                    0 => bpf_timer_start(timer, timers.timeout, 0),
                    error => error,
                },
                error => error,
            }
        };
        if result == 0 {
            timers.made += 1;
        } else {
            timers.failed += 1;
            timers.errno = result;
        }
        true
    })
}

/// The timer of an idle flow fires.
unsafe extern "C" fn fire(_map: *mut c_void, key: *const FlowKey, _flow: *mut Timed) -> i64 {
    // SAFETY: key and place are valid memory while this runs, and the place is this CPU's own.
    unsafe {
        let _ = TIMED.remove(*key);
        if let Some(fired) = FIRED.get_ptr_mut(0) {
            *fired += 1;
        }
    }
    0
}
