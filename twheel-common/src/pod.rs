//! `aya::Pod` for the types that kernel and userspace exchange: aya copies their bytes to and from
//! the kernel.
//!
//! This is the only place that implements it for them. A type gets it only if it derives zerocopy's
//! traits, and those derives do not compile for a type with padding, or with bytes that are none of
//! its values. So an enum is exchanged as a number, such as
//! [`RtoExpired::direction`](crate::event::RtoExpired::direction).

use zerocopy::{FromBytes, IntoBytes};

use crate::{
    config::{Config, Meta, Watched},
    counter::Counters,
    enforce::Tombstone,
    event::{Event, RtoExpired, Staged},
    flow::Account,
    key::FlowKey,
    policy::{Active, Ends, Header, Prefix, Rules},
    pool::Shelf,
    probe::Probe,
    quota::{OverQuota, Victims},
    rto::Timers,
    rule::Rule,
    step::{Call, Delete, Enter, Step, Sweep},
    table::{Details, Extras, Hash, Line},
    wheel::{Link, Wheel},
};

/// Compiles only for types that any bytes are a value of, and that have no padding.
const fn is_bytes<T: FromBytes + IntoBytes + 'static>() {}

/// The same, for types that may be copied.
const fn is_pod<T: FromBytes + IntoBytes + Copy + 'static>() {}

macro_rules! pod {
    ($($type:ty),+ $(,)?) => {$(
        const _: () = is_pod::<$type>();
        // SAFETY: any bytes are a value of the type, and it has no padding, as the line above
        // checks.
        unsafe impl aya::Pod for $type {}
    )+};
}

pod!(
    Active, Config, Counters, Delete, Details, Ends, Enter, Extras, FlowKey, Hash, Header, Line,
    Link, Meta, OverQuota, Prefix, Rule, Rules, Shelf, Step, Sweep, Tombstone, Victims, Watched,
    Wheel,
);

// These are exchanged without aya: in rings, in mapped memory, in test runs.
const _: () = {
    is_pod::<Account>();
    is_pod::<Call>();
    is_pod::<Event>();
    is_pod::<Probe>();
    is_pod::<RtoExpired>();
    is_pod::<Staged>();
    is_bytes::<Timers>();
};
