//! Flows that leave as IPFIX, as collectors of others read them.

mod collectors;
mod dissected;
mod faults;
mod flows;
mod listener;
mod living;

use std::{collections::BTreeSet, fs};

use anyhow::Result;
use twheel_tests::netns::require_root;

use crate::{
    collectors::{Nfacctd, Nfcapd, free_port, is_installed},
    flows::{Lab, Record},
};

/// Asserts that a collector has read what was sent, and nothing else.
fn agree(read: &[Record], sent: &[Record]) {
    let only = |these: &[Record], those: &[Record]| -> Vec<_> {
        let only = these.iter().filter(|it| !those.contains(it));
        only.take(5).cloned().collect()
    };
    let (wrong, missing) = (only(read, sent), only(sent, read));
    assert!(
        read == sent,
        "{} records of {}; read alone: {wrong:#?}; sent alone: {missing:#?}",
        read.len(),
        sent.len()
    );
}

/// What is to be sent, for a collector that does not tell why a flow ended.
fn without_reason(lab: &Lab, biflow: bool) -> Result<Vec<Record>> {
    let records = lab.records(biflow)?.into_iter();
    let mut records: Vec<_> = records
        .map(|it| Record {
            end_reason: 0,
            ..it
        })
        .collect();
    records.sort();
    Ok(records)
}

#[test]
fn collectors_read_what_the_events_say() -> Result<()> {
    require_root();
    let lab = Lab::new("ipfix")?;
    let host = &lab.pair.server;
    let reasons: BTreeSet<_> = lab
        .ends
        .iter()
        .filter_map(|it| it["reason"].as_str())
        .collect();
    assert!(
        reasons
            .into_iter()
            .eq(["closed", "deleted", "evicted", "idle", "reset"])
    );
    for (biflow, options) in [(false, &[][..]), (true, &["--biflow"])] {
        if !is_installed("nfcapd") {
            break;
        }
        let port = free_port(host)?;
        let nfcapd = Nfcapd::start(host, &lab.directory, port)?;
        let to = format!("127.0.0.1:{port}");
        lab.export_once(&to, &format!("nfcapd-{biflow}"), options)?;
        let (read, counted) = nfcapd.stop()?;
        agree(&read, &without_reason(&lab, biflow)?);
        // nfcapd 1.7.1 does not count the record of the exporter's statistics.
        assert!(counted.contains("Sequence failures: 1\n"), "{counted}");
        fs::remove_dir_all(lab.directory.0.join("nfcapd"))?;
    }
    if is_installed("nfacctd") {
        let port = free_port(host)?;
        let nfacctd = Nfacctd::start(host, &lab.directory, port)?;
        lab.export_once(&format!("127.0.0.1:{port}"), "pmacct", &[])?;
        let sent = without_reason(&lab, false)?;
        agree(&nfacctd.stop(sent.len())?, &sent);
    }
    Ok(())
}
