//! One run watches interfaces of several network namespaces: existing ones, new ones and ones that
//! are removed.

mod apart;
mod come_and_go;
mod commands;
mod later_run;

use std::{
    fs::File,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{netns::Namespace, pair::Connection, running::Twheel};

const PORT: u16 = 7979;
/// A pod's interface; its name and index are the same in each pod.
const POD: &str = "eth0";

/// A host, and pods that reach it and one another through it.
struct Lab {
    host: Namespace,
    pods: Vec<Namespace>,
    role: &'static str,
    /// How many pods were made so far.
    made: usize,
}

impl Lab {
    fn new(pods: usize) -> Result<Self> {
        Self::with(pods, "host", "pod")
    }

    /// A lab with names of its own, for a run whose pattern must not match another test's names.
    fn with(pods: usize, host: &str, pod: &'static str) -> Result<Self> {
        let mut lab = Self {
            host: Namespace::new(host)?,
            pods: Vec::new(),
            role: pod,
            made: 0,
        };
        lab.host
            .enter(|| Ok(std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?))?;
        for _ in 0..pods {
            lab.add()?;
        }
        Ok(lab)
    }

    fn add(&mut self) -> Result<()> {
        let number = self.made;
        let pod = Namespace::new(self.role)?;
        let veth = format!("veth{number}");
        let peer = format!("type veth peer name {POD} netns {}", pod.name());
        let [gateway, own] = [1, 2].map(|last| address(number, last));
        self.host.batch(&format!(
            "link add {veth} {peer}\naddr add {gateway}/24 dev {veth}\nlink set {veth} up\n"
        ))?;
        pod.batch(&format!(
            "addr add {own}/24 dev {POD}\nlink set {POD} up\nroute add default via {gateway}\n"
        ))?;
        self.pods.push(pod);
        self.made += 1;
        Ok(())
    }

    /// Starts a run that watches the lab's pods only, whatever other namespaces exist.
    fn watch(&self, options: &[&str]) -> Result<Twheel> {
        let pods: Vec<_> = self.pods.iter().map(Namespace::name).collect();
        let pods = pods.join(",");
        let args = [&["--iface", POD, "--netns", &pods, "--json"], options].concat();
        let twheel = Twheel::start(&self.host, &args)?;
        for pod in 0..self.pods.len() {
            twheel.await_stderr(&format!("{}: attached", self.label(pod)))?;
        }
        Ok(twheel)
    }

    /// The label of a pod's interface.
    fn label(&self, pod: usize) -> String {
        format!("{}/{POD}", self.pods[pod].name())
    }

    fn listen(&self, pod: usize) -> Result<TcpListener> {
        let at = SocketAddr::from((address(pod, 2), PORT));
        self.pods[pod].enter(|| TcpListener::bind(at).context("cannot listen"))
    }

    fn flows(&self) -> Result<Vec<Value>> {
        let ended = self.host.twheel_once(&["flows", "--json"])?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        let lines = ended.lines.iter();
        lines
            .map(|line| Ok(serde_json::from_str(&line.text)?))
            .collect()
    }

    fn check_clean(&self) -> Result<()> {
        for pod in &self.pods {
            pod.check_clean(POD)?;
        }
        self.host.check_clean("lo")
    }
}

/// Two watched pods, and a connection from the first to the second.
fn two_pods_that_talk() -> Result<(Lab, Twheel, Connection)> {
    let lab = Lab::new(2)?;
    let twheel = lab.watch(&["--timeout", "1h"])?;
    let listener = lab.listen(1)?;
    let mut connection = Connection::open(&lab.pods[0], &listener)?;
    connection.talk()?;
    Ok((lab, twheel, connection))
}

fn address(pod: usize, last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 81 + (pod / 256) as u8, pod as u8, last)
}

fn stop(twheel: Twheel) -> Result<String> {
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    Ok(ended.stderr)
}

/// Another name of a network namespace; removed when dropped.
struct Alias(String);

impl Alias {
    fn new(of: &Namespace) -> Result<Self> {
        Self::after(of, format!("{}-too", of.name()), Duration::ZERO)
    }

    /// Creates the name, and mounts the namespace there after a pause.
    fn after(of: &Namespace, alias: String, pause: Duration) -> Result<Self> {
        let [from, to] = [of.name(), &alias].map(|name| PathBuf::from("/run/netns").join(name));
        File::create(&to)?;
        let alias = Self(alias);
        thread::sleep(pause);
        nix::mount::mount(
            Some(&from),
            &to,
            None::<&str>,
            nix::mount::MsFlags::MS_BIND,
            None::<&str>,
        )?;
        Ok(alias)
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        let path = PathBuf::from("/run/netns").join(&self.0);
        let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
        let _ = std::fs::remove_file(path);
    }
}
