//! Collectors of others, and what they have read.

use std::{
    fs,
    net::{IpAddr, UdpSocket},
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, program},
    running::wait_within,
};

use crate::flows::Record;

/// Whether a program of others is installed; if not, that is said.
pub fn is_installed(name: &str) -> bool {
    let found = Command::new(program(name))
        .arg("-h")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if found.is_err() {
        twheel_tests::skipped(format_args!("{name} is not installed"));
    }
    found.is_ok()
}

/// A UDP port on which nothing listens.
pub fn free_port(host: &Namespace) -> Result<u16> {
    host.enter(|| Ok(UdpSocket::bind("127.0.0.1:0")?.local_addr()?.port()))
}

/// A collector; ended when this is dropped.
struct Process(Child);

impl Process {
    /// Starts it, and waits until it listens.
    fn start(host: &Namespace, mut command: Command, port: u16) -> Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut process = Self(child.spawn().context("cannot start a collector")?);
        let end = Instant::now() + PATIENCE;
        while host.enter(|| Ok(UdpSocket::bind(("127.0.0.1", port)).is_ok()))? {
            ensure!(Instant::now() < end, "the collector does not listen");
            let ended = process.0.try_wait()?;
            ensure!(ended.is_none(), "the collector has ended: {ended:?}");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(process)
    }

    /// Ends it, so that it writes what it has.
    fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.0.id() as i32), Signal::SIGINT)?;
        let ended = wait_within(&mut self.0, PATIENCE)?;
        ensure!(ended.is_some(), "the collector does not end");
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// nfdump's collector.
pub struct Nfcapd {
    process: Process,
    directory: PathBuf,
}

impl Nfcapd {
    /// Starts it.
    pub fn start(host: &Namespace, directory: &Directory, port: u16) -> Result<Self> {
        let directory = directory.0.join("nfcapd");
        fs::create_dir_all(&directory)?;
        let mut command = host.command(program("nfcapd"))?;
        command.args(["-b", "127.0.0.1", "-t", "3600", "-p", &port.to_string()]);
        command.arg("-w").arg(&directory);
        Ok(Self {
            process: Process::start(host, command, port)?,
            directory,
        })
    }

    /// Ends it. Returns the records that it has read, sorted, and what it has counted: lines of
    /// `nfdump -I`.
    pub fn stop(self) -> Result<(Vec<Record>, String)> {
        self.process.stop()?;
        let nfdump = |args: &[&str]| -> Result<String> {
            let mut command = Command::new(program("nfdump"));
            command
                .arg("-R")
                .arg(&self.directory)
                .args(args)
                .env("TZ", "UTC");
            let output = command.output()?;
            ensure!(output.status.success(), "{output:?}");
            Ok(String::from_utf8(output.stdout)?)
        };
        let listed: Value = serde_json::from_str(&nfdump(&["-o", "json"])?)?;
        let listed = listed.as_array().context("no list")?;
        let mut records = listed.iter().map(of_nfdump).collect::<Result<Vec<_>>>()?;
        records.sort();
        Ok((records, nfdump(&["-I"])?))
    }
}

fn of_nfdump(line: &Value) -> Result<Record> {
    let number = |key: &str| line[key].as_u64().unwrap_or(0);
    let address = |key: [&str; 2]| -> Result<IpAddr> {
        let text = key.iter().find_map(|key| line[key].as_str());
        Ok(text
            .with_context(|| format!("no {key:?}: {line}"))?
            .parse()?)
    };
    let time = |key: &str| -> Result<u64> {
        let text = line[key].as_str().context("no time")?;
        let time = humantime::parse_rfc3339(&format!("{text}Z"))?;
        Ok(time.duration_since(std::time::UNIX_EPOCH)?.as_millis() as u64)
    };
    Ok(Record {
        ends: [
            (
                address(["src4_addr", "src6_addr"])?,
                number("src_port") as u16,
            ),
            (
                address(["dst4_addr", "dst6_addr"])?,
                number("dst_port") as u16,
            ),
        ],
        proto: number("proto") as u8,
        start: time("first")?,
        end: time("last")?,
        packets: number("in_packets"),
        bytes: number("in_bytes"),
        reverse: (number("out_packets"), number("out_bytes")),
        end_reason: 0,
        vlan: number("src_vlan") as u16,
    })
}

/// pmacct's collector.
pub struct Nfacctd {
    process: Process,
    output: PathBuf,
}

impl Nfacctd {
    /// Starts it.
    pub fn start(host: &Namespace, directory: &Directory, port: u16) -> Result<Self> {
        let (config, output) = (
            directory.file("nfacctd.conf"),
            directory.0.join("pmacct.json"),
        );
        let text = format!(
            "nfacctd_ip: 127.0.0.1\nnfacctd_port: {port}\nplugins: print\n\
             aggregate: src_host, dst_host, src_port, dst_port, proto, vlan, timestamp_start, timestamp_end\n\
             print_output: json\nprint_output_file: {}\nprint_output_file_append: true\n\
             print_refresh_time: 1\ntimestamps_since_epoch: true\n",
            output.display()
        );
        fs::write(&config, text)?;
        let mut command = host.command(program("nfacctd"))?;
        command.args(["-f", &config]);
        Ok(Self {
            process: Process::start(host, command, port)?,
            output,
        })
    }

    /// Ends it. Returns the records that it has read, sorted, of which there should be so many.
    pub fn stop(self, wanted: usize) -> Result<Vec<Record>> {
        // It passes records on to a process of its own, which writes them once this one ends.
        self.process.stop()?;
        let end = Instant::now() + PATIENCE / 4;
        let lines = loop {
            let lines = fs::read_to_string(&self.output).unwrap_or_default();
            if lines.lines().count() >= wanted || Instant::now() > end {
                break lines;
            }
            thread::sleep(Duration::from_millis(50));
        };
        let lines = lines.lines().map(serde_json::from_str);
        let mut records = Vec::new();
        for line in lines {
            records.push(of_pmacct(&line?)?);
        }
        records.sort();
        Ok(records)
    }
}

fn of_pmacct(line: &Value) -> Result<Record> {
    let number = |key: &str| line[key].as_u64().unwrap_or(0);
    let address = |key: &str| -> Result<IpAddr> {
        Ok(line[key]
            .as_str()
            .with_context(|| format!("no {key}: {line}"))?
            .parse()?)
    };
    // Seconds and a fraction.
    let time = |key: &str| -> Result<u64> {
        let text = line[key].as_str().context("no time")?;
        let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
        Ok(1000 * seconds.parse::<u64>()? + fraction.get(..3).unwrap_or("0").parse::<u64>()?)
    };
    Ok(Record {
        ends: [
            (address("ip_src")?, number("port_src") as u16),
            (address("ip_dst")?, number("port_dst") as u16),
        ],
        proto: match line["ip_proto"].as_str() {
            Some("tcp") => 6,
            Some("udp") => 17,
            Some("icmp") => 1,
            Some("ipv6-icmp") => 58,
            other => anyhow::bail!("{other:?} is no protocol"),
        },
        start: time("timestamp_start")?,
        end: time("timestamp_end")?,
        packets: number("packets"),
        bytes: number("bytes"),
        reverse: (0, 0),
        end_reason: 0,
        vlan: number("vlan") as u16,
    })
}
