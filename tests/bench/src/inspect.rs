//! The cost of inspecting a large table from the command line.

use std::{
    mem::MaybeUninit,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use serde_json::json;
use twheel_tests::{netns::Namespace, running::Twheel};

use crate::{
    report::{Figure, Report, verdict},
    size,
};

const FLOWS: u32 = size(1_000_000, 10_000);
const ROUNDS: usize = size(5, 1);
const INTERFACE: &str = "bench0";
/// In seconds and bytes.
const LISTING_BOUNDS: (f64, f64) = (2.0, (64 << 20) as f64);

/// Lists a million flows of an instance whose twheel runs meanwhile.
pub fn bench(report: &mut Report) -> Result<()> {
    let host = Namespace::new("bench")?;
    host.ip(&format!("link add {INTERFACE} type veth peer name bench1"))?;
    for interface in [INTERFACE, "bench1"] {
        host.ip(&format!("link set {interface} up"))?;
    }
    let flows = FLOWS.to_string();
    let twheel = Twheel::start(
        &host,
        &["--iface", INTERFACE, "--max-flows", &flows, "--accounting"],
    )?;
    host.begin_flows(INTERFACE, FLOWS)?;
    report.say(&format!(
        "An instance with {FLOWS} flows and --accounting, and its loader; the flows have come as packets of the \
         pinned program's.\nEach command {ROUNDS} times, its output to /dev/null: seconds from start to exit, and the \
         most memory that was\nresident (ru_maxrss), which has the mapped table in it, memory that the kernel has anyway. Median \
         (least–most).\n"
    ));
    report.say(&format!(
        "{:<44} {:>22}  {:>10}",
        "command", "seconds", "MiB"
    ));
    for (args, bounds) in [
        ("flows", Some(LISTING_BOUNDS)),
        ("flows --json", Some(LISTING_BOUNDS)),
        ("flows dport==80", Some(LISTING_BOUNDS)),
        ("flows --sort idle --limit 20", None),
        ("talkers --by port", None),
        ("stats", None),
    ] {
        let mut seconds = Vec::new();
        let mut bytes = Vec::new();
        for _ in 0..ROUNDS {
            let (time, resident) = run(&host, args)?;
            seconds.push(time.as_secs_f64());
            bytes.push(resident as f64);
        }
        let (seconds, bytes) = (Figure::from_samples(&seconds), Figure::from_samples(&bytes));
        let mebibytes = |bytes: f64| bytes / f64::from(1 << 20);
        report.say(&format!(
            "{args:<44} {:>5.2} ({:.2}–{:.2}) {}  {:>6.1} {}",
            seconds.median,
            seconds.min,
            seconds.max,
            within(seconds.median, bounds.map(|(seconds, _)| seconds)),
            mebibytes(bytes.median),
            within(
                mebibytes(bytes.median),
                bounds.map(|(_, bytes)| mebibytes(bytes))
            ),
        ));
        report.object(&json!({
            "bench": "inspect", "variant": args, "n": FLOWS, "rounds": ROUNDS,
            "median_s": seconds.median, "min_s": seconds.min, "max_s": seconds.max,
            "resident_bytes": bytes.median,
        }));
    }
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}

fn within(value: f64, bound: Option<f64>) -> String {
    let text = verdict(&Figure::from_samples(&[value]), bound);
    text.split_once(' ')
        .map_or_else(String::new, |(_, rest)| rest.to_owned())
}

/// Runs a command. Returns its duration and its memory in bytes.
fn run(host: &Namespace, args: &str) -> Result<(Duration, u64)> {
    let args: Vec<_> = args.split(' ').collect();
    let mut command = host.twheel(&args)?;
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let begun = Instant::now();
    let child = command.spawn()?;
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: both pointers are valid for writes; the child is this process's, and nothing else
    // waits for it.
    let waited = unsafe { libc::wait4(child.id() as i32, &raw mut status, 0, usage.as_mut_ptr()) };
    let time = begun.elapsed();
    ensure!(waited > 0 && status == 0, "{args:?} has failed: {status}");
    // SAFETY: the kernel has filled it in, and all-zero bytes are valid anyway.
    let usage = unsafe { usage.assume_init() };
    Ok((time, usage.ru_maxrss as u64 * 1024))
}
