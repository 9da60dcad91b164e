//! What `twheel run` will meet on this host: one finding a question, each with what to do.
//!
//! A check is a function of what was read; [`examine`] reads. Nothing is attached, and what is loaded for a trial is
//! gone at the end.

mod run;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs, io,
    net::SocketAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use aya::programs::{ProgramInfo, loaded_programs};
use caps::Capability;
use humantime::format_duration;
use nix::{
    mount::{MsFlags, mount},
    net::if_::if_nametoindex,
    sched::{CloneFlags, unshare},
};
use serde::Serialize;
use twheel_common::{config::Config, rule::Rule};

use crate::{
    attach::{self, Egress, Mode},
    clock::Clock,
    clsact,
    data_plane::{DataPlane, Load, OBJECT, STEP_BUDGET},
    hooks::{self, Hooks},
    host,
    links::{self, Link},
    netns,
    pins::{self, BPFFS, Found, Instance},
    policy::install,
    privilege,
    stepping::{self, Stepping, Why},
    tc::Way,
    tcx,
};

/// The loopback interface, which has this number in each network namespace.
const LOOPBACK: u32 = 1;

/// Conntrack's table is called nearly full at so many hundredths.
const NEARLY_FULL: u64 = 90;

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Worse than it could be, or not to be seen from here.
    Warn,
    /// `twheel run` will fail.
    Fail,
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    #[serde(rename = "check")]
    pub name: &'static str,
    /// The interface, where it is one's.
    pub interface: Option<String>,
    /// How it went.
    pub status: Status,
    /// What is the case.
    pub what: String,
    /// What to do.
    pub remedy: Option<String>,
    /// Of the programs: instructions that the verifier went through, by program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<BTreeMap<String, u32>>,
    /// Of the programs: milliseconds until they were loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_ms: Option<u64>,
}

/// What `twheel run` would do.
pub struct Wanted {
    /// The interfaces; none: of this network namespace all but loopback are looked at, and one is loaded for.
    pub interfaces: Vec<String>,
    /// Whether it would wait for interfaces that do not exist.
    pub waits: bool,
    /// By what it would see packets.
    pub hooks: Hooks,
    /// Its configuration, with what flows of no rule are given.
    pub config: (Config, Rule),
    /// Its clock.
    pub clock: Clock,
    /// How wheels are stepped, where that was asked for.
    pub stepping: Option<Stepping>,
    /// Its policy.
    pub policy: Option<PathBuf>,
    /// aya-log's level.
    pub log_level: u8,
    /// Where it would serve its metrics.
    pub metrics: Option<SocketAddr>,
    /// The group that it would let in.
    pub group: Option<String>,
}

/// What became of loading it.
struct Tried {
    verified: BTreeMap<String, u32>,
    took: Duration,
}

impl Finding {
    fn new(name: &'static str, status: Status, what: impl Into<String>) -> Self {
        Self {
            name,
            interface: None,
            status,
            what: what.into(),
            remedy: None,
            instructions: None,
            load_ms: None,
        }
    }

    fn ok(name: &'static str, what: impl Into<String>) -> Self {
        Self::new(name, Status::Ok, what)
    }

    fn warn(name: &'static str, what: impl Into<String>) -> Self {
        Self::new(name, Status::Warn, what)
    }

    fn fail(name: &'static str, what: impl Into<String>) -> Self {
        Self::new(name, Status::Fail, what)
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    fn on(mut self, interface: &str) -> Self {
        self.interface = Some(interface.to_owned());
        self
    }
}

/// Looks at this host and its interfaces, and tries what a run would load.
pub fn examine(wanted: &Wanted) -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(path).ok();
    let permitted = host::check_capabilities().is_ok();
    let bpffs = host::check_bpffs(Path::new(BPFFS)).is_ok();
    let can_hide = privilege::has(Capability::CAP_SYS_ADMIN);
    let asked = permitted.then(|| host::check_kernel().map_err(|error| format!("{error:#}")));
    let fits = matches!(asked, Some(Ok(())));
    let way = fits.then(|| {
        let found = stepping::find(wanted.stepping);
        found.map_err(|error| format!("{error:#}"))
    });
    let trial = match &way {
        Some(Ok(found)) if bpffs && can_hide => {
            Some(trial(wanted, found.way).map_err(|error| format!("{error:#}")))
        }
        _ => None,
    };
    let mut findings = vec![
        kernel(&host::release(), asked.as_ref()),
        btf(Path::new("/sys/kernel/btf/vmlinux").exists()),
        capabilities(permitted),
        self::bpffs(bpffs),
        stepping(way.as_ref()),
        programs(trial.as_ref()),
        jit(
            read(host::JIT).as_deref(),
            trial.as_ref().is_some_and(Result::is_ok),
        ),
        egress(
            wanted.hooks.egress,
            privilege::has(Capability::CAP_NET_ADMIN).then(|| tcx::exists(LOOPBACK)),
            || can_hide.then(clsact::probe),
        ),
        clock(Clock::jiffies()),
        conntrack(
            read("/proc/sys/net/netfilter/nf_conntrack_count").as_deref(),
            read("/proc/sys/net/netfilter/nf_conntrack_max").as_deref(),
        ),
    ];
    let instances = pins::found();
    // What a run on these would have.
    let kept = match wanted.interfaces[..] {
        [] => Ok(None),
        _ => Instance::find(&wanted.interfaces),
    };
    let own: Vec<u32> = match (&wanted.interfaces[..], &kept) {
        ([], _) => instances
            .iter()
            .flatten()
            .flat_map(|it| programs_of(&it.path))
            .collect(),
        (_, Ok(Some(pins))) => programs_of(pins.path()),
        _ => Vec::new(),
    };
    findings.extend(
        wanted
            .policy
            .as_deref()
            .map(|file| policy(file, install::check(file, wanted.clock, &wanted.config.0))),
    );
    findings.extend(self::interfaces(wanted, &own));
    findings.extend(pinned(instances));
    // Another user has other rights.
    if permitted && bpffs {
        findings.extend(run::findings(wanted, kept));
    }
    findings
}

/// Of the interfaces of a run, or of all but loopback. `own`: ids of twheel's programs.
fn interfaces(wanted: &Wanted, own: &[u32]) -> Vec<Finding> {
    let links = match links::all() {
        Ok(links) => links,
        Err(error) => {
            let what = format!("{error:#}");
            return vec![
                Finding::warn("interfaces", what).remedy("`ip -d link` may still describe them"),
            ];
        }
    };
    let given = &wanted.interfaces;
    let is_wanted = |link: &&Link| match given[..] {
        [] => !link.loopback,
        _ => given.contains(&link.name),
    };
    let is_run = !given.is_empty();
    let found = links.iter().filter(is_wanted).flat_map(|link| {
        let mut found = interface(link, &wanted.hooks, is_run, own, &name);
        if is_run && wanted.hooks.takes_xdp() {
            found.extend(above(link, &links));
        }
        found
    });
    let missing = given
        .iter()
        .filter(|name| links.iter().all(|link| link.name != **name));
    let missing = missing.map(|name| {
        let finding = if wanted.waits {
            Finding::ok("interface", "not there yet: `--wait-iface` waits for it")
        } else {
            Finding::fail("interface", "there is none of this name here")
                .remedy("give one of those that `ip link` lists")
        };
        finding.on(name)
    });
    found.chain(missing).collect()
}

fn pinned(instances: Result<Vec<Found>>) -> Vec<Finding> {
    match instances.and_then(|instances| Ok((instances, pins::namespace()?))) {
        Ok((instances, _)) if instances.is_empty() => vec![Finding::ok("pins", "none")],
        Ok((instances, here)) => {
            let exists = |name: &str| match name.rsplit_once('/') {
                // Of interfaces elsewhere the namespace is looked for.
                Some((namespace, _)) => Path::new(netns::DIRECTORY).join(namespace).exists(),
                None => if_nametoindex(name).is_ok(),
            };
            let alive = namespaces();
            let describe = |it| instance(it, here, exists, &alive);
            instances.iter().map(describe).collect()
        }
        Err(error) => {
            vec![Finding::warn("pins", format!("{error:#}")).remedy("run this as root")]
        }
    }
}

/// What the kernel said when it was asked for what the programs need; `None`: it was not asked.
fn kernel(release: &str, answer: Option<&Result<(), String>>) -> Finding {
    match answer {
        Some(Ok(())) => Finding::ok("kernel", release),
        Some(Err(error)) => Finding::fail("kernel", error).remedy("boot a newer kernel"),
        None => Finding::warn(
            "kernel",
            format!("{release}: this user cannot ask what it has"),
        )
        .remedy("run this as root"),
    }
}

/// `None`: not tried.
fn stepping(found: Option<&Result<stepping::Found, String>>) -> Finding {
    match found {
        Some(Ok(stepping::Found { way, why })) => {
            let way = way.name();
            match why {
                Why::Safe => {
                    Finding::ok("stepping", format!("{way}, which hold softirqs off here"))
                }
                Why::Asked => Finding::ok("stepping", format!("{way}, as asked for")),
                Why::Unsafe => Finding::ok(
                    "stepping",
                    format!("{way}: test runs do not hold softirqs off here"),
                ),
                Why::Untold => Finding::warn(
                    "stepping",
                    format!("{way}: whether test runs hold softirqs off could not be told"),
                )
                .remedy(
                    "nothing need be done, but a step costs more: try when the CPUs are less busy",
                ),
            }
        }
        Some(Err(error)) => Finding::fail("stepping", error)
            .remedy("wheels cannot be stepped safely on this kernel: boot another"),
        None => Finding::warn("stepping", "how wheels can be stepped here was not tried")
            .remedy("run this as root"),
    }
}

fn policy(file: &Path, checked: Result<()>) -> Finding {
    match checked {
        Ok(()) => Finding::ok("policy", file.display().to_string()),
        Err(error) => Finding::fail("policy", format!("{error:#}"))
            .remedy(format!("`twheel policy check {}`", file.display())),
    }
}

fn btf(there: bool) -> Finding {
    if there {
        return Finding::ok("BTF", "the kernel describes its types");
    }
    Finding::warn(
        "BTF",
        "none at /sys/kernel/btf/vmlinux: twheel runs, tools that look into it show less",
    )
    .remedy("for those, a kernel with CONFIG_DEBUG_INFO_BTF")
}

fn capabilities(permitted: bool) -> Finding {
    if permitted {
        return Finding::ok("capabilities", "may load and attach programs");
    }
    Finding::warn(
        "capabilities",
        "this user may not load programs: not all can be seen",
    )
    .remedy("run twheel as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN")
}

fn bpffs(mounted: bool) -> Finding {
    if mounted {
        return Finding::ok("bpffs", format!("mounted at {BPFFS}"));
    }
    Finding::fail("bpffs", format!("not mounted at {BPFFS}"))
        .remedy(format!("mount -t bpf bpf {BPFFS}"))
}

/// Loads the data plane, and drops it. Its pins are in a bpffs that nobody else sees, and that is gone with
/// this thread: whatever ends the process leaves nothing behind.
fn trial(wanted: &Wanted, way: Stepping) -> Result<Tried> {
    let unseen = || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), none)
    };
    let trial = || {
        unseen()
            .map_err(io::Error::from)
            .context("cannot mount a bpffs to try it in")?;
        load(wanted, way)
    };
    thread::scope(|scope| {
        scope
            .spawn(trial)
            .join()
            .unwrap_or_else(|_| bail!("the trial panicked"))
    })
}

fn load(wanted: &Wanted, way: Stepping) -> Result<Tried> {
    let load = Load {
        later: &[],
        stepping: way,
        room: match wanted.interfaces.len() {
            0 | 1 => 0,
            several => several as u32,
        },
        log_level: wanted.log_level,
        ..Load::new(OBJECT, wanted.config, wanted.clock)
    };
    let before = Instant::now();
    let plane = DataPlane::load_unpinned(&load, "doctor")?;
    let took = before.elapsed();
    plane
        .step(STEP_BUDGET)
        .context("they load, and cannot be run")?;
    Ok(Tried {
        took,
        verified: plane.verified()?,
    })
}

/// `None`: not tried.
fn programs(trial: Option<&Result<Tried, String>>) -> Finding {
    match trial {
        Some(Ok(Tried { verified, took })) => {
            let most = verified.values().max().copied().unwrap_or_default();
            let ms = took.as_millis() as u64;
            Finding {
                instructions: Some(verified.clone()),
                load_ms: Some(ms),
                ..Finding::ok(
                    "programs",
                    format!(
                        "the kernel accepts them: {most} instructions verified at most, loaded in {ms} ms"
                    ),
                )
            }
        }
        Some(Err(error)) => Finding::fail("programs", error.lines().next().unwrap_or_default())
            .remedy("`twheel run` with the same options will fail likewise"),
        None => Finding::warn("programs", "whether the kernel accepts them was not tried").remedy(
            "run this as root (it takes CAP_SYS_ADMIN, for a bpffs of its own), with bpffs mounted",
        ),
    }
}

/// The setting is that of the host's own network namespace, and not to be seen in others.
fn jit(setting: Option<&str>, loads: bool) -> Finding {
    match setting {
        _ if host::is_off(setting) => Finding::fail(
            "JIT",
            "off: the kernel's interpreter cannot run the programs",
        )
        .remedy("sysctl -w net.core.bpf_jit_enable=1"),
        Some(_) => Finding::ok("JIT", "on"),
        None if loads => Finding::ok("JIT", "on: the programs load, which they do not without"),
        None => Finding::warn(
            "JIT",
            "cannot be seen in this network namespace by this user",
        )
        .remedy("run this as root, or in the host's own network namespace"),
    }
}

/// How a run would see outgoing packets. `tcx`: whether the kernel has TCX, if this user may ask; `clsact` tries a
/// filter, if it can (`None`).
fn egress(
    wanted: Egress,
    tcx: Option<bool>,
    clsact: impl FnOnce() -> Option<Result<()>>,
) -> Finding {
    const NAME: &str = "egress";
    const OFF: &str = "`--egress off`, which sees incoming packets only";
    match (wanted, tcx) {
        (Egress::Off, _) => return Finding::ok(NAME, "outgoing packets are not to be seen"),
        (Egress::Auto | Egress::On | Egress::Tcx, Some(true)) => {
            return Finding::ok(NAME, "TCX: outgoing packets can be seen");
        }
        (Egress::Tcx, Some(false)) => {
            return Finding::fail(
                NAME,
                "this kernel has no TCX (CONFIG_NET_XGRESS, Linux 6.6)",
            )
            .remedy("`--egress clsact`, or `--egress auto`");
        }
        (_, None) => {
            return Finding::warn(NAME, "cannot be seen by this user").remedy("run this as root");
        }
        (Egress::Clsact, _) | (_, Some(false)) => {}
    }
    match clsact() {
        Some(Ok(())) => Finding::ok(NAME, "clsact: outgoing packets can be seen by a filter"),
        Some(Err(error)) if wanted == Egress::Auto => Finding::warn(
            NAME,
            format!("neither TCX nor clsact, so only incoming packets can be seen: {error:#}"),
        )
        .remedy(
            "a kernel with CONFIG_NET_XGRESS (6.6), or with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF",
        ),
        Some(Err(error)) => Finding::fail(NAME, format!("no clsact filter: {error:#}")).remedy(OFF),
        None => Finding::warn(NAME, "whether the kernel has clsact filters was not tried")
            .remedy("run this as root (it takes CAP_SYS_ADMIN, for a network namespace of its own)"),
    }
}

fn clock(clock: Result<Clock>) -> Finding {
    match clock {
        Ok(clock) => {
            let unit = format_duration(clock.unit());
            Finding::ok(
                "clock",
                format!("ticks every {unit}: --tick {unit} or longer"),
            )
        }
        Err(error) => Finding::fail("clock", format!("{error:#}"))
            .remedy("report it: the kernel should have CLOCK_MONOTONIC_COARSE"),
    }
}

fn conntrack(count: Option<&str>, most: Option<&str>) -> Finding {
    let number = |text: Option<&str>| text?.trim().parse::<u64>().ok();
    let (Some(count), Some(most)) = (number(count), number(most)) else {
        return Finding::ok(
            "conntrack",
            "not loaded: nothing for `--timeout inherit` to inherit",
        );
    };
    let what = format!("{count} of {most} entries");
    if count * 100 > most * NEARLY_FULL {
        return Finding::warn(
            "conntrack",
            format!("{what}: nearly full, it will refuse connections"),
        )
        .remedy(format!(
            "sysctl -w net.netfilter.nf_conntrack_max={}, or shorter timeouts there",
            most.saturating_mul(2)
        ));
    }
    Finding::ok("conntrack", what)
}

/// `is_run`: these are the options of a run on this very interface. `own`: ids of twheel's programs. `name`: that of a
/// program, by its id.
fn interface(
    link: &Link,
    hooks: &Hooks,
    is_run: bool,
    own: &[u32],
    name: &dyn Fn(u32) -> Option<String>,
) -> Vec<Finding> {
    if is_run && let Err(error) = attach::check_name(&link.name) {
        return vec![
            Finding::fail("interface", format!("{error:#}"))
                .remedy("`ip link set dev OLD name NEW` renames it")
                .on(&link.name),
        ];
    }
    if link.layer.is_none() {
        let status = match is_run {
            true => Status::Fail,
            false => Status::Warn,
        };
        let what = format!("of type {}, which twheel does not read", link.link_type);
        return vec![
            Finding::new("packets", status, what)
                .remedy("give an interface whose packets begin with an Ethernet or IP header")
                .on(&link.name),
        ];
    }
    let mut found = vec![
        driver(link, hooks).on(&link.name),
        xdp(link, hooks, own, name).on(&link.name),
    ];
    found.extend(tcx(link, own, name).map(|finding| finding.on(&link.name)));
    found
}

/// The kernel attaches no XDP program below one that is attached.
fn above(link: &Link, links: &[Link]) -> Option<Finding> {
    let other = hooks::above(link, links)?;
    let finding = Finding::fail(
        "XDP",
        format!("{} above it has a program, so it can have none", other.name),
    );
    let remedy = format!(
        "give --hook tcx, run twheel on {}, or detach that program first",
        other.name
    );
    Some(finding.remedy(remedy).on(&link.name))
}

fn driver(link: &Link, hooks: &Hooks) -> Finding {
    let driver = link.driver.as_deref().unwrap_or("no driver");
    let mode = hooks.mode.unwrap_or(Mode::Auto);
    match (mode, link.native) {
        (Mode::Generic, _) => Finding::ok("driver", format!("{driver}: generic XDP, as asked for")),
        (_, Some(true)) => Finding::ok("driver", format!("{driver}: native XDP")),
        (_, _) if !hooks.takes_xdp() => Finding::ok(
            "driver",
            format!("{driver}: no native XDP, and none is needed"),
        ),
        (Mode::Native, Some(false)) => {
            Finding::fail("driver", format!("{driver}: has no native XDP")).remedy("`--hook auto`")
        }
        (Mode::Auto, Some(false)) => Finding::warn(
            "driver",
            format!("{driver}: generic XDP alone, which costs more a packet"),
        )
        .remedy("`--hook auto` takes TCX, which costs less"),
        (_, None) => Finding::warn(
            "driver",
            format!("{driver}: the kernel does not say whether it has native XDP"),
        )
        .remedy("`twheel run` says which it got"),
    }
}

fn xdp(link: &Link, hooks: &Hooks, own: &[u32], name: &dyn Fn(u32) -> Option<String>) -> Finding {
    let describe = |(mode, id): &(&str, u32)| match name(*id) {
        Some(name) => format!("{name} (id {id}, {mode})"),
        None => format!("id {id}, {mode}"),
    };
    let all: Vec<_> = link.xdp.iter().map(describe).collect();
    let all = all.join(", ");
    let foreign: Vec<_> = link
        .xdp
        .iter()
        .filter(|(_, id)| !own.contains(id))
        .collect();
    let interface = &link.name;
    match foreign[..] {
        [] if all.is_empty() => Finding::ok("XDP", "no program is attached"),
        [] => Finding::ok("XDP", format!("twheel's own: {all}")),
        // Who may not see a program's name does not see whose it is.
        [(_, id), ..] if name(*id).is_none() => {
            Finding::warn("XDP", format!("a program, and this user cannot see whose: {all}"))
                .remedy("run this as root")
        }
        _ if !hooks.takes_xdp() => {
            let what = format!("a program of somebody else's: {all}; twheel goes beside it");
            Finding::ok("XDP", what)
        }
        _ => Finding::fail("XDP", format!("a program of somebody else's: {all}")).remedy(format!(
            "give --hook tcx, which goes beside it, or stop whoever attached it (`bpftool net show dev {interface}` and \
             `bpftool link` tell more; `twheel detach` removes what was pinned under another name); what was attached \
             without a link goes with `ip link set dev {interface} xdp off`"
        )),
    }
}

/// What is at TCX, in the order in which packets meet it; nothing where that cannot be asked.
fn tcx(link: &Link, own: &[u32], name: &dyn Fn(u32) -> Option<String>) -> Option<Finding> {
    let describe = |id: &u32| {
        let whose = if own.contains(id) {
            "twheel's own "
        } else {
            ""
        };
        match name(*id) {
            Some(name) => format!("{whose}{name} (id {id})"),
            None => format!("{whose}id {id}"),
        }
    };
    let list = |way| -> Option<String> {
        let ids = tcx::programs(link.index, way).ok()?;
        let all: Vec<_> = ids.iter().map(describe).collect();
        Some(match all[..] {
            [] => "none".to_owned(),
            _ => all.join(", "),
        })
    };
    let (incoming, outgoing) = (list(Way::In)?, list(Way::Out)?);
    Some(Finding::ok(
        "TCX",
        format!("incoming: {incoming}; outgoing: {outgoing}"),
    ))
}

/// The name of a loaded program; `None` if it is gone, or if this user may not see it.
fn name(id: u32) -> Option<String> {
    let program = loaded_programs().flatten().find(|it| it.id() == id)?;
    Some(program.name_as_str().unwrap_or("?").to_owned())
}

/// The ids of the programs by which an instance sees packets.
fn programs_of(instance: &Path) -> Vec<u32> {
    let seeing = ["twheel_xdp", "twheel_ingress", "twheel_egress"];
    let programs = seeing.map(|name| ProgramInfo::from_pin(instance.join(name)));
    // Of a run that was killed while it attached, a link may have another program than the one that is pinned.
    let links = pins::entries(instance).unwrap_or_default();
    let of_links = links.iter().filter_map(|it| hooks::program(it));
    let programs = programs.iter().flatten().map(ProgramInfo::id);
    programs.chain(of_links).collect()
}

/// The network namespaces that this user sees: those of processes, and those with a name.
fn namespaces() -> HashSet<u64> {
    let list = |path: &str| fs::read_dir(path).into_iter().flatten().flatten();
    let processes = list("/proc").map(|process| process.path().join("ns/net"));
    let named = list(netns::DIRECTORY).map(|name| name.path());
    processes
        .chain(named)
        .filter_map(|path| Some(fs::metadata(path).ok()?.ino()))
        .collect()
}

/// A command of twheel for these interfaces.
fn with_interfaces(command: &str, interfaces: &[String]) -> String {
    let options = interfaces.iter().map(|name| format!(" --iface {name}"));
    format!("`twheel {command}{}`", options.collect::<String>())
}

/// The run for these interfaces: those of other network namespaces, `blue/eth0`, are given by two options.
fn run_for(interfaces: &[String]) -> String {
    let (mut namespaces, mut names) = (BTreeSet::new(), BTreeSet::new());
    for interface in interfaces {
        let (namespace, name) = interface.rsplit_once('/').unzip();
        names.insert(name.unwrap_or(interface).to_owned());
        namespaces.insert(namespace);
    }
    let names: Vec<_> = names.into_iter().collect();
    let given: Vec<_> = namespaces.iter().flatten().copied().collect();
    let command = match (given.is_empty(), namespaces.contains(&None)) {
        (true, _) => "run".to_owned(),
        (false, true) => "run --netns all".to_owned(),
        (false, false) => format!("run --netns {}", given.join(",")),
    };
    with_interfaces(&command, &names)
}

/// `here`: the network namespace, in which `exists` knows the interfaces; `alive`: those that are seen.
fn instance(it: &Found, here: u64, exists: impl Fn(&str) -> bool, alive: &HashSet<u64>) -> Finding {
    let path = it.path.display();
    let names = it.interfaces.join(", ");
    let options = |command: &str| with_interfaces(command, &it.interfaces);
    let remove = format!("rm -r {path}");
    if it.namespace != Some(here) {
        let there = it.namespace.is_some_and(|inode| alive.contains(&inode));
        return match (it.held, there) {
            (true, _) => Finding::ok(
                "pins",
                format!("{path}: in use in another network namespace"),
            ),
            (false, true) => Finding::warn(
                "pins",
                format!("{path}: kept in another network namespace, nothing expires"),
            )
            .remedy(format!(
                "there: {} adopts it, {} removes it",
                run_for(&it.interfaces),
                options("detach")
            )),
            (false, false) => Finding::warn(
                "pins",
                format!("{path}: no network namespace that it could be of is seen"),
            )
            .remedy(format!("if it is gone: {remove}")),
        };
    }
    let gone = it.interfaces.iter().any(|name| !exists(name));
    match (it.held, it.current, it.interfaces.is_empty()) {
        (true, true, _) => Finding::ok("pins", format!("{path}: twheel is running on {names}")),
        (true, false, _) => Finding::warn(
            "pins",
            format!("{path}: another version of twheel is running on {names}"),
        )
        .remedy("stop that one before this one runs there"),
        (false, _, true) => Finding::warn(
            "pins",
            format!("{path}: attached to nothing: a loader was killed"),
        )
        .remedy(remove),
        (false, false, false) => Finding::fail(
            "pins",
            format!("{path}: left on {names} by another version of twheel"),
        )
        .remedy(options("detach")),
        (false, true, false) if gone => Finding::warn(
            "pins",
            format!("{path}: of {names}, which is not all there any more"),
        )
        .remedy(options("detach")),
        (false, true, false) => Finding::warn(
            "pins",
            format!("{path}: flows of {names} are tracked, and nothing expires"),
        )
        .remedy(format!(
            "{} goes on with them, {} removes them",
            run_for(&it.interfaces),
            options("detach")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{hooks::Ingress, order::Names};

    /// Every finding that is not `ok` says what to do; checks its status.
    fn is(finding: &Finding, status: Status) {
        assert_eq!(finding.status, status, "{finding:?}");
        assert_eq!(
            finding.remedy.is_some(),
            status != Status::Ok,
            "{finding:?}"
        );
    }

    #[test]
    fn what_a_host_has() {
        is(&kernel("6.12.0", Some(&Ok(()))), Status::Ok);
        is(&kernel("5.10.0", Some(&Err("no".to_owned()))), Status::Fail);
        is(&kernel("6.12.0", None), Status::Warn);
        for (way, why, status) in [
            (Stepping::TestRuns, Why::Safe, Status::Ok),
            (Stepping::LiveFrames, Why::Unsafe, Status::Ok),
            (Stepping::LiveFrames, Why::Asked, Status::Ok),
            (Stepping::LiveFrames, Why::Untold, Status::Warn),
        ] {
            is(&stepping(Some(&Ok(stepping::Found { way, why }))), status);
        }
        is(&stepping(Some(&Err("no".to_owned()))), Status::Fail);
        is(&stepping(None), Status::Warn);
        is(&btf(true), Status::Ok);
        is(&btf(false), Status::Warn);
        is(&bpffs(false), Status::Fail);
        let tried = Tried {
            verified: BTreeMap::from([("twheel_xdp".to_owned(), 31_000)]),
            took: Duration::from_millis(300),
        };
        is(&programs(Some(&Ok(tried))), Status::Ok);
        let refused = programs(Some(&Err("the kernel refuses\nand why".to_owned())));
        is(&refused, Status::Fail);
        assert_eq!(refused.what, "the kernel refuses");
        is(&programs(None), Status::Warn);
        for (setting, loads, status) in [
            (Some("1\n"), false, Status::Ok),
            (Some("0\n"), false, Status::Fail),
            (None, true, Status::Ok),
            (None, false, Status::Warn),
        ] {
            is(&jit(setting, loads), status);
        }
        let never = || panic!("nothing to try");
        let none = || Some(Err(anyhow::anyhow!("no such qdisc")));
        use Egress::{Auto, Clsact, Off, On, Tcx};
        for (finding, status, words) in [
            (egress(Auto, Some(true), never), Status::Ok, "TCX: "),
            (egress(Auto, None, never), Status::Warn, "this user"),
            (
                egress(Auto, Some(false), || Some(Ok(()))),
                Status::Ok,
                "clsact: ",
            ),
            (
                egress(Auto, Some(false), none),
                Status::Warn,
                "no such qdisc",
            ),
            (
                egress(Auto, Some(false), || None),
                Status::Warn,
                "not tried",
            ),
            (egress(On, Some(true), never), Status::Ok, "TCX: "),
            (egress(On, Some(false), none), Status::Fail, "no such qdisc"),
            (egress(Tcx, Some(false), never), Status::Fail, "no TCX"),
            (
                egress(Clsact, Some(true), || Some(Ok(()))),
                Status::Ok,
                "clsact: ",
            ),
            (
                egress(Clsact, Some(true), none),
                Status::Fail,
                "no such qdisc",
            ),
            (
                egress(Off, Some(false), never),
                Status::Ok,
                "not to be seen",
            ),
        ] {
            is(&finding, status);
            assert!(finding.what.contains(words), "{finding:?}");
        }
        is(&clock(Clock::jiffies()), Status::Ok);
    }

    #[test]
    fn conntrack_is_full_above_nine_tenths() {
        for (count, most, status) in [
            (Some("90\n"), Some("100\n"), Status::Ok),
            (Some("91\n"), Some("100\n"), Status::Warn),
            (Some("0"), Some("0"), Status::Ok),
            (None, None, Status::Ok),
        ] {
            is(&conntrack(count, most), status);
        }
    }

    #[test]
    fn what_an_interface_carries() {
        let link = |native, xdp: &[(&'static str, u32)]| Link {
            name: "eth0".to_owned(),
            layer: Some(links::LinkLayer::Ethernet),
            native,
            xdp: xdp.to_vec(),
            ..Link::default()
        };
        let hooks = |ingress, mode| Hooks {
            ingress,
            mode,
            egress: Egress::Auto,
            order: None,
            resets: false,
            names: Names::default(),
        };
        use Ingress::{Auto, Tcx, Xdp};
        for (ingress, mode, native, status) in [
            (Auto, None, Some(true), Status::Ok),
            (Auto, None, Some(false), Status::Ok),
            (Auto, None, None, Status::Ok),
            (Tcx, None, Some(false), Status::Ok),
            (Xdp, None, Some(false), Status::Warn),
            (Xdp, None, None, Status::Warn),
            (Xdp, Some(Mode::Native), Some(true), Status::Ok),
            (Auto, Some(Mode::Native), Some(false), Status::Fail),
            (Auto, Some(Mode::Generic), Some(false), Status::Ok),
        ] {
            is(&driver(&link(native, &[]), &hooks(ingress, mode)), status);
        }
        let hook = hooks(Xdp, None);
        let named = |_| Some("other".to_owned());
        let own = [7];
        is(&xdp(&link(None, &[]), &hook, &own, &named), Status::Ok);
        is(
            &xdp(&link(None, &[("native", 7)]), &hook, &own, &named),
            Status::Ok,
        );
        for programs in [&[("native", 8)][..], &[("native", 7), ("hardware", 8)]] {
            let link = link(None, programs);
            is(&xdp(&link, &hook, &own, &named), Status::Fail);
            is(&xdp(&link, &hook, &own, &|_| None), Status::Warn);
            let auto = xdp(&link, &hooks(Auto, None), &own, &named);
            is(&auto, Status::Ok);
            assert!(auto.what.contains("other (id 8, "), "{auto:?}");
        }
    }

    #[test]
    fn what_is_pinned() {
        let found = |namespace, current, held, interfaces: &[&str]| Found {
            path: "/sys/fs/bpf/twheel/v5/1-eth0".into(),
            current,
            namespace: Some(namespace),
            interfaces: interfaces.iter().map(|&name| name.to_owned()).collect(),
            held,
        };
        let alive = HashSet::from([1, 2]);
        for (found, status, words) in [
            (found(1, true, true, &["eth0"]), Status::Ok, ""),
            (found(1, false, true, &["eth0"]), Status::Warn, "stop"),
            (
                found(1, true, false, &["eth0"]),
                Status::Warn,
                "`twheel run --iface eth0`",
            ),
            (
                found(1, true, false, &["eth0", "gone"]),
                Status::Warn,
                "`twheel detach --iface eth0 --iface gone`",
            ),
            (
                found(1, false, false, &["eth0"]),
                Status::Fail,
                "`twheel detach --iface eth0`",
            ),
            (
                found(1, true, false, &["blue/eth0", "green/eth0", "blue/eth1"]),
                Status::Warn,
                "`twheel run --netns blue,green --iface eth0 --iface eth1`",
            ),
            (
                found(1, true, false, &["eth0", "blue/eth0"]),
                Status::Warn,
                "`twheel run --netns all --iface eth0`",
            ),
            (
                found(1, true, false, &["blue/eth0", "gone/eth0"]),
                Status::Warn,
                "`twheel detach --iface blue/eth0 --iface gone/eth0`",
            ),
            (found(1, true, false, &[]), Status::Warn, "rm -r"),
            (found(2, true, true, &["eth0"]), Status::Ok, ""),
            (found(2, true, false, &["eth0"]), Status::Warn, "there:"),
            (found(3, true, false, &["eth0"]), Status::Warn, "rm -r"),
        ] {
            let finding = instance(&found, 1, |name| !name.contains("gone"), &alive);
            is(&finding, status);
            assert!(
                finding.remedy.unwrap_or_default().contains(words),
                "{found:?}"
            );
        }
    }
}
