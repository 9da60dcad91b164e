//! Writes the page of figures.

use std::fmt::Write;

use twheel_timers::End;

use super::{
    Operation, Results, contender, drain,
    paper::{self, line},
    workload::{Intervals, Random},
};
use crate::report::Figure;

/// Returns the page as Markdown.
pub fn write(machine: &str, how: &str, results: &Results) -> String {
    let mut text = format!("# Schemes\n\nBy `cargo xtask bench schemes`. {machine}.\n\n{how}");
    for operation in Operation::ALL {
        for intervals in Intervals::ALL {
            let title = format!("{}, {} intervals", operation.name(), intervals.name());
            let cell = |contender, n| {
                let figure = results.figure(intervals, contender, operation, n)?;
                Some(format!("{:.1}", figure.median))
            };
            table(&mut text, &title, results, cell);
        }
        let file = operation.name().replace(' ', "-");
        let _ = writeln!(text, "\n![{}](schemes-{file}.svg)", operation.name());
    }
    for (title, bytes) in [
        ("bytes a timer, the id included", &results.bytes),
        ("bytes a timer after 4 re-arms of each", &results.rearmed),
    ] {
        let cell = |contender, n| Some(format!("{:.0}", bytes.get(&(contender, n))?));
        table(&mut text, title, results, cell);
    }
    text.push_str(
        "\nOf the wheels of one level most is the slots where timers are few: 8 bytes each, and a block of 64 bytes \
         for each\nslot in use. Memory is allocated in chunks of 8,192 timers and blocks.\n",
    );
    peers(&mut text, results);
    drains(&mut text, results);
    working_set(&mut text, results);
    slopes(&mut text, results);
    scheme_2(&mut text);
    scheme_6(&mut text);
    text
}

fn table(
    text: &mut String,
    title: &str,
    results: &Results,
    cell: impl Fn(usize, u32) -> Option<String>,
) {
    let _ = write!(text, "\n## {}\n\n| n |", capital(title));
    for n in &results.sizes {
        let _ = write!(text, " {n} |");
    }
    let _ = write!(text, "\n|---|{}\n", "--:|".repeat(results.sizes.len()));
    for (contender, entry) in contender::ALL.iter().enumerate() {
        let _ = write!(text, "| {} |", entry.name);
        for n in &results.sizes {
            let cell = cell(contender, *n).unwrap_or_else(|| "–".to_owned());
            let _ = write!(text, " {cell} |");
        }
        text.push('\n');
    }
}

fn capital(title: &str) -> String {
    let mut letters = title.chars();
    let first = letters.next().map(|it| it.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

/// How many times slower the peers are, with the most timers.
fn peers(text: &mut String, results: &Results) {
    let Some(n) = results.sizes.last() else {
        return;
    };
    let _ = writeln!(
        text,
        "\n## The peers beside the wheels, {n} timers, uniform intervals\n\n\
         How many times what the wheel takes the peer takes: the median of the ratios of each round \
         (least–most).\nTargets: {} 3, for expiry 2; {} 1 in all; {} 0.67.\n\n\
         | peer | wheel | fill | start | stop | re-arm | empty tick | expiry | after re-arm |\n\
         |---|---|--:|--:|--:|--:|--:|--:|--:|",
        contender::DELAY_QUEUE,
        contender::QUAD,
        contender::LINUX
    );
    for peer in [contender::DELAY_QUEUE, contender::QUAD, contender::LINUX] {
        for name in [
            "4 simple",
            "6 hashed",
            "7 hierarchical",
            contender::INTRUSIVE,
            contender::OUR_QUEUE,
        ] {
            let _ = write!(text, "| {peer} | {name} |");
            for operation in Operation::ALL {
                let _ = write!(text, "{} |", ratio(results, (peer, name), operation, *n));
            }
            text.push('\n');
        }
    }
    let _ = writeln!(
        text,
        "\nFill and after re-arm have no target: the one is mostly page faults, and in the other a lazy \
         re-arm pays what a peer has\ndone at once. Nor has the empty tick, except beside {}.",
        contender::QUAD
    );
}

/// How many times what one takes the other takes, and whether that is enough.
fn ratio(results: &Results, (peer, name): (&str, &str), operation: Operation, n: u32) -> String {
    let place = |name| contender::ALL.iter().position(|entry| entry.name == name);
    let samples = |name| results.samples(Intervals::Uniform, place(name)?, operation, n);
    let (Some(theirs), Some(ours)) = (samples(peer), samples(name)) else {
        return String::new();
    };
    let ratios = theirs.iter().zip(ours).map(|(peer, ours)| peer / ours);
    let Figure {
        median, min, max, ..
    } = Figure::from_samples(&ratios.collect::<Vec<_>>());
    let verdict = match operation.target(peer) {
        Some(target) if median < target => " BELOW",
        _ => "",
    };
    format!(" {median:.2} ({min:.2}–{max:.2}){verdict}")
}

/// What a budget achieves.
fn drains(text: &mut String, results: &Results) {
    let Some(n) = results.sizes.last() else {
        return;
    };
    let _ = write!(
        text,
        "\n## The longest tick while {n} timers drain\n\n\
         All are due at once. Microseconds of the longest call of the bookkeeping with a budget, and of handing \
         out what\nit has found: the median of three drains.\n\n| budget |"
    );
    for budget in drain::BUDGETS {
        match budget {
            usize::MAX => text.push_str(" none |"),
            budget => {
                let _ = write!(text, " {budget} |");
            }
        }
    }
    let _ = writeln!(text, "\n|---|{}", "--:|".repeat(drain::BUDGETS.len()));
    for (name, longest) in drain::SCHEMES.iter().zip(&results.drains) {
        let _ = write!(text, "| {name} |");
        for microseconds in longest {
            let _ = write!(text, " {microseconds:.0} |");
        }
        text.push('\n');
    }
}

/// The cost of a read within this many bytes.
fn read(results: &Results, bytes: f64) -> f64 {
    let after = results.misses.partition_point(|point| point.0 < bytes);
    let (Some(a), Some(b)) = (
        results.misses.get(after.saturating_sub(1)),
        results.misses.get(after),
    ) else {
        return results.misses.last().map_or(f64::NAN, |point| point.1);
    };
    if a.0 == b.0 {
        return a.1;
    }
    a.1 + (b.1 - a.1) * (bytes.ln() - a.0.ln()) / (b.0.ln() - a.0.ln())
}

/// Whether cache misses explain why an operation costs more with more timers.
fn working_set(text: &mut String, results: &Results) {
    let (Some(&least), Some(&most)) = (results.sizes.first(), results.sizes.last()) else {
        return;
    };
    let _ = writeln!(
        text,
        "\n## What the misses explain\n\n\
         ![cost against the working set](schemes-working-set.svg)\n\n\
         Uniform intervals. A read whose address the read before has told, in as many bytes as {least} \
         and {most} timers take, and what\nan operation costs more with the latter, in units of what such a \
         read costs more. A stop reads the handle and the timer; lists through the timers (schemes 3 and 5)\nhave \
         neighbours, too. A re-arm also reads the new slot.\n\n\
         | scheme | MB | read, ns | start | stop | re-arm | expiry |\n|---|--:|--:|--:|--:|--:|--:|"
    );
    for (contender, entry) in contender::ALL.iter().enumerate() {
        let bytes = |n: u32| {
            let each = results.bytes.get(&(contender, n))?;
            Some((each + 8.0) * f64::from(n))
        };
        let (true, Some(few), Some(many)) = (entry.most == usize::MAX, bytes(least), bytes(most))
        else {
            continue;
        };
        let reads = (read(results, few), read(results, many));
        let _ = write!(
            text,
            "| {} | {:.1} | {:.1} |",
            entry.name,
            many / 1e6,
            reads.1
        );
        for operation in [
            Operation::Start,
            Operation::Stop,
            Operation::Rearm,
            Operation::Expiry,
        ] {
            let median = |n| {
                Some(
                    results
                        .figure(Intervals::Uniform, contender, operation, n)?
                        .median,
                )
            };
            let (Some(few), Some(many)) = (median(least), median(most)) else {
                continue;
            };
            let _ = write!(text, " {:.1} |", (many - few) / (reads.1 - reads.0));
        }
        text.push('\n');
    }
}

/// The asymptotic table of the paper.
fn slopes(text: &mut String, results: &Results) {
    let _ = writeln!(
        text,
        "\n## Exponents\n\n\
         The k of cost ~ n^k, fitted over all sizes, uniform intervals: 0 for O(1) and O(log n), 1 for O(n). \
         What is O(1) and reads memory\nat random rises by what a cache miss costs; the left one of each \
         pair is of the sizes up to 10,000, which the caches hold.\n\n\
         | scheme | fill | start | stop | re-arm | empty tick | expiry | after re-arm | the paper: start, stop, tick |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|---|"
    );
    for (contender, entry) in contender::ALL.iter().enumerate() {
        let _ = write!(text, "| {} |", entry.name);
        for operation in Operation::ALL {
            let mut curve: Vec<(f64, f64)> =
                results.curve(Intervals::Uniform, contender, operation);
            curve
                .iter_mut()
                .for_each(|point| *point = (point.0.ln(), point.1.ln()));
            let (cached, all) = (
                curve
                    .iter()
                    .filter(|point| point.0 <= 10_001f64.ln())
                    .copied()
                    .collect::<Vec<_>>(),
                curve,
            );
            let _ = write!(text, " {:.2} / {:.2} |", line(&cached).1, line(&all).1);
        }
        let paper = match entry.name.as_bytes()[0] {
            b'1' => "O(1), O(1), O(n)",
            b'2' => "O(n), O(1), O(1)",
            b'3' => "O(log n), O(log n), O(1)",
            b'4' => "O(1), O(1), O(1)",
            b'5' => "O(1) in the mean, O(1), O(1)",
            b'6' => "O(1), O(1), O(n/M) in the mean",
            b'7' => "O(m), O(1), O(1) in the mean",
            _ => "",
        };
        let _ = writeln!(text, " {paper} |");
    }
}

fn scheme_2(text: &mut String) {
    let _ = writeln!(
        text,
        "\n## Scheme 2: element reads of an insertion\n\n\
         Timers come at random and all run out; n are armed in the mean. Fitted: a + b·n.\n\n\
         | intervals | search from | a | b | theory | constants as cited |\n|---|---|--:|--:|--:|---|"
    );
    let exponential: fn(&mut Random) -> f64 = Random::exponential;
    let uniform: fn(&mut Random) -> f64 = |random| 2.0 * random.unit();
    for (intervals, draw, front) in [
        ("exponential", exponential, "1/2"),
        ("uniform", uniform, "2/3"),
    ] {
        for (end, from) in [(End::Front, "the front"), (End::Rear, "the rear")] {
            let (a, b) = line(&paper::insertion(end, draw));
            let (theory, paper) = match (end, intervals) {
                (End::Front, "exponential") => (front, "2 + 2n/3"),
                (End::Front, _) => (front, "2 + n/2"),
                (End::Rear, "exponential") => ("1/2", "2 + n/3"),
                (End::Rear, _) => ("1/3", ""),
            };
            let _ = writeln!(
                text,
                "| {intervals} | {from} | {a:.2} | {b:.3} | {theory} | {paper} |"
            );
        }
    }
    let _ = writeln!(
        text,
        "\nThe constants 1/2, 2/3 and 1/3 all appear. They belong to the distributions as the theory column \
         has them: what is left of\nan interval that has begun is exponential again where intervals are, so a \
         new one falls behind half of the others; and where\nthey are uniform, what is left has the density \
         2(1 - x), so it falls behind E[1 - (1 - x)²] = 2/3 of them."
    );
}

fn scheme_6(text: &mut String) {
    let points = paper::hashed_tick();
    let (a, b) = line(&points);
    let _ = writeln!(
        text,
        "\n## Scheme 6: nanoseconds a tick, none due\n\n\
         Fitted: {a:.1} + {b:.2}·n/M (256 slots; at most 4,096 timers, which the caches hold).\n\n\
         | n/M | measured | fitted |\n|--:|--:|--:|"
    );
    for (load, each) in points {
        let _ = writeln!(text, "| {load} | {each:.1} | {:.1} |", a + b * load);
    }
}
