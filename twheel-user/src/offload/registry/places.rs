//! Where the registration of a record's flow is.

/// For each record of the table a place, in three bytes: there are two records to a flow, and few
/// flows are registered. It may be that of a registration that is over: then it is free, or another
/// flow's.
pub(super) struct Places(Vec<[u8; 3]>);

impl Places {
    /// Most places.
    pub(super) const MOST: u32 = (1 << 24) - 1;

    /// Of so many records. Memory that is not used yet takes none.
    pub(super) fn new(records: u32) -> Self {
        Self(vec![[0; 3]; records as usize])
    }

    /// The place of a record's registration. A window may reach beyond the last record, and programs
    /// give any number.
    pub(super) fn get(&self, record: u32) -> Option<u32> {
        let [a, b, c] = *self.0.get(record as usize)?;
        u32::from_le_bytes([a, b, c, 0]).checked_sub(1)
    }

    /// The registration of a record is at this place, which is less than [`MOST`](Self::MOST).
    pub(super) fn set(&mut self, record: u32, place: u32) {
        let [a, b, c, _] = (place + 1).to_le_bytes();
        if let Some(held) = self.0.get_mut(record as usize) {
            *held = [a, b, c];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_record_has_any_place() {
        let mut places = Places::new(3);
        assert_eq!(places.get(1), None);
        for place in [0, 255, 256, 70_000, Places::MOST - 1] {
            places.set(1, place);
            assert_eq!(
                [0, 1, 2, 3].map(|it| places.get(it)),
                [None, Some(place), None, None]
            );
        }
    }
}
