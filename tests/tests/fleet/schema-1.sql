-- The script of version 1 of the schema, as `twheel fleet schema` printed it.
CREATE DATABASE IF NOT EXISTS `twheel`;

CREATE TABLE IF NOT EXISTS `twheel`.schema_version (version UInt32, applied DateTime DEFAULT now()) ENGINE = MergeTree ORDER BY version;

SELECT throwIf(max(version) > 1, 'the schema in this database is of a later version than 1: use the twheel that set it up') FROM `twheel`.schema_version FORMAT Null;

CREATE TABLE IF NOT EXISTS `twheel`.events
(
    schema UInt8,
    event LowCardinality(String),
    time DateTime64(6, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    host LowCardinality(String),
    instance LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    flow_id UUID,
    start DateTime64(6, 'UTC') CODEC(ZSTD(1)),
    proto LowCardinality(String),
    src IPv6 CODEC(ZSTD(1)),
    sport UInt16 CODEC(ZSTD(1)),
    dst IPv6 CODEC(ZSTD(1)),
    dport UInt16 CODEC(ZSTD(1)),
    state LowCardinality(String),
    iface LowCardinality(String),
    direction LowCardinality(String),
    vlan UInt16 CODEC(ZSTD(1)),
    inner_vlan UInt16 CODEC(ZSTD(1)),
    zone UInt16 CODEC(ZSTD(1)),
    rule LowCardinality(String),
    nat_src IPv6 CODEC(ZSTD(1)),
    nat_sport UInt16 CODEC(ZSTD(1)),
    nat_dst IPv6 CODEC(ZSTD(1)),
    nat_dport UInt16 CODEC(ZSTD(1)),
    owner_pid UInt32 CODEC(ZSTD(1)),
    owner_command LowCardinality(String),
    owner_cgroup LowCardinality(String),
    owner_user LowCardinality(String),
    picked_up Bool CODEC(ZSTD(1)),
    reason LowCardinality(String),
    age_us UInt64 CODEC(ZSTD(1)),
    idle_us UInt64 CODEC(ZSTD(1)),
    orig_packets Nullable(UInt64) CODEC(ZSTD(1)),
    orig_bytes Nullable(UInt64) CODEC(ZSTD(1)),
    reply_packets Nullable(UInt64) CODEC(ZSTD(1)),
    reply_bytes Nullable(UInt64) CODEC(ZSTD(1)),
    interval_us Nullable(UInt64) CODEC(ZSTD(1)),
    orig_packets_delta Nullable(UInt64) CODEC(ZSTD(1)),
    orig_bytes_delta Nullable(UInt64) CODEC(ZSTD(1)),
    reply_packets_delta Nullable(UInt64) CODEC(ZSTD(1)),
    reply_bytes_delta Nullable(UInt64) CODEC(ZSTD(1)),
    orig_rtt_us UInt32 CODEC(ZSTD(1)),
    orig_rto_us UInt32 CODEC(ZSTD(1)),
    orig_retransmissions Nullable(UInt64) CODEC(ZSTD(1)),
    reply_rtt_us UInt32 CODEC(ZSTD(1)),
    reply_rto_us UInt32 CODEC(ZSTD(1)),
    reply_retransmissions Nullable(UInt64) CODEC(ZSTD(1)),
    stalled Bool CODEC(ZSTD(1)),
    sender LowCardinality(String),
    outstanding UInt32 CODEC(ZSTD(1)),
    backoff UInt32 CODEC(ZSTD(1)),
    rtt_us UInt32 CODEC(ZSTD(1)),
    rto_us UInt32 CODEC(ZSTD(1)),
    retransmissions UInt32 CODEC(ZSTD(1)),
    end_seq UInt64 CODEC(ZSTD(1)),
    action LowCardinality(String),
    outcome LowCardinality(String),
    error String CODEC(ZSTD(1)),
    what LowCardinality(String),
    hook LowCardinality(String),
    flows Nullable(UInt64) CODEC(ZSTD(1)),
    ended Nullable(UInt64) CODEC(ZSTD(1)),
    lost Nullable(UInt64) CODEC(ZSTD(1)),
    inserted DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    INDEX by_time time TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(inserted)
PARTITION BY toStartOfQuarter(time)
ORDER BY (host, instance, seq)
TTL toDateTime(time) + INTERVAL 90 DAY
SETTINGS merge_with_ttl_timeout = 86400, materialize_ttl_recalculate_only = 1;

ALTER TABLE `twheel`.events
    ADD COLUMN IF NOT EXISTS schema UInt8,
    ADD COLUMN IF NOT EXISTS event LowCardinality(String),
    ADD COLUMN IF NOT EXISTS time DateTime64(6, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    ADD COLUMN IF NOT EXISTS flow_id UUID,
    ADD COLUMN IF NOT EXISTS start DateTime64(6, 'UTC') CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS proto LowCardinality(String),
    ADD COLUMN IF NOT EXISTS src IPv6 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS sport UInt16 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS dst IPv6 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS dport UInt16 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS state LowCardinality(String),
    ADD COLUMN IF NOT EXISTS iface LowCardinality(String),
    ADD COLUMN IF NOT EXISTS direction LowCardinality(String),
    ADD COLUMN IF NOT EXISTS vlan UInt16 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS inner_vlan UInt16 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS zone UInt16 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS rule LowCardinality(String),
    ADD COLUMN IF NOT EXISTS nat_src IPv6 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS nat_sport UInt16 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS nat_dst IPv6 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS nat_dport UInt16 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS owner_pid UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS owner_command LowCardinality(String),
    ADD COLUMN IF NOT EXISTS owner_cgroup LowCardinality(String),
    ADD COLUMN IF NOT EXISTS owner_user LowCardinality(String),
    ADD COLUMN IF NOT EXISTS picked_up Bool CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS reason LowCardinality(String),
    ADD COLUMN IF NOT EXISTS age_us UInt64 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS idle_us UInt64 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS orig_packets Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS orig_bytes Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS reply_packets Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS reply_bytes Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS interval_us Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS orig_packets_delta Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS orig_bytes_delta Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS reply_packets_delta Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS reply_bytes_delta Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS orig_rtt_us UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS orig_rto_us UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS orig_retransmissions Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS reply_rtt_us UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS reply_rto_us UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS reply_retransmissions Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS stalled Bool CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS sender LowCardinality(String),
    ADD COLUMN IF NOT EXISTS outstanding UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS backoff UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS rtt_us UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS rto_us UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS retransmissions UInt32 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS end_seq UInt64 CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS action LowCardinality(String),
    ADD COLUMN IF NOT EXISTS outcome LowCardinality(String),
    ADD COLUMN IF NOT EXISTS error String CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS what LowCardinality(String),
    ADD COLUMN IF NOT EXISTS hook LowCardinality(String),
    ADD COLUMN IF NOT EXISTS flows Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS ended Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS lost Nullable(UInt64) CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS inserted DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC') CODEC(Delta, ZSTD(1));

ALTER TABLE `twheel`.events MODIFY TTL toDateTime(time) + INTERVAL 90 DAY;

CREATE TABLE IF NOT EXISTS `twheel`.refused
(
    time DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    topic LowCardinality(String),
    partition UInt64 CODEC(ZSTD(1)),
    offset UInt64 CODEC(Delta, ZSTD(1)),
    line String CODEC(ZSTD(1)),
    error String CODEC(ZSTD(1))
)
ENGINE = ReplacingMergeTree(time)
PARTITION BY toStartOfQuarter(time)
ORDER BY (topic, partition, offset)
TTL toDateTime(time) + INTERVAL 90 DAY;

ALTER TABLE `twheel`.refused
    ADD COLUMN IF NOT EXISTS time DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    ADD COLUMN IF NOT EXISTS line String CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS error String CODEC(ZSTD(1));

ALTER TABLE `twheel`.refused MODIFY TTL toDateTime(time) + INTERVAL 90 DAY;

CREATE TABLE IF NOT EXISTS `twheel`.ends_by_minute
(
    minute DateTime('UTC') CODEC(Delta, ZSTD(1)),
    host LowCardinality(String),
    instance LowCardinality(String),
    proto LowCardinality(String),
    service UInt16,
    reason LowCardinality(String),
    state LowCardinality(String),
    ends AggregateFunction(groupBitmap, UInt64)
)
ENGINE = AggregatingMergeTree()
PARTITION BY toStartOfQuarter(minute)
ORDER BY (minute, host, instance, proto, service, reason, state)
TTL minute + INTERVAL 90 DAY
SETTINGS merge_with_ttl_timeout = 86400, materialize_ttl_recalculate_only = 1;

ALTER TABLE `twheel`.ends_by_minute
    ADD COLUMN IF NOT EXISTS ends AggregateFunction(groupBitmap, UInt64);

ALTER TABLE `twheel`.ends_by_minute MODIFY TTL minute + INTERVAL 90 DAY;

CREATE TABLE IF NOT EXISTS `twheel`.seqs_by_minute
(
    minute DateTime('UTC') CODEC(Delta, ZSTD(1)),
    host LowCardinality(String),
    instance LowCardinality(String),
    seqs AggregateFunction(groupBitmap, UInt64),
    first_seq SimpleAggregateFunction(min, UInt64),
    last_seq SimpleAggregateFunction(max, UInt64),
    latest SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    delay_us SimpleAggregateFunction(max, Int64)
)
ENGINE = AggregatingMergeTree()
PARTITION BY toStartOfQuarter(minute)
ORDER BY (minute, host, instance)
TTL minute + INTERVAL 90 DAY
SETTINGS merge_with_ttl_timeout = 86400, materialize_ttl_recalculate_only = 1;

ALTER TABLE `twheel`.seqs_by_minute
    ADD COLUMN IF NOT EXISTS seqs AggregateFunction(groupBitmap, UInt64),
    ADD COLUMN IF NOT EXISTS first_seq SimpleAggregateFunction(min, UInt64),
    ADD COLUMN IF NOT EXISTS last_seq SimpleAggregateFunction(max, UInt64),
    ADD COLUMN IF NOT EXISTS latest SimpleAggregateFunction(max, DateTime64(6, 'UTC')),
    ADD COLUMN IF NOT EXISTS delay_us SimpleAggregateFunction(max, Int64);

ALTER TABLE `twheel`.seqs_by_minute MODIFY TTL minute + INTERVAL 90 DAY;

CREATE MATERIALIZED VIEW IF NOT EXISTS `twheel`.ends_by_minute_view TO `twheel`.ends_by_minute AS
SELECT toStartOfMinute(time, 'UTC') AS minute, host, instance, proto, if(proto IN ('icmp', 'icmpv6'), 0, dport) AS service, reason, state, groupBitmapState(seq) AS ends FROM `twheel`.events WHERE event = 'end' GROUP BY minute, host, instance, proto, service, reason, state;

ALTER TABLE `twheel`.ends_by_minute_view MODIFY QUERY
SELECT toStartOfMinute(time, 'UTC') AS minute, host, instance, proto, if(proto IN ('icmp', 'icmpv6'), 0, dport) AS service, reason, state, groupBitmapState(seq) AS ends FROM `twheel`.events WHERE event = 'end' GROUP BY minute, host, instance, proto, service, reason, state;

CREATE MATERIALIZED VIEW IF NOT EXISTS `twheel`.seqs_by_minute_view TO `twheel`.seqs_by_minute AS
SELECT toStartOfMinute(time, 'UTC') AS minute, host, instance, groupBitmapState(seq) AS seqs, min(seq) AS first_seq, max(seq) AS last_seq, max(time) AS latest, max(toUnixTimestamp64Micro(inserted) - toUnixTimestamp64Micro(time)) AS delay_us FROM `twheel`.events GROUP BY minute, host, instance;

ALTER TABLE `twheel`.seqs_by_minute_view MODIFY QUERY
SELECT toStartOfMinute(time, 'UTC') AS minute, host, instance, groupBitmapState(seq) AS seqs, min(seq) AS first_seq, max(seq) AS last_seq, max(time) AS latest, max(toUnixTimestamp64Micro(inserted) - toUnixTimestamp64Micro(time)) AS delay_us FROM `twheel`.events GROUP BY minute, host, instance;

INSERT INTO `twheel`.schema_version (version) SELECT 1 WHERE 1 NOT IN (SELECT version FROM `twheel`.schema_version);
