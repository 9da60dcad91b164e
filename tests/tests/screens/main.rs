//! What a person sees of twheel: tables, help, manual pages, the proposals of shells, and refusals.

mod shells;

use std::{
    fs::{self, File},
    io::Read,
    os::fd::OwnedFd,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use etherparse::{PacketBuilder, PacketBuilderStep, UdpHeader};
use nix::{
    pty::{Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};
use twheel::output::table::HELD;
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, require_root},
    pair::{Busy, CLIENT, Pair, SERVER},
    path,
    running::{Ended, Twheel, once, twheel_bin, wait_within},
};

fn lines(host: &Namespace, args: &[&str]) -> Result<Vec<String>> {
    let ended = host.twheel_once(args)?;
    ensure!(ended.code() == Some(0), "{args:?}: {}", ended.stderr);
    Ok(ended.lines.into_iter().map(|line| line.text).collect())
}

/// Runs twheel on a terminal of its own for a while, and returns what it wrote.
fn on_terminal(command: &mut Command, size: (u16, u16), wait: Duration) -> Result<String> {
    let size = Winsize {
        ws_col: size.0,
        ws_row: size.1,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let pty = openpty(Some(&size), None)?;
    let copy = || -> Result<OwnedFd> { Ok(pty.slave.try_clone()?) };
    command.stdin(copy()?).stdout(copy()?).stderr(copy()?);
    let mut child = command.spawn()?;
    // The command holds copies of the descriptors, which keep the terminal open.
    let (input, output, error) = (Stdio::null(), Stdio::null(), Stdio::null());
    command.stdin(input).stdout(output).stderr(error);
    drop(pty.slave);
    let reader = thread::spawn(move || {
        let mut written = Vec::new();
        // Linux returns an error once no process has the other end open.
        let _ = File::from(pty.master).read_to_end(&mut written);
        written
    });
    wait_within(&mut child, wait)?;
    let written = reader.join().ok().context("the reader panicked")?;
    Ok(String::from_utf8(written)?)
}

#[test]
fn stats_are_grouped_and_without_zeros_and_drawn_over() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let _open = pair.connect_some(3)?;
    let names = |lines: &[String]| -> Vec<String> {
        let mut lines = lines.iter().skip_while(|line| !line.starts_with("COUNTER"));
        lines.next();
        lines
            .filter_map(|line| Some(line.split_once("  ")?.0.to_owned()))
            .collect()
    };
    let some = lines(&pair.server, &["stats"])?;
    let has = |lines: &[String], text: &str| lines.iter().any(|line| line == text);
    ensure!(
        has(&some, "Flow table") && has(&some, "Packets"),
        "{some:#?}"
    );
    ensure!(!has(&some, "Losses") && !has(&some, "Reaper"), "{some:#?}");
    let shown = names(&some);
    ensure!(shown.contains(&"created".to_owned()), "{some:#?}");
    ensure!(!shown.contains(&"events_lost".to_owned()), "{some:#?}");
    let all = lines(&pair.server, &["stats", "--all", "--cpus"])?;
    ensure!(has(&all, "Losses") && has(&all, "Reaper"), "{all:#?}");
    let every = lines(&pair.server, &["stats", "--json"])?.len();
    ensure!(names(&all).len() == every, "{all:#?}");
    ensure!(all.iter().any(|line| line.contains("CPU 0")), "{all:#?}");

    // On a small terminal each look fits, and is drawn over the last one.
    let (columns, rows) = (80, 16);
    let mut command = pair
        .server
        .twheel(&["stats", "--watch", "--interval", "200ms"])?;
    let wait = Duration::from_millis(900);
    let text = on_terminal(&mut command, (columns, rows), wait)?;
    let looks: Vec<_> = text.split("\x1b[H").skip(1).collect();
    ensure!(looks.len() >= 3, "{text:?}");
    for look in looks {
        let shown: Vec<_> = look.split("\x1b[K\r\n").collect();
        ensure!(shown.len() <= usize::from(rows), "{look:?}");
        let fits = |line: &&str| line.chars().count() <= usize::from(columns) + "\x1b[J".len();
        ensure!(shown.iter().all(fits), "{look:?}");
    }
    ensure!(text.contains("A SECOND"), "{text:?}");
    twheel.stop()?;
    pair.server.check_clean(SERVER)
}

#[test]
fn what_programs_cost_is_measured() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = Twheel::start(&pair.server, &["--iface", SERVER])?;
    let open = pair.connect_some(2)?;
    let busy = Busy::start(open, Duration::from_millis(5));
    let text = lines(&pair.server, &["stats", "--cost"])?;
    let json = lines(&pair.server, &["stats", "--cost", "--json"])?;
    busy.stop()?;
    for program in ["twheel_xdp", "all packets"] {
        let line = text.iter().find(|line| line.starts_with(program));
        let line = line.with_context(|| format!("no {program}: {text:#?}"))?;
        let numbers = line[program.len()..].split_ascii_whitespace();
        let numbers: Vec<f64> = numbers
            .map(|it| it.trim_end_matches('%').parse())
            .collect::<Result<_, _>>()?;
        let [runs, nanoseconds, share] = numbers[..] else {
            anyhow::bail!("{line}");
        };
        ensure!(
            runs > 50.0 && (10.0..100_000.0).contains(&nanoseconds),
            "{line}"
        );
        ensure!(share < 100.0, "{line}");
    }
    let costs = json
        .iter()
        .filter(|line| line.contains("\"event\":\"cost\""));
    ensure!(costs.count() >= 3, "{json:#?}");
    let ran = |line: &&String| line.contains("twheel_xdp") && line.contains("\"run_us\":");
    ensure!(json.iter().filter(ran).count() == 1, "{json:#?}");
    twheel.stop()?;
    pair.server.check_clean(SERVER)
}

#[test]
fn long_addresses_and_large_numbers_shift_no_column() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let long = "fd77:1111:2222:3333:4444:5555:6666";
    for (host, iface, last) in [(&pair.client, "client0", 1), (&pair.server, SERVER, 2)] {
        host.ip(&format!("addr add {long}:{last}/112 dev {iface} nodad"))?;
    }
    let args = ["--iface", SERVER, "--accounting", "--timeout", "1h"];
    let twheel = Twheel::start(&pair.server, &args)?;
    let mut open = pair.connect_some(4)?;
    let listener = pair
        .server
        .enter(|| Ok(std::net::TcpListener::bind(format!("[{long}:2]:0"))?))?;
    let far = pair
        .client
        .enter(|| Ok(std::net::TcpStream::connect(listener.local_addr()?)?))?;
    let table = lines(&pair.server, &["flows"])?;
    let at = |line: &String, text: &str| line.find(text).map(|at| line[..at].chars().count());
    let arrows: Vec<_> = table[1..].iter().map(|line| at(line, "-> ")).collect();
    ensure!(arrows.len() == 5 && arrows[0].is_some(), "{table:#?}");
    ensure!(arrows.iter().all(|it| *it == arrows[0]), "{table:#?}");
    ensure!(
        at(&table[0], "DST") == arrows[0].map(|it| it + 3),
        "{table:#?}"
    );
    // The numbers end where their headings do.
    let end = at(&table[0], "BYTES").context("no heading")? + "BYTES".len();
    let ends = |line: &String| line.trim_end().chars().count() == end;
    ensure!(table.iter().all(ends), "{table:#?}");

    let (packet, mut sum) = (vec![0; 1 << 16], 0);
    while sum < 200_000 {
        std::io::Write::write_all(&mut open[0].client, &packet)?;
        let mut got = vec![0; packet.len()];
        open[0].server.read_exact(&mut got)?;
        sum += packet.len();
    }
    thread::sleep(Duration::from_millis(300));
    let filter = "bytes > 200000";
    let human = lines(&pair.server, &["flows", filter])?;
    let exact = lines(&pair.server, &["flows", filter, "--bytes"])?;
    ensure!(human.len() == 2 && exact.len() == 2, "{human:?}");
    let last = |lines: &[String]| lines[1].split('/').next_back().map(str::to_owned);
    let orig = |lines: &[String]| -> Option<String> {
        let bytes = lines[1].split_ascii_whitespace().last()?;
        Some(bytes.split_once('/')?.0.to_owned())
    };
    ensure!(last(&human) == last(&exact), "{human:?} {exact:?}");
    let bytes: u64 = orig(&exact).context("no bytes")?.parse()?;
    ensure!(bytes > 200_000, "{exact:?}");
    let shown = format!("{:.0}k", bytes as f64 / 1000.0);
    ensure!(orig(&human) == Some(shown), "{human:?} {exact:?}");
    drop((far, open));
    twheel.stop()?;
    pair.server.check_clean(SERVER)
}

/// Sends a datagram over IPv4 from each of so many addresses, and one over IPv6 whose addresses are
/// as long as possible.
fn send_datagrams(pair: &Pair, count: u32) -> Result<()> {
    let socket = pair.client.enter(|| path::open(CLIENT, 0))?;
    let send = |packet: PacketBuilderStep<UdpHeader>| {
        let mut frame = Vec::new();
        packet.write(&mut frame, b"!")?;
        path::send(&socket, &frame)
    };
    let ethernet = || PacketBuilder::ethernet2([2; 6], [4; 6]);
    for number in 0..count {
        let [_, high, middle, low] = number.to_be_bytes();
        let packet = ethernet().ipv4([10, high, middle, low], [10, 0, 0, 2], 64);
        send(packet.udp(40_000, 53))?;
    }
    let packet = ethernet().ipv6([0xfd; 16], [0xfe; 16], 64);
    send(packet.udp(40_000, 53))
}

/// Also in a table with more rows than wait until the widths are known.
#[test]
fn a_long_address_at_the_end_shifts_no_column() -> Result<()> {
    require_root();
    for count in [1_200, HELD as u32 + 100] {
        let pair = Pair::new()?;
        let args = ["--iface", SERVER, "--proto", "udp", "--max-flows", "200000"];
        let twheel = Twheel::start(
            &pair.server,
            &[&args[..], &["--timeout", "udp=1h"]].concat(),
        )?;
        send_datagrams(&pair, count)?;
        let until = Instant::now() + PATIENCE;
        while pair.server.counter("created")? <= u64::from(count) {
            ensure!(Instant::now() < until, "some flows are missing");
            thread::sleep(Duration::from_millis(50));
        }
        for sort in [&[][..], &["--sort", "dst"], &["--sort", "dst", "--reverse"]] {
            let table = lines(&pair.server, &[&["flows"], sort].concat())?;
            ensure!(table.len() >= count as usize + 2, "{sort:?}");
            let first = &table[0];
            ensure!(first.len() > 2 * "[fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd]:40000".len());
            let other = table.iter().find(|line| line.len() != first.len());
            ensure!(other.is_none(), "{count} {sort:?}:\n{first}\n{other:?}");
        }
        twheel.stop()?;
        pair.server.check_clean(SERVER)?;
    }
    Ok(())
}

#[test]
fn documents_and_manual_pages_are_in_the_program() -> Result<()> {
    require_root();
    let host = Namespace::new("screens")?;
    for (topic, word) in [
        ("filter", "picked_up"),
        ("events", "flow_id"),
        ("states", "syn_sent"),
        ("policy", "[[rule]]"),
    ] {
        let text = lines(&host, &["help", topic])?;
        ensure!(
            text.iter().any(|line| line.contains(word)),
            "{topic}: {text:#?}"
        );
        // Without a terminal, the lines are those of a page; only code is longer.
        let is_long = |line: &&String| line.chars().count() > 100 && !line.starts_with("    ");
        ensure!(text.iter().find(is_long).is_none(), "{topic}: {text:#?}");
    }
    let mut narrow = host.twheel(&["help", "states"])?;
    let shown = on_terminal(&mut narrow, (80, 24), Duration::from_secs(10))?;
    ensure!(
        shown.lines().all(|line| line.chars().count() <= 80),
        "{shown}"
    );
    let heading = shown.lines().find(|line| line.starts_with("state "));
    for column in ["seen of the flow", "timeout", "conntrack's state"] {
        ensure!(heading.is_some_and(|it| it.contains(column)), "{shown}");
    }
    let of_command = lines(&host, &["help", "policy", "check"])?;
    let options = lines(&host, &["policy", "check", "--help"])?;
    ensure!(of_command == options, "{of_command:#?}");
    let page = lines(&host, &["man", "policy", "check"])?;
    ensure!(
        page.iter()
            .any(|line| line.starts_with(".TH twheel-policy-check") && line.contains("\"twheel 0.")),
        "{page:#?}"
    );
    let mut command = host.twheel(&["man", "run"])?;
    command
        .env("MANPAGER", "cat")
        .env("PAGER", "cat")
        .env("TERM", "xterm");
    let shown = on_terminal(&mut command, (100, 50), Duration::from_secs(20))?;
    ensure!(
        shown.contains("twheel-run(1)") && !shown.contains(".TH"),
        "{shown}"
    );
    for args in [&["help", "nonsense"][..], &["man", "policy", "nonsense"]] {
        let ended = host.twheel_once(args)?;
        ensure!(
            ended.code() == Some(2) && ended.stderr.contains("give one of"),
            "{ended:?}"
        );
    }
    let ended = host.twheel_once(&["help", "nonsense"])?;
    ensure!(
        ended.stderr.contains(", filter, events, states"),
        "{ended:?}"
    );
    Ok(())
}

fn refused(ended: &Ended, code: i32, says: &str) -> Result<()> {
    ensure!(ended.code() == Some(code), "{says}: {ended:?}");
    ensure!(ended.stderr.contains(says), "{says}: {}", ended.stderr);
    Ok(())
}

#[test]
fn refusals_say_what_to_give() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    let run = ["run", "--iface", SERVER, "--history", "off"];
    let with = |more: &[&str]| host.twheel_once(&[&run[..], more].concat());
    refused(
        &with(&["--timeout", "0s"])?,
        2,
        "--timeout 0s: give 100ms (the tick)",
    )?;
    refused(
        &with(&["--timeout", "close=0s"])?,
        2,
        "--timeout close=0s: give",
    )?;
    refused(
        &with(&["--timeout", "99999d"])?,
        2,
        "--timeout 99999d: give",
    )?;
    refused(
        &with(&["--history-size", "banana"])?,
        2,
        "give a size, such as",
    )?;
    refused(
        &with(&["--tick", "fast"])?,
        2,
        "give a duration with its unit",
    )?;
    refused(
        &host.twheel_once(&["expired", "--since", "yesterday"])?,
        2,
        "such as 150ms, 30s",
    )?;
    refused(
        &host.twheel_once(&["plan", "--flows", "9", "--memory", "x"])?,
        2,
        "give a size",
    )?;

    refused(
        &with(&["--timeout", "close=1h,close=2h"])?,
        2,
        "close is given twice",
    )?;
    refused(
        &with(&["--reap", "enforce=reset"])?,
        2,
        "--reap enforce=reset refuses packets",
    )?;

    let idle = "--dry-run --protect udp --reap-rate 9 --reap-max-share 5 --rto-min 1s --rto-max 9s \
                --max-retrans 2 --i-know-this-drops-traffic --enforce-rate 7";
    let idle = idle.replace("udp", "dport==22");
    let args: Vec<_> = ["--iface", SERVER]
        .into_iter()
        .chain(idle.split(' '))
        .collect();
    let twheel = Twheel::start(host, &args)?;
    for says in [
        "--dry-run without --reap: nothing is reaped",
        "--protect without --reap: nothing is reaped",
        "--reap-rate without --reap: nothing is reaped",
        "--reap-max-share without --reap: nothing is reaped",
        "--i-know-this-drops-traffic without --reap enforce: nothing is dropped",
        "--enforce-rate without --reap enforce=reset: it sends no RST",
        "--rto-min without --rto on",
        "--rto-max without --rto on",
        "--max-retrans without --rto on",
    ] {
        ensure!(
            twheel.stderr().contains(says),
            "{says}: {}",
            twheel.stderr()
        );
    }
    twheel.stop()?;
    let args = ["--iface", SERVER, "--reap", "socket", "--reap-rate", "9"];
    let twheel = Twheel::start(host, &args)?;
    ensure!(!twheel.stderr().contains("without"), "{}", twheel.stderr());
    refused(
        &host.twheel_once(&["flows", "dport in {1,2"])?,
        2,
        "column 14: the set ends with `}`: add it",
    )?;
    // What is attached is the running twheel's, and no earlier run left it.
    let ended = host.twheel_once(&["doctor", "--iface", SERVER])?;
    let said: Vec<_> = ended.lines.iter().map(|it| &it.text).collect();
    let says = |what: &str| said.iter().any(|line| line.contains(what));
    ensure!(
        says("the twheel that runs there uses it") && !says("an earlier run left"),
        "{said:#?}"
    );
    twheel.stop()?;

    let history = Directory::new("screens")?;
    let twheel = Twheel::start(host, &["--iface", SERVER, "--history", history.path()])?;
    for key in ["rtt", "bytes", "packets"] {
        refused(
            &host.twheel_once(&["flows", "--sort", key])?,
            2,
            &format!("--sort {key}: it is not"),
        )?;
    }
    // Nobody has the right to read the history.
    let mut nobody = host.command("setpriv")?;
    nobody.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    nobody
        .arg(twheel_bin()?)
        .args(["expired", "--history", history.path()]);
    refused(&once(nobody)?, 3, "use the account of `twheel run`")?;
    // There is nothing to read again, and nothing else to do.
    kill(Pid::from_raw(twheel.pid() as i32), Signal::SIGHUP)?;
    twheel.await_stderr("there is no --policy to read again")?;
    ensure!(lines(host, &["flows"])?.len() == 1);
    ensure!(twheel.stop()?.code() == Some(0));
    host.check_clean(SERVER)
}

#[test]
fn interfaces_are_found_by_list_and_by_a_new_name() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let host = &pair.server;
    host.ip("link add twd0 type veth peer name twd9")?;
    host.ip("link set twd0 up")?;
    let both = format!("{SERVER},twd0");
    let twheel = Twheel::start(host, &["--iface", &both, "--keep"])?;
    twheel.await_stderr("twd0: attached")?;
    lines(host, &["flows", "--iface", &both])?;
    refused(
        &host.twheel_once(&["flows", "--iface", &format!("{SERVER},lo")])?,
        6,
        "not running on lo",
    )?;
    host.batch("link set twd0 down\nlink set twd0 name twd1\nlink set twd1 up\n")?;
    twheel.await_stderr("twd0: renamed to twd1")?;
    for name in ["twd0", "twd1"] {
        let stats = lines(host, &["stats", "--iface", name])?;
        let says = |text: &str| stats.iter().any(|line| line.starts_with(text));
        ensure!(says("twd1: 0 packets received"), "{stats:#?}");
        ensure!(!says("twd0: "), "{stats:#?}");
    }
    let listed = lines(host, &["list", "--json"])?;
    let both = format!("[\"{SERVER}\",\"twd1\"]");
    ensure!(listed.iter().any(|line| line.contains(&both)), "{listed:?}");
    twheel.stop()?;
    refused(
        &host.twheel_once(&["detach", "--iface", "twd1"])?,
        6,
        "twheel detach --iface twd0",
    )?;
    let ended = host.twheel_once(&["detach", "--iface", "twd0"])?;
    refused(
        &ended,
        0,
        &format!("twd0: detached; still attached: {SERVER}"),
    )?;
    let ended = host.twheel_once(&["detach", "--iface", SERVER])?;
    refused(&ended, 0, &format!("{SERVER}: detached\n"))?;
    host.check_clean(SERVER)
}

#[test]
fn the_examples_of_policy_check_fit_the_policy_of_the_document() -> Result<()> {
    ensure!(geteuid().is_root(), "run as root");
    let host = Namespace::new("screens")?;
    let document = include_str!("../../../docs/policy.md");
    let policy = document.split("```toml\n").nth(1);
    let policy = policy
        .and_then(|it| it.split("```").next())
        .context("no policy")?;
    let directory = Directory::new("examples")?;
    fs::write(format!("{}/policy.toml", directory.path()), policy)?;
    let help = lines(&host, &["policy", "check", "--help"])?;
    let examples = help
        .iter()
        .filter_map(|line| line.strip_prefix("  twheel "));
    let mut count = 0;
    for example in examples {
        let mut shell = host.command("sh")?;
        let program = twheel_bin()?;
        shell.args([
            "-c",
            &format!("cd {} && {} {example}", directory.path(), program.display()),
        ]);
        let ended = once(shell)?;
        ensure!(ended.code() == Some(0), "{example}: {ended:?}");
        count += 1;
    }
    ensure!(count >= 4, "{help:#?}");
    Ok(())
}
