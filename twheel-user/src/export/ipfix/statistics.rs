//! What the exporter says of itself.

/// What one exporting process has sent since it began.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics<'a> {
    /// The observation domain.
    pub domain: u32,
    /// The process id.
    pub process: u32,
    /// Messages.
    pub messages: u64,
    /// Records of flows.
    pub flow_records: u64,
    /// Bytes of the messages.
    pub bytes: u64,
    /// Events that could not be sent because the history does not have them; an upper bound.
    pub not_sent: u64,
    /// The name of the history.
    pub name: &'a str,
}
