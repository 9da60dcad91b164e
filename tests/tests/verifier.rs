//! What the kernel's verifier goes through for each program has a budget: `docs/design.md` says how to keep it.

use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load, OBJECT},
    settings::Wanted,
};
use twheel_common::packet::Protocols;

/// Instructions of a program as `twheel run` loads it when nothing is asked for.
const BY_DEFAULT: u32 = 60_000;
/// Instructions of a program with every option that adds some.
const WITH_EVERYTHING: u32 = 120_000;

/// What is loaded where nothing else is asked for.
fn by_default() -> Wanted {
    Wanted {
        share: true,
        ..Wanted::default()
    }
}

fn everything() -> Wanted {
    Wanted {
        protocols: Protocols::TCP.with(Protocols::UDP).with(Protocols::ICMP),
        accounting: true,
        rto: true,
        enforce: true,
        hold: true,
        ..by_default()
    }
}

/// Loads as production does, for these interfaces: the object that the library carries, or one in a file that
/// `TWHEEL_VERIFY` names.
fn verify(name: &str, wanted: Wanted, interfaces: &[u32], budget: u32) {
    let clock = Clock::jiffies().unwrap();
    let other = std::env::var_os("TWHEEL_VERIFY").map(|path| std::fs::read(path).unwrap());
    let object = other.as_deref().unwrap_or(OBJECT);
    let mut load = Load::new(object, wanted.config(clock).unwrap(), clock);
    load.interfaces = interfaces.to_vec();
    let plane = DataPlane::load_unpinned(&load, name).unwrap();
    let verified = plane.verified().unwrap();
    println!("{name}: {verified:?}");
    for program in ["twheel_xdp", "twheel_egress", "twheel_step"] {
        let instructions = verified[program];
        assert!(
            instructions <= budget,
            "{program} takes the verifier {instructions} instructions ({name}), not {budget} at the most"
        );
    }
}

#[test]
fn programs_are_within_their_budget() {
    verify("default", by_default(), &[1], BY_DEFAULT);
    verify("everything", everything(), &[1], WITH_EVERYTHING);
}

/// Where there are several, each has counters of its own.
#[test]
fn so_they_are_for_several_interfaces() {
    verify("several", by_default(), &[1, 2], BY_DEFAULT);
    verify("several-everything", everything(), &[1, 2], WITH_EVERYTHING);
}

#[test]
fn so_they_are_for_each_scheme_and_view() {
    use twheel_common::wheel::Scheme;
    for (scheme, slots) in [(Scheme::Hashed, None), (Scheme::Simple, Some(4096))] {
        let mut wanted = Wanted {
            scheme,
            slots,
            one_way: true,
            strict: true,
            ..everything()
        };
        if scheme == Scheme::Simple {
            wanted.timeouts = twheel::timeouts::Timeouts::new(
                std::time::Duration::from_secs(60),
                std::time::Duration::from_secs(10),
            );
            wanted.tick = std::time::Duration::from_secs(1);
        }
        verify("schemes", wanted, &[1], WITH_EVERYTHING);
    }
}
