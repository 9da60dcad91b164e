//! The kernel verifier's work for each program has a budget: `docs/design.md` tells how to keep it.

use object::{Object as _, ObjectSection as _, ObjectSymbol as _};
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load, OBJECT},
    failure::{Kind, exit_code},
    pins::PROGRAMS,
    settings::Settings,
    stepping::Stepping,
};
use twheel_common::packet::Protocols;

/// The most instructions that the verifier may process for a program of `twheel run` without
/// options.
const BY_DEFAULT: u32 = 60_000;
/// The most for a program with every option that adds instructions.
const WITH_EVERYTHING: u32 = 120_000;

/// The configuration without options.
fn by_default() -> Settings {
    Settings {
        share: true,
        ..Settings::default()
    }
}

fn everything() -> Settings {
    Settings {
        protocols: Protocols::TCP.with(Protocols::UDP).with(Protocols::ICMP),
        accounting: true,
        rto: true,
        enforce: true,
        hold: true,
        offload: true,
        ..by_default()
    }
}

/// Loads as production does, with capacity for this many interfaces: the object in the library, or
/// one in a file that `TWHEEL_VERIFY` names.
fn verify(name: &str, wanted: Settings, room: u32, budget: u32) {
    verify_load(name, wanted, budget, |load| load.room = room);
}

/// The same; `change` sets what a run sets besides the configuration.
fn verify_load(name: &str, wanted: Settings, budget: u32, change: impl FnOnce(&mut Load<'_>)) {
    let clock = Clock::jiffies().unwrap();
    let other = std::env::var_os("TWHEEL_VERIFY").map(|path| std::fs::read(path).unwrap());
    let object = other.as_deref().unwrap_or(OBJECT);
    let mut load = Load::new(object, wanted.config(clock).unwrap(), clock);
    load.later = &[];
    change(&mut load);
    let plane = DataPlane::load_unpinned(&load).unwrap();
    let verified = plane.verified().unwrap();
    println!("{name}: {verified:?}");
    for program in PROGRAMS {
        assert!(verified.contains_key(program), "{program} is not loaded");
    }
    for (program, instructions) in verified {
        assert!(
            instructions <= budget,
            "the verifier processes {instructions} instructions for {program} ({name}), more than {budget}"
        );
    }
}

#[test]
fn programs_are_within_their_budget() {
    verify("default", by_default(), 0, BY_DEFAULT);
    verify("everything", everything(), 0, WITH_EVERYTHING);
    let offload = Settings {
        offload: true,
        ..by_default()
    };
    verify("offload", offload, 0, BY_DEFAULT);
}

#[test]
fn so_they_are_by_live_frames() {
    let live = |load: &mut Load<'_>| load.stepping = Stepping::LiveFrames;
    verify_load("live", by_default(), BY_DEFAULT, live);
    verify_load("live-everything", everything(), WITH_EVERYTHING, live);
}

#[test]
fn so_they_are_at_each_log_level() {
    for level in 1..=5 {
        let told = |load: &mut Load<'_>| load.log_level = level;
        verify_load("log", by_default(), BY_DEFAULT, told);
        verify_load("log-everything", everything(), WITH_EVERYTHING, told);
    }
}

/// With several interfaces, each has its own counters.
#[test]
fn so_they_are_for_several_interfaces() {
    verify("several", by_default(), 2, BY_DEFAULT);
    verify("several-everything", everything(), 2, WITH_EVERYTHING);
}

#[test]
fn so_they_are_for_each_scheme_and_view() {
    use twheel_common::wheel::WheelScheme;
    for (scheme, slots) in [
        (WheelScheme::Hashed, None),
        (WheelScheme::Simple, Some(4096)),
    ] {
        let mut wanted = Settings {
            scheme,
            slots,
            one_way: true,
            strict: true,
            ..everything()
        };
        if scheme == WheelScheme::Simple {
            wanted.timeouts = twheel::timeouts::Timeouts::new(
                std::time::Duration::from_secs(60),
                std::time::Duration::from_secs(10),
            );
            wanted.tick = std::time::Duration::from_secs(1);
        }
        verify("schemes", wanted, 0, WITH_EVERYTHING);
    }
}

/// The committed object, with a program that begins by reading a register that was never written.
fn broken(program: &str) -> Vec<u8> {
    let file = object::File::parse(OBJECT).unwrap();
    let symbol = file.symbol_by_name(program).unwrap();
    let section = file
        .section_by_index(symbol.section_index().unwrap())
        .unwrap();
    let at = section.file_range().unwrap().0 + symbol.address();
    let mut bytes = OBJECT.to_vec();
    // r0 = r9
    bytes[at as usize..][..8].copy_from_slice(&[0xbf, 0x90, 0, 0, 0, 0, 0, 0]);
    bytes
}

#[test]
fn a_refused_program_is_told_in_one_sentence_and_its_log_kept() {
    let clock = Clock::jiffies().unwrap();
    let object = broken("twheel_step");
    let load = Load::new(&object, by_default().config(clock).unwrap(), clock);
    let error = DataPlane::load_unpinned(&load).err().unwrap();
    assert_eq!(exit_code(&error), Kind::Unsupported as u8);
    let said = format!("{error:#}");
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    for words in [
        kernel.trim(),
        "refuses the program twheel_step",
        "after 1 instructions",
    ] {
        assert!(said.contains(words), "{said}");
    }
    assert!(!said.contains('\n'), "{said}");
    let (_, path) = said.split_once("log is in ").unwrap();
    let (path, _) = path.split_once(';').unwrap();
    let log = std::fs::read_to_string(path).unwrap();
    std::fs::remove_file(path).unwrap();
    assert!(log.contains("R9 !read_ok"), "{log}");
}
