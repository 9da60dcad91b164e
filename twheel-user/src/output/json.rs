//! One JSON object a flow and line; the field names are stable.

use std::io;

use serde::Serialize;

use super::{Expired, Output};

/// Lines of JSON.
pub struct Json;

#[derive(Serialize)]
struct Line<'a> {
    event: &'a str,
    proto: &'a str,
    src: std::net::IpAddr,
    sport: u16,
    dst: std::net::IpAddr,
    dport: u16,
    state: &'a str,
    picked_up: bool,
    reason: &'a str,
    rule: Option<&'a str>,
    age_ms: u64,
    idle_ms: u64,
    #[serde(flatten)]
    account: Option<Account>,
}

#[derive(Serialize)]
struct Account {
    orig_packets: u64,
    orig_bytes: u64,
    reply_packets: u64,
    reply_bytes: u64,
}

impl Output for Json {
    fn expired(
        &mut self,
        flow: &Expired,
        rule: Option<&str>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let line = Line {
            event: "expired",
            proto: flow.proto,
            src: flow.src.ip(),
            sport: flow.src.port(),
            dst: flow.dst.ip(),
            dport: flow.dst.port(),
            state: flow.state,
            picked_up: flow.picked_up,
            reason: flow.reason.name(),
            rule,
            age_ms: flow.age.as_millis() as u64,
            idle_ms: flow.idle.as_millis() as u64,
            account: flow.account.map(|[orig, reply]| Account {
                orig_packets: orig.packets,
                orig_bytes: orig.bytes,
                reply_packets: reply.packets,
                reply_bytes: reply.bytes,
            }),
        };
        serde_json::to_writer(&mut *to, &line)?;
        writeln!(to)
    }
}
