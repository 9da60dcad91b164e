//! What an interface is, and what other programs have attached to it.

use aya::programs::loaded_programs;

use super::finding::{Finding, Intended, Status};
use crate::{
    attach,
    hooks::{self, Hooks, Mode},
    interfaces::{self, Interface},
    tc::Way,
    tcx,
};

/// Checks the interfaces of a run, or all except loopback. `own`: ids of twheel's programs.
pub(super) fn interfaces(intended: &Intended, own: &[u32]) -> Vec<Finding> {
    let all = match interfaces::all() {
        Ok(all) => all,
        Err(error) => {
            let what = format!("{error:#}");
            return vec![Finding::warn("interfaces", what).remedy("list them with `ip -d link`")];
        }
    };
    let given = &intended.interfaces;
    let is_wanted = |it: &&Interface| match given[..] {
        [] => !it.loopback,
        _ => given.contains(&it.name),
    };
    let is_run = !given.is_empty();
    let found = all.iter().filter(is_wanted).flat_map(|it| {
        let mut found = interface(it, &intended.hooks, is_run, own, &name);
        if is_run && intended.hooks.takes_xdp() {
            found.extend(above(it, &all));
        }
        found
    });
    let missing = given
        .iter()
        .filter(|name| all.iter().all(|it| it.name != **name));
    let missing = missing.map(|name| {
        let finding = if intended.waits {
            Finding::ok(
                "interface",
                "does not exist yet: `--wait-iface` waits for it",
            )
        } else {
            Finding::fail("interface", "does not exist")
                .remedy("give an interface that `ip link` lists")
        };
        finding.on(name)
    });
    found.chain(missing).collect()
}

/// `is_run`: these are the options of a run on this very interface. `own`: ids of twheel's
/// programs. `name`: looks up a program's name by its id.
fn interface(
    it: &Interface,
    hooks: &Hooks,
    is_run: bool,
    own: &[u32],
    name: &dyn Fn(u32) -> Option<String>,
) -> Vec<Finding> {
    if is_run && let Err(error) = attach::check_name(&it.name) {
        return vec![
            Finding::fail("interface", format!("{error:#}"))
                .remedy("rename it with `ip link set dev OLD name NEW`")
                .on(&it.name),
        ];
    }
    if it.layer.is_none() {
        let status = match is_run {
            true => Status::Fail,
            false => Status::Warn,
        };
        let what = format!("has type {}, which twheel does not support", it.link_type);
        return vec![
            Finding::new("packets", status, what)
                .remedy("give an interface whose packets begin with an Ethernet or IP header")
                .on(&it.name),
        ];
    }
    let mut found = vec![
        driver(it, hooks).on(&it.name),
        xdp(it, hooks, own, name).on(&it.name),
    ];
    found.extend(tcx(it, own, name).map(|finding| finding.on(&it.name)));
    found
}

/// The kernel attaches no XDP program below an interface that has one.
fn above(it: &Interface, all: &[Interface]) -> Option<Finding> {
    let other = hooks::above(it, all)?;
    let finding = Finding::fail(
        "XDP",
        format!(
            "{} above it has an XDP program, so the kernel allows none here",
            other.name
        ),
    );
    let remedy = format!(
        "use --hook tcx, run twheel on {}, or detach that program first",
        other.name
    );
    Some(finding.remedy(remedy).on(&it.name))
}

pub(super) fn driver(it: &Interface, hooks: &Hooks) -> Finding {
    let driver = it.driver.as_deref().unwrap_or("no driver");
    let mode = hooks.mode.unwrap_or(Mode::Auto);
    match (mode, it.native) {
        (Mode::Generic, _) => Finding::ok("driver", format!("{driver}: generic XDP, as requested")),
        (_, Some(true)) => Finding::ok("driver", format!("{driver}: native XDP")),
        (_, _) if !hooks.takes_xdp() => Finding::ok(
            "driver",
            format!("{driver}: no native XDP, but none is needed"),
        ),
        (Mode::Native, Some(false)) => {
            Finding::fail("driver", format!("{driver}: has no native XDP"))
                .remedy("use `--hook auto`")
        }
        (Mode::Auto, Some(false)) => Finding::warn(
            "driver",
            format!("{driver}: only generic XDP, which costs more per packet"),
        )
        .remedy("use `--hook auto`: TCX costs less"),
        (_, None) => Finding::warn(
            "driver",
            format!("{driver}: the kernel does not report whether it has native XDP"),
        )
        .remedy("start `twheel run`: it reports the mode"),
    }
}

pub(super) fn xdp(
    it: &Interface,
    hooks: &Hooks,
    own: &[u32],
    name: &dyn Fn(u32) -> Option<String>,
) -> Finding {
    let describe = |(mode, id): &(&str, u32)| match name(*id) {
        Some(name) => format!("{name} (id {id}, {mode})"),
        None => format!("id {id}, {mode}"),
    };
    let all: Vec<_> = it.xdp.iter().map(describe).collect();
    let all = all.join(", ");
    let foreign: Vec<_> = it.xdp.iter().filter(|(_, id)| !own.contains(id)).collect();
    let interface = &it.name;
    match foreign[..] {
        [] if all.is_empty() => Finding::ok("XDP", "no program is attached"),
        [] => Finding::ok("XDP", format!("twheel's own: {all}")),
        // A user who may not see a program's name cannot tell whose it is.
        [(_, id), ..] if name(*id).is_none() => Finding::warn(
            "XDP",
            format!("a program is attached, but this user cannot see whose: {all}"),
        )
        .remedy("run `twheel doctor` as root"),
        _ if !hooks.takes_xdp() => {
            let what =
                format!("another program is attached: {all}; twheel uses another hook, beside it");
            Finding::ok("XDP", what)
        }
        _ => Finding::fail("XDP", format!("another program is attached: {all}")).remedy(format!(
            "use --hook tcx, which works beside it, or remove that program: \
             `bpftool net show dev {interface}` and `bpftool link` show what it is. If it is an \
             earlier twheel's, pinned under another name, `twheel detach` removes it; without a \
             BPF link, `ip link set dev {interface} xdp off` does"
        )),
    }
}

/// The programs at TCX, in the order in which packets meet them; `None` if that cannot be queried.
fn tcx(it: &Interface, own: &[u32], name: &dyn Fn(u32) -> Option<String>) -> Option<Finding> {
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
        let ids = tcx::programs(it.index, way).ok()?;
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

/// The name of a loaded program; `None` if it was unloaded, or if this user may not see it.
fn name(id: u32) -> Option<String> {
    let program = loaded_programs().flatten().find(|it| it.id() == id)?;
    Some(program.name_as_str().unwrap_or("?").to_owned())
}
