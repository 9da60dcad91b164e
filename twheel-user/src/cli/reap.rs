//! What `twheel run` does to flows that have expired.

use anyhow::Result;
use clap::Args;

use super::complete;
use crate::{
    action::{Action, Actions},
    failure::{Failure, Kind},
    filter::{Filter, Knowable},
    given,
    reap::{Mandate, NamespacePath, Sites},
};

/// Options of the reaper.
#[derive(Args)]
#[command(next_help_heading = "Reaping")]
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
    #[arg(long, value_name = "N", value_parser = given::number(1..=1_000_000_u32), allow_hyphen_values = true)]
    reap_rate: Option<u32>,
    /// Pause if more than this percentage of the live flows would be reaped within a minute [default: 20]
    #[arg(long, value_name = "PERCENT", value_parser = given::number(1..=100_u8), allow_hyphen_values = true)]
    reap_max_share: Option<u8>,
    /// Also close sockets and delete entries in this network namespace: a name of `ip netns`, or a path; may be repeated
    #[arg(long, value_name = "NAME", add = complete::namespace_name())]
    reap_netns: Vec<String>,
    /// Required for enforce, and for a policy with it: packets are dropped
    #[arg(long)]
    pub i_know_this_drops_traffic: bool,
    /// Most RSTs a second that enforce=reset sends to one source [default: 10]
    #[arg(long, value_name = "N", value_parser = given::number(1..=1_000_u32), allow_hyphen_values = true)]
    pub enforce_rate: Option<u32>,
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
        let mut actions = self.actions.iter();
        let enforcing = actions.find(|action| action.enforces());
        if let Some(action) = enforcing.filter(|_| !self.i_know_this_drops_traffic) {
            return refuse(&format!(
                "--reap {} refuses packets of expired flows: to confirm, add \
                     --i-know-this-drops-traffic",
                action.name()
            ));
        }
        if strict && !self.actions.is_empty() {
            return refuse(
                "--reap with --pickup strict: twheel could not see that a flow is active again: \
                 remove one of the two options",
            );
        }
        if !has_policy {
            self.tell_what_has_no_effect();
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
            max_share: f64::from(self.reap_max_share.unwrap_or(20)) / 100.0,
            sites: Sites::open(namespaces.collect::<Result<_>>()?, self.actions)?,
            strict,
            holds: self.holds(),
        })
    }

    /// Reports the options that have no effect with these actions and without a policy.
    fn tell_what_has_no_effect(&self) {
        let reaps = !self.actions.is_empty();
        let enforces = self.actions.iter().any(Action::enforces);
        let resets = self.actions.has(Action::EnforceReset);
        let reaping = ("--reap", "nothing is reaped", reaps);
        let enforcing = ("--reap enforce", "nothing is dropped", enforces);
        let resetting = ("--reap enforce=reset", "it sends no RST", resets);
        for (option, is_given, (needed, effect, has_effect)) in [
            ("--dry-run", self.dry_run, reaping),
            ("--protect", !self.protect.is_empty(), reaping),
            ("--reap-rate", self.reap_rate.is_some(), reaping),
            ("--reap-max-share", self.reap_max_share.is_some(), reaping),
            ("--reap-netns", !self.reap_netns.is_empty(), reaping),
            (
                "--i-know-this-drops-traffic",
                self.i_know_this_drops_traffic,
                enforcing,
            ),
            ("--enforce-rate", self.enforce_rate.is_some(), resetting),
        ] {
            if is_given && !has_effect {
                say!(
                    "twheel: {option} without {needed}: {effect}, unless a policy that is loaded \
                     later says so"
                );
            }
        }
    }

    /// Whether the XDP program must be able to drop packets, permanently or while a socket is
    /// closed.
    pub fn holds(&self) -> bool {
        self.i_know_this_drops_traffic || self.actions.has(Action::Socket)
    }
}
