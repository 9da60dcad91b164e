//! `twheel run`

use anyhow::Result;
use clap::Args;

use super::{complete, options::Options};
use crate::{
    clock::Clock,
    daemon::{self, Setup},
    failure::{Failure, Kind},
    netns::NamespaceSelection,
    order,
    patterns::Selection,
    policy::install,
    reap::Mandate,
};

/// Watch interfaces and print each flow that has ended
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel run --iface eth0
  twheel run --iface eth0,eth1 --timeout 5m --json
  twheel run --iface 'veth*' --exclude veth0    # those that exist, and those that appear later
  twheel run --iface all                        # all except lo
  twheel run --iface all --netns all            # in all network namespaces
  twheel run --iface eth0 --timeout established=1h,syn_sent=20s
  twheel run --iface eth0 --metrics 9435    # then open http://127.0.0.1:9435/
  twheel run --iface tun0 --wait-iface      # wait for tun0, and again when it disappears
  twheel run --iface eth0 --keep     # after Ctrl-C flows stay tracked; the next run adopts them
  twheel run --config eth0.toml      # options from a file: `twheel config example`")]
pub struct Run {
    /// Interface, or a list with commas; or a pattern such as 'veth*', or all (except lo), for interfaces that exist and
    /// those that appear later; may be repeated
    #[arg(long = "iface", value_name = "NAME", required_unless_present = "config", add = complete::interfaces())]
    interfaces: Vec<String>,
    /// Exclude these from the interfaces that --iface patterns match: a name, pattern or list
    #[arg(long, value_name = "NAME", add = complete::excluded())]
    exclude: Vec<String>,
    /// Network namespaces in which to look for interfaces: a name of /run/netns, a pattern or a list; or all, which is this
    /// one and each of those. Namespaces that appear later are watched too. An interface of another namespace is called
    /// NETNS/IFACE [default: this network namespace]
    #[arg(long, value_name = "NAME", add = complete::namespaces())]
    netns: Vec<String>,
    #[command(flatten)]
    options: Options,
}

impl Run {
    pub(super) fn execute(self) -> Result<()> {
        let level = self.options.log_level;
        env_logger::Builder::new()
            .filter_level(log::LevelFilter::Warn)
            .filter_module("twheel", level.max(log::LevelFilter::Warn))
            .format_timestamp(None)
            .init();
        let (setup, reap) = self.setup()?;
        daemon::run(setup, reap)
    }

    /// Checks the options, and the policy file that they name.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: what [`execute`](Self::execute) would refuse before it touches an interface.
    pub(super) fn check(self) -> Result<()> {
        let (setup, _) = self.setup()?;
        if let Some(policy) = &setup.policy {
            install::check(policy, setup.clock, &setup.config.0)?;
        }
        Ok(())
    }

    fn setup(self) -> Result<(Setup, Mandate)> {
        if self.interfaces.is_empty() {
            let what =
                "no interface: give --iface NAME, or iface = \"NAME\" in a configuration file";
            return Err(Failure::new(Kind::Usage, what).into());
        }
        let mut selection = Selection::new(&self.interfaces, &self.exclude)?;
        if let Some((namespace, interface)) = selection.names().find_map(|it| it.rsplit_once('/')) {
            let message = format!(
                "--iface {namespace}/{interface}: no interface has such a name: give --iface {interface} --netns {namespace}"
            );
            return Err(Failure::new(Kind::Usage, message).into());
        }
        let namespaces = NamespaceSelection::parse(&self.netns)?;
        if namespaces.is_elsewhere() {
            selection = selection.everywhere();
        }
        let options = self.options;
        let clock = Clock::jiffies()?;
        let (config, reap) = options.config(clock, selection.count())?;
        options.check_zones(&selection, &namespaces)?;
        // The names of programs are read later, under a lock, when no other `twheel run` loads any.
        let names = order::ProgramNames::default();
        let setup = Setup {
            hooks: options.hooks(selection.count(), &config.0, clock, names),
            selection,
            namespaces,
            config,
            clock,
            wait: options.wait_iface,
            zones: options.zones,
            policy: options.policy,
            quota: options.source_share.0,
            history: Some(options.history).filter(|it| it.as_os_str() != "off"),
            history_bytes: options.history_size.as_u64(),
            json: options.json,
            events: options.events,
            nat: options.nat,
            owner: options.owner,
            final_records: options.final_records,
            metrics: options.metrics,
            offload: options.offload,
            offload_limit: options.offload_limit,
            offload_program_limit: options.offload_program_limit,
            keep: options.keep,
            group: options.group,
            log_level: options.log_level,
            stepping: options.stepping,
        };
        Ok((setup, reap))
    }
}
