//! Sends to a topic, and notes what was acknowledged.

use std::{
    collections::VecDeque,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rdkafka::{
    ClientContext, Message as _,
    config::RDKafkaLogLevel,
    error::KafkaError,
    producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext},
    types::RDKafkaErrorCode as Code,
};

use super::fault::{Named, weight};
use crate::{
    export::{Format, Sink},
    history::Position,
};

/// How long to wait for an acknowledgement if an error was reported meanwhile; then the brokers are
/// asked for the topic again, which tells what is wrong.
const FAILED: Duration = Duration::from_secs(15);
/// How long to wait for one in any case: longer than replicas may take to leave those in sync
/// (`replica.lag.time.max.ms`, 30 s).
const SILENT: Duration = Duration::from_secs(60);
/// How long to wait for a place in the queue before looking again.
const FULL: Duration = Duration::from_millis(5);

/// What librdkafka has reported.
#[derive(Default)]
pub(super) struct Reports(Mutex<Reported>);

#[derive(Default)]
struct Reported {
    /// What is on its way, in order.
    batches: VecDeque<Batch>,
    /// The number of the first of them.
    first: usize,
    /// A message was acknowledged since the last look.
    has_acknowledged: bool,
    /// Why a message was not delivered.
    failed: Option<Code>,
    /// Why a connection failed.
    reason: Option<(Code, String)>,
}

/// Messages that were written together.
struct Batch {
    /// The position behind them.
    next: Position,
    /// How many there are, once all are in the queue.
    sent: Option<usize>,
    /// How many of them were acknowledged.
    acknowledged: usize,
}

impl Reports {
    fn lock(&self) -> MutexGuard<'_, Reported> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why a connection has failed since the last call: the error that says most.
    pub fn take_reason(&self) -> Option<(Code, String)> {
        self.lock().reason.take()
    }
}

impl ClientContext for Reports {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, message: &str) {
        log::debug!("librdkafka: {facility} {message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let KafkaError::Global(code) = error else {
            return;
        };
        log::debug!("librdkafka: {code:?} {reason}");
        let mut reported = self.lock();
        let known = reported.reason.as_ref().map(|(code, _)| weight(*code));
        if known.is_none_or(|known| known <= weight(code)) {
            reported.reason = Some((code, reason.to_owned()));
        }
    }
}

impl ProducerContext for Reports {
    /// The number of a batch.
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, number: usize) {
        let mut reported = self.lock();
        match result {
            // The broker takes the message for one that it has, and does not say where that is. Some
            // brokers note the number of a batch before they keep it: one that is killed in between
            // has the number alone. So all that is not acknowledged is sent again, under new numbers.
            Ok(message) if message.offset() < 0 => {
                reported.failed = Some(Code::DuplicateSequenceNumber);
            }
            Ok(_) => {
                let at = number.wrapping_sub(reported.first);
                if let Some(batch) = reported.batches.get_mut(at) {
                    batch.acknowledged += 1;
                }
                reported.has_acknowledged = true;
                // Whatever was wrong is over.
                reported.reason = None;
            }
            Err((error, _)) => {
                reported.failed = Some(error.rdkafka_error_code().unwrap_or(Code::Unknown));
            }
        }
    }
}

/// A producer, and what it has not delivered yet.
pub(super) struct Producing {
    producer: BaseProducer<Reports>,
    named: Named,
    /// The number of the next batch.
    number: usize,
    /// The position before which everything is acknowledged.
    arrived: Position,
    /// When something was acknowledged, or there was nothing to acknowledge.
    alive: Instant,
    has_worked: bool,
}

impl Producing {
    /// What is written first stands at `from` in the history.
    pub fn new(producer: BaseProducer<Reports>, named: Named, from: Position) -> Self {
        Self {
            producer,
            named,
            number: 0,
            arrived: from,
            alive: Instant::now(),
            has_worked: false,
        }
    }

    /// Takes what librdkafka has reported by now.
    fn heed(&mut self) -> io::Result<()> {
        self.producer.poll(Duration::ZERO);
        let mut reported = self.producer.context().lock();
        while let Some(batch) = reported.batches.front()
            && batch.sent == Some(batch.acknowledged)
        {
            self.arrived = batch.next;
            reported.batches.pop_front();
            reported.first += 1;
        }
        if reported.has_acknowledged || reported.batches.is_empty() {
            self.has_worked |= reported.has_acknowledged;
            reported.has_acknowledged = false;
            self.alive = Instant::now();
        }
        if let Some(code) = reported.failed {
            return Err(self.named.fault(code, ""));
        }
        let waited = self.alive.elapsed();
        if waited < FAILED {
            return Ok(());
        }
        match reported.reason.take() {
            Some((code, said)) => Err(self.named.fault(code, &said)),
            None if waited >= SILENT => Err(self.named.silent(SILENT.as_secs())),
            None => Ok(()),
        }
    }
}

impl Sink for Producing {
    fn write(&mut self, bytes: &[u8], next: Position, format: &dyn Format) -> io::Result<()> {
        let number = self.number;
        self.number += 1;
        self.producer.context().lock().batches.push_back(Batch {
            next,
            sent: None,
            acknowledged: 0,
        });
        let topic = self.named.topic.clone();
        let mut sent = 0;
        for line in format.messages(bytes) {
            let line = line.trim_ascii_end();
            let mut record = BaseRecord::with_opaque_to(&topic, number)
                .key(key(line))
                .payload(line);
            loop {
                match self.producer.send(record) {
                    Ok(()) => break,
                    Err((KafkaError::MessageProduction(Code::QueueFull), refused)) => {
                        record = refused;
                        self.producer.poll(FULL);
                        self.heed()?;
                    }
                    Err((error, _)) => {
                        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
                        return Err(match self.producer.client().fatal_error() {
                            Some((code, said)) => self.named.fault(code, &said),
                            None => self.named.fault(code, ""),
                        });
                    }
                }
            }
            sent += 1;
        }
        let mut reported = self.producer.context().lock();
        if let Some(batch) = reported.batches.back_mut() {
            batch.sent = Some(sent);
        }
        drop(reported);
        self.heed()
    }

    fn arrived(&mut self) -> io::Result<Position> {
        self.heed()?;
        Ok(self.arrived)
    }

    fn is_settled(&self) -> bool {
        self.producer.context().lock().batches.is_empty()
    }

    fn is_closed(&self) -> bool {
        false
    }

    fn has_worked(&self) -> bool {
        self.has_worked
    }
}

/// The key of a line: its flow, so that all that is said of one is in one partition and in order; or
/// the instance.
fn key(line: &[u8]) -> &[u8] {
    value(line, b"\"flow_id\":\"")
        .or_else(|| value(line, b"\"instance\":\""))
        .unwrap_or_default()
}

/// The text after this name and before the next quote. (Quotes in a value are escaped.)
fn value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let at = line.windows(name.len()).position(|it| it == name)? + name.len();
    let rest = &line[at..];
    let end = rest.iter().position(|byte| *byte == b'"')?;
    Some(&rest[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_keyed_by_its_flow_or_by_its_instance() {
        let line = br#"{"schema":1,"event":"end","host":"a\"flow_id\":\"b","instance":"eth0@host.5","seq":1,"flow_id":"0f","start":1}"#;
        assert_eq!(key(line), b"0f");
        let line = br#"{"schema":1,"event":"run","host":"h","instance":"eth0@host.5","seq":1}"#;
        assert_eq!(key(line), b"eth0@host.5");
        assert_eq!(key(b"{}"), b"");
    }
}
