//! Exemplars: for a number, a flow that was counted in it. The format of OpenMetrics has them,
//! Prometheus' own format does not.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    time::{SystemTime, UNIX_EPOCH},
};

use super::numbers::LATENESS_BUCKETS;
use crate::{
    identity::Identity,
    model::{Birth, Ended, Mark},
};

/// The content type of OpenMetrics' text format.
pub(super) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The latest flow of each number.
#[derive(Default)]
pub(super) struct Exemplars {
    /// By bucket of the lateness; the last one is that without a bound.
    lateness: [Option<Exemplar>; LATENESS_BUCKETS.len() + 1],
    /// By reason and state.
    ended: BTreeMap<(&'static str, &'static str), Exemplar>,
}

/// A flow that was counted.
#[derive(Clone, Copy)]
struct Exemplar {
    birth: Birth,
    value: f64,
    time: SystemTime,
}

impl Exemplars {
    /// Notes a flow that has ended; `lateness`: in seconds, if it is counted.
    pub(super) fn note(&mut self, mark: Mark, ended: &Ended, lateness: Option<f64>) {
        let of = |value| Exemplar {
            birth: ended.flow.birth,
            value,
            time: mark.time,
        };
        let key = (ended.reason.name(), ended.flow.state);
        self.ended.insert(key, of(1.0));
        if let Some(late) = lateness {
            let bucket = LATENESS_BUCKETS.partition_point(|bound| *bound < late);
            self.lateness[bucket] = Some(of(late));
        }
    }

    /// The exemplars as text, by the sample that they belong to.
    pub(super) fn by_sample(&self, identity: &Identity) -> BTreeMap<String, String> {
        let text = |it: &Exemplar| {
            let since = it.time.duration_since(UNIX_EPOCH).unwrap_or_default();
            format!(
                "{{flow_id=\"{}\"}} {} {:.3}",
                identity.flow_id(&it.birth),
                it.value,
                since.as_secs_f64()
            )
        };
        let bounds = LATENESS_BUCKETS.iter().map(f64::to_string);
        let buckets = bounds.chain(["+Inf".to_owned()]).zip(&self.lateness);
        let lateness = buckets.filter_map(|(bound, exemplar)| {
            let sample = format!("twheel_expiry_lateness_seconds_bucket{{le=\"{bound}\"}}");
            Some((sample, text(exemplar.as_ref()?)))
        });
        let ended = self.ended.iter().map(|((reason, state), exemplar)| {
            let labels = format!("reason=\"{reason}\",state=\"{state}\"");
            (
                format!("twheel_ended_flows_total{{{labels}}}"),
                text(exemplar),
            )
        });
        lateness.chain(ended).collect()
    }
}

/// Prometheus' text format as OpenMetrics': a counter's name has no `_total` in what describes it,
/// a bound is a decimal, exemplars stand behind their samples, and the end is marked.
pub(super) fn to_open_metrics(text: &str, exemplars: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len() + 256 * exemplars.len());
    for line in text.lines() {
        let described = ["# HELP ", "# TYPE "]
            .iter()
            .find_map(|begin| Some((begin, line.strip_prefix(begin)?.split_once(' ')?)));
        // Writing to a string does not fail.
        let _ = match described {
            Some((begin, (name, rest))) => {
                let name = name.strip_suffix("_total").unwrap_or(name);
                let rest = rest.replace('"', "\\\"");
                writeln!(out, "{begin}{name} {rest}")
            }
            None => {
                let sample = line.rsplit_once(' ').map_or(line, |(sample, _)| sample);
                let line = decimal(line);
                match exemplars.get(sample) {
                    Some(exemplar) => writeln!(out, "{line} # {exemplar}"),
                    None => writeln!(out, "{line}"),
                }
            }
        };
    }
    out.push_str("# EOF\n");
    out
}

/// A sample whose bound, if it has one, is a decimal.
fn decimal(line: &str) -> String {
    let Some((before, rest)) = line.split_once("le=\"") else {
        return line.to_owned();
    };
    match rest.split_once('"') {
        Some((bound, after)) if bound.bytes().all(|it| it.is_ascii_digit()) => {
            format!("{before}le=\"{bound}.0\"{after}")
        }
        _ => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formats_differ_in_this() {
        let text = "# HELP a_total says \\\\ \"this\"\n# TYPE a_total counter\na_total{b=\"c\"} 1\n\
                    # HELP h hist\n# TYPE h histogram\nh_bucket{le=\"0.5\"} 1\nh_bucket{le=\"1\"} 2\n\
                    h_bucket{le=\"+Inf\"} 2\n# HELP table flows\n# TYPE table gauge\ntable 3\n";
        let exemplars = BTreeMap::from([
            (
                "a_total{b=\"c\"}".to_owned(),
                "{f=\"1\"} 1 2.000".to_owned(),
            ),
            (
                "h_bucket{le=\"1\"}".to_owned(),
                "{f=\"2\"} 0.7 2.000".to_owned(),
            ),
        ]);
        assert_eq!(
            to_open_metrics(text, &exemplars),
            "# HELP a says \\\\ \\\"this\\\"\n# TYPE a counter\na_total{b=\"c\"} 1 # {f=\"1\"} 1 2.000\n\
             # HELP h hist\n# TYPE h histogram\nh_bucket{le=\"0.5\"} 1\n\
             h_bucket{le=\"1.0\"} 2 # {f=\"2\"} 0.7 2.000\nh_bucket{le=\"+Inf\"} 2\n\
             # HELP table flows\n# TYPE table gauge\ntable 3\n# EOF\n"
        );
    }
}
