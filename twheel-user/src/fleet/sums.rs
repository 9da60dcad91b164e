//! Sums of ended flows: by talker, and by reason and state.

use std::net::Ipv6Addr;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::question::{Question, Sql, ask};
use crate::{
    clickhouse::Server,
    filter::sql::{Parameters, Rows},
};

/// What flows are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// Address of the initiator
    Src,
    /// Address of the responder
    Dst,
    /// Protocol and port of the responder
    Port,
    /// Host that reported the flows
    Host,
    /// Command of the process that has the local socket; `-`: unknown
    Command,
    /// Cgroup of the local socket; `-`: unknown
    Cgroup,
    /// Policy rule; `-`: none
    Rule,
}

impl By {
    /// The expression of its name, a text.
    fn sql(self) -> &'static str {
        match self {
            Self::Src => "toString(src)",
            Self::Dst => "toString(dst)",
            Self::Port => "concat(proto, '/', toString(if(proto IN ('icmp', 'icmpv6'), 0, dport)))",
            Self::Host => "toString(host)",
            Self::Command => "if(owner_command = '', '-', toString(owner_command))",
            Self::Cgroup => "if(owner_cgroup = '', '-', toString(owner_cgroup))",
            Self::Rule => "if(rule = '', '-', toString(rule))",
        }
    }
}

/// The ended flows of one talker.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct Talker {
    /// Its name.
    pub talker: String,
    /// How many flows.
    pub flows: u64,
    /// How many of them have counts of packets and bytes.
    pub counted: u64,
    /// The packets of these.
    pub packets: u64,
    /// The bytes of these.
    pub bytes: u64,
    /// How many flows there are of all talkers.
    pub all: u64,
    /// How many talkers there are.
    pub talkers: u64,
}

/// The talkers with most ended flows.
///
/// # Errors
///
/// The server was not reached, or has refused the question.
pub fn talkers(server: &Server, question: &Question, by: By, limit: usize) -> Result<Vec<Talker>> {
    let mut parameters = Parameters::default();
    let condition = question.condition(Rows::Events, question.from(), &mut parameters);
    let limit = parameters.bind(limit as u64, "UInt64");
    let text = format!(
        "SELECT *, sum(flows) OVER () AS all, count() OVER () AS talkers FROM (\
         SELECT {by} AS talker, count() AS flows, countIf(isNotNull(orig_packets)) AS counted, \
         ifNull(sum(orig_packets + reply_packets), 0) AS packets, \
         ifNull(sum(orig_bytes + reply_bytes), 0) AS bytes \
         FROM events FINAL WHERE {condition} GROUP BY talker) \
         ORDER BY flows DESC, talker LIMIT {limit}",
        by = by.sql(),
    );
    let mut talkers: Vec<Talker> = ask(server, &Sql { text, parameters })?;
    if matches!(by, By::Src | By::Dst) {
        for talker in &mut talkers {
            if let Ok(address) = talker.talker.parse::<Ipv6Addr>() {
                talker.talker = address.to_canonical().to_string();
            }
        }
    }
    Ok(talkers)
}

/// The ended flows of one reason and state.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct Reason {
    /// Why they ended.
    pub reason: String,
    /// Their state at the end.
    pub state: String,
    /// How many.
    pub flows: u64,
}

/// Ended flows by reason and state, most first. The time begins at a whole minute.
///
/// # Errors
///
/// The server was not reached, or has refused the question.
pub fn reasons(server: &Server, question: &Question) -> Result<Vec<Reason>> {
    let mut parameters = Parameters::default();
    let from = question.from_minute();
    let text = if question.filter.fits_minutes(false) {
        let condition = question.condition(Rows::Minutes, from, &mut parameters);
        format!(
            "SELECT reason, state, sum(ended) AS flows FROM (\
             SELECT host, instance, reason, state, groupBitmapMerge(ends) AS ended \
             FROM ends_by_minute WHERE {condition} GROUP BY host, instance, reason, state) \
             GROUP BY reason, state ORDER BY flows DESC, reason, state"
        )
    } else {
        let condition = question.condition(Rows::Events, from, &mut parameters);
        format!(
            "SELECT reason, state, count() AS flows FROM events FINAL WHERE {condition} \
             GROUP BY reason, state ORDER BY flows DESC, reason, state"
        )
    };
    ask(server, &Sql { text, parameters })
}
