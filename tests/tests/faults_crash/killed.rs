//! Kills runs at random moments.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel::pins::Instance;
use twheel_tests::{
    directory::Directory,
    is_long,
    netns::{PATIENCE, require_root},
    pair::{Pair, SERVER},
    running::Twheel,
};

use crate::{
    Random,
    accounts::{
        await_clean, await_loaded, check_accounts, detached, held, kept, key, key_of, link_ids,
        loaded, names, pinned, programs_by_xdp, repeated, tracked,
    },
    millis,
    traffic::{Run, Sender},
};

#[test]
fn a_run_killed_at_any_moment_loses_no_flow() -> Result<()> {
    require_root();
    let kills = if is_long() { 200 } else { 20 };
    let mut random = Random::new();
    let history = Directory::new("crash")?;
    let pair = Pair::new()?;
    // Capacity for all flows that wait while a start takes long; no other test has a table of this
    // size.
    let max_flows = (400_000 + std::process::id() % 50_000).to_string();
    let args = [
        "run",
        "--iface",
        SERVER,
        "--timeout",
        "300ms",
        "--tick",
        "20ms",
        "--keep",
        "--json",
        // Less code for the kernel to verify, which takes most of a start; and each kill needs a
        // start.
        "--source-share",
        "off",
        "--max-flows",
        &max_flows,
        "--history",
        history.path(),
        // Large enough for all events: the sender goes by time, and the machine may be slow.
        "--history-size",
        "1GiB",
    ];
    let (reader, writer) = std::io::pipe()?;
    let lines = Arc::new(Mutex::new(Vec::new()));
    let collected = lines.clone();
    let reading = thread::spawn(move || {
        for line in BufReader::new(reader).lines().map_while(Result::ok) {
            if !line.contains("\"event\":\"run\"") {
                collected.lock().unwrap().push(line);
            }
        }
    });

    // A first run attaches, so that all packets are seen from the first one on.
    let begun = Instant::now();
    let first = Twheel::start(&pair.server, &args[1..])?;
    let start = begun.elapsed();
    first.kill()?;
    let instance = pinned(&pair.server)?;
    let pinned = names(&pair.server)?;
    let table = pair.server.enter(|| Instance::with(SERVER)?.map("FLOWS"))?;
    let entries = table.info()?.max_entries();
    drop(table);
    let (maps, programs) = loaded(entries);
    assert!(maps > 0 && programs.len() == programs_by_xdp().count());
    let links = link_ids(&instance)?;
    let sender = Sender::start(&pair, 4)?;
    let (mut most, mut total) = (0, 0);
    let (mut starting, mut stepping, mut ending) = (0, 0, 0);
    let mut checks = 0;
    let mut number = 0;
    // So many at least while they step, and while they end: a run that is told to end may have ended
    // before it is killed, and is not counted then. This needs a few more kills at most.
    let (few_stepping, few_ending) = (kills / 5, kills / 20);
    let goes_on = |starting, stepping, ending| {
        starting + stepping + ending < kills || stepping < few_stepping || ending < few_ending
    };
    while goes_on(starting, stepping, ending) && number < 3 * kills {
        number += 1;
        // If starts take long, all flows that begin meanwhile wait; this test must not fill the
        // table.
        let waiting = pair.server.enter(|| tracked(&Instance::with(SERVER)?))?;
        sender.pause(waiting > 200_000);
        let mut run = Run::start(&pair.server, &args, &writer)?;
        // Kills runs while they start, while they have something to do, and while they end. The
        // kernel's verification takes most of a start: the delays begin after it, or most kills
        // would fall into it.
        let is_ending = number % 10 == 9;
        let wait = match number % 10 {
            9 => {
                run.await_steps()?;
                thread::sleep(Duration::from_micros(random.below(50_000)));
                run.signal(Signal::SIGINT)?;
                // A run ends within a few milliseconds.
                random.below(4_000)
            }
            1 | 6 => {
                run.await_steps()?;
                random.below(150_000)
            }
            5 => random.below(start.as_micros() as u64),
            _ if is_long() => random.below(start.as_micros() as u64),
            _ => random.below(250_000),
        };
        thread::sleep(Duration::from_micros(wait));
        let steps = run.steps();
        let was_alive = run.kill()?;
        assert!(
            was_alive || is_ending,
            "kill {number}: the run had already ended"
        );
        match (is_ending, steps) {
            (true, _) => ending += u32::from(was_alive),
            (false, true) => stepping += 1,
            (false, false) => starting += 1,
        }
        assert_eq!(
            pair.server.attached(SERVER)?,
            ["xdp", "egress"],
            "kill {number}: a hook is not attached"
        );
        assert_eq!(link_ids(&instance)?, links, "a hook was attached anew");
        if number % 10 == 0 {
            checks += 1;
            sender.pause(true);
            let flows = check_accounts(&pair.server)?;
            assert_eq!(names(&pair.server)?, pinned);
            await_loaded(entries, maps, || held(&instance))?;
            (most, total) = (most.max(flows), total + flows);
            sender.pause(false);
            eprintln!("{number} kills: {flows} flows");
        }
    }
    assert!(
        stepping >= few_stepping,
        "only {stepping} runs were killed while they stepped"
    );
    assert!(
        ending >= few_ending,
        "only {ending} runs were killed while they ended"
    );
    let sent = sender.stop()?;
    thread::sleep(millis(500));

    let last = Run::start(&pair.server, &args, &writer)?;
    let end = Instant::now() + PATIENCE;
    let (src, _) = key_of(sent - 1);
    let text = format!("\"src\":\"{}\",\"sport\":{},", src.ip(), src.port());
    while !lines
        .lock()
        .unwrap()
        .iter()
        .rev()
        .any(|line: &String| line.contains(&text))
    {
        ensure!(
            Instant::now() < end,
            "the last flow was not reported in time"
        );
        thread::sleep(millis(50));
    }
    // On a busy machine the wheel of the other CPU may lag.
    while pair.server.enter(|| tracked(&Instance::with(SERVER)?))? > 0 {
        ensure!(Instant::now() < end, "flows are left in the table");
        thread::sleep(millis(50));
    }
    thread::sleep(millis(500));
    assert_eq!(
        check_accounts(&pair.server)?,
        0,
        "some flows have not ended"
    );
    assert_eq!(loaded(entries).1.len(), programs_by_xdp().count());
    last.signal(Signal::SIGINT)?;
    let mut last = last;
    assert!(last.0.wait()?.success());
    drop((last, writer));
    reading.join().expect("the reader panicked");

    // Each packet began a flow of its own. If all flows are reported, all packets were seen.
    let all: BTreeSet<_> = (0..sent).map(key_of).collect();
    let mut printed = BTreeMap::<_, u32>::new();
    for line in lines.lock().unwrap().iter() {
        *printed.entry(key(line)?).or_default() += 1;
    }
    let missing: Vec<_> = all.iter().filter(|it| !printed.contains_key(it)).collect();
    assert!(
        missing.is_empty(),
        "{} flows were not printed: {:?}",
        missing.len(),
        missing.first()
    );
    let again = repeated(&lines.lock().unwrap())?;
    eprintln!(
        "{kills} kills in {:?}: {starting} while they started, {stepping} while they stepped, {ending} while they ended; \
         {sent} flows of one packet each, {} tracked at a checkpoint, {most} at most; printed twice: {again:?}",
        begun.elapsed(),
        total / checks
    );
    assert!(again.len() <= (stepping + ending) as usize, "{again:?}");

    let kept = kept(&pair.server, &history)?;
    let segments = history.0.join(pair.server.history(SERVER));
    assert!(
        segments.join("0000000001.history").exists(),
        "the history dropped segments"
    );
    let missing: Vec<_> = all.iter().filter(|it| !kept.contains(it)).collect();
    assert!(
        missing.is_empty(),
        "{} flows are not in the history: {:?}",
        missing.len(),
        missing.first()
    );
    assert_eq!(kept.len(), printed.len());

    let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(&pair.server)?;
    await_loaded(entries, 0, || Ok(BTreeSet::new()))
}

#[test]
fn one_killed_while_it_begins_or_cleans_up_leaves_nothing_that_detach_does_not_find() -> Result<()>
{
    require_root();
    let mut random = Random::new();
    let pair = Pair::new()?;
    let (_reader, writer) = std::io::pipe()?;
    let args = ["run", "--iface", SERVER, "--json"];
    for number in 0..if is_long() { 100 } else { 10 } {
        if number % 2 == 0 {
            let run = Run::start(&pair.server, &args, &writer)?;
            thread::sleep(Duration::from_micros(random.below(600_000)));
            run.kill()?;
        } else {
            let run = Twheel::start(&pair.server, &args[1..])?;
            kill(Pid::from_raw(run.pid() as i32), Signal::SIGINT)?;
            thread::sleep(Duration::from_micros(random.below(30_000)));
            run.kill()?;
        }
        // Exit code 6: there was nothing to detach.
        let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
        assert!(matches!(ended.code(), Some(0 | 6)), "{}", ended.stderr);
        await_clean(&pair.server)?;
    }
    Ok(())
}

#[test]
fn a_run_that_adopts_more_than_its_ring_holds_starts_and_reports_all() -> Result<()> {
    require_root();
    const FLOWS: u32 = 30_000;
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "1s", "--keep", "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, FLOWS)?;
    let early = twheel.kill()?.lines.len();
    thread::sleep(millis(1500));
    let twheel = Twheel::start(&pair.server, &args)?;
    let mut found = BTreeSet::new();
    let end = Instant::now() + PATIENCE;
    while found.len() + early < FLOWS as usize {
        let line = twheel.line(end.saturating_duration_since(Instant::now()))?;
        let line = line.with_context(|| format!("only {} flows are reported", found.len()))?;
        assert!(
            found.insert(key(&line.text)?),
            "reported twice: {}",
            line.text
        );
    }
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert_eq!(ended.lines.len(), 0);
    detached(&pair.server)
}

#[test]
fn runs_killed_while_they_print_lose_no_line() -> Result<()> {
    require_root();
    let flows = if is_long() { 30_000 } else { 10_000 };
    let mut random = Random::new();
    let history = Directory::new("print")?;
    let pair = Pair::new()?;
    let args = [
        "run",
        "--iface",
        SERVER,
        "--timeout",
        "1s",
        "--keep",
        "--json",
        "--events",
        "end",
        "--history",
        history.path(),
    ];
    Twheel::start(&pair.server, &args[1..])?.stop()?;
    pair.server.begin_flows(SERVER, flows)?;
    thread::sleep(millis(1500));
    let (reader, writer) = std::io::pipe()?;
    let (tell, lines) = std::sync::mpsc::channel();
    thread::spawn(move || {
        for (number, line) in BufReader::new(reader)
            .lines()
            .map_while(Result::ok)
            .enumerate()
        {
            if number % 50 == 0 {
                // Slowly, so that there is something to print for a while.
                thread::sleep(millis(2));
            }
            if tell.send(line).is_err() {
                break;
            }
        }
    });
    let (mut printed, mut all, mut kills) = (BTreeSet::new(), Vec::new(), 0);
    let mut take = |line: String| -> Result<usize> {
        printed.insert(key(&line)?);
        all.push(line);
        Ok(printed.len())
    };
    let mut count = 0;
    while count < flows as usize {
        let run = Run::start(&pair.server, &args, &writer)?;
        let line = lines
            .recv_timeout(PATIENCE)
            .with_context(|| format!("{count} lines"))?;
        count = take(line)?;
        thread::sleep(Duration::from_micros(random.below(60_000)));
        run.kill()?;
        kills += 1;
        while let Ok(line) = lines.recv_timeout(millis(50)) {
            count = take(line)?;
        }
    }
    let again = repeated(&all)?;
    eprintln!("{kills} kills, {count} flows, lines printed twice: {again:?}");
    assert!(
        kills > 1,
        "no run was killed while it still had lines to print"
    );
    assert!(again.len() <= kills, "{again:?}");
    let kept = kept(&pair.server, &history)?;
    assert_eq!(kept.len(), count);
    assert_eq!(kept, printed);
    assert_eq!(check_accounts(&pair.server)?, 0);
    detached(&pair.server)
}
