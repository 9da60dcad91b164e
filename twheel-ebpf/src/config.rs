//! What the running twheel configured before it loaded the programs. The verifier knows these
//! values, and drops the code that they rule out.

use aya_ebpf::Global;
use twheel_common::{
    config::{CLOCK_JIFFIES, Config, Enforce, Rto},
    jiffies,
    packet::Protocols,
    rto::Limits,
    seen::View,
    table::Hash,
    wheel::Geometry,
};

/// Set before the programs are loaded; read-only to the verifier.
#[unsafe(no_mangle)]
pub static CONFIG: Global<Config> = Global::new(Config {
    tick: 25,
    geometry: Geometry::hierarchical(3, 10),
    clock: CLOCK_JIFFIES,
    max_stall: jiffies::MAX_STALL,
    max_flows: 131_072,
    details: 131_072,
    one_way: 0,
    strict: 0,
    one_armed: 0,
    protocols: Protocols::TCP.0,
    two_seconds: 500,
    accounting: 0,
    begins: 0,
    active_timeout: 0,
    rto: Rto {
        on: 0,
        min: 200_000,
        max: 120_000_000,
        max_retrans: 3,
        unit: 4_000,
    },
    enforce: Enforce::NEVER,
    enforce_rate: 10,
    quota: 0,
    live: 0,
    vlans: 1,
    watched: 0,
    offload: 0,
});

/// One field of [`CONFIG`], for the packet path: `CONFIG.load()` would load every field.
#[macro_export]
macro_rules! config {
    ($($field:ident).+) => {
        // SAFETY: the global's own memory, which is not written after the programs were loaded.
        unsafe {
            let config = (&raw const $crate::config::CONFIG).cast::<twheel_common::config::Config>();
            (&raw const (*config).$($field).+).read_volatile()
        }
    };
}

/// Set like [`CONFIG`]; apart from it, because every packet reads all of this.
#[unsafe(no_mangle)]
pub static HASH: Global<Hash> = Global::new(Hash {
    keys: [0; 11],
    homes: 64,
});

/// How much of a flow can be seen, and what is required of it.
#[inline(always)]
pub fn view() -> View {
    View {
        one_way: config!(one_way) != 0,
        strict: config!(strict) != 0,
    }
}

/// The shape of each CPU's wheel.
#[inline(always)]
pub fn geometry() -> Geometry {
    Geometry {
        levels: config!(geometry.levels),
        bits: config!(geometry.bits),
        scheme: config!(geometry.scheme),
    }
}

/// Whether there are retransmission timers.
#[inline(always)]
pub fn rto_is_on() -> bool {
    config!(rto.on) != 0
}

/// The bounds of retransmission timers.
#[inline(always)]
pub fn limits() -> Limits {
    Limits {
        min: config!(rto.min),
        max: config!(rto.max),
    }
}
