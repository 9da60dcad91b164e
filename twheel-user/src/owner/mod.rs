//! Whose a flow's local socket is: the process, its command, its cgroup and its user.
//!
//! sock_diag gives the socket of a flow, with its user, its cgroup and its inode. The process is
//! the one that has a descriptor of that inode.
//!
//! | question | file |
//! |---|---|
//! | which socket is a flow's, and what is remembered of it | `mod.rs` |
//! | the sockets of a network namespace | `site.rs` |
//! | which process has a socket | `processes.rs` |
//! | the path of a cgroup | `cgroups.rs` |
//! | how often the last two search | `pacing.rs` |
//! | owners for the events of a run | `lookups.rs` |

mod cgroups;
mod lookups;
mod pacing;
mod processes;
mod site;

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use anyhow::Result;
use caps::Capability;
use lru::LruCache;
use nix::{
    net::if_::if_nametoindex,
    unistd::{Uid, User},
};
use serde::Serialize;

pub use self::{
    cgroups::{Cgroups, is_at},
    lookups::Lookups,
};
use self::{pacing::Pacing, processes::Processes, site::Site};
use crate::{
    model::{Birth, Flow, Named},
    privilege::has,
    reap::{NamespacePath, Scope},
    sockets::{Holder, Protocol},
};

/// Most flows whose owners are remembered; those that were not asked for longest are forgotten
/// first.
const FLOWS: NonZeroUsize = NonZeroUsize::new(1 << 16).unwrap();
/// How long an owner is not looked up again, nor what interfaces have which addresses.
const FRESH: Duration = Duration::from_secs(2);
/// Most entries of each of the other caches, which are emptied when they are full.
const ENTRIES: usize = 1 << 12;
/// Most sentences about what could not be found out.
const NOTICES: usize = 16;

/// Whose a flow's local socket is, as far as that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Owner {
    /// The process that has the socket; that with the lowest number if there are several.
    #[serde(rename = "owner_pid", skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its command, from `/proc/PID/comm`.
    #[serde(rename = "owner_command", skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The cgroup (version 2) in which the socket, or the listening socket that accepted it, was
    /// made, as `/proc/PID/cgroup` has it.
    #[serde(rename = "owner_cgroup", skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The user who made it, by name; by number if there is no name.
    #[serde(rename = "owner_user", skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Where a socket of a flow may be bound to: an end's address; the flow's zone, interface, VLANs.
type BoundKey = (IpAddr, u16, Option<u32>, [u16; 2]);

/// Finds the owners of flows, and remembers them.
pub struct Owners {
    /// The network namespace of this process, and those that were given.
    sites: Vec<Site>,
    /// The network namespaces in which flows are counted, by name.
    elsewhere: HashMap<String, Site>,
    is_listing: bool,
    processes: Processes,
    cgroups: Option<Cgroups>,
    cgroup_pacing: Pacing,
    users: HashMap<u32, String>,
    known: LruCache<Birth, (Instant, Owner)>,
    bound: (Instant, HashMap<BoundKey, Vec<u32>>),
    notices: BTreeSet<String>,
}

impl Owners {
    /// For a process that runs for long: each flow's socket is looked up by itself. `namespaces`:
    /// where to look for sockets of flows besides the network namespace of this process.
    pub fn new(namespaces: Vec<NamespacePath>) -> Self {
        let given = namespaces.into_iter().map(|it| Site::new(Some(it)));
        let (cgroups, notice) = match Cgroups::open() {
            Ok(cgroups) => (Some(cgroups), None),
            Err(error) => (None, Some(format!("cgroups are not shown: {error:#}"))),
        };
        Self {
            sites: [Site::new(None)].into_iter().chain(given).collect(),
            elsewhere: HashMap::new(),
            is_listing: false,
            processes: Processes::default(),
            cgroups,
            cgroup_pacing: Pacing::default(),
            users: HashMap::new(),
            known: LruCache::new(FLOWS),
            bound: (Instant::now(), HashMap::new()),
            notices: BTreeSet::from_iter(notice),
        }
    }

    /// For a listing: if many flows are asked for, all sockets are listed once.
    pub fn for_listing(namespaces: Vec<NamespacePath>) -> Self {
        Self {
            is_listing: true,
            ..Self::new(namespaces)
        }
    }

    /// The owner of a flow's local socket; if both ends are local, of the responder's. `None`: this
    /// host has no such socket, and had none when it was asked before.
    ///
    /// It may have to look at all processes, for two seconds at most and an eighth of the time
    /// altogether. What could not be found out is in [`notices`](Self::notices).
    pub fn find(&mut self, flow: &Flow, named: Named<'_>) -> Option<Owner> {
        let now = Instant::now();
        let known = self.known.get(&flow.birth);
        if let Some((then, owner)) = known
            && owner.pid.is_some()
            && now < *then + FRESH
        {
            return Some(owner.clone());
        }
        match self.holder(flow, named) {
            Some(holder) => {
                let owner = self.owner(holder);
                self.known.put(flow.birth, (now, owner.clone()));
                Some(owner)
            }
            // The socket may have been closed since.
            None => self.known.get(&flow.birth).map(|(_, owner)| owner.clone()),
        }
    }

    /// What could not be found out, and why: a sentence each.
    pub fn notices(&self) -> impl Iterator<Item = String> {
        let missed = self.processes.missed;
        let needed = [Capability::CAP_SYS_PTRACE, Capability::CAP_DAC_READ_SEARCH];
        let refused = match needed.into_iter().all(has) {
            false => {
                "processes of other users are not shown: not permitted without CAP_SYS_PTRACE and \
                 CAP_DAC_READ_SEARCH"
            }
            true => "some processes are not shown: the system does not permit to look at them",
        };
        let rest = "some processes are not shown: this host has more processes or descriptors than \
                    are looked at";
        let own = [(missed.refused, refused), (missed.rest, rest)];
        let own = own.into_iter().filter(|(is, _)| *is);
        own.map(|(_, text)| text.to_owned())
            .chain(self.notices.iter().cloned())
    }

    /// The part of a result that could be found out; the rest is noted.
    fn noted<T>(&mut self, result: Result<Option<T>>) -> Option<T> {
        result.unwrap_or_else(|error| {
            if self.notices.len() < NOTICES {
                self.notices.insert(format!("{error:#}"));
            }
            None
        })
    }

    /// The flow's local socket.
    fn holder(&mut self, flow: &Flow, named: Named<'_>) -> Option<Holder> {
        let protocol = Protocol::of_flow(flow.birth.key.proto())?;
        let ends = [(flow.dst, flow.src), (flow.src, flow.dst)];
        let is_apart = named.zone != 0 || flow.vlans != [0; 2];
        // A flow that is counted in another network namespace has its sockets there.
        if let Some((namespace, _)) = named.iface.and_then(|it| it.split_once('/')) {
            if is_apart {
                return None;
            }
            if !self.elsewhere.contains_key(namespace) {
                let site = Site::new(Some(NamespacePath::of_name(namespace)));
                self.elsewhere.insert(namespace.to_owned(), site);
            }
            let site = self.elsewhere.get_mut(namespace)?;
            let found = ends
                .into_iter()
                .map(|ends| site.find(protocol, ends, 0, self.is_listing))
                .find(|found| !matches!(found, Ok(None)));
            return self.noted(found.unwrap_or(Ok(None)));
        }
        for at in 0..self.sites.len() {
            // The interfaces that tell VLANs and zones apart are those of the first namespace.
            if at > 0 && is_apart {
                break;
            }
            for ends in ends {
                for bound in self.bound(flow, named, ends.0)? {
                    let found = self.sites[at].find(protocol, ends, bound, self.is_listing);
                    if let Some(holder) = self.noted(found) {
                        return Some(holder);
                    }
                }
            }
        }
        None
    }

    /// The interfaces to which a socket of the flow with this endpoint may be bound.
    fn bound(&mut self, flow: &Flow, named: Named<'_>, local: SocketAddr) -> Option<Vec<u32>> {
        if named.zone == 0 && flow.vlans == [0; 2] {
            return Some(vec![Scope::UNBOUND]);
        }
        let interface = named.iface.and_then(|name| if_nametoindex(name).ok());
        let key = (local.ip(), named.zone, interface, flow.vlans);
        let (since, known) = &mut self.bound;
        if since.elapsed() > FRESH || known.len() >= ENTRIES {
            (*since, *known) = (Instant::now(), HashMap::new());
        }
        if let Some(bound) = known.get(&key) {
            return Some(bound.clone());
        }
        let scope = Scope::of_flow(flow.vlans, named.zone, interface);
        let bound = scope.and_then(|scope| scope.bound(local.ip()));
        let bound = self.noted(bound.map(Some))?;
        self.bound.1.insert(key, bound.clone());
        Some(bound)
    }

    fn owner(&mut self, holder: Holder) -> Owner {
        let process = holder.inode.and_then(|inode| self.processes.find(inode));
        let (pid, command) = process.map(|it| (it.pid, it.command)).unzip();
        Owner {
            pid,
            command,
            cgroup: holder.cgroup.and_then(|number| self.cgroup(number)),
            user: holder.uid.map(|uid| self.user(uid)),
        }
    }

    fn cgroup(&mut self, number: u64) -> Option<String> {
        let cgroups = self.cgroups.as_mut()?;
        if let Some(known) = cgroups.known(number) {
            return Some(known.to_owned());
        }
        let found = self.cgroup_pacing.turn(|| cgroups.find(number, "/"))?;
        self.noted(found)
    }

    fn user(&mut self, uid: u32) -> String {
        if self.users.len() >= ENTRIES {
            self.users.clear();
        }
        let name = || match User::from_uid(Uid::from_raw(uid)) {
            Ok(Some(user)) => user.name,
            _ => uid.to_string(),
        };
        self.users.entry(uid).or_insert_with(name).clone()
    }
}
