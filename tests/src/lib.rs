//! What the tests that need root stand on: labs of network namespaces, and the loaded data plane
//! under virtual time.
pub mod plane;

pub mod ctnetlink;

pub mod netns;

pub mod path;

pub mod tracefs;
