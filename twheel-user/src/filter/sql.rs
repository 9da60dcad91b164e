//! A filter as a condition of SQL, over rows of ended flows in ClickHouse.
//!
//! The values of a filter never become part of the SQL: each is a parameter, which the server binds.
//! A condition is true, 1, or false, 0, and never NULL, so that `not` of an unknown field is true.

use std::{
    net::Ipv6Addr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::Value as Json;

use super::{
    Filter,
    expression::Test,
    field::Field,
    value::{Operator, Value},
};
use crate::policy::network::Network;

/// The values of a query. The server binds `{p0:Type}` to the first one, and so on.
#[derive(Clone, Debug, Default)]
pub struct Parameters(Vec<Json>);

impl Parameters {
    /// Adds a value of this type of ClickHouse; what stands for it in the SQL.
    pub fn bind(&mut self, value: impl Into<Json>, kind: &str) -> String {
        self.0.push(value.into());
        format!("{{p{}:{kind}}}", self.0.len() - 1)
    }

    /// The values, in order.
    pub fn values(&self) -> &[Json] {
        &self.0
    }
}

/// The rows that a condition is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Events.
    Events,
    /// Ended flows by minute, protocol, service, reason and state.
    Minutes,
}

impl Filter {
    /// The condition that a row of an ended flow matches. `now`: what `ended` counts from.
    pub fn sql(&self, rows: Rows, now: SystemTime, parameters: &mut Parameters) -> String {
        let mut compiler = Compiler {
            rows,
            now: micros_of(now),
            parameters,
        };
        match &self.0 {
            Some(test) => compiler.test(test),
            None => "1".to_owned(),
        }
    }

    /// Whether rows of [`Rows::Minutes`] have all fields of the filter. They have no port of ICMP;
    /// `has_ports`: no flows of ICMP are asked for.
    pub fn fits_minutes(&self, has_ports: bool) -> bool {
        let Some(test) = &self.0 else {
            return true;
        };
        let has_ports = has_ports || is_of_ports(test);
        let fits = |field: &Field| match field {
            Field::Proto | Field::State | Field::Reason => true,
            Field::Dport => has_ports,
            _ => false,
        };
        fields(test).iter().all(fits)
    }
}

/// The fields that an expression uses.
fn fields(test: &Test) -> Vec<Field> {
    match test {
        Test::All(tests) | Test::Any(tests) => tests.iter().flat_map(fields).collect(),
        Test::Not(test) => fields(test),
        Test::Is(field) | Test::OneOf(field, _) | Test::Compares(field, ..) => vec![*field],
    }
}

/// Whether only flows of protocols with ports match.
fn is_of_ports(test: &Test) -> bool {
    let has_ports = |value: &Value| match value {
        Value::Name(name) => ["tcp", "udp"]
            .iter()
            .any(|it| it.eq_ignore_ascii_case(name)),
        _ => false,
    };
    match test {
        Test::All(tests) => tests.iter().any(is_of_ports),
        Test::OneOf(Field::Proto, values) => values.iter().all(has_ports),
        _ => false,
    }
}

/// Any of these conditions.
fn any_of(conditions: &[String]) -> String {
    match conditions.len() {
        0 => "0".to_owned(),
        _ => format!("({})", conditions.join(" OR ")),
    }
}

/// Whole microseconds, rounded down, and whether that is all.
fn in_micros(duration: Duration) -> (u128, bool) {
    let nanos = duration.as_nanos();
    (nanos / 1000, nanos.is_multiple_of(1000))
}

/// Microseconds since 1970.
pub fn micros_of(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// An operand of SQL: a value of a field, and when it is known.
struct Operand {
    sql: String,
    /// The condition that it is known; empty: always.
    known: &'static str,
    /// It is NULL if it is unknown.
    is_nullable: bool,
}

impl Operand {
    fn new(sql: impl Into<String>) -> Self {
        Self {
            sql: sql.into(),
            known: "",
            is_nullable: false,
        }
    }

    fn known_if(sql: &str, known: &'static str) -> Self {
        Self {
            known,
            ..Self::new(sql)
        }
    }

    fn nullable(sql: &str) -> Self {
        Self {
            is_nullable: true,
            ..Self::new(sql)
        }
    }

    /// A comparison of the operand, false if the operand is unknown.
    fn if_known(&self, comparison: String) -> String {
        match (self.is_nullable, self.known) {
            (true, _) => format!("ifNull({comparison}, 0)"),
            (_, "") => comparison,
            (_, known) => format!("({known} AND {comparison})"),
        }
    }
}

/// The values of a list, by kind, as parameters.
#[derive(Default)]
struct Values {
    /// In small letters: ClickHouse's `lower` changes ASCII letters alone, as the filter does.
    names: Vec<Json>,
    /// Numbers, and durations in microseconds.
    numbers: Vec<Json>,
    addresses: Vec<Json>,
    /// The first and the last numbers.
    number_ranges: [Vec<Json>; 2],
    /// The first and the last addresses.
    networks: [Vec<Json>; 2],
}

impl Values {
    fn of(list: &[Value]) -> Self {
        let mut values = Self::default();
        for value in list {
            match value {
                Value::Name(name) => values.names.push(name.to_ascii_lowercase().into()),
                Value::Number(number) => values.numbers.push((*number).into()),
                Value::Range(from, to) => {
                    values.number_ranges[0].push((*from).into());
                    values.number_ranges[1].push((*to).into());
                }
                // Rows have whole microseconds, and at most 2^64 of them.
                Value::Duration(duration) => {
                    let (micros, is_whole) = in_micros(*duration);
                    let micros = u64::try_from(micros).ok().filter(|_| is_whole);
                    values.numbers.extend(micros.map(Json::from));
                }
                Value::Network(network) => values.add(*network),
            }
        }
        values
    }

    /// The families are separate.
    fn add(&mut self, network: Network) {
        let [first, last] = network.range();
        let [low, high] = Network::IPV4.range();
        if first == last {
            self.addresses.push(address(first));
        } else if first < low && last >= high {
            // What is below IPv4's addresses, and what is above.
            self.networks[0].push(address(first));
            self.networks[1].push(address(before(low)));
            self.networks[0].push(address(after(high)));
            self.networks[1].push(address(last));
        } else {
            self.networks[0].push(address(first));
            self.networks[1].push(address(last));
        }
    }
}

/// An address as a parameter.
fn address(address: Ipv6Addr) -> Json {
    address.to_string().into()
}

/// The address before one that is not the first.
fn before(address: Ipv6Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits(address.to_bits() - 1)
}

/// The address after one that is not the last.
fn after(address: Ipv6Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits(address.to_bits() + 1)
}

struct Compiler<'a> {
    rows: Rows,
    now: i64,
    parameters: &'a mut Parameters,
}

impl Compiler<'_> {
    fn test(&mut self, test: &Test) -> String {
        match test {
            Test::All(tests) => self.joined(tests, " AND ", "1"),
            Test::Any(tests) => self.joined(tests, " OR ", "0"),
            Test::Not(test) => format!("(NOT {})", self.test(test)),
            Test::Is(field) => format!("({} = 1)", field.name()),
            Test::OneOf(field, values) => {
                let values = Values::of(values);
                let mut any = Vec::new();
                for operand in self.operands(*field) {
                    let equal = self.one_of(&operand.sql, &values);
                    any.extend(equal.into_iter().map(|it| operand.if_known(it)));
                }
                any_of(&any)
            }
            Test::Compares(field, operator, value) => {
                let mut any = Vec::new();
                for operand in self.operands(*field) {
                    let ordered = self.ordered(&operand.sql, *operator, value);
                    any.push(operand.if_known(ordered));
                }
                any_of(&any)
            }
        }
    }

    fn joined(&mut self, tests: &[Test], word: &str, none: &str) -> String {
        let tests: Vec<_> = tests.iter().map(|test| self.test(test)).collect();
        match tests.len() {
            0 => none.to_owned(),
            _ => format!("({})", tests.join(word)),
        }
    }

    /// `operand` equals a value, or is in a range or network: any of these conditions. There are only
    /// a few, however many values there are: a server needs minutes for a condition of thousands of
    /// parts.
    fn one_of(&mut self, operand: &str, values: &Values) -> Vec<String> {
        let mut any = Vec::new();
        for (list, kind) in [
            (&values.names, "String"),
            (&values.numbers, "UInt64"),
            (&values.addresses, "IPv6"),
        ] {
            if !list.is_empty() {
                let list = self
                    .parameters
                    .bind(list.clone(), &format!("Array({kind})"));
                any.push(format!("{operand} IN {list}"));
            }
        }
        for ([first, last], kind) in [
            (&values.number_ranges, "UInt64"),
            (&values.networks, "IPv6"),
        ] {
            if !first.is_empty() {
                let kind = format!("Array({kind})");
                let mut bind = |list: &Vec<Json>| self.parameters.bind(list.clone(), &kind);
                any.push(format!(
                    "arrayExists((low, high) -> {operand} BETWEEN low AND high, {}, {})",
                    bind(first),
                    bind(last)
                ));
            }
        }
        any
    }

    /// `operand` is less than a value, or more, and so on.
    fn ordered(&mut self, operand: &str, operator: Operator, value: &Value) -> String {
        match value {
            Value::Number(number) => {
                let sign = match operator {
                    Operator::Less => "<",
                    Operator::AtMost => "<=",
                    Operator::AtLeast => ">=",
                    Operator::More => ">",
                };
                let number = self.parameters.bind(*number, "UInt64");
                format!("{operand} {sign} {number}")
            }
            // For whole microseconds: more than 1.5 is more than 1, less than 1.5 is at most 1.
            Value::Duration(duration) => {
                let (micros, is_whole) = in_micros(*duration);
                let (sign, if_beyond) = match operator {
                    Operator::Less if is_whole => ("<", "1"),
                    Operator::Less | Operator::AtMost => ("<=", "1"),
                    Operator::AtLeast if is_whole => (">=", "0"),
                    Operator::AtLeast | Operator::More => (">", "0"),
                };
                self.micros(operand, sign, micros)
                    .unwrap_or(if_beyond.to_owned())
            }
            _ => "0".to_owned(),
        }
    }

    /// A comparison with microseconds; `None` if there are more than any row can have.
    fn micros(&mut self, operand: &str, sign: &str, micros: u128) -> Option<String> {
        let micros = self.parameters.bind(u64::try_from(micros).ok()?, "UInt64");
        Some(format!("{operand} {sign} {micros}"))
    }

    /// The values of a field, of which any may match.
    fn operands(&mut self, field: Field) -> Vec<Operand> {
        let plain = |names: &[&str]| names.iter().map(|name| Operand::new(*name)).collect();
        match field {
            Field::Src | Field::Dst | Field::Sport | Field::Zone => plain(&[field.name()]),
            Field::Proto | Field::State | Field::Direction | Field::Reason => {
                plain(&[field.name()])
            }
            Field::Dport => match self.rows {
                Rows::Events => plain(&["dport"]),
                Rows::Minutes => plain(&["service"]),
            },
            Field::Host => plain(&["src", "dst"]),
            Field::Port => plain(&["sport", "dport"]),
            Field::Rule => vec![Operand::known_if("lower(rule)", "rule != ''")],
            Field::Iface => vec![Operand::known_if("lower(iface)", "iface != ''")],
            Field::Vlan => vec![
                Operand::known_if("vlan", "vlan != 0"),
                Operand::known_if("inner_vlan", "inner_vlan != 0"),
            ],
            Field::Idle => plain(&["idle_us"]),
            Field::Age => plain(&["age_us"]),
            Field::Ended => {
                let now = self.parameters.bind(self.now, "Int64");
                vec![Operand::new(format!(
                    "greatest({now} - toUnixTimestamp64Micro(time), toInt64(0))"
                ))]
            }
            Field::Packets => vec![Operand::nullable("orig_packets + reply_packets")],
            Field::Bytes => vec![Operand::nullable("orig_bytes + reply_bytes")],
            Field::Rtt => vec![
                Operand::known_if("orig_rtt_us", "orig_rtt_us != 0"),
                Operand::known_if("reply_rtt_us", "reply_rtt_us != 0"),
            ],
            Field::Retransmissions => vec![Operand::nullable(
                "orig_retransmissions + reply_retransmissions",
            )],
            // They are not known of ended flows, so a filter of these has none; flags have no
            // value.
            Field::Expires | Field::Cpu | Field::PickedUp | Field::Stalled => Vec::new(),
        }
    }
}
