//! twheel.
