//! A million registrations of one program.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use twheel_client::protocol::{self, BATCH, Kind, Op, Request};
use twheel_tests::{netns::PATIENCE, pair::SERVER};

use crate::{
    DATA, Lab, about, millis,
    raw::{Raw, framed},
    rights::{self, NOBODY, Other},
    start,
};

const MANY: u32 = 1_000_000;
/// What a registration takes of twheel's own memory, as documented.
const EACH: usize = 64;
/// For how long other programs are looked at while a million registrations are freed.
const FREEING: Duration = Duration::from_millis(200);

fn named(number: u32) -> Request {
    let mut request = start(3_600_000, DATA, number.into());
    let (local, remote) = framed(number);
    request.name(local, remote);
    request
}

/// Its own memory, and all that is resident, in KiB.
fn memory(lab: &Lab) -> Result<[usize; 2]> {
    let status = fs::read_to_string(format!("/proc/{}/status", lab.twheel.pid()))?;
    let field = |name: &str| -> Result<usize> {
        let found = status.lines().find_map(|line| line.strip_prefix(name));
        let found = found.and_then(|it| it.split_ascii_whitespace().next());
        Ok(found.context("no such field")?.parse()?)
    };
    Ok([field("RssAnon:")?, field("VmRSS:")?])
}

/// How many requests of a program are answered within this time, and how long the slowest takes.
fn answers(raw: &Raw, within: Duration) -> Result<(u32, Duration)> {
    let (begun, mut count, mut slowest) = (Instant::now(), 0, Duration::ZERO);
    while begun.elapsed() < within {
        let asked = Instant::now();
        ensure!(raw.error(about(Op::Stop, 7), &[])? == libc::ENOENT);
        (count, slowest) = (count + 1, slowest.max(asked.elapsed()));
    }
    Ok((count, slowest))
}

#[test]
fn a_million_of_one_program_are_held_and_freed() -> Result<()> {
    // One side's packets make a flow established: those that the test makes are of one side.
    let (most, limit) = ((MANY * 2).to_string(), MANY.to_string());
    let args = [
        "--egress",
        "off",
        "--max-flows",
        &most,
        "--offload-limit",
        &limit,
    ];
    let lab = Lab::new("million", &args)?;
    rights::open_to_all(&lab)?;
    thread::scope(|scope| {
        let (host, half) = (&lab.pair.server, MANY / 2);
        let other = scope.spawn(move || host.begin_these(SERVER, 0..half));
        host.begin_these(SERVER, half..MANY + 1)?;
        other.join().expect("a thread panicked")
    })?;
    let other = Other::connect(&lab.path(), NOBODY)?;
    let raw = lab.raw()?;
    let before = memory(&lab)?;
    let (begun, mut slowest) = (Instant::now(), Duration::ZERO);
    for from in (0..MANY).step_by(BATCH) {
        let some: Vec<_> = (from..from + BATCH as u32).map(named).collect();
        let asked = Instant::now();
        let replies = raw.ask(&some, &[])?;
        slowest = slowest.max(asked.elapsed());
        ensure!(
            replies.iter().all(|it| it.error == 0),
            "{from}: {:?}",
            replies.iter().find(|it| it.error != 0)
        );
    }
    let registering = begun.elapsed();
    let after = memory(&lab)?;
    ensure!(raw.error(named(MANY), &[])? == libc::EDQUOT, "one more");
    ensure!(raw.error(named(0), &[])? == libc::EDQUOT);
    let [grown, resident] = [0, 1].map(|at| after[at].saturating_sub(before[at]));
    println!(
        "{MANY} in {registering:?}, a packet of {BATCH} in {slowest:?} at most; grown by {grown} KiB of its own, \
         {resident} KiB resident"
    );
    ensure!(
        grown <= ((MANY as usize * EACH) >> 10) + (4 << 10),
        "{grown} KiB"
    );
    // A program that comes and goes beside them.
    let comings = Instant::now();
    for _ in 0..200 {
        drop(lab.raw()?);
    }
    let coming = comings.elapsed() / 200;
    // And one that registers something.
    let connection = lab.connect(0)?;
    let own = protocol::write(Kind::Requests, 9, &[start(60_000, DATA, 5)]);
    let comings = Instant::now();
    for _ in 0..50 {
        let other = Other::connect(&lab.path(), NOBODY)?;
        let socket = [std::os::fd::AsFd::as_fd(&connection.server)];
        ensure!(other.raw.answer(&own, &socket)?.1[0].error == 0);
        drop(other);
    }
    println!(
        "{coming:?} a coming and going, {:?} with a registration",
        comings.elapsed() / 50
    );
    drop(raw);
    // Freed at once, in one go, they take longer than that.
    let (count, slowest) = answers(&other.raw, FREEING)?;
    println!("{count} answers in {FREEING:?} while they were freed, the slowest in {slowest:?}");
    ensure!(count >= 10, "{count} answers, the slowest in {slowest:?}");
    let end = Instant::now() + PATIENCE;
    while lab.standing()?.registered > 0 {
        ensure!(Instant::now() < end, "they are not freed");
        thread::sleep(millis(100));
    }
    // Their places are used again.
    let raw = lab.raw()?;
    for from in (0..100_000).step_by(BATCH) {
        let some: Vec<_> = (from..from + BATCH as u32).map(named).collect();
        ensure!(
            raw.ask(&some, &[])?.iter().all(|it| it.error == 0),
            "{from}"
        );
    }
    let [again, _] = memory(&lab)?;
    ensure!(again <= after[0] + (8 << 10), "{again} KiB after {after:?}");
    drop((raw, other));
    lab.serves()?;
    lab.end()
}
