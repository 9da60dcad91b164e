//! Who reports an event, the host and the instance; and which flow it is about.

use std::fs;

use nix::sys::utsname::uname;
use twheel_common::{config::Meta, flow::FlowKey};
use uuid::Uuid;
use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

use crate::{model::Birth, pins::Pins};

/// Who reports events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The host's name.
    pub host: String,
    /// The instance's lasting name, and when its maps were made, in milliseconds since 1970.
    pub instance: String,
    /// Differs between hosts, boots and instances.
    pub seed: u64,
}

impl Identity {
    /// Of the instance with these pins and these maps.
    pub fn new(pins: &Pins, meta: &Meta) -> Self {
        let instance = pins.lasting_name();
        let mut seed = Xxh3::new();
        for file in ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"] {
            // Where a file is missing, the other ones tell hosts and boots apart, and the time.
            seed.update(&fs::read(file).unwrap_or_default());
        }
        seed.update(&meta.made.to_ne_bytes());
        seed.update(instance.as_bytes());
        Self {
            host: host(),
            instance: format!("{instance}.{}", meta.made / 1_000_000),
            seed: seed.digest(),
        }
    }

    /// The number of a flow: the same in all that is said of one life of a flow, and another one for
    /// each other flow, of any host. (A flow older than 2^31 clock units gets a new one.)
    pub fn flow_id(&self, birth: &Birth) -> Uuid {
        let Birth {
            key,
            created,
            generation,
        } = birth;
        let mut bytes = [0; size_of::<FlowKey>() + 6];
        let (first, rest) = bytes.split_at_mut(size_of::<FlowKey>());
        first.copy_from_slice(zerocopy::IntoBytes::as_bytes(key));
        rest[..4].copy_from_slice(&created.to_ne_bytes());
        rest[4..].copy_from_slice(&generation.to_ne_bytes());
        Uuid::new_v8(xxh3_128_with_seed(&bytes, self.seed).to_be_bytes())
    }
}

/// The host's name.
pub fn host() -> String {
    uname().map_or_else(
        |_| "localhost".to_owned(),
        |names| names.nodename().to_string_lossy().into_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_has_one_number_and_no_other_flow_has_it() {
        let identity = |seed| Identity {
            seed,
            ..Identity::default()
        };
        let birth = Birth {
            key: FlowKey::from_parts([0, 1, 0, 2], 3),
            created: 4,
            generation: 5,
        };
        let id = identity(6).flow_id(&birth);
        assert_eq!(identity(6).flow_id(&birth), id);
        assert_eq!(id.get_version_num(), 8);
        let others = [
            Birth {
                key: FlowKey::from_parts([0, 1, 0, 2], 4),
                ..birth
            },
            Birth {
                created: 5,
                ..birth
            },
            Birth {
                generation: 6,
                ..birth
            },
        ];
        for other in others {
            assert_ne!(identity(6).flow_id(&other), id, "{other:?}");
        }
        assert_ne!(identity(7).flow_id(&birth), id);
    }
}
