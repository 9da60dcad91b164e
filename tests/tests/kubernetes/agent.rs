//! What runs in the pods: `twheel`, with the options of the manifests.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, require_root},
    running::{Twheel, once, twheel_bin},
    skipped,
};

use super::{VARIANTS, kustomized, objects, tools};

/// The arguments of a container, with the files of the ConfigMap in a directory, and this address for
/// metrics.
fn arguments(
    tools: &Path,
    variant: &str,
    container: &str,
    files: &Directory,
) -> Result<Vec<String>> {
    let objects = objects(tools, &kustomized(tools, variant)?)?;
    let data = objects["ConfigMap"]["data"]
        .as_object()
        .context("no data")?;
    for (name, text) in data {
        let text = text.as_str().context("no text")?;
        fs::write(files.0.join(name), moved(text, files))?;
    }
    let containers = &objects["DaemonSet"]["spec"]["template"]["spec"]["containers"];
    let containers = containers.as_array().context("no containers")?;
    let container = containers.iter().find(|it| it["name"] == container);
    let args = container.context("no such container")?["args"].as_array();
    args.context("no arguments")?
        .iter()
        .map(|arg| Ok(moved(arg.as_str().context("no text")?, files)))
        .collect()
}

/// A text with the paths of the pod as they are here.
fn moved(text: &str, files: &Directory) -> String {
    text.replace("/etc/twheel/", &format!("{}/", files.path()))
        .replace("$(METRICS_ADDRESS)", "127.0.0.1")
}

/// The command line that the files of a variant stand for.
fn command_line(tools: &Path, variant: &str) -> Result<String> {
    let files = Directory::new("kubernetes-options")?;
    let args = arguments(tools, variant, "twheel", &files)?;
    let configs = args.iter().filter_map(|arg| arg.strip_prefix("--config="));
    let configs: Vec<_> = configs
        .map(|file| file.trim_start_matches('-'))
        .filter(|file| Path::new(file).exists())
        .collect();
    let mut check = Command::new(twheel_bin()?);
    check.args(["config", "check"]).args(configs);
    let ended = once(check)?;
    ensure!(ended.code() == Some(0), "{variant}: {ended:?}");
    let lines = ended.lines.iter().map(|line| line.text.as_str());
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

#[test]
fn options_are_valid_and_only_one_variant_reaps() -> Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    for (variant, _) in VARIANTS {
        let line = command_line(&tools, variant)?;
        ensure!(line.contains("--keep"), "{variant}: {line}");
        ensure!(
            line.contains("--dry-run") == (variant != "overlays/reap"),
            "{variant}: {line}"
        );
        ensure!(
            line.contains("--netns") == (variant == "overlays/netns"),
            "{variant}: {line}"
        );
    }
    Ok(())
}

/// The exporter's arguments are understood. Without a history it does not get further.
#[test]
fn the_exporter_takes_its_options() -> Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let files = Directory::new("kubernetes-export")?;
    let args = arguments(&tools, "overlays/export-kafka", "export", &files)?;
    let mut export = Command::new(twheel_bin()?);
    export
        .args(args)
        .arg("--once")
        .env("TWHEEL_HISTORY", files.file("none"));
    let ended = once(export)?;
    if ended.stderr.contains("feature") {
        skipped("this twheel was built without the export to Kafka");
        return Ok(());
    }
    ensure!(ended.code() != Some(0), "{ended:?}");
    ensure!(ended.code() != Some(2), "{ended:?}");
    Ok(())
}

/// A run as in a pod of `base`: attaches to what looks like a pod's interface, answers the probes, and
/// leaves the flows for the next.
#[test]
fn a_pod_adopts_the_flows_of_the_one_before() -> Result<()> {
    require_root();
    let Some(tools) = tools() else { return Ok(()) };
    let [node, pod] = [Namespace::new("node")?, Namespace::new("pod")?];
    node.ip("link set lo up")?;
    node.ip(&format!(
        "link add cali12ab type veth peer name eth0 netns {}",
        pod.name()
    ))?;
    for (host, name, address) in [
        (&node, "cali12ab", "10.88.0.1"),
        (&pod, "eth0", "10.88.0.2"),
    ] {
        host.ip(&format!("address add {address}/24 dev {name}"))?;
        host.ip(&format!("link set {name} up"))?;
    }
    let listener = pod.enter(|| Ok(TcpListener::bind("10.88.0.2:8080")?))?;
    let files = Directory::new("kubernetes-pod")?;
    let args = arguments(&tools, "base", "twheel", &files)?;
    ensure!(args[0] == "run", "{args:?}");
    let start = || -> Result<Twheel> {
        let mut command = node.twheel(&[])?;
        command
            .args(&args)
            .env("TWHEEL_HISTORY", files.file("history"));
        Twheel::start_command(command, |_| {})
    };
    let flows = || -> Result<usize> {
        let ended = node.twheel_once(&["flows", "--json"])?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        Ok(ended.lines.len())
    };

    let agent = start()?;
    ensure!(healthy(&node)?);
    let connect = || Ok(TcpStream::connect(listener.local_addr()?)?);
    let _open: Vec<_> = (0..7).map(|_| node.enter(connect)).collect::<Result<_>>()?;
    ensure!(flows()? == 7);
    agent.stop()?;
    let agent = start()?;
    ensure!(flows()? == 7);
    ensure!(healthy(&node)?);
    agent.stop()?;

    // As docs/kubernetes.md removes it.
    fs::write(files.0.join("local.toml"), "keep = false\n")?;
    start()?.stop()?;
    node.check_clean("cali12ab")
}

/// Whether the probes find a run healthy.
fn healthy(node: &Namespace) -> Result<bool> {
    let mut socket = node.enter(|| Ok(TcpStream::connect("127.0.0.1:9435")?))?;
    socket
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:9435\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer.starts_with("HTTP/1.1 200 "))
}
