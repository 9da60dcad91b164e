//! Parses the text of a policy file into rules, and checks each by itself.

use std::{fmt::Display, ops::RangeInclusive, time::Duration};

use anyhow::Result;
use humantime::{format_duration, parse_duration};
use toml::de::{DeInteger, DeValue};
use twheel_common::policy::{Hook, MAX_RULES, MAX_VLAN, Protocol, TIMEOUTS, TimeoutName};

use super::{
    cgroups,
    network::{Network, number},
    rule::{Policy, Reap, Rule, Timeouts},
};
use crate::{
    action::{Action, Actions},
    toml_file::{self, Location, Value, entries, quoted, refuse, type_of},
};

const KEYS: &str =
    "name, dport, src, dst, any, iface, vlan, zone, direction, proto, timeouts, reap";
/// Longest name, in characters: a table of rules must stay readable.
const MAX_NAME: usize = 64;
/// The kernel's IFNAMSIZ, without the terminator.
const MAX_INTERFACE_NAME: usize = 15;

/// Parses rules, and checks what can be checked of each rule by itself.
pub(super) fn parse(file: &str, bytes: &[u8], allowed: RangeInclusive<Duration>) -> Result<Policy> {
    let text = toml_file::text(file, bytes, "policy")?;
    Parser {
        file,
        text,
        allowed,
    }
    .policy()
}

struct Parser<'a> {
    file: &'a str,
    text: &'a str,
    allowed: RangeInclusive<Duration>,
}

impl Parser<'_> {
    fn policy(&self) -> Result<Policy> {
        let document = toml_file::parse(self.file, self.text)?;
        let mut timeouts = [None; TIMEOUTS];
        let mut reap = None;
        let mut rules = Vec::new();
        for (key, value) in entries(document.get_ref()) {
            match key.get_ref().as_ref() {
                "timeouts" => timeouts = self.timeouts(value)?,
                "reap" => reap = Some(self.reap(value)?),
                "rule" => {
                    let DeValue::Array(items) = value.get_ref() else {
                        return Err(self.wrong_type("rule", value, "begin each with [[rule]]"));
                    };
                    for item in items.iter() {
                        if rules.len() == MAX_RULES {
                            let what = format!("too many rules: {MAX_RULES} are allowed");
                            return Err(self.error(item.span().start, what));
                        }
                        let rule = self.rule(item, &rules)?;
                        rules.push(rule);
                    }
                }
                other => {
                    return Err(self.unknown_key(key.span().start, other, "timeouts, reap, rule"));
                }
            }
        }
        for rule in &mut rules {
            for (own, common) in rule.timeouts.iter_mut().zip(timeouts) {
                *own = own.or(common);
            }
            rule.reap = rule.reap.take().or_else(|| reap.clone());
        }
        Ok(Policy {
            file: self.file.to_owned(),
            timeouts,
            reap,
            rules,
        })
    }

    fn rule(&self, value: &Value, earlier: &[Rule]) -> Result<Rule> {
        let DeValue::Table(table) = value.get_ref() else {
            return Err(self.wrong_type("rule", value, "begin each with [[rule]]"));
        };
        let mut rule = Rule {
            name: String::new(),
            place: self.place(value.span().start),
            ports: None,
            source: None,
            destination: None,
            either: None,
            interfaces: None,
            vlans: None,
            zones: None,
            hook: None,
            protocols: None,
            timeouts: [None; TIMEOUTS],
            reap: None,
        };
        let mut ports_at = None;
        for (key, value) in entries(table) {
            match key.get_ref().as_ref() {
                "name" => rule.name = self.name(value, earlier)?,
                "dport" => {
                    ports_at = Some(value.span().start);
                    rule.ports = Some(self.ports(value)?);
                }
                "src" => rule.source = Some(self.networks("src", value)?),
                "dst" => rule.destination = Some(self.networks("dst", value)?),
                "any" => rule.either = Some(self.networks("any", value)?),
                "iface" => rule.interfaces = Some(self.interfaces(value)?),
                "vlan" => rule.vlans = Some(self.vlans(value)?),
                "zone" => rule.zones = Some(self.zones(value)?),
                "direction" => rule.hook = Some(self.hook(value)?),
                "proto" => rule.protocols = Some(self.protocols(value)?),
                "timeouts" => rule.timeouts = self.timeouts(value)?,
                "reap" => rule.reap = Some(self.reap(value)?),
                other => return Err(self.unknown_key(key.span().start, other, KEYS)),
            }
        }
        if rule.name.is_empty() {
            let what = "this rule has no name: give it a unique one, name = \"...\"";
            return Err(self.error(value.span().start, what));
        }
        if let (Some(at), Some(protocols)) = (ports_at, &rule.protocols)
            && protocols.iter().all(|protocol| *protocol == Protocol::Icmp)
        {
            let what = "icmp has no ports: leave out dport, or add tcp or udp to proto";
            return Err(self.error(at, what));
        }
        Ok(rule)
    }

    fn name(&self, value: &Value, earlier: &[Rule]) -> Result<String> {
        let allowed = format!("give 1 to {MAX_NAME} letters, digits, `-`, `_` or `.`");
        let name = self.string("name", value, &allowed)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(plain) {
            return Err(self.at(value, format!("name {}: {allowed}", quoted(name))));
        }
        if let Some(other) = earlier.iter().find(|rule| rule.name == name) {
            let line = other.place.line;
            let what = format!(
                "the rule on line {line} is also called `{name}`: give each rule a unique name"
            );
            return Err(self.at(value, what));
        }
        Ok(name.to_owned())
    }

    fn ports(&self, value: &Value) -> Result<Vec<RangeInclusive<u16>>> {
        let mut ports: Vec<RangeInclusive<u16>> = Vec::new();
        for item in self.items("dport", value)? {
            let range = self.port_range(item)?;
            let overlaps = |other: &&RangeInclusive<u16>| {
                other.start() <= range.end() && range.start() <= other.end()
            };
            if let Some(other) = ports.iter().find(overlaps) {
                let what = format!(
                    "dport {} overlaps {} of the same rule: name each port once",
                    written(&range),
                    written(other)
                );
                return Err(self.at(item, what));
            }
            ports.push(range);
        }
        Ok(ports)
    }

    fn port_range(&self, value: &Value) -> Result<RangeInclusive<u16>> {
        const ALLOWED: &str =
            "give a port such as 22 or a range such as \"8000-8099\", within 1 to 65535";
        let given;
        let (low, high) = match value.get_ref() {
            DeValue::Integer(integer) => {
                given = integer.to_string();
                let port = whole(integer);
                (port, port)
            }
            DeValue::String(text) => {
                given = quoted(text);
                let (low, high) = text.split_once('-').unwrap_or((text, text));
                (number(low), number(high))
            }
            _ => return Err(self.wrong_type("dport", value, ALLOWED)),
        };
        let port = |port: Option<u32>| {
            port.and_then(|port| u16::try_from(port).ok())
                .filter(|port| *port != 0)
        };
        let (Some(low), Some(high)) = (port(low), port(high)) else {
            return Err(self.at(value, format!("dport {given}: {ALLOWED}")));
        };
        if low > high {
            let what = format!("dport {given} ends before it begins: give \"{high}-{low}\"");
            return Err(self.at(value, what));
        }
        Ok(low..=high)
    }

    fn networks(&self, key: &str, value: &Value) -> Result<Vec<Network>> {
        let allowed = "give an address or a network such as \"192.0.2.0/24\", or a list of them";
        let network = |item| {
            let text = self.string(key, item, allowed)?;
            Network::parse(text).map_err(|what| self.at(item, format!("{key}: {what}")))
        };
        self.items(key, value)?.into_iter().map(network).collect()
    }

    fn interfaces(&self, value: &Value) -> Result<Vec<(String, Location)>> {
        let allowed = format!(
            "give the name of an interface, 1 to {MAX_INTERFACE_NAME} bytes without spaces or `/`"
        );
        let interface = |item| {
            let name = self.string("iface", item, &allowed)?;
            let strange = |c: char| c.is_whitespace() || c.is_control() || c == '/' || c == ':';
            if name.is_empty() || name.len() > MAX_INTERFACE_NAME || name.contains(strange) {
                return Err(self.at(item, format!("iface {}: {allowed}", quoted(name))));
            }
            Ok((name.to_owned(), self.place(item.span().start)))
        };
        self.items("iface", value)?
            .into_iter()
            .map(interface)
            .collect()
    }

    fn vlans(&self, value: &Value) -> Result<Vec<u16>> {
        let allowed = format!(
            "give a VLAN identifier, 1 to {MAX_VLAN}, 0 for flows in no VLAN, or a list of them"
        );
        let vlans = self.numbers("vlan", value, MAX_VLAN, &allowed)?;
        Ok(vlans.into_iter().map(|(vlan, _)| vlan).collect())
    }

    fn zones(&self, value: &Value) -> Result<Vec<(u16, Location)>> {
        let allowed = format!(
            "give a zone as `twheel run --zone` has it, 1 to {}, 0 for flows of no zone, or a list \
             of them",
            u16::MAX
        );
        self.numbers("zone", value, u16::MAX, &allowed)
    }

    /// Numbers from 0 to `last`, each with its location.
    fn numbers(
        &self,
        key: &str,
        value: &Value,
        last: u16,
        allowed: &str,
    ) -> Result<Vec<(u16, Location)>> {
        let number = |item: &Value| {
            let DeValue::Integer(integer) = item.get_ref() else {
                return Err(self.wrong_type(key, item, allowed));
            };
            let number = whole(integer)
                .and_then(|number| u16::try_from(number).ok())
                .filter(|number| *number <= last);
            match number {
                Some(number) => Ok((number, self.place(item.span().start))),
                None => Err(self.at(item, format!("{key} {integer}: {allowed}"))),
            }
        };
        self.items(key, value)?.into_iter().map(number).collect()
    }

    fn hook(&self, value: &Value) -> Result<Hook> {
        const ALLOWED: &str = "give \"in\" or \"out\"; for both, leave it out";
        match self.string("direction", value, ALLOWED)? {
            "in" => Ok(Hook::Ingress),
            "out" => Ok(Hook::Egress),
            other => Err(self.at(value, format!("direction {}: {ALLOWED}", quoted(other)))),
        }
    }

    fn protocols(&self, value: &Value) -> Result<Vec<Protocol>> {
        const ALLOWED: &str =
            "give \"tcp\", \"udp\" or \"icmp\", or a list of them; for all, leave it out";
        let protocol = |item| {
            let name = self.string("proto", item, ALLOWED)?;
            let protocol = Protocol::ALL
                .into_iter()
                .find(|protocol| protocol.name() == name);
            protocol.ok_or_else(|| self.at(item, format!("proto {}: {ALLOWED}", quoted(name))))
        };
        self.items("proto", value)?
            .into_iter()
            .map(protocol)
            .collect()
    }

    fn timeouts(&self, value: &Value) -> Result<Timeouts> {
        let names = TimeoutName::NAMES.join(", ");
        let DeValue::Table(table) = value.get_ref() else {
            return Err(self.wrong_type(
                "timeouts",
                value,
                "give a table such as { established = \"1h\" }",
            ));
        };
        let mut timeouts = [None; TIMEOUTS];
        for (key, value) in entries(table) {
            let Some(name) = TimeoutName::from_name(key.get_ref()) else {
                return Err(self.unknown_key(key.span().start, key.get_ref(), &names));
            };
            timeouts[name as usize] = Some(self.timeout(name.name(), value)?);
        }
        Ok(timeouts)
    }

    fn timeout(&self, name: &str, value: &Value) -> Result<Duration> {
        let text = self.string(
            name,
            value,
            "give a duration with its unit, such as \"20s\"",
        )?;
        let timeout = parse_duration(text).map_err(|_| {
            let what = format!(
                "{name} {}: give a duration with its unit, such as \"20s\"",
                quoted(text)
            );
            self.at(value, what)
        })?;
        if timeout.is_zero() || !self.allowed.contains(&timeout) {
            let what = format!(
                "{name} {}: give {} to {}",
                quoted(text),
                format_duration(*self.allowed.start()),
                format_duration(*self.allowed.end())
            );
            return Err(self.at(value, what));
        }
        Ok(timeout)
    }

    /// A list of actions, or a table that also says for which cgroups.
    fn reap(&self, value: &Value) -> Result<Reap> {
        let DeValue::Table(table) = value.get_ref() else {
            let actions = self.actions(value)?;
            return Ok(Reap {
                actions,
                ..Reap::default()
            });
        };
        let mut reap = Reap::default();
        let mut has_actions = false;
        for (key, value) in entries(table) {
            match key.get_ref().as_ref() {
                "actions" => {
                    reap.actions = self.actions(value)?;
                    has_actions = true;
                }
                "cgroup" => reap.cgroups = self.cgroups(value)?,
                other => {
                    return Err(self.unknown_key(key.span().start, other, "actions, cgroup"));
                }
            }
        }
        match has_actions {
            true => Ok(reap),
            false => Err(self.at(value, "reap has no actions: give actions = [\"...\"]")),
        }
    }

    fn cgroups(&self, value: &Value) -> Result<Vec<String>> {
        const ALLOWED: &str = "give the path of a cgroup as /proc/PID/cgroup has it, such as \
                               \"/system.slice/nginx.service\", or a list of them";
        let cgroup = |item| {
            let path = self.string("cgroup", item, ALLOWED)?;
            let is_name = |name: &str| !["", ".", ".."].contains(&name);
            let is_path = match path.strip_prefix('/') {
                Some("") => true,
                Some(rest) => rest.split('/').all(is_name) && !path.contains(char::is_control),
                None => false,
            };
            match is_path {
                true => Ok(path.to_owned()),
                false => Err(self.at(item, format!("cgroup {}: {ALLOWED}", quoted(path)))),
            }
        };
        let items = self.items("cgroup", value)?;
        let cgroups: Vec<_> = items.into_iter().map(cgroup).collect::<Result<_>>()?;
        let (length, most) = (cgroups::text(&cgroups).len(), cgroups::BYTES);
        if length > most {
            let what = format!(
                "cgroup: the paths take {length} bytes, with one more for each, and at most {most} \
                 are allowed: name a cgroup that they are all below"
            );
            return Err(self.at(value, what));
        }
        Ok(cgroups)
    }

    /// A list of actions; an empty list means none.
    fn actions(&self, value: &Value) -> Result<Actions> {
        let names = Action::ALL.map(Action::name).join(", ");
        let allowed = format!(
            "give a list of {names}, an empty one, or a table such as {{ actions = [\"socket\"], \
             cgroup = \"/system.slice/nginx.service\" }}"
        );
        let DeValue::Array(items) = value.get_ref() else {
            return Err(self.wrong_type("reap", value, &allowed));
        };
        let action = |item| {
            let name = self.string("reap", item, &allowed)?;
            Action::from_name(name)
                .ok_or_else(|| self.at(item, format!("reap {}: {allowed}", quoted(name))))
        };
        let actions: Actions = items.iter().map(action).collect::<Result<_>>()?;
        if actions.iter().filter(|action| action.enforces()).count() > 1 {
            let what = "reap: enforce=drop and enforce=reset exclude each other: give only one";
            return Err(self.at(value, what));
        }
        Ok(actions)
    }

    /// A single value as a list, or the values of a list.
    fn items<'v, 'i>(&self, key: &str, value: &'v Value<'i>) -> Result<Vec<&'v Value<'i>>> {
        match value.get_ref() {
            DeValue::Array(items) if items.is_empty() => {
                let what = format!(
                    "{key} is an empty list, which no flow matches: leave it out, or fill it"
                );
                Err(self.at(value, what))
            }
            DeValue::Array(items) => Ok(items.iter().collect()),
            _ => Ok(vec![value]),
        }
    }

    fn string<'v>(&self, key: &str, value: &'v Value<'_>, allowed: &str) -> Result<&'v str> {
        let string = value.get_ref().as_str();
        string.ok_or_else(|| self.wrong_type(key, value, allowed))
    }

    fn wrong_type(&self, key: &str, value: &Value, allowed: &str) -> anyhow::Error {
        self.at(value, format!("{key} is {}: {allowed}", type_of(value)))
    }

    fn unknown_key(&self, at: usize, key: &str, allowed: &str) -> anyhow::Error {
        self.error(
            at,
            format!("unknown key {}: use one of {allowed}", quoted(key)),
        )
    }

    fn at(&self, value: &Value, what: impl Display) -> anyhow::Error {
        self.error(value.span().start, what)
    }

    fn error(&self, at: usize, what: impl Display) -> anyhow::Error {
        refuse(self.file, self.place(at), what)
    }

    fn place(&self, at: usize) -> Location {
        Location::new(self.text, at)
    }
}

/// An integer that fits into 32 bits without a sign.
fn whole(integer: &DeInteger<'_>) -> Option<u32> {
    u32::from_str_radix(integer.as_str(), integer.radix()).ok()
}

fn written(range: &RangeInclusive<u16>) -> String {
    match (range.start(), range.end()) {
        (low, high) if low == high => low.to_string(),
        (low, high) => format!("{low}-{high}"),
    }
}
