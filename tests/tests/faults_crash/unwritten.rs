//! What a killed run had not yet written, printed or counted.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Read as _, Write},
    net::TcpStream,
    process::Stdio,
    time::{Instant, SystemTime},
};

use anyhow::{Context, Result};
use nix::fcntl::{FcntlArg, fcntl};
use twheel::{
    clock::Wall,
    inspect::Reader,
    ring::{Batch, Events, Read},
};
use twheel_common::{
    event::{BATCH, Record},
    flow::Direction,
};
use twheel_tests::{
    directory::Directory,
    netns::{PATIENCE, require_root},
    pair::{Pair, SERVER},
    running::Twheel,
};

use crate::{
    accounts::{check_accounts, counted_by, detached, kept, key, key_of},
    end, keep, millis,
    traffic::Run,
};

/// The events as a batch that was read now.
fn timed(reader: &Reader, events: Vec<Read>) -> Result<Batch> {
    let wall = Wall::new(reader.clock(), reader.now()?, SystemTime::now());
    Ok(Batch::new(events, wall))
}

#[test]
fn a_history_that_was_cut_within_a_record_goes_on_there() -> Result<()> {
    require_root();
    const FLOWS: u32 = 100;
    const CUT: usize = 40;
    let history = Directory::new("record")?;
    let pair = Pair::new()?;
    let mut args = vec!["--iface", SERVER, "--timeout", "1s", "--keep", "--json"];
    args.extend(["--history", history.path()]);
    Twheel::start(&pair.server, &args)?.stop()?;
    let left = pair.server.enter(|| {
        let (pins, mut events, batch) = end(&pair.server, FLOWS)?;
        assert!(batch.is_sorted_by(|one, next| one.end < next.end && one.free <= next.free));
        let whole = |read: &Read| read.free == read.end;
        assert!(whole(&batch[CUT / BATCH * BATCH - 1]) && !whole(&batch[CUT - 1]));

        // The state that a run leaves if it is killed after writing 40 events to the file and
        // printing as many.
        let reader = Reader::open_pins(pins)?;
        let mut writer = keep(&history, &reader)?;
        writer.add_now(timed(&reader, batch[..CUT].to_vec())?);
        assert!(events.release(batch[CUT - 1].free));

        // The next run begins with the whole record.
        let (mut events, mut left) = (Events::open(reader.pins().map("EVENTS")?)?, Vec::new());
        events.read(&mut left, usize::MAX);
        let ends = |of: &[Read]| of.iter().map(|read| read.end).collect::<Vec<_>>();
        assert_eq!(ends(&left), ends(&batch[CUT / BATCH * BATCH..]));
        Ok(left)
    })?;
    let twheel = Twheel::start(&pair.server, &args)?;
    for read in &left {
        let line = twheel
            .line(PATIENCE)?
            .context("not all flows are reported")?;
        let Record::Ended(event) = read.record else {
            anyhow::bail!("{read:?}");
        };
        let ends = [Direction::FromLow, Direction::FromHigh].map(|it| event.key.sender(it));
        assert!(ends.contains(&key(&line.text)?.0), "{}", line.text);
    }
    let ended = twheel.stop()?;
    assert_eq!((ended.code(), ended.lines.len()), (Some(0), 0));
    assert_eq!(kept(&pair.server, &history)?.len(), FLOWS as usize);
    detached(&pair.server)
}

#[test]
fn what_has_left_the_ring_unwritten_is_counted() -> Result<()> {
    require_root();
    const FLOWS: u32 = 100;
    const WRITTEN: usize = 5 * BATCH;
    let history = Directory::new("gap")?;
    let pair = Pair::new()?;
    let mut args = vec!["--iface", SERVER, "--timeout", "1s", "--keep"];
    args.extend(["--history", history.path()]);
    Twheel::start(&pair.server, &args)?.stop()?;
    pair.server.enter(|| {
        let (pins, mut events, mut batch) = end(&pair.server, FLOWS)?;

        // The state that a run leaves if it is killed while its disk is stuck: everything is
        // printed, but only some of it is in the file.
        let reader = Reader::open_pins(pins)?;
        let mut writer = keep(&history, &reader)?;
        batch.truncate(WRITTEN);
        writer.add_now(timed(&reader, batch)?);
        // It cannot note a clean end.
        std::mem::forget(writer);
        events.release_all();
        Ok(())
    })?;
    let lost = FLOWS as usize - WRITTEN;
    let mut metered = args.clone();
    metered.extend(["--metrics", "127.0.0.1:9435"]);
    let twheel = Twheel::start(&pair.server, &metered)?;
    let counted = pair.server.enter(|| scrape("127.0.0.1:9435"))?;
    let line = format!("twheel_history_lost_total {lost}\n");
    assert!(counted.contains(&line), "{counted}");
    let ended = twheel.stop()?;
    assert_eq!(counted_by(&pair.server, "history_lost")?, lost as u64);
    let text = format!("up to {lost} events are not in the history: an earlier run");
    assert!(ended.stderr.contains(&text), "{}", ended.stderr);
    // The gap is reported once, and readers of the history are told.
    let ended = Twheel::start(&pair.server, &args)?.stop()?;
    assert!(
        !ended.stderr.contains("are not in the history"),
        "{}",
        ended.stderr
    );
    let read = ["expired", "--iface", SERVER, "--history", history.path()];
    let ended = pair.server.twheel_once(&read)?;
    assert_eq!(ended.lines.len(), WRITTEN);
    let text = format!("up to {lost} events are not in the history");
    assert!(ended.stderr.contains(&text), "{}", ended.stderr);
    detached(&pair.server)
}

#[test]
fn actions_that_a_killed_run_had_before_it_are_counted() -> Result<()> {
    require_root();
    const FLOWS: u32 = 40;
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "1s", "--keep", "--json"];
    let mut args = args.to_vec();
    args.extend(["--history", "off", "--reap", "conntrack"]);
    let mut slow = args.clone();
    slow.extend(["--reap-rate", "5"]);
    let twheel = Twheel::start(&pair.server, &slow)?;
    pair.server.begin_flows(SERVER, FLOWS)?;
    let (mut expired, mut reaped) = (0, 0);
    while expired < FLOWS || reaped < 3 {
        let line = twheel.line(PATIENCE)?.context("no more lines")?;
        match line.text.contains("\"event\":\"reap\"") {
            true => reaped += 1,
            false => expired += 1,
        }
    }
    let counted = |counter| counted_by(&pair.server, counter);
    // An action is counted once its line is written.
    let begun = Instant::now();
    while counted("reap_settled")? < reaped {
        assert!(
            begun.elapsed() < PATIENCE,
            "{reaped} actions are not counted"
        );
    }
    twheel.kill()?;
    assert_eq!(counted("reap_asked")?, u64::from(FLOWS));
    let settled = counted("reap_settled")?;
    assert!((reaped..u64::from(FLOWS)).contains(&settled), "{settled}");
    assert_eq!(counted("reap_lost")?, 0, "reported before the next run");

    let lost = u64::from(FLOWS) - settled;
    let text = format!("up to {lost} actions on expired flows were not done");
    let ended = Twheel::start(&pair.server, &args)?.stop()?;
    assert!(ended.stderr.contains(&text), "{}", ended.stderr);
    assert_eq!(counted("reap_lost")?, lost);
    // Reported once.
    let ended = Twheel::start(&pair.server, &args)?.stop()?;
    assert!(!ended.stderr.contains("were not done"), "{}", ended.stderr);
    assert_eq!(counted("reap_lost")?, lost);
    detached(&pair.server)
}

#[test]
fn what_is_not_printed_is_printed_by_the_next_run() -> Result<()> {
    require_root();
    // All events fit into the ring: in a full ring, `delete` would make room, and the events that
    // it takes out would not be printed.
    const FLOWS: u32 = 6_000;
    // Lines that may have been in a pipe, and in a reader's buffer of 8 KiB.
    const UNREAD: usize = (4096 + 8192) / 200;
    let pair = Pair::new()?;
    let args = [
        "run",
        "--iface",
        SERVER,
        "--timeout",
        "2s",
        "--tick",
        "20ms",
        "--keep",
    ];
    let mut args = args.to_vec();
    let history = Directory::new("unprinted")?;
    args.extend(["--json", "--events", "end", "--history", history.path()]);
    // A full disk is an error, even for the first run here.
    let full = fs::File::options().write(true).open("/dev/full")?;
    let mut command = pair.server.twheel(&args)?;
    let command = command.stdin(Stdio::null()).stdout(full);
    let mut run = Run(command.stderr(Stdio::piped()).spawn()?);
    run.await_steps()?;
    pair.server.begin_these(SERVER, 0..10)?;
    let mut stderr = String::new();
    let mut pipe = run
        .0
        .stderr
        .take()
        .context("standard error is not a pipe")?;
    pipe.read_to_string(&mut stderr)?;
    assert_eq!(run.0.wait()?.code(), Some(1), "{stderr}");
    assert!(stderr.contains("No space left"), "{stderr}");
    assert_eq!(pair.server.attached(SERVER)?, ["xdp", "egress"]);

    // A reader that goes away after some lines is no error.
    let mut printed = BTreeSet::new();
    for (count, begins) in [(500, 10..FLOWS), (1, FLOWS..FLOWS)] {
        let (reader, writer) = std::io::pipe()?;
        fcntl(&writer, FcntlArg::F_SETPIPE_SZ(4096))?;
        let mut run = Run::start(&pair.server, &args, &writer)?;
        drop(writer);
        run.await_steps()?;
        pair.server.begin_these(SERVER, begins)?;
        for line in BufReader::new(reader).lines().take(count) {
            printed.insert(key(&line?)?);
        }
        assert!(run.0.wait()?.success());
        assert_eq!(pair.server.attached(SERVER)?, ["xdp", "egress"]);
    }
    let first: BTreeSet<_> = (0..10).map(key_of).collect();
    assert!(
        first.is_subset(&printed),
        "the flows of the full disk were not printed"
    );

    // A command that does a run's work does not take them, either, and its own events come after
    // them.
    pair.server.begin_these(SERVER, FLOWS..FLOWS + 5)?;
    let delete = ["delete", "--iface", SERVER, "--history", history.path()];
    let delete = [&delete[..], &["sport in 7024-7028"]].concat();
    let ended = pair.server.twheel_once(&delete)?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert_eq!(counted_by(&pair.server, "deleted")?, 5);

    let last = Twheel::start(&pair.server, &args[1..])?;
    let deleted: BTreeSet<_> = (FLOWS..FLOWS + 5).map(key_of).collect();
    // A busy machine takes its time to start; after that, lines come without a pause.
    let patience = |printed: &BTreeSet<_>| match deleted.is_subset(printed) {
        true => millis(3000),
        false => PATIENCE,
    };
    while let Some(line) = last.line(patience(&printed))? {
        printed.insert(key(&line.text)?);
    }
    assert!(
        deleted.is_subset(&printed),
        "the deleted flows were not printed"
    );
    let missing = FLOWS as usize + 5 - printed.len();
    assert!(
        missing <= UNREAD,
        "{missing} flows were neither printed nor in a pipe"
    );
    assert_eq!(last.stop()?.code(), Some(0));
    assert_eq!(check_accounts(&pair.server)?, 0);
    let all: BTreeSet<_> = (0..FLOWS + 5).map(key_of).collect();
    assert_eq!(kept(&pair.server, &history)?, all);
    detached(&pair.server)
}

/// The metrics that a run serves.
fn scrape(address: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")?;
    Ok(std::io::read_to_string(stream)?)
}
