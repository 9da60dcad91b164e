//! The latest flows that have ended, and the search among them.

use std::{
    collections::VecDeque,
    time::{Instant, SystemTime},
};

use anyhow::{Context, Result};
use serde::Serialize;
use twheel_common::event::Reason;

use super::{
    history::Reasons,
    numbers::{Metrics, lock},
    talkers::Sums,
};
use crate::{
    filter::{Filter, Knowable, Subject},
    given,
    model::{Ended, KnownAs, Mark},
    output::json,
};

/// Ended flows that can be searched: about half a kilobyte each.
const LATEST: usize = 1000;
/// Lines of an answer, unless it is asked for fewer.
const LINES: usize = 100;

/// The latest flows that have ended.
#[derive(Default)]
pub(super) struct Ends {
    /// The latest comes first.
    latest: VecDeque<Latest>,
    /// All that have ended.
    pub(super) reasons: Reasons,
    /// Those that have ended since this was taken.
    sums: Sums,
}

/// A flow that has ended.
pub(super) struct Latest {
    pub(super) at: Instant,
    pub(super) mark: Mark,
    pub(super) ended: Ended,
    pub(super) known_as: KnownAs,
}

/// What is asked of the ended flows.
#[derive(Debug, Default)]
pub(super) struct Question {
    filter: String,
    limit: Option<usize>,
}

impl Question {
    /// From the query of a URL.
    ///
    /// # Errors
    ///
    /// It asks for something else: what to give instead.
    pub(super) fn new(query: &str) -> Result<Self, String> {
        let mut question = Self::default();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "filter" => question.filter = value.into_owned(),
                "limit" => {
                    let limit = given::count(&value);
                    question.limit = Some(limit.map_err(|why| format!("limit={value}: {why}\n"))?);
                }
                _ => {
                    return Err(format!(
                        "there is no parameter {name}: give filter=FILTER or limit=N\n"
                    ));
                }
            }
        }
        Ok(question)
    }
}

#[derive(Serialize)]
struct Answer<'a> {
    /// The flows that match, at most as many as were asked for.
    flows: Vec<Line<'a>>,
    /// How many match.
    matching: usize,
    /// How many were looked at.
    of: usize,
    /// How many are kept, at most.
    kept: usize,
}

#[derive(Serialize)]
struct Line<'a> {
    seconds_ago: f64,
    #[serde(flatten)]
    line: json::FlowLine<'a>,
}

impl Ends {
    /// Adds a flow.
    pub(super) fn add(&mut self, latest: Latest) {
        if let Some(count) = Reason::ALL.iter().position(|it| *it == latest.ended.reason) {
            self.reasons[count] += 1;
        }
        self.sums.add(&latest.ended.flow, latest.ended.account);
        self.latest.truncate(LATEST - 1);
        self.latest.push_front(latest);
    }

    /// Takes the sums of what has ended since this was called last.
    pub(super) fn take_sums(&mut self) -> Sums {
        std::mem::take(&mut self.sums)
    }
}

impl Metrics {
    /// The latest ended flows that match a filter, as JSON. The first error is the answer to a
    /// filter that is none: what is wrong, and where.
    ///
    /// # Errors
    ///
    /// The answer cannot be written.
    pub(super) fn ended(&self, question: &Question) -> Result<Result<String, String>> {
        let known = Knowable {
            ended: true,
            accounting: self.config.accounting != 0,
            rto: self.config.rto.on != 0,
        };
        let filter = match Filter::parse(&question.filter, known) {
            Ok(filter) => filter,
            Err(wrong) => return Ok(Err(format!("{wrong:#}"))),
        };
        let limit = question.limit.unwrap_or(LINES).min(LATEST);
        let now = SystemTime::now();
        let ends = lock(&self.ends);
        let (mut flows, mut matching) = (Vec::new(), 0);
        for it in &ends.latest {
            let ago = now.duration_since(it.mark.time).unwrap_or_default();
            let named = it.known_as.named();
            if !filter.matches(&Subject::ended(&it.ended, named, ago)) {
                continue;
            }
            matching += 1;
            if flows.len() < limit {
                flows.push(Line {
                    seconds_ago: it.at.elapsed().as_secs_f64(),
                    line: json::ended_line(&self.identity, it.mark, &it.ended, named),
                });
            }
        }
        let answer = Answer {
            flows,
            matching,
            of: ends.latest.len(),
            kept: LATEST,
        };
        serde_json::to_string(&answer)
            .context("cannot write the ended flows")
            .map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_decoded() {
        let question = Question::new("filter=reason%20%3D%3D+idle&limit=7").unwrap();
        assert_eq!(question.filter, "reason == idle");
        assert_eq!(question.limit, Some(7));
        let question = Question::new("").unwrap();
        assert_eq!((&*question.filter, question.limit), ("", None));
        for (query, says) in [
            ("limit=many", "limit=many: give a whole number"),
            ("limit=-1", "limit=-1: give"),
            ("filter=&since=9", "no parameter since: give filter="),
        ] {
            let error = Question::new(query).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
