//! The comparison.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::Path,
    sync::mpsc::sync_channel,
    thread,
};

use anyhow::{Context, Result, ensure};
use twheel_tests::recorded::captures;

use crate::{
    LONGEST,
    difference::{
        Name::{self, *},
        packets,
    },
    flows::{Key, Packets, add},
    lab::{Lab, Replayed},
    tshark::{Capture, Frame, dissect},
};

/// tshark's number for the link type Ethernet.
const ETHERNET: usize = 1;

/// The result for all files.
#[derive(Default)]
pub struct Summary {
    pub files: usize,
    sent: u64,
    pub flows: usize,
    pub packets: i64,
    /// Files without any difference; flows; and their packets.
    outright_files: usize,
    pub outright: usize,
    outright_packets: i64,
    /// Files that were not replayed; and flows and packets that differ, by the name of the
    /// difference.
    pub skipped: BTreeMap<&'static str, usize>,
    pub explained: BTreeMap<Name, (BTreeSet<(usize, Key)>, i64)>,
    /// Differences without a name.
    pub wrong: Vec<String>,
}

impl Summary {
    fn add(&mut self, file: &str, capture: &Capture, replayed: &Replayed) {
        self.files += 1;
        self.sent += replayed.sent;
        let mut theirs = Packets::new();
        let mut differences = Packets::new();
        let mut begun = BTreeSet::new();
        let frames = capture.frames.len() as u64;
        let unsent = frames.saturating_sub(replayed.sent);
        let is_long = |frame: &&Frame| frame.number("frame.cap_len", 0) > Some(LONGEST);
        let long = capture.frames.iter().filter(is_long).count() as u64;
        // If a frame is longer than the file's header allows, tcpreplay cuts it: then it may fit
        // after all.
        if replayed.sent > frames || unsent != 0 && unsent != long {
            self.wrong.push(format!(
                "{file}: {} of {frames} frames were sent, though {long} are too long",
                replayed.sent
            ));
        }
        for frame in &capture.frames {
            let too_long = unsent != 0 && is_long(&frame);
            for packet in packets(frame) {
                let (key, _) = packet.flow;
                if packet.theirs {
                    add(&mut theirs, packet.flow, 1);
                }
                let known = packet.begins || begun.contains(&key);
                let (ours, name) = match packet.name {
                    name if too_long => (false, name.filter(|_| packet.theirs).or(Some(TooLong))),
                    None if packet.ours && !known => (false, Some(BeginsNothing)),
                    Some(OptionsCut | OtherAddress) if packet.ours && !known => (false, None),
                    name => (packet.ours, name),
                };
                if ours {
                    begun.insert(key);
                }
                let difference = i64::from(ours) - i64::from(packet.theirs);
                let Some(name) = name.filter(|_| difference != 0) else {
                    continue;
                };
                add(&mut differences, packet.flow, difference);
                let (flows, packets) = self.explained.entry(name).or_default();
                flows.insert((self.files, key));
                *packets += 1;
            }
        }
        self.check_statistics(file, &capture.conversations, &theirs);
        let all = [&theirs, &replayed.flows, &differences];
        self.outright_files += usize::from(differences.is_empty());
        let keys: BTreeSet<_> = all.into_iter().flatten().map(|(key, _)| *key).collect();
        for key in keys {
            let of = |packets: &Packets| packets.get(&key).copied().unwrap_or_default();
            let [theirs, ours, differences] = all.map(of);
            self.flows += 1;
            self.packets += theirs[0] + theirs[1];
            if theirs == ours {
                self.outright += 1;
                self.outright_packets += ours[0] + ours[1];
            }
            if [0, 1].map(|side| theirs[side] + differences[side]) != ours {
                self.wrong.push(format!(
                    "{file}: {key}: tshark has {theirs:?} packets, twheel {ours:?}, and of the difference \
                     {differences:?} is explained"
                ));
            }
        }
    }
}

impl Summary {
    /// tshark's fields must add up to its statistics. The statistics neither distinguish VLANs nor
    /// include ICMP.
    fn check_statistics(&mut self, file: &str, statistics: &Packets, theirs: &Packets) {
        let mut sum = Packets::new();
        for (key, sides) in theirs {
            if !key.proto.starts_with("icmp") {
                let key = key.in_vlans([0; 2]);
                add(&mut sum, (key, 0), sides[0]);
                add(&mut sum, (key, 1), sides[1]);
            }
        }
        let keys: BTreeSet<_> = statistics.keys().chain(sum.keys()).collect();
        for key in keys {
            let [said, counted] = [statistics, &sum].map(|all| all.get(key).copied());
            if said.unwrap_or_default() != counted.unwrap_or_default() {
                self.wrong.push(format!(
                    "{file}: {key}: tshark's statistics have {said:?} packets, and its fields {counted:?}"
                ));
            }
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<36}{:>8}{:>8}{:>9}", "", "files", "flows", "packets")?;
        let mut line = |what: &str, files: usize, flows: usize, packets: i64| {
            writeln!(f, "{what:<36}{files:>8}{flows:>8}{packets:>9}")
        };
        line("compared", self.files, self.flows, self.packets)?;
        line(
            "agree outright",
            self.outright_files,
            self.outright,
            self.outright_packets,
        )?;
        for (name, (flows, packets)) in &self.explained {
            let files: BTreeSet<_> = flows.iter().map(|(file, _)| file).collect();
            line(name.text(), files.len(), flows.len(), *packets)?;
        }
        for (why, files) in &self.skipped {
            writeln!(f, "{:<36}{files:>8}", format!("not replayed: {why}"))?;
        }
        write!(f, "{} frames were replayed.", self.sent)
    }
}

/// Compares all files of a folder.
pub fn compare(lab: &mut Lab, folder: &Path) -> Result<Summary> {
    let paths = captures(folder)?;
    ensure!(!paths.is_empty(), "no captures in {}", folder.display());
    let mut summary = Summary::default();
    thread::scope(|scope| {
        // tshark reads one file while the previous one is replayed.
        let (to, from) = sync_channel(2);
        scope.spawn(move || {
            for path in paths {
                let capture = dissect(&path);
                if to.send((path, capture)).is_err() {
                    break;
                }
            }
        });
        for (path, capture) in from {
            let name = path
                .strip_prefix(folder)
                .unwrap_or(&path)
                .display()
                .to_string();
            let Some(capture) = capture.with_context(|| name.clone())? else {
                *summary
                    .skipped
                    .entry("tshark does not read it")
                    .or_default() += 1;
                continue;
            };
            let of_ethernet = |frame: &Frame| frame.number("frame.encap_type", 0) == Some(ETHERNET);
            let why = if capture.frames.is_empty() {
                Some("has no frames")
            } else {
                let all = capture.frames.iter().all(of_ethernet);
                (!all).then_some("not Ethernet")
            };
            match why {
                Some(why) => *summary.skipped.entry(why).or_default() += 1,
                None => match lab.replay(&path).with_context(|| name.clone())? {
                    Some(replayed) => summary.add(&name, &capture, &replayed),
                    None => {
                        *summary.skipped.entry("tcpreplay gives it up").or_default() += 1;
                    }
                },
            }
        }
        Ok(summary)
    })
}
