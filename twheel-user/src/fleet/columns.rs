//! The columns of the tables that hold lines of JSON: one for each field of the lines, of the same
//! name. All else in the schema is made from these lists.

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Its name: that of the line's field.
    pub name: &'static str,
    /// Its type in ClickHouse.
    pub kind: &'static str,
    /// Its codecs; empty: the server's default.
    pub codec: &'static str,
}

impl Column {
    const fn new(name: &'static str, kind: &'static str, codec: &'static str) -> Self {
        Self { name, kind, codec }
    }

    /// Its name and type.
    pub(super) fn typed(&self) -> String {
        format!("{} {}", self.name, self.kind)
    }

    /// Its name, its type and how it is stored.
    pub(super) fn stored(&self) -> String {
        match self.codec {
            "" => self.typed(),
            codec => format!("{} CODEC({codec})", self.typed()),
        }
    }
}

const TIME: &str = "DateTime64(6, 'UTC')";
const NAME: &str = "LowCardinality(String)";
const TEXT: &str = "String";
const FLAG: &str = "Bool";
const ADDRESS: &str = "IPv6";
const PORT: &str = "UInt16";
const SMALL: &str = "UInt32";
const NUMBER: &str = "UInt64";
/// A number that may be 0 or absent, which differ.
const COUNT: &str = "Nullable(UInt64)";
const GROWING: &str = "Delta, ZSTD(1)";
const PLAIN: &str = "ZSTD(1)";

/// The columns of `events`. A field that is absent from a line is 0, empty or false in its row, or
/// NULL where 0 would mean something else.
pub const EVENTS: &[Column] = &[
    Column::new("schema", "UInt8", ""),
    Column::new("event", NAME, ""),
    Column::new("time", TIME, "DoubleDelta, ZSTD(1)"),
    Column::new("host", NAME, ""),
    Column::new("instance", NAME, ""),
    Column::new("seq", NUMBER, GROWING),
    Column::new("flow_id", "UUID", ""),
    Column::new("start", TIME, PLAIN),
    Column::new("proto", NAME, ""),
    Column::new("src", ADDRESS, PLAIN),
    Column::new("sport", PORT, PLAIN),
    Column::new("dst", ADDRESS, PLAIN),
    Column::new("dport", PORT, PLAIN),
    Column::new("state", NAME, ""),
    Column::new("iface", NAME, ""),
    Column::new("direction", NAME, ""),
    Column::new("vlan", PORT, PLAIN),
    Column::new("inner_vlan", PORT, PLAIN),
    Column::new("zone", PORT, PLAIN),
    Column::new("rule", NAME, ""),
    Column::new("nat_src", ADDRESS, PLAIN),
    Column::new("nat_sport", PORT, PLAIN),
    Column::new("nat_dst", ADDRESS, PLAIN),
    Column::new("nat_dport", PORT, PLAIN),
    Column::new("owner_pid", SMALL, PLAIN),
    Column::new("owner_command", NAME, ""),
    Column::new("owner_cgroup", NAME, ""),
    Column::new("owner_user", NAME, ""),
    Column::new("picked_up", FLAG, PLAIN),
    Column::new("reason", NAME, ""),
    Column::new("age_us", NUMBER, PLAIN),
    Column::new("idle_us", NUMBER, PLAIN),
    Column::new("orig_packets", COUNT, PLAIN),
    Column::new("orig_bytes", COUNT, PLAIN),
    Column::new("reply_packets", COUNT, PLAIN),
    Column::new("reply_bytes", COUNT, PLAIN),
    Column::new("interval_us", COUNT, PLAIN),
    Column::new("orig_packets_delta", COUNT, PLAIN),
    Column::new("orig_bytes_delta", COUNT, PLAIN),
    Column::new("reply_packets_delta", COUNT, PLAIN),
    Column::new("reply_bytes_delta", COUNT, PLAIN),
    Column::new("orig_rtt_us", SMALL, PLAIN),
    Column::new("orig_rto_us", SMALL, PLAIN),
    Column::new("orig_retransmissions", COUNT, PLAIN),
    Column::new("reply_rtt_us", SMALL, PLAIN),
    Column::new("reply_rto_us", SMALL, PLAIN),
    Column::new("reply_retransmissions", COUNT, PLAIN),
    Column::new("stalled", FLAG, PLAIN),
    Column::new("sender", NAME, ""),
    Column::new("outstanding", SMALL, PLAIN),
    Column::new("backoff", SMALL, PLAIN),
    Column::new("rtt_us", SMALL, PLAIN),
    Column::new("rto_us", SMALL, PLAIN),
    Column::new("retransmissions", SMALL, PLAIN),
    Column::new("end_seq", NUMBER, PLAIN),
    Column::new("action", NAME, ""),
    Column::new("outcome", NAME, ""),
    Column::new("error", TEXT, PLAIN),
    Column::new("what", NAME, ""),
    Column::new("hook", NAME, ""),
    Column::new("flows", COUNT, PLAIN),
    Column::new("ended", COUNT, PLAIN),
    Column::new("lost", COUNT, PLAIN),
];

/// The columns of `exports`.
pub const EXPORTS: &[Column] = &[
    Column::new("time", TIME, "DoubleDelta, ZSTD(1)"),
    Column::new("host", NAME, ""),
    Column::new("instance", NAME, ""),
    Column::new("exporter", TEXT, PLAIN),
    Column::new("behind_us", NUMBER, PLAIN),
    Column::new("not_sent", NUMBER, PLAIN),
];

/// The columns of `refused`: the lines of a topic that are no events.
pub(super) const REFUSED: &[Column] = &[
    Column::new(
        "time",
        "DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC')",
        GROWING,
    ),
    Column::new("topic", NAME, ""),
    Column::new("partition", NUMBER, PLAIN),
    Column::new("offset", NUMBER, GROWING),
    Column::new("line", TEXT, PLAIN),
    Column::new("error", TEXT, PLAIN),
];

/// When a row was inserted. Of rows of the same event, the latest one stays.
pub(super) const INSERTED: Column = Column::new(
    "inserted",
    "DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC')",
    GROWING,
);

/// The columns of `ends_by_minute`: the numbers (`seq`) of the flows that ended, as a set, so that
/// an event that is inserted twice counts once.
pub(super) const ENDS: &[Column] = &[
    Column::new("minute", "DateTime('UTC')", GROWING),
    Column::new("host", NAME, ""),
    Column::new("instance", NAME, ""),
    Column::new("proto", NAME, ""),
    Column::new("service", PORT, ""),
    Column::new("reason", NAME, ""),
    Column::new("state", NAME, ""),
    Column::new("ends", "AggregateFunction(groupBitmap, UInt64)", ""),
];

/// The columns of `seqs_by_minute`: the numbers of all events, as a set.
pub(super) const SEQS: &[Column] = &[
    Column::new("minute", "DateTime('UTC')", GROWING),
    Column::new("host", NAME, ""),
    Column::new("instance", NAME, ""),
    Column::new("seqs", "AggregateFunction(groupBitmap, UInt64)", ""),
    Column::new("first_seq", "SimpleAggregateFunction(min, UInt64)", ""),
    Column::new("last_seq", "SimpleAggregateFunction(max, UInt64)", ""),
    Column::new(
        "latest",
        "SimpleAggregateFunction(max, DateTime64(6, 'UTC'))",
        "",
    ),
    Column::new("delay_us", "SimpleAggregateFunction(max, Int64)", ""),
];
