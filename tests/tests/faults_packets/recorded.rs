//! Recorded packets.

use std::{env, fs, path::Path};

use anyhow::{Context, Result};
use pcap_parser::{Block, PcapBlockOwned, PcapError, create_reader, traits::PcapNGPacketBlock};
use twheel_common::packet::Wanted;
use twheel_fuzz::{corpus, input};
use twheel_tests::recorded::captures;

use crate::{
    say,
    watch::{LONGEST, PROGRAMS, WANTED, Watch},
};

/// The folder with captures, which is searched recursively.
const FOLDER: &str = "TWHEEL_CAPTURES";

/// The frames of a capture of any link type, as far as it can be read.
fn frames(path: &Path) -> Result<Vec<Vec<u8>>> {
    let file = fs::File::open(path)?;
    let mut frames = Vec::new();
    let Ok(mut reader) = create_reader(1 << 20, file) else {
        return Ok(frames);
    };
    loop {
        match reader.next() {
            Ok((length, block)) => {
                match block {
                    PcapBlockOwned::Legacy(packet) => frames.push(packet.data.to_vec()),
                    PcapBlockOwned::NG(Block::EnhancedPacket(packet)) => {
                        frames.push(packet.packet_data().to_vec());
                    }
                    PcapBlockOwned::NG(Block::SimplePacket(packet)) => {
                        frames.push(packet.packet_data().to_vec());
                    }
                    _ => {}
                }
                reader.consume(length);
            }
            Err(PcapError::Incomplete(_)) => {
                if reader.reader_exhausted() || reader.refill().is_err() {
                    return Ok(frames);
                }
            }
            _ => return Ok(frames),
        }
    }
}

/// The packets of the corpus, and of a folder if one is given. Frames that are not Ethernet are
/// taken for it, which makes them hostile.
#[test]
fn recorded_packets_meet_the_fate_that_the_host_says() -> Result<()> {
    let mut recorded: Vec<_> = corpus::kept()
        .filter_map(|bytes| Some(input(&bytes)?.1.to_vec()))
        .collect();
    let folder = env::var_os(FOLDER);
    let paths = folder.map_or(Ok(Vec::new()), |folder| captures(Path::new(&folder)))?;
    for path in &paths {
        recorded.extend(frames(path).with_context(|| path.display().to_string())?);
    }
    if paths.is_empty() {
        twheel_tests::skipped(format_args!(
            "recorded captures; give a folder of them with {FOLDER}=…"
        ));
    }
    for frame in &recorded {
        for wanted in [
            WANTED,
            Wanted {
                timing: true,
                ..WANTED
            },
            Wanted {
                vlans: false,
                ..WANTED
            },
        ] {
            twheel_fuzz::opinion::compare(frame, wanted).unwrap_or_else(|wrong| panic!("{wrong}"));
        }
    }
    for program in PROGRAMS {
        let mut watch = Watch::new(program);
        for frame in &recorded {
            if program.takes(frame) && frame.len() <= LONGEST {
                watch.send(frame);
            }
        }
        let sent = watch.sent;
        anyhow::ensure!(sent > 20, "{program:?}: only {sent} packets");
        let flows = watch.end();
        say(&format!(
            "{program:?}: {sent} packets of the corpus and of {} files, {flows} flows",
            paths.len()
        ));
    }
    Ok(())
}
