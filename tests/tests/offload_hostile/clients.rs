//! Programs that come in numbers, come again and again, and do not read.

use std::{
    io,
    os::fd::AsFd,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use twheel_client::{
    channel::Channel,
    protocol::{self, BATCH, Kind, Op, Request},
};
use twheel_tests::{netns::PATIENCE, offload::most_descriptors};

use crate::{
    DATA, Lab, about, millis,
    raw::Raw,
    rights::{self, NOBODY, Other},
    start, start_nobodys,
};

/// Most programs of a user.
const OF_A_USER: usize = 512;

#[test]
fn who_does_not_read_is_not_asked_for_more() -> Result<()> {
    // KiB: what the packets that wait for one program and an allocator may take.
    const MOST: usize = 4 << 10;
    let lab = Lab::new("unread", &[])?;
    lab.withstands("replies that nobody reads", || {
        let before = lab.memory()?;
        let raw = lab.raw()?;
        let packet = protocol::write(Kind::Requests, 9, &vec![about(Op::Stop, 7); BATCH]);
        let mut sent = 0_u64;
        let mut last = Instant::now();
        while last.elapsed() < millis(300) {
            match raw.try_send(&packet, &[]) {
                Ok(()) => (sent, last) = (sent + 1, Instant::now()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(millis(5)),
                Err(error) => return Err(error.into()),
            }
        }
        let grown = lab.memory()?.saturating_sub(before);
        println!("{sent} packets were sent, twheel has grown by {grown} KiB");
        ensure!(sent < 100 && grown < MOST, "{sent} packets, {grown} KiB");
        lab.serves()?;
        // Each is answered once it reads.
        for at in 0..sent {
            ensure!(raw.replies()?.1.len() == BATCH, "{at} of {sent} answered");
        }
        Ok(())
    })?;
    lab.withstands("events that nobody reads", || {
        const MANY: u32 = 30_000;
        let before = lab.memory()?;
        let raw = lab.raw()?;
        let named = |number| start_nobodys(1_000, number, u64::from(number));
        for from in (0..MANY).step_by(BATCH) {
            let some: Vec<Request> = (from..from + BATCH as u32).map(named).collect();
            let replies = raw.ask(&some, &[])?;
            ensure!(replies.iter().all(|it| it.error == 0));
        }
        let end = Instant::now() + PATIENCE;
        while lab.standing()?.registered > 0 {
            ensure!(Instant::now() < end, "they do not expire");
            thread::sleep(millis(20));
        }
        let grown = lab.memory()?.saturating_sub(before);
        println!("{MANY} events wait, twheel has grown by {grown} KiB");
        // Registrations of 64 bytes, their events of 32, and the pages of their flows.
        ensure!(grown < 16 << 10, "{grown} KiB");
        lab.serves()?;
        let mut seen = vec![false; MANY as usize];
        let mut left = MANY;
        while left > 0 {
            for event in raw.events()? {
                let seen = &mut seen[event.tag as usize];
                ensure!(!*seen, "{event:?} twice");
                (*seen, left) = (true, left - 1);
            }
        }
        Ok(())
    })?;
    lab.end()
}

/// What a program is told that finds no place.
fn refusal(path: &Path) -> Result<()> {
    let error = Channel::connect(path).expect_err("there is a place");
    ensure!(error.kind() == io::ErrorKind::QuotaExceeded, "{error:?}");
    Ok(())
}

#[test]
fn programs_that_find_no_place_are_told() -> Result<()> {
    most_descriptors()?;
    let lab = Lab::new("crowd", &[])?;
    rights::open_to_all(&lab)?;
    lab.withstands("2,000 programs", || {
        let begun = Instant::now();
        let mut held = Vec::new();
        for number in 0..2_000 {
            match Channel::connect(&lab.path()) {
                Ok(channel) => held.push(channel),
                Err(error) => {
                    ensure!(error.kind() == io::ErrorKind::QuotaExceeded, "{error:?}");
                    ensure!(number >= OF_A_USER, "{number}");
                }
            }
        }
        println!(
            "{} of 2,000 have a place, after {:?}",
            held.len(),
            begun.elapsed()
        );
        ensure!(held.len() == OF_A_USER, "{}", held.len());
        // Another user is served.
        let other = Other::connect(&lab.path(), NOBODY)?;
        let connection = lab.connect(0)?;
        let request = start(60_000, DATA, 1);
        ensure!(other.raw.error(request, &[connection.server.as_fd()])? == 0);
        drop(other);
        // And those that have a place.
        let connection = lab.connect(1)?;
        held[7].send(1, &[start(60_000, DATA, 1)], &[connection.server.as_fd()])?;
        ensure!(held[7].receive()?.is_some());
        refusal(&lab.path())?;
        // One leaves, another one comes.
        held.pop();
        let end = Instant::now() + PATIENCE / 6;
        while Channel::connect(&lab.path())
            .map(|it| held.push(it))
            .is_err()
        {
            ensure!(Instant::now() < end, "a place is not given back");
            thread::sleep(millis(2));
        }
        refusal(&lab.path())
    })?;
    lab.end()
}

#[test]
fn who_comes_and_goes_holds_up_nobody() -> Result<()> {
    let lab = Lab::new("comings", &[])?;
    let connection = lab.connect(0)?;
    lab.withstands("a program that comes and goes", || {
        let request = protocol::write(Kind::Requests, 9, &[start(60_000, DATA, 5)]);
        let begun = Instant::now();
        let mut comings = 0_u32;
        while begun.elapsed() < millis(1_500) {
            let raw = lab.raw()?;
            if comings.is_multiple_of(2) {
                // It goes without having read the answer.
                raw.send(&request, &[connection.server.as_fd()])?;
            }
            comings += 1;
        }
        println!("{comings} comings, {:?} each", begun.elapsed() / comings);
        ensure!(comings > 500, "{comings}");
        Ok(())
    })?;
    lab.end()
}

/// For how long a process has used the CPU.
fn cpu_time(pid: u32) -> Result<Duration> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let schedstat = std::fs::read_to_string(task?.path().join("schedstat"))?;
        let first = schedstat.split_whitespace().next().unwrap_or_default();
        sum += first.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(sum))
}

#[test]
fn without_descriptors_it_waits_for_some() -> Result<()> {
    let lab = Lab::new("descriptor-limit", &[])?;
    lab.withstands("more programs than descriptors", || {
        lab.limit_descriptors(lab.standing()?.files + 8)?;
        let first = lab.raw()?;
        let mut others = Vec::new();
        for _ in 0..40 {
            let socket = crate::raw::unconnected()?;
            nix::sys::socket::connect(
                std::os::fd::AsRawFd::as_raw_fd(&socket),
                &nix::sys::socket::UnixAddr::new(&lab.path())?,
            )?;
            others.push(Raw::unread(socket));
        }
        thread::sleep(millis(100));
        let (before, begun) = (cpu_time(lab.twheel.pid())?, Instant::now());
        thread::sleep(millis(700));
        let used = cpu_time(lab.twheel.pid())? - before;
        println!("{used:?} of {:?}", begun.elapsed());
        ensure!(
            used < begun.elapsed() / 4,
            "{used:?} of {:?}",
            begun.elapsed()
        );
        // Who is there is served. A socket cannot be passed now.
        ensure!(first.error(about(Op::Stop, 7), &[])? == libc::ENOENT);
        let connection = lab.connect(0)?;
        let found = first.error(start(60_000, DATA, 1), &[connection.server.as_fd()])?;
        ensure!(found == libc::EMFILE, "{found}");
        Ok(())
    })?;
    lab.end()
}

/// No descriptor is left with which to read its rights.
#[test]
fn who_connects_with_the_last_descriptor_has_its_rights_later() -> Result<()> {
    let lab = Lab::new("last-descriptor", &[])?;
    lab.withstands("a program for which one descriptor was left", || {
        let files = lab.standing()?.files;
        let limit = lab.leave_one_descriptor()?;
        let socket = crate::raw::unconnected()?;
        nix::sys::socket::connect(
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            &nix::sys::socket::UnixAddr::new(&lab.path())?,
        )?;
        thread::sleep(millis(1_500));
        let now = lab.standing()?.files;
        ensure!(now == files + 1, "{now} descriptors, {files} before");
        lab.limit_descriptors(limit)?;
        let raw = Raw::welcomed(socket)?;
        // An administrator.
        ensure!(raw.error(start_nobodys(60_000, 1, 1), &[])? == 0);
        Ok(())
    })?;
    lab.end()
}

/// If twheel has descriptors for some of what was passed, and not for all, it keeps none.
#[test]
fn what_is_received_in_part_is_closed() -> Result<()> {
    let lab = Lab::new("part", &[])?;
    lab.withstands("more than there are descriptors", || {
        let (raw, null) = (lab.raw()?, std::fs::File::open("/dev/null")?);
        let before = lab.standing()?.files;
        let limit = lab.limit_descriptors(before + 3)?;
        for _ in 0..5 {
            let replies = raw.ask(&[start(60_000, DATA, 1)], &[null.as_fd(); 30]);
            ensure!(matches!(replies?[..], [reply] if reply.error == libc::EMFILE as u32));
        }
        lab.limit_descriptors(limit)?;
        ensure!(raw.error(about(Op::Stop, 7), &[])? == libc::ENOENT);
        Ok(())
    })?;
    lab.end()
}

#[test]
fn what_a_user_may_hold_is_exact() -> Result<()> {
    let lab = Lab::new("quota", &["--offload-limit", "100"])?;
    rights::open_to_all(&lab)?;
    let connections = (0..104).map(|number| lab.connect(number));
    let connections = connections.collect::<Result<Vec<_>>>()?;
    lab.withstands("more than a user may hold", || {
        let raw = [lab.raw()?, lab.raw()?];
        let request = start(60_000, DATA, 1);
        let mut ids = Vec::new();
        // Half by one program, half by another.
        for (at, connection) in connections[..100].iter().enumerate() {
            let reply = raw[at % 2].ask(&[request], &[connection.server.as_fd()])?[0];
            ensure!(reply.error == 0, "{at}: {reply:?}");
            ids.push(reply.id);
        }
        let [one, two, three] = [100, 101, 102].map(|at| connections[at].server.as_fd());
        for raw in &raw {
            ensure!(raw.error(request, &[one])? == libc::EDQUOT);
        }
        // Another user has a limit of its own.
        let other = Other::connect(&lab.path(), NOBODY)?;
        ensure!(other.raw.error(request, &[one])? == 0);
        // Each that is stopped makes room for one, once.
        for _ in 0..2 {
            let _ = raw[0].error(about(Op::Stop, ids[0]), &[])?;
        }
        ensure!(raw[1].error(request, &[two])? == 0);
        ensure!(raw[1].error(request, &[three])? == libc::EDQUOT);
        // An end that was not read is held.
        let restart = Request {
            timeout: 1,
            ..about(Op::Restart, ids[1])
        };
        ensure!(raw[1].error(restart, &[])? == 0);
        ensure!(raw[1].events()?.len() == 1);
        ensure!(raw[1].error(request, &[three])? == 0);
        ensure!(raw[1].error(request, &[connections[103].server.as_fd()])? == libc::EDQUOT);
        Ok(())
    })?;
    lab.end()
}

#[test]
fn what_a_program_may_hold_is_exact() -> Result<()> {
    let limits = ["--offload-limit", "5", "--offload-program-limit", "3"];
    let lab = Lab::new("program-quota", &limits)?;
    lab.withstands("more than a program may hold", || {
        let raw = [lab.raw()?, lab.raw()?];
        let named = |number| start_nobodys(60_000, number, 1);
        let some: Vec<_> = (0..4).map(named).collect();
        let replies = raw[0].ask(&some, &[])?;
        let errors: Vec<_> = replies.iter().map(|reply| reply.error as i32).collect();
        ensure!(errors == [0, 0, 0, libc::EDQUOT], "{errors:?}");
        // Another program has two more, which are all of their user.
        ensure!(raw[1].error(named(4), &[])? == 0);
        ensure!(raw[1].error(named(5), &[])? == 0);
        ensure!(raw[1].error(named(6), &[])? == libc::EDQUOT);
        // Each that is stopped makes room for one.
        ensure!(raw[0].error(about(Op::Stop, replies[0].id), &[])? == 0);
        ensure!(raw[0].error(named(7), &[])? == 0);
        ensure!(raw[0].error(named(8), &[])? == libc::EDQUOT);
        Ok(())
    })?;
    lab.end()
}

/// Connections that twheel never sees have no flow left when nobody asks for them.
#[test]
fn what_was_entered_leaves_with_its_registration() -> Result<()> {
    let lab = Lab::new("entered", &["--max-flows", "2048", "--offload-limit", "16"])?;
    let mut raw = lab.raw()?;
    let flows = || -> Result<usize> {
        let args = ["flows", "--iface", "server0", "--json"];
        Ok(lab.pair.server.twheel_once(&args)?.lines.len())
    };
    let before = flows()?;
    let mut entered = 0_u32;
    for from in (0..3_000).step_by(10) {
        let requests: Vec<_> = (from..from + 10)
            .map(|number| start_nobodys(60_000, number, 1))
            .collect();
        let replies = raw.ask(&requests, &[])?;
        // Some are stopped, and some left by a program that ends.
        if from % 20 == 0 {
            entered += replies.iter().filter(|it| it.error == 0).count() as u32;
            raw = lab.raw()?;
            continue;
        }
        let stops = replies.iter().filter(|it| it.error == 0);
        let stops: Vec<_> = stops.map(|it| about(Op::Stop, it.id)).collect();
        entered += stops.len() as u32;
        if stops.is_empty() {
            break;
        }
        raw.ask(&stops, &[])?;
    }
    let left = flows()? - before;
    println!("{entered} entered, {left} left");
    ensure!(entered == 3_000, "{entered} entered, {left} left");
    let end = Instant::now() + PATIENCE / 6;
    while flows()? > before {
        ensure!(
            Instant::now() < end,
            "{} of {entered} stay",
            flows()? - before
        );
    }
    drop(raw);
    lab.end()
}
