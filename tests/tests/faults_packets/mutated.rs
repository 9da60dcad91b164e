//! Mutated packets, and packets whose headers are in two buffers.

use std::collections::HashMap;

use aya::programs::{TestRun, TestRunOptions};
use twheel_common::counter::Counter;
use twheel_fuzz::make::{Random, damage, packet};
use twheel_tests::plane::PASS;
use zerocopy::{Immutable, IntoBytes};

use crate::{
    say,
    watch::{LEAST, PROGRAMS, Program, Watch},
};

#[test]
fn the_programs_and_the_host_agree_on_mutated_packets() {
    let packets = match twheel_tests::is_long() {
        true => 1_000_000,
        false => 100_000,
    };
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        let mut random = Random(program as u64 + 42);
        let mut frame = Vec::new();
        let mut fates: HashMap<&str, u64> = HashMap::new();
        while watch.sent < packets {
            packet(&mut random, &mut frame);
            if program.takes(&frame) {
                let fate = watch.send(&frame);
                *fates.entry(fate.name()).or_default() += 1;
            }
        }
        // Every verdict occurs, and not just once.
        for fate in [
            Counter::Touched,
            Counter::Created,
            Counter::NotIp,
            Counter::NotTracked,
            Counter::Fragment,
            Counter::Truncated,
            Counter::Malformed,
            Counter::BadFlags,
            Counter::NoFlow,
        ] {
            let times = fates.get(fate.name()).copied().unwrap_or(0);
            assert!(times > packets / 1000, "{}: {times}", fate.name());
        }
        let flows = watch.end();
        say(&format!(
            "{program:?}: {packets} packets, {flows} flows, {fates:?}"
        ));
    }
}

/// The kernel's `xdp_md`, from which a test run takes the length of the linear part.
#[repr(C)]
#[derive(IntoBytes, Immutable)]
struct Linear {
    data: u32,
    end: u32,
    rest: [u32; 4],
}

#[test]
fn headers_in_another_buffer_are_called_truncated() {
    let mut watch = Watch::new(Program::Xdp);
    let mut random = Random(7);
    let mut frame = Vec::new();
    while watch.sent < 5_000 {
        packet(&mut random, &mut frame);
        if random.once_in(2) {
            damage(&mut random, &mut frame);
        }
        // As drivers may do it, the first buffer has a part of the packet, and the next one the
        // rest.
        frame.resize(frame.len().max(LEAST) + 1 + random.below(5_000), 7);
        let linear = LEAST + random.below(frame.len().min(160) - LEAST);
        let context = Linear {
            data: 0,
            end: linear as u32,
            rest: [0; 4],
        };
        let program = watch.plane.plane().xdp("twheel_xdp").unwrap();
        let result = program.test_run(TestRunOptions {
            data_in: Some(&frame),
            ctx_in: Some(context.as_bytes()),
            ..TestRunOptions::new()
        });
        let result = match result {
            Ok(result) => result,
            Err(_) if watch.sent == 0 => {
                return twheel_tests::skipped(
                    "packets in several buffers: this kernel's test runs do not have them",
                );
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(result.return_value, PASS);
        let expected = watch.foresee(&frame[..linear]);
        assert_eq!(watch.fate(), expected, "{linear} of {frame:02x?}");
    }
    assert!(watch.plane.count(Counter::Truncated) > 1_000);
    let flows = watch.end();
    assert!(flows > 500, "{flows}");
}
