//! Which sources are over their quota, while the table is full.

use std::sync::{Arc, Mutex};

use anyhow::Result;

use crate::{data_plane::DataPlane, output::several, quota::QuotaReader};

/// When the table is full, finds the sources that are over their quota.
#[derive(Clone)]
pub struct QuotaWatch(Arc<Mutex<Option<QuotaReader>>>);

impl QuotaWatch {
    /// `percent`: the quota, as a share of a full table; `None`: no quota.
    pub fn new(plane: &DataPlane, percent: Option<u8>) -> Result<Self> {
        let reader = percent.map(|percent| QuotaReader::new(plane, percent));
        Ok(Self(Arc::new(Mutex::new(reader.transpose()?))))
    }

    /// Runs on another thread: the steppers' calls must not wait.
    pub fn look(&self) {
        let quota = self.clone();
        tokio::task::spawn_blocking(move || quota.look_now());
    }

    /// Finds over-quota sources, unless another thread is doing so.
    fn look_now(&self) {
        let Ok(mut reader) = self.0.try_lock() else {
            return;
        };
        let Some(reader) = &mut *reader else {
            return;
        };
        match reader.read() {
            Ok(holders) => {
                for holder in holders.iter().filter(|holder| holder.is_new) {
                    say!(
                        "the table is full: {} has {}, its quota is {}: its flows above the \
                         quota are evicted when others need space (--source-share)",
                        holder.source,
                        several(holder.flows, "flow"),
                        reader.most()
                    );
                }
            }
            Err(error) => say!("twheel: cannot find the over-quota sources: {error:#}"),
        }
    }
}
