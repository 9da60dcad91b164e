//! What `twheel run` does to flows that have expired.

use anyhow::Result;
use clap::Args;

use super::complete;
use crate::{
    action::{Action, Actions},
    failure::{Failure, Kind},
    filter::{Filter, Knowable},
    reap::{Mandate, NamespacePath, Sites},
};

/// Options of the reaper.
#[derive(Args)]
#[command(next_help_heading = "Reaping: docs/reap.md")]
pub struct Reap {
    /// What to do to a flow that expired idle: `none`, or a list of reset (send both ends a RST), socket (close the local
    /// socket), conntrack (delete the kernel's entry), enforce=drop, enforce=reset (drop or reset its later packets, except
    /// a SYN). Rules of a policy may say otherwise
    #[arg(long = "reap", value_name = "ACTIONS", value_parser = Actions::parse, default_value = "none", add = complete::actions())]
    pub actions: Actions,
    /// Never reap flows that match this filter; may be repeated
    #[arg(long, value_name = "FILTER", add = complete::filter())]
    protect: Vec<String>,
    /// Report what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Most actions a second [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    reap_rate: Option<u32>,
    /// Pause if more than this percentage of the live flows would be reaped within a minute
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(1..=100))]
    reap_max_share: u8,
    /// Also close sockets and delete entries in this network namespace: a name of `ip netns`, or a path; may be repeated
    #[arg(long, value_name = "NAME", add = complete::namespace_name())]
    reap_netns: Vec<String>,
    /// Required for enforce, and for a policy with it: packets are dropped
    #[arg(long)]
    pub i_know_this_drops_traffic: bool,
    /// Most RSTs a second that enforce=reset sends to one source
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub enforce_rate: u32,
}

impl Reap {
    /// What the reaper may do. `known`: the fields that are known of flows that have ended.
    /// `has_policy`: a policy may ask for actions, too.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: a filter is invalid, a namespace does not exist, or enforcement was not
    /// confirmed. Also if something that the actions need cannot be opened.
    pub fn wanted(&self, known: Knowable, strict: bool, has_policy: bool) -> Result<Mandate> {
        fn refuse<T>(what: &str) -> Result<T> {
            Err(Failure::new(Kind::Usage, what).into())
        }
        if self.actions.iter().any(|action| action.enforces()) && !self.i_know_this_drops_traffic {
            return refuse(
                "--reap enforce drops packets of expired flows: to confirm, add \
                 --i-know-this-drops-traffic",
            );
        }
        if strict && !self.actions.is_empty() {
            return refuse(
                "--reap with --pickup strict: twheel could not see that a flow is active again: \
                 remove one of the two options",
            );
        }
        let given = [
            ("--dry-run", self.dry_run),
            ("--protect", !self.protect.is_empty()),
        ];
        for (option, _) in given.into_iter().filter(|(_, given)| *given && !has_policy) {
            if self.actions.is_empty() {
                say!(
                    "twheel: {option} without --reap: nothing is reaped, unless a policy that is \
                     loaded later says so"
                );
            }
        }
        let protect = self.protect.iter().map(|text| {
            let filter = Filter::parse(text, known)?;
            match filter.is_empty() {
                true => refuse("--protect \"\": give a filter, such as 'dport == 22'"),
                false => Ok(filter),
            }
        });
        let namespaces = self
            .reap_netns
            .iter()
            .map(|name| NamespacePath::named("--reap-netns", name));
        Ok(Mandate {
            protect: protect.collect::<Result<_>>()?,
            dry_run: self.dry_run,
            rate: self.reap_rate,
            max_share: f64::from(self.reap_max_share) / 100.0,
            sites: Sites::open(namespaces.collect::<Result<_>>()?, self.actions)?,
            strict,
            holds: self.holds(),
        })
    }

    /// Whether the XDP program must be able to drop packets, permanently or while a socket is
    /// closed.
    pub fn holds(&self) -> bool {
        self.i_know_this_drops_traffic || self.actions.has(Action::Socket)
    }
}
