//! Templates (RFC 7011, section 3.4): tables of fields. A field's length in the template and its
//! value in a record come from the same entry.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    ops::BitOr,
};

use super::{
    record::{Half, v4, v6},
    statistics::Statistics,
};

/// The private enterprise number of reverse elements (RFC 5103, section 6.1).
const REVERSE: u32 = 29305;
/// The length of a field whose records say how long it is (RFC 7011, section 7).
const VARIABLE: u16 = u16::MAX;
/// A longer text is cut: the length of this one takes one byte (RFC 7011, section 7).
const MOST_TEXT: usize = 254;
/// The first number of a template (RFC 7011, section 3.4.1): that of the exporter's statistics.
pub(super) const STATISTICS: u16 = 256;

/// What is known of a flow, and what of it is wanted: a set of bits that selects fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape(u16);

impl Shape {
    pub const NONE: Self = Self(0);
    /// The addresses are IPv6.
    pub const V6: Self = Self(1);
    /// Packets and bytes are counted.
    pub const COUNTS: Self = Self(1 << 1);
    /// The protocol has ports.
    pub const PORTS: Self = Self(1 << 2);
    pub const VLAN: Self = Self(1 << 3);
    pub const INNER_VLAN: Self = Self(1 << 4);
    /// The interface of this direction is known.
    pub const IFACE: Self = Self(1 << 5);
    /// One record has both directions.
    pub const BIFLOW: Self = Self(1 << 6);
    /// Private elements are sent, too.
    pub const PRIVATE: Self = Self(1 << 7);
    /// The flow met a rule; matters only with private elements.
    pub const RULE: Self = Self(1 << 8);
    /// The endpoints on the other side of a translation are known.
    pub const NAT: Self = Self(1 << 9);
    /// How many there are.
    pub const ALL: usize = 1 << 10;

    /// With these bits if a condition holds.
    pub fn with_if(self, condition: bool, other: Self) -> Self {
        if condition { self | other } else { self }
    }

    /// Without bits that select nothing.
    pub fn reduced(self) -> Self {
        match self.has(Self::PRIVATE) {
            true => self,
            false => Self(self.0 & !Self::RULE.0),
        }
    }

    /// Its index among all.
    pub fn index(self) -> usize {
        self.0.into()
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Shape {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A kind of records.
pub(super) trait Kind: 'static {
    /// What its fields are read from.
    type Record<'a>;
}

/// Records of flows.
pub(super) enum Flows {}

impl Kind for Flows {
    type Record<'a> = Half<'a>;
}

/// Records of the exporter itself.
pub(super) enum Exporter {}

impl Kind for Exporter {
    type Record<'a> = Statistics<'a>;
}

/// The type of a field, and how its value is read from a record.
enum Value<K: Kind> {
    U8(for<'a> fn(&K::Record<'a>) -> u8),
    U16(for<'a> fn(&K::Record<'a>) -> u16),
    U32(for<'a> fn(&K::Record<'a>) -> u32),
    U64(for<'a> fn(&K::Record<'a>) -> u64),
    V4(for<'a> fn(&K::Record<'a>) -> Ipv4Addr),
    V6(for<'a> fn(&K::Record<'a>) -> Ipv6Addr),
    Id(for<'a> fn(&K::Record<'a>) -> [u8; 16]),
    Text(Text<K>),
}

type Text<K> = for<'a, 'b> fn(&'b <K as Kind>::Record<'a>) -> &'b str;

/// Who has numbered an element.
enum Whose {
    Iana,
    Reverse,
    /// Whoever `--pen` names.
    Private,
}

/// An entry of a table.
pub(super) struct Field<K: Kind> {
    number: u16,
    whose: Whose,
    /// It is there in these shapes,
    with: Shape,
    /// and not in these.
    without: Shape,
    value: Value<K>,
}

impl<K: Kind> Field<K> {
    const fn new(number: u16, value: Value<K>) -> Self {
        Self {
            number,
            whose: Whose::Iana,
            with: Shape::NONE,
            without: Shape::NONE,
            value,
        }
    }

    const fn with(self, with: Shape) -> Self {
        Self { with, ..self }
    }

    const fn without(self, without: Shape) -> Self {
        Self { without, ..self }
    }

    const fn reverse(self) -> Self {
        Self {
            whose: Whose::Reverse,
            with: Shape(Shape::COUNTS.0 | Shape::BIFLOW.0),
            ..self
        }
    }

    const fn private(self) -> Self {
        Self {
            whose: Whose::Private,
            with: Shape::PRIVATE,
            ..self
        }
    }

    fn is_in(&self, shape: Shape) -> bool {
        shape.has(self.with) && (self.without == Shape::NONE || !shape.has(self.without))
    }

    fn length(&self) -> u16 {
        match self.value {
            Value::U8(_) => 1,
            Value::U16(_) => 2,
            Value::U32(_) | Value::V4(_) => 4,
            Value::U64(_) => 8,
            Value::V6(_) | Value::Id(_) => 16,
            Value::Text(_) => VARIABLE,
        }
    }

    /// Its specifier (RFC 7011, section 3.2).
    fn define(&self, pen: u32, to: &mut Vec<u8>) {
        let enterprise = match self.whose {
            Whose::Iana => None,
            Whose::Reverse => Some(REVERSE),
            Whose::Private => Some(pen),
        };
        let bit = u16::from(enterprise.is_some()) << 15;
        to.extend_from_slice(&(self.number | bit).to_be_bytes());
        to.extend_from_slice(&self.length().to_be_bytes());
        if let Some(number) = enterprise {
            to.extend_from_slice(&number.to_be_bytes());
        }
    }

    fn write(&self, record: &K::Record<'_>, to: &mut Vec<u8>) {
        match &self.value {
            Value::U8(get) => to.push(get(record)),
            Value::U16(get) => to.extend_from_slice(&get(record).to_be_bytes()),
            Value::U32(get) => to.extend_from_slice(&get(record).to_be_bytes()),
            Value::U64(get) => to.extend_from_slice(&get(record).to_be_bytes()),
            Value::V4(get) => to.extend_from_slice(&get(record).octets()),
            Value::V6(get) => to.extend_from_slice(&get(record).octets()),
            Value::Id(get) => to.extend_from_slice(&get(record)),
            Value::Text(get) => {
                let text = cut(get(record));
                to.push(text.len() as u8);
                to.extend_from_slice(text);
            }
        }
    }
}

fn cut(text: &str) -> &[u8] {
    &text.as_bytes()[..text.floor_char_boundary(MOST_TEXT)]
}

/// The fields of flow records, in the order in which they are sent. `docs/ipfix.md` lists them.
static FLOW: &[Field<Flows>] = {
    use Value::{Id, Text, U8, U16, U64, V4, V6};
    type F = Field<Flows>;
    &[
        F::new(152, U64(|it| it.flow.start)),
        F::new(153, U64(|it| it.flow.end)),
        F::new(8, V4(|it| it.v4(0))).without(Shape::V6),
        F::new(12, V4(|it| it.v4(1))).without(Shape::V6),
        F::new(27, V6(|it| it.v6(0))).with(Shape::V6),
        F::new(28, V6(|it| it.v6(1))).with(Shape::V6),
        F::new(7, U16(|it| it.port(0))).with(Shape::PORTS),
        F::new(11, U16(|it| it.port(1))).with(Shape::PORTS),
        F::new(4, U8(|it| it.flow.proto)),
        F::new(136, U8(|it| it.flow.end_reason as u8)),
        F::new(239, U8(|it| 1 + it.sender as u8)),
        F::new(2, U64(|it| it.sent(0).packets)).with(Shape::COUNTS),
        F::new(1, U64(|it| it.sent(0).bytes)).with(Shape::COUNTS),
        F::new(2, U64(|it| it.sent(1).packets)).reverse(),
        F::new(1, U64(|it| it.sent(1).bytes)).reverse(),
        F::new(58, U16(|it| it.flow.vlans[0])).with(Shape::VLAN),
        F::new(245, U16(|it| it.flow.vlans[1])).with(Shape::INNER_VLAN),
        F::new(61, U8(|it| it.direction())).with(Shape::IFACE),
        F::new(82, Text(|it| it.flow.iface.unwrap_or_default())).with(Shape::IFACE),
        F::new(225, V4(|it| v4(it.nat(0))))
            .with(Shape::NAT)
            .without(Shape::V6),
        F::new(226, V4(|it| v4(it.nat(1))))
            .with(Shape::NAT)
            .without(Shape::V6),
        F::new(281, V6(|it| v6(it.nat(0)))).with(Shape(Shape::NAT.0 | Shape::V6.0)),
        F::new(282, V6(|it| v6(it.nat(1)))).with(Shape(Shape::NAT.0 | Shape::V6.0)),
        F::new(227, U16(|it| it.nat(0).port())).with(Shape::NAT),
        F::new(228, U16(|it| it.nat(1).port())).with(Shape::NAT),
        F::new(148, U64(|it| it.flow.flow_id.as_u64_pair().0)),
        F::new(1, Id(|it| it.flow.flow_id.into_bytes())).private(),
        F::new(2, U64(|it| it.flow.seq)).private(),
        F::new(3, Text(|it| it.flow.state)).private(),
        F::new(4, Text(|it| it.flow.reason)).private(),
        F::new(5, Text(|it| it.flow.rule.unwrap_or_default()))
            .private()
            .with(Shape(Shape::PRIVATE.0 | Shape::RULE.0)),
        F::new(6, U16(|it| it.flow.zone)).private(),
    ]
};

/// The fields of the exporter's own record; the first one is the scope (RFC 7011, section 4.1).
static EXPORTER: &[Field<Exporter>] = {
    use Value::{Text, U32, U64};
    type F = Field<Exporter>;
    &[
        F::new(149, U32(|it| it.domain)),
        F::new(144, U32(|it| it.process)),
        F::new(41, U64(|it| it.messages)),
        F::new(42, U64(|it| it.flow_records)),
        F::new(40, U64(|it| it.bytes)),
        F::new(166, U64(|it| it.not_sent)),
        F::new(300, Text(|it| it.name)),
    ]
};

/// A template.
pub(super) struct Template<K: Kind> {
    /// Its number, which is that of its data sets.
    pub number: u16,
    /// Its record (RFC 7011, sections 3.4.1 and 3.4.2.2).
    pub definition: Vec<u8>,
    fields: Vec<&'static Field<K>>,
    texts: Vec<Text<K>>,
    /// Bytes of a record, with the lengths of its texts but without the texts.
    fixed: usize,
}

impl Template<Flows> {
    /// Of flows of this shape.
    pub fn of_flows(shape: Shape, pen: u32) -> Self {
        let fields = FLOW.iter().filter(|it| it.is_in(shape)).collect();
        Self::new(STATISTICS + 1 + shape.index() as u16, fields, &[], pen)
    }
}

impl Template<Exporter> {
    /// Of the exporter's statistics.
    pub fn of_exporter() -> Self {
        // One field is the scope.
        Self::new(STATISTICS, EXPORTER.iter().collect(), &[0, 1], 0)
    }
}

impl<K: Kind> Template<K> {
    /// `after_count`: what comes between the number of fields and the fields.
    fn new(number: u16, fields: Vec<&'static Field<K>>, after_count: &[u8], pen: u32) -> Self {
        let mut definition = Vec::new();
        definition.extend_from_slice(&number.to_be_bytes());
        definition.extend_from_slice(&(fields.len() as u16).to_be_bytes());
        definition.extend_from_slice(after_count);
        fields.iter().for_each(|it| it.define(pen, &mut definition));
        let fixed = fields.iter().map(|it| match it.length() {
            VARIABLE => 1,
            length => length.into(),
        });
        Self {
            number,
            definition,
            fixed: fixed.sum(),
            texts: fields
                .iter()
                .filter_map(|it| match it.value {
                    Value::Text(get) => Some(get),
                    _ => None,
                })
                .collect(),
            fields,
        }
    }

    /// Bytes that a record takes.
    pub fn size(&self, record: &K::Record<'_>) -> usize {
        let texts = self.texts.iter().map(|get| cut(get(record)).len());
        self.fixed + texts.sum::<usize>()
    }

    /// Appends a record.
    pub fn write(&self, record: &K::Record<'_>, to: &mut Vec<u8>) {
        self.fields.iter().for_each(|it| it.write(record, to));
    }
}
