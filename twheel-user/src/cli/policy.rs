//! `twheel policy`

mod load;

use std::{
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value, json};
use twheel_common::policy::{Hook, MAX_VLAN, Protocol, TimeoutName, Tuple, first_match};

use super::complete;
use crate::{
    action::Action,
    clock::Clock,
    failure::{Failure, Kind},
    given, output,
    policy::{
        Compiled, Policy as Rules, Query, Reap, Rule, Timeouts, Verdict, mapped, packed, words,
    },
    settings::longest_timeout,
};

/// Check and load policy files: timeouts per service
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel policy check policy.toml
  twheel policy load policy.toml --iface eth0 --dry-run
  twheel policy load policy.toml --iface eth0")]
pub struct Policy {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Check(Check),
    Load(load::Load),
}

impl Policy {
    pub(super) fn execute(self) -> Result<()> {
        match self.command {
            Command::Check(check) => check.execute(),
            Command::Load(load) => load.execute(),
        }
    }
}

/// Check a policy file, and tell which rule a flow would meet
///
/// With options that describe a flow, it also prints the rule that the flow meets, and why it meets none before.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel policy check policy.toml
  twheel policy check policy.toml --proto tcp --src 10.1.2.3 --dst 192.0.2.1:22
  twheel policy check policy.toml --proto udp --dst '[2001:db8::1]:53' --iface eth0 --direction in --src 2001:db8::9 --vlan 0
  twheel policy check policy.toml --proto tcp --src 10.1.2.3 --dst 192.0.2.1:25 --vlan 10 --zone 7")]
struct Check {
    /// Policy file
    file: PathBuf,
    /// Protocol of the flow
    #[arg(long, value_enum)]
    proto: Option<Proto>,
    /// Initiator of the flow; its port does not matter
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = end)]
    src: Option<Endpoint>,
    /// Responder of the flow
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = end)]
    dst: Option<Endpoint>,
    /// Interface on which the flow's first packet is seen
    #[arg(long, value_name = "NAME", add = complete::interface())]
    iface: Option<String>,
    /// VLAN of the flow, or the outer and the inner one; 0: none
    #[arg(long, value_name = "ID[,INNER]", value_parser = vlans)]
    vlan: Option<Vlans>,
    /// Zone of the flow, as given to `twheel run --zone`; 0: none
    #[arg(long, value_name = "N", value_parser = given::number(0..=u16::MAX), allow_hyphen_values = true)]
    zone: Option<u16>,
    /// Direction of that packet, as this host sees it
    #[arg(long, value_enum)]
    direction: Option<Way>,
    /// Tick, as for `twheel run`: no timeout may be shorter
    #[arg(long, value_parser = given::duration, allow_hyphen_values = true, default_value = "100ms")]
    tick: Duration,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Proto {
    Tcp,
    Udp,
    Icmp,
}

#[derive(Clone, Copy, ValueEnum)]
enum Way {
    In,
    Out,
}

/// An address, and a port if one was given.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Endpoint(IpAddr, Option<u16>);

fn end(text: &str) -> Result<Endpoint, String> {
    let address = || {
        let inner = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'));
        inner
            .unwrap_or(text)
            .parse()
            .map(|address| Endpoint(address, None))
    };
    let with_port = text
        .parse::<SocketAddr>()
        .map(|end| Endpoint(end.ip(), Some(end.port())));
    with_port.or_else(|_| address()).map_err(|_| {
        "give an address, or one with a port: 192.0.2.1, 192.0.2.1:22, [2001:db8::1]:22".to_owned()
    })
}

/// The outer and the inner identifier; 0: none.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Vlans([u16; 2]);

fn vlans(text: &str) -> Result<Vlans, String> {
    let (outer, inner) = text.split_once(',').unwrap_or((text, "0"));
    let [outer, inner] = [outer, inner].map(|vlan| vlan.parse().ok());
    match (outer, inner) {
        (Some(outer @ ..=MAX_VLAN), Some(inner @ ..=MAX_VLAN)) => Ok(Vlans([outer, inner])),
        _ => Err(format!(
            "give a VLAN identifier from 1 to {MAX_VLAN}, 0 for none, or an outer and an inner one, such as 10, 0 or 10,20"
        )),
    }
}

impl Check {
    fn execute(self) -> Result<()> {
        let longest = longest_timeout(Clock::jiffies()?);
        let policy = Rules::load(&self.file, self.tick..=longest)?;
        let mut text = Vec::new();
        self.report(&policy, &mut text)?;
        io::stdout()
            .lock()
            .write_all(&text)
            .context("cannot write to standard output")
    }

    fn report(&self, policy: &Rules, out: &mut impl Write) -> Result<()> {
        let describes_flow = self.proto.is_some()
            || self.src.is_some()
            || self.dst.is_some()
            || self.iface.is_some()
            || self.vlan.is_some()
            || self.zone.is_some()
            || self.direction.is_some();
        if !describes_flow {
            let result = if self.json {
                print_rules_json(policy, out)
            } else {
                print_rules(policy, out)
            };
            return result.context("cannot write the report");
        }
        let met = Met::find(policy, &self.query()?)?;
        let result = if self.json {
            met.print_json(policy, out)
        } else {
            met.print(policy, out)
        };
        result.context("cannot write the report")
    }

    fn query(&self) -> Result<Query> {
        let usage = |what: String| Err(Failure::new(Kind::Usage, what).into());
        if let (Some(Endpoint(src, _)), Some(Endpoint(dst, _))) = (self.src, self.dst)
            && src.to_canonical().is_ipv4() != dst.to_canonical().is_ipv4()
        {
            return usage(format!(
                "--src {src} --dst {dst}: both ends of a flow are of one family: give two IPv4 or two IPv6 addresses"
            ));
        }
        let port = self.dst.and_then(|Endpoint(_, port)| port);
        if let (Some(Proto::Icmp), Some(port)) = (self.proto, port) {
            return usage(format!(
                "--dst …:{port}: icmp has no ports: remove the port, or give --proto tcp or udp"
            ));
        }
        Ok(Query {
            protocol: self.proto.map(|proto| match proto {
                Proto::Tcp => Protocol::Tcp,
                Proto::Udp => Protocol::Udp,
                Proto::Icmp => Protocol::Icmp,
            }),
            source: self.src.map(|Endpoint(address, _)| mapped(address)),
            destination: self.dst.map(|Endpoint(address, _)| mapped(address)),
            port,
            interface: self.iface.clone(),
            vlans: self.vlan.map(|Vlans(vlans)| vlans),
            zone: self.zone,
            hook: self.direction.map(|way| match way {
                Way::In => Hook::Ingress,
                Way::Out => Hook::Egress,
            }),
        })
    }
}

/// The rule that a flow matches.
struct Met {
    /// The rule's number; 0: none.
    number: usize,
    /// The condition that fails, for each rule before it.
    failed: Vec<String>,
}

impl Met {
    fn find(policy: &Rules, query: &Query) -> Result<Self> {
        let mut failed = Vec::new();
        let mut number = 0;
        for (place, rule) in policy.rules.iter().enumerate() {
            match rule.judge(query) {
                Verdict::Failed(why) => failed.push(why),
                Verdict::Met => {
                    number = place + 1;
                    break;
                }
                Verdict::Unknown(key) => {
                    let option = match key {
                        "dport" => "--dst with a port".to_owned(),
                        key => format!("--{key}"),
                    };
                    let what = format!(
                        "whether the flow meets rule `{}` of {}:{} depends on {key}: give {option} too",
                        rule.name, policy.file, rule.place
                    );
                    return Err(Failure::new(Kind::Usage, what).into());
                }
            }
        }
        // The data plane's tables must give the same rule, or there is a bug. For an unknown
        // property any value will do: no rule up to this one depended on it.
        let looked_up = usize::from(lookup(policy, query)?);
        anyhow::ensure!(
            looked_up == number,
            "bug in twheel: the rules give rule {number}, the tables rule {looked_up}: please report it with the file"
        );
        Ok(Self { number, failed })
    }

    fn rule<'p>(&self, policy: &'p Rules) -> Option<&'p Rule> {
        policy.rules.get(self.number.checked_sub(1)?)
    }

    fn print(&self, policy: &Rules, out: &mut impl Write) -> io::Result<()> {
        let (timeouts, reap) = match self.rule(policy) {
            Some(rule) => {
                writeln!(
                    out,
                    "rule {} `{}`, {}:{}",
                    self.number, rule.name, policy.file, rule.place.line
                )?;
                (&rule.timeouts, &rule.reap)
            }
            None => {
                writeln!(out, "no rule")?;
                (&policy.timeouts, &policy.reap)
            }
        };
        for (name, timeout) in named(timeouts) {
            writeln!(out, "  {:<12} {}", name.name(), given::written(timeout))?;
        }
        writeln!(
            out,
            "  {:<12} as without a policy",
            if named(timeouts).next().is_some() {
                "others"
            } else {
                "all"
            }
        )?;
        if let Some(reap) = reap {
            writeln!(out, "  {:<12} {reap}", "reap")?;
        }
        for ((number, rule), why) in (1..).zip(&policy.rules).zip(&self.failed) {
            writeln!(
                out,
                "not rule {number} `{}` (line {}): {why}",
                rule.name, rule.place.line
            )?;
        }
        Ok(())
    }

    fn print_json(&self, policy: &Rules, out: &mut impl Write) -> io::Result<()> {
        let rule = self.rule(policy);
        let failed = (1..).zip(&policy.rules).zip(&self.failed).map(|((number, rule), why): ((usize, _), _)| {
            json!({ "number": number, "name": rule.name, "line": rule.place.line, "failed": why })
        });
        let reap = rule.map_or(&policy.reap, |rule| &rule.reap);
        let report = json!({
            "file": policy.file,
            "rule": rule.map(|rule| json!({
                "number": self.number,
                "name": rule.name,
                "line": rule.place.line,
            })),
            "timeouts_us": micros(rule.map_or(&policy.timeouts, |rule| &rule.timeouts)),
            "reap": names(reap),
            "reap_cgroup": cgroups(reap),
            "not": failed.collect::<Vec<_>>(),
        });
        output::json::write_now("match", without_nulls(report), out)
    }
}

/// The number of the rule, by the data plane's tables.
fn lookup(policy: &Rules, query: &Query) -> Result<u16> {
    // A policy's interfaces need not exist where the policy is checked: any number for each name
    // will do.
    let mut names: Vec<String> = query.interface.iter().cloned().collect();
    let tables: Compiled = policy.compile(|name| {
        let place = names
            .iter()
            .position(|known| known == name)
            .unwrap_or_else(|| {
                names.push(name.to_owned());
                names.len() - 1
            });
        u32::try_from(place + 1).ok()
    })?;
    let known = |address: Option<_>| words(address.unwrap_or(std::net::Ipv6Addr::UNSPECIFIED));
    let tuple = Tuple {
        source: known(query.source),
        destination: known(query.destination),
        port: query.port.unwrap_or(0).to_be(),
        interface: u32::from(query.interface.is_some()),
        hook: query.hook.unwrap_or(Hook::Ingress),
        protocol: query.protocol.unwrap_or(Protocol::Tcp),
        vlans: packed(query.vlans.unwrap_or_default()),
        zone: query.zone.unwrap_or(0).into(),
    };
    Ok(first_match(&tables, &tuple))
}

fn print_rules(policy: &Rules, out: &mut impl Write) -> io::Result<()> {
    let count = policy.rules.len();
    writeln!(
        out,
        "{}: {count} {}, ok",
        policy.file,
        if count == 1 { "rule" } else { "rules" }
    )?;
    let width = policy
        .rules
        .iter()
        .map(|rule| rule.name.len())
        .max()
        .unwrap_or(0)
        .max(4);
    writeln!(
        out,
        "\n{:>4} {:>5}  {:<width$}  conditions; timeouts",
        "rule", "line", "name"
    )?;
    let line = |out: &mut dyn Write,
                number: String,
                place: String,
                name: &str,
                conditions: String,
                all: &Timeouts,
                reap: &Option<Reap>| {
        let timeouts: Vec<_> = named(all)
            .map(|(name, timeout)| format!("{} {}", name.name(), given::written(timeout)))
            .collect();
        let timeouts = if timeouts.is_empty() {
            "as without a policy".to_owned()
        } else {
            timeouts.join(" ")
        };
        writeln!(
            out,
            "{number:>4} {place:>5}  {name:<width$}  {conditions}; {timeouts}{}",
            reap.as_ref()
                .map_or_else(String::new, |reap| format!("; reap {reap}"))
        )
    };
    for (number, rule) in (1..).zip(&policy.rules) {
        let number: usize = number;
        let conditions = match rule.conditions() {
            none if none.is_empty() => "every flow".to_owned(),
            some => some.join(" "),
        };
        line(
            out,
            number.to_string(),
            rule.place.line.to_string(),
            &rule.name,
            conditions,
            &rule.timeouts,
            &rule.reap,
        )?;
    }
    line(
        out,
        "-".into(),
        "-".into(),
        "-",
        "no rule".into(),
        &policy.timeouts,
        &policy.reap,
    )
}

fn print_rules_json(policy: &Rules, out: &mut impl Write) -> io::Result<()> {
    let rules = (1..).zip(&policy.rules).map(|(number, rule): (usize, _)| {
        json!({
            "number": number,
            "name": rule.name,
            "line": rule.place.line,
            "conditions": rule.conditions(),
            "timeouts_us": micros(&rule.timeouts),
            "reap": names(&rule.reap),
            "reap_cgroup": cgroups(&rule.reap),
        })
    });
    let report = json!({
        "file": policy.file,
        "rules": rules.collect::<Vec<_>>(),
        "timeouts_us": micros(&policy.timeouts),
        "reap": names(&policy.reap),
        "reap_cgroup": cgroups(&policy.reap),
    });
    output::json::write_now("policy", without_nulls(report), out)
}

/// The object without what it says nothing of.
fn without_nulls(mut object: Value) -> Value {
    match &mut object {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields
                .values_mut()
                .for_each(|value| *value = without_nulls(value.take()));
        }
        Value::Array(values) => {
            values
                .iter_mut()
                .for_each(|value| *value = without_nulls(value.take()));
        }
        _ => {}
    }
    object
}

/// The names of the actions.
fn names(reap: &Option<Reap>) -> Option<Vec<&'static str>> {
    let reap = reap.as_ref()?;
    Some(reap.actions.iter().map(Action::name).collect())
}

/// The cgroups that the actions are limited to.
fn cgroups(reap: &Option<Reap>) -> Option<&[String]> {
    let reap = reap.as_ref()?;
    (!reap.cgroups.is_empty()).then_some(&reap.cgroups)
}

/// The timeouts that are set.
fn named(timeouts: &Timeouts) -> impl Iterator<Item = (TimeoutName, Duration)> {
    let all = TimeoutName::ALL.into_iter().zip(timeouts);
    all.filter_map(|(name, timeout)| timeout.map(|timeout| (name, timeout)))
}

fn micros(timeouts: &Timeouts) -> Value {
    let pairs = named(timeouts)
        .map(|(name, timeout)| (name.name().to_owned(), json!(output::json::micros(timeout))));
    Value::Object(pairs.collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests;
