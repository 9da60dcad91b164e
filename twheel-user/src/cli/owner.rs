//! The options that ask for the owners of flows.

use anyhow::Result;
use clap::Args;

use super::complete;
use crate::{owner::Owners, reap::NamespacePath};

/// Whether owners are shown, and where to look for them.
#[derive(Args)]
pub struct Owned {
    /// Also show which process has the flow's local socket, its user and its cgroup
    #[arg(long)]
    owner: bool,
    /// With --owner, also look for sockets in this network namespace: a name of `ip netns`, or a path; may be repeated
    #[arg(long, value_name = "NAME", requires = "owner", add = complete::namespace_name())]
    owner_netns: Vec<String>,
}

impl Owned {
    /// What finds owners, if they are asked for.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`](crate::failure::Kind::Usage): there is no such namespace.
    pub fn open(&self, make: fn(Vec<NamespacePath>) -> Owners) -> Result<Option<Owners>> {
        if !self.owner {
            return Ok(None);
        }
        let names = self.owner_netns.iter();
        let namespaces = names.map(|name| NamespacePath::named("--owner-netns", name));
        Ok(Some(make(namespaces.collect::<Result<_>>()?)))
    }
}

/// Says what could not be found out.
pub fn say_notices(owners: Option<&Owners>) {
    for notice in owners.into_iter().flat_map(Owners::notices) {
        say!("twheel: --owner: {notice}");
    }
}
