//! Entry points of the benches.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

use twheel_ebpf as _;

#[cfg(not(target_arch = "bpf"))]
fn main() {}
