//! Messages (RFC 7011, section 3): headers, sets, sequence numbers.

use std::time::{SystemTime, UNIX_EPOCH};

use super::{
    record::{FlowRecord, Half},
    statistics::Statistics,
    template::{Exporter, Flows, Shape, Template},
};

/// The version of IPFIX (RFC 7011, section 3.1).
const VERSION: u16 = 10;
/// Bytes of a message's header.
const HEADER: usize = 16;
/// Bytes of a set's header.
const SET_HEADER: usize = 4;
/// The set of templates (RFC 7011, section 3.3.2).
const TEMPLATES: u16 = 2;
/// The set of options templates.
const OPTIONS: u16 = 3;
/// No message can be smaller: it has room for the largest record and its set, and for the largest
/// template.
pub const LEAST_MESSAGE: usize = 640;

/// How messages are made.
#[derive(Clone, Debug)]
pub struct Config {
    /// The observation domain (RFC 7011, section 3.1).
    pub domain: u32,
    /// Its name, which the exporter's statistics have.
    pub name: String,
    /// Whose private elements are sent; `None`: none are.
    pub pen: Option<u32>,
    /// One record a flow, with reverse elements (RFC 5103), instead of one a direction.
    pub biflow: bool,
    /// Most bytes in a message, at least [`LEAST_MESSAGE`].
    pub most: usize,
}

/// Writes flows as messages. They are whole after [`complete`](Self::complete).
pub struct Encoder {
    config: Config,
    /// What is wanted of each flow, besides what is known of it.
    wanted: Shape,
    flows: Vec<Option<Template<Flows>>>,
    /// Which of those templates the present session has.
    told: Vec<bool>,
    exporter: Template<Exporter>,
    /// Records before the message that is being written, in this session.
    sequence: u32,
    open: Option<Open>,
    statistics: Statistics<'static>,
}

/// The message that is being written.
struct Open {
    /// Where it begins.
    at: usize,
    /// The last set: its number, and where it begins.
    set: Option<(u16, usize)>,
    records: u32,
    /// Those of them that are of flows.
    flow_records: u64,
}

impl Encoder {
    /// Without any session yet.
    pub fn new(config: Config) -> Self {
        Self {
            wanted: Shape::NONE
                .with_if(config.biflow, Shape::BIFLOW)
                .with_if(config.pen.is_some(), Shape::PRIVATE),
            flows: (0..Shape::ALL).map(|_| None).collect(),
            told: vec![false; Shape::ALL],
            exporter: Template::of_exporter(),
            sequence: 0,
            open: None,
            statistics: Statistics {
                domain: config.domain,
                process: std::process::id(),
                ..Statistics::default()
            },
            config,
        }
    }

    /// Begins a session: templates are sent anew, and what was not completed is dropped. Each
    /// connection counts its records from 0 on; over UDP the count goes on (RFC 7011, section 3.1).
    pub fn begin(&mut self, is_connection: bool) {
        self.told.fill(false);
        self.open = None;
        if is_connection {
            self.sequence = 0;
        }
    }

    /// Appends the records of a flow: one for each direction that has packets, or one for both.
    pub fn flow(&mut self, flow: &FlowRecord<'_>, to: &mut Vec<u8>) {
        if self.config.biflow {
            return self.half(&Half { flow, sender: 0 }, to);
        }
        let sent = flow.has_sent;
        (0..2)
            .filter(|sender| sent[*sender])
            .for_each(|sender| self.half(&Half { flow, sender }, to));
    }

    fn half(&mut self, half: &Half<'_>, to: &mut Vec<u8>) {
        let shape = (half.shape() | self.wanted).reduced();
        let index = shape.index();
        // Taken out, so that it can be read while the message changes.
        let template = self.flows[index]
            .take()
            .unwrap_or_else(|| Template::of_flows(shape, self.config.pen.unwrap_or_default()));
        if !self.told[index] {
            self.told[index] = true;
            self.room(TEMPLATES, template.definition.len(), to);
            to.extend_from_slice(&template.definition);
        }
        self.room(template.number, template.size(half), to);
        template.write(half, to);
        self.flows[index] = Some(template);
        self.count(1);
    }

    /// Appends the template of the exporter's statistics, and those statistics. `not_sent`: events
    /// that could not be sent so far.
    pub fn statistics(&mut self, not_sent: u64, to: &mut Vec<u8>) {
        self.room(OPTIONS, self.exporter.definition.len(), to);
        to.extend_from_slice(&self.exporter.definition);
        let name = std::mem::take(&mut self.config.name);
        let record = Statistics {
            not_sent,
            name: &name,
            ..self.statistics
        };
        self.room(self.exporter.number, self.exporter.size(&record), to);
        self.exporter.write(&record, to);
        self.config.name = name;
        self.count(0);
    }

    /// Appends again all templates that this session has (RFC 7011, section 8.4).
    pub fn templates(&mut self, to: &mut Vec<u8>) {
        for index in 0..self.flows.len() {
            if self.told[index]
                && let Some(template) = self.flows[index].take()
            {
                self.room(TEMPLATES, template.definition.len(), to);
                to.extend_from_slice(&template.definition);
                self.flows[index] = Some(template);
            }
        }
    }

    /// Messages that were completed so far.
    pub fn messages(&self) -> u64 {
        self.statistics.messages
    }

    /// Completes the message that is being written, if there is one.
    pub fn complete(&mut self, to: &mut [u8]) {
        let Some(open) = self.open.take() else {
            return;
        };
        end_set(&open, to);
        let message = &mut to[open.at..];
        let length = message.len();
        message[2..4].copy_from_slice(&(length as u16).to_be_bytes());
        message[8..12].copy_from_slice(&self.sequence.to_be_bytes());
        self.sequence = self.sequence.wrapping_add(open.records);
        self.statistics.messages += 1;
        self.statistics.flow_records += open.flow_records;
        self.statistics.bytes += length as u64;
    }

    /// Counts a record, and how many of a flow it is.
    fn count(&mut self, flow_records: u64) {
        if let Some(open) = &mut self.open {
            open.records += 1;
            open.flow_records += flow_records;
        }
    }

    /// Sees to it that the message's last set has this number, and that so many bytes fit.
    fn room(&mut self, set: u16, bytes: usize, to: &mut Vec<u8>) {
        if let Some(open) = &self.open {
            let is_same = open.set.is_some_and(|(number, _)| number == set);
            let more = bytes + if is_same { 0 } else { SET_HEADER };
            if to.len() - open.at + more > self.config.most {
                self.complete(to);
            }
        }
        let domain = self.config.domain;
        let open = self.open.get_or_insert_with(|| header(domain, to));
        if open.set.is_none_or(|(number, _)| number != set) {
            end_set(open, to);
            open.set = Some((set, to.len()));
            to.extend_from_slice(&set.to_be_bytes());
            to.extend_from_slice(&[0; 2]);
        }
    }
}

/// Begins a message. Its length and its sequence number are not known yet.
fn header(domain: u32, to: &mut Vec<u8>) -> Open {
    let at = to.len();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    // Seconds since 1970, modulo 2^32 (RFC 7011, section 3.1).
    let now = now.map_or(0, |since| since.as_secs() as u32);
    to.extend_from_slice(&VERSION.to_be_bytes());
    to.extend_from_slice(&[0; 2]);
    to.extend_from_slice(&now.to_be_bytes());
    to.extend_from_slice(&[0; 4]);
    to.extend_from_slice(&domain.to_be_bytes());
    debug_assert_eq!(to.len() - at, HEADER);
    Open {
        at,
        set: None,
        records: 0,
        flow_records: 0,
    }
}

/// Writes the length of the last set.
fn end_set(open: &Open, to: &mut [u8]) {
    if let Some((_, at)) = open.set {
        let length = (to.len() - at) as u16;
        to[at + 2..at + 4].copy_from_slice(&length.to_be_bytes());
    }
}

/// The messages of which these bytes consist.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_be_bytes([*bytes.get(2)?, *bytes.get(3)?]));
        let (message, rest) = bytes.split_at_checked(length.max(HEADER))?;
        bytes = rest;
        Some(message)
    })
}
