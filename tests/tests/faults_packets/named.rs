//! Each named packet gets the verdict that goes with its name.

use twheel_common::counter::Counter;
use twheel_tests::plane::ACK;

use crate::{
    frames::{AUTHENTICATION, EIGHT, FIRST, Frames, named},
    watch::{LEAST, PROGRAMS, Watch},
};

#[test]
fn packets_meet_the_fate_that_their_names_say() {
    let all = named();
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        for (name, frame, fate) in &all {
            if program.takes(frame) {
                assert_eq!(watch.send(frame), *fate, "{program:?}: {name}");
            }
        }
        watch.end();
    }
}

#[test]
fn tags_tell_flows_apart_and_a_priority_does_not() {
    use Counter::{Created, Touched};
    const CUSTOMER: u16 = 0x8100;
    const SERVICE: u16 = 0x88a8;
    let untagged = Frames(1_000).tcp(false);
    // EtherType and control information of each tag, the outer one first.
    let tagged: [(&[[u16; 2]], Counter); 13] = [
        (&[], Created),
        (&[[CUSTOMER, 0]], Touched),
        (&[[CUSTOMER, 0xe000]], Touched),
        (&[[CUSTOMER, 0], [CUSTOMER, 0xe000]], Touched),
        (&[[CUSTOMER, 7]], Created),
        (&[[CUSTOMER, 0xf007]], Touched),
        (&[[SERVICE, 7]], Touched),
        (&[[SERVICE, 0], [CUSTOMER, 7]], Touched),
        (&[[SERVICE, 7], [CUSTOMER, 0]], Touched),
        (&[[CUSTOMER, 0xfff]], Created),
        (&[[SERVICE, 7], [CUSTOMER, 0xfff]], Created),
        (&[[SERVICE, 0xfff], [CUSTOMER, 7]], Created),
        (&[[CUSTOMER, 7], [CUSTOMER, 7]], Created),
    ];
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        for (tags, fate) in tagged {
            let bytes: Vec<u8> = tags
                .iter()
                .flatten()
                .flat_map(|it| it.to_be_bytes())
                .collect();
            let mut frame = untagged.clone();
            frame.splice(12..12, bytes);
            assert_eq!(watch.send(&frame), fate, "{program:?}: {tags:04x?}");
        }
        assert_eq!(watch.end(), 6);
    }
}

#[test]
fn cut_at_every_byte_a_packet_is_truncated_until_its_header_is_there() {
    let f = &mut Frames(1_000);
    let stamped = [1, 1, 8, 10, 0, 0, 0, 7, 0, 0, 0, 9];
    // The length of the headers that the parser needs: it needs no options.
    let all = [
        (f.tcp(false), 54),
        (f.tcp(true), 74),
        (f.tcp_with(false, ACK, &stamped, b"data"), 54),
        (f.tcp_with(true, ACK, &stamped, b"data"), 74),
        (f.tagged(&[0x88a8, 0x8100]), 82),
        (f.ip_options(&[1; 40]), 94),
        (f.authenticated(6, AUTHENTICATION), 78),
        (
            f.chain(&[(0, EIGHT), (51, AUTHENTICATION), (44, FIRST)]),
            114,
        ),
        (f.udp(false, b"data"), 42),
        (f.udp(true, b"data"), 62),
        (f.echo(false), 42),
        (f.echo(true), 62),
    ];
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        for (frame, header) in &all {
            for length in LEAST..=frame.len() {
                if !program.takes(&frame[..length]) {
                    continue;
                }
                let expected = match length.cmp(header) {
                    std::cmp::Ordering::Less => Counter::Truncated,
                    std::cmp::Ordering::Equal => Counter::Created,
                    std::cmp::Ordering::Greater => Counter::Touched,
                };
                let fate = watch.send(&frame[..length]);
                assert_eq!(fate, expected, "{program:?}: {length} of {frame:02x?}");
            }
        }
        assert_eq!(watch.end(), all.len());
    }
}
