//! What a tracker adds to bulk data of one TCP connection through a gateway, where GRO joins
//! segments.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use aya::{
    Ebpf,
    programs::{Xdp, xdp::XdpMode},
};
use serde_json::json;
use twheel::{progress, stepper::pin_to};
use twheel_tests::{netns::Namespace, path::offload, running::Twheel};

use crate::{
    gateway::{GRO, INTERFACES, LANES, TCX, TWHEEL, WARM_UP, namespace, program},
    inputs::{self, CPU},
    plane,
    report::{Figure, Report},
    size,
};

/// Bytes per round.
const BYTES: usize = size(256 << 20, 4 << 20);
/// Bytes per write and read.
const BLOCK: usize = 1 << 17;
const PORT: u16 = 9000;

/// A gateway between its own client and server.
struct Lane {
    stream: [TcpStream; 2],
    twheel: Option<Twheel>,
    gateway: Namespace,
    // Kept because their sockets need them.
    _ends: [Namespace; 2],
}

impl Lane {
    fn new(name: &str, bpf: &mut Ebpf) -> Result<Self> {
        let gateway = namespace(name)?;
        let ends = [namespace("client")?, namespace("server")?];
        for (number, (end, interface)) in (1..).zip(ends.iter().zip(INTERFACES)) {
            gateway.ip(&format!(
                "link add {interface} type veth peer name end0 netns {}",
                end.name()
            ))?;
            let [here, there] = [1, 2].map(|last| Ipv4Addr::new(10, 82, number, last));
            gateway.batch(&format!(
                "addr add {here}/24 dev {interface}\nlink set {interface} up\n"
            ))?;
            end.batch(&format!(
                "addr add {there}/24 dev end0\nlink set end0 up\nroute add default via {here}\n"
            ))?;
            gateway.enter(|| offload(interface, GRO, true))?;
            end.enter(|| offload("end0", GRO, true))?;
        }
        let watch = |args: &[&str]| {
            Twheel::start(&gateway, &[&["--iface", INTERFACES[0]], args].concat()).map(Some)
        };
        let mut twheel = None;
        match name {
            "xdp" => {
                let pass: &mut Xdp = program(bpf, "peer_pass")?.try_into()?;
                pass.load().context("cannot load peer_pass")?;
                gateway.enter(|| Ok(pass.attach(INTERFACES[0], XdpMode::Driver)?))?;
            }
            "conntrack" => gateway.nft(
                "table ip bench { chain in { type filter hook input priority 0; ct state invalid drop; }; }",
            )?,
            "twheel" => twheel = watch(&["--mode", "native"])?,
            "tcx" => twheel = watch(&["--hook", "tcx"])?,
            _ => {}
        }
        let at = SocketAddr::from(([10, 82, 2, 2], PORT));
        let listener = ends[1].enter(|| TcpListener::bind(at).context("cannot listen"))?;
        let client = ends[0].enter(|| TcpStream::connect(at).context("cannot connect"))?;
        let (server, _) = listener.accept()?;
        Ok(Self {
            stream: [client, server],
            twheel,
            gateway,
            _ends: ends,
        })
    }

    /// Sends the data. Returns nanoseconds per KiB on the one CPU that does everything: sending,
    /// both directions through the gateway, receiving.
    fn run(&self) -> Result<f64> {
        let [client, server] = &self.stream;
        let begin = Instant::now();
        thread::scope(|scope| {
            let sender = scope.spawn(move || -> Result<()> {
                pin_to(CPU)?;
                let (block, mut client) = (vec![1; BLOCK], client);
                (0..BYTES / BLOCK).try_for_each(|_| client.write_all(&block))?;
                Ok(())
            });
            let receiver = scope.spawn(move || -> Result<()> {
                pin_to(CPU)?;
                let (mut block, mut left, mut server) = (vec![0; BLOCK], BYTES, server);
                while left > 0 {
                    let read = server.read(&mut block)?;
                    ensure!(read > 0, "the connection is closed");
                    left -= read;
                }
                Ok(())
            });
            for thread in [sender, receiver] {
                thread.join().expect("no panic")?;
            }
            Ok::<_, anyhow::Error>(())
        })?;
        Ok(begin.elapsed().as_nanos() as f64 / (BYTES >> 10) as f64)
    }

    /// Checks that twheel has seen all the data, as it was sent.
    fn end(self, rounds: u32) -> Result<()> {
        let Some(twheel) = self.twheel else {
            return Ok(());
        };
        let ended = self.gateway.twheel_once(&["flows", "--json"])?;
        let line = ended.lines.first().context("no flow")?;
        ensure!(line.text.contains("\"established\""), "{}", line.text);
        let touched = self.gateway.counter("touched")?;
        // One packet per 64 KiB at least, and one acknowledgment for several of these.
        let least = u64::from(rounds) * (BYTES as u64 >> 16);
        ensure!(touched >= least, "{touched} packets, not {least} at least");
        ensure!(twheel.stop()?.code() == Some(0));
        Ok(())
    }
}

/// Measures all gateways.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    let object = inputs::object("TWHEEL_PEERS_OBJECT")?;
    let mut bpf = Ebpf::load(&object).context("cannot load the peers")?;
    let lanes = LANES
        .iter()
        .map(|name| Lane::new(name, &mut bpf))
        .collect::<Result<Vec<_>>>()?;
    let mut samples = plane::no_samples::<{ LANES.len() }>();
    for round in progress::over("bulk data".to_owned(), 0..WARM_UP + rounds) {
        for turn in 0..LANES.len() {
            let lane = (turn + round as usize) % LANES.len();
            let nanoseconds = lanes[lane].run()?;
            if round >= WARM_UP {
                samples[lane].push(nanoseconds);
            }
        }
    }
    for lane in lanes {
        lane.end(WARM_UP + rounds)?;
    }
    report.say(&format!(
        "\nBulk data of one connection: nanoseconds for each KiB, {} MiB a round, GRO and TSO on; one CPU sends, forwards and\n\
         receives.",
        BYTES >> 20
    ));
    for (name, samples) in LANES.iter().zip(&samples) {
        let figure = Figure::from_samples(samples);
        report.nanoseconds("path", &format!("bulk_{name}"), 1, &figure);
        report.say(&format!("{name:>10}  {}", Figure::row(&[figure])));
    }
    let ratios: Vec<_> = samples[TCX]
        .iter()
        .zip(&samples[TWHEEL])
        .map(|(tcx, xdp)| tcx / xdp)
        .collect();
    let ratio = Figure::from_samples(&ratios);
    report.say(&format!(
        "TCX takes {:.3} ({:.3}–{:.3}) of what XDP takes{}.",
        ratio.median,
        ratio.min,
        ratio.max,
        match ratio.median > 1.0 {
            true => ": ABOVE 1",
            false => "",
        }
    ));
    report.object(&json!({
        "bench": "path",
        "variant": "bulk_ratio",
        "n": 1,
        "ratio": ratio.median,
        "min": ratio.min,
        "max": ratio.max,
        "rounds": ratio.rounds,
    }));
    Ok(())
}
