//! Sweeps a kernel hash map from userspace: reads it in batches, and deletes idle flows in batches.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use aya::maps::Map;
use aya_obj::generated::{bpf_attr, bpf_cmd};

use crate::plane::cpu_time;

/// The size of a `FlowKey`.
type Key = [u64; 5];
/// The value of a flow in the peer's table: when it was last seen, and the rest.
type Value = [u64; 5];

/// Sweeps a table, with memory of its own so that a pass allocates nothing.
pub struct Sweeper {
    keys: Vec<Key>,
    values: Vec<Value>,
    idle: Vec<Key>,
}

/// The result of a pass.
#[derive(Default)]
pub struct Swept {
    /// CPU time of this thread, including time in the kernel.
    pub cpu: Duration,
    /// Flows looked at.
    pub met: u64,
    /// Flows deleted.
    pub deleted: u64,
    /// The most recent stamp.
    pub newest: u64,
}

impl Sweeper {
    /// Flows per batch.
    pub const CHUNK: usize = 4096;

    /// Allocates the memory for a batch.
    pub fn new() -> Self {
        Self {
            keys: vec![[0; 5]; Self::CHUNK],
            values: vec![[0; 5]; Self::CHUNK],
            idle: Vec::with_capacity(Self::CHUNK),
        }
    }

    /// Looks at every flow of an LRU hash, and deletes those last seen before this time.
    pub fn pass(&mut self, map: &Map, before: u64) -> Result<Swept> {
        let Map::LruHashMap(map) = map else {
            bail!("not an LRU hash");
        };
        let fd = map.fd().as_fd().as_raw_fd();
        let begun = cpu_time()?;
        let mut swept = Swept::default();
        // Where the last batch ended, in the kernel's own form: four bytes for a hash map.
        let (mut from, mut to) = (0u32, 0u32);
        let mut first = true;
        loop {
            let in_batch = if first { 0 } else { (&raw const from) as u64 };
            // SAFETY: all-zero bytes are a valid `bpf_attr`; only fields of this command are set.
            let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
            attr.batch.in_batch = in_batch;
            attr.batch.out_batch = (&raw mut to) as u64;
            attr.batch.keys = self.keys.as_mut_ptr() as u64;
            attr.batch.values = self.values.as_mut_ptr() as u64;
            attr.batch.count = Self::CHUNK as u32;
            attr.batch.map_fd = fd as u32;
            // SAFETY: there is memory for as many keys and values as passed, of the map's sizes.
            let ended = match unsafe { bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) } {
                Ok(()) => false,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                Err(error) => return Err(error).context("cannot look up a batch"),
            };
            // SAFETY: the kernel has written the count.
            let count = unsafe { attr.batch.count } as usize;
            self.idle.clear();
            for (key, value) in self.keys.iter().zip(&self.values).take(count) {
                swept.newest = swept.newest.max(value[0]);
                if value[0] < before {
                    self.idle.push(*key);
                }
            }
            swept.met += count as u64;
            swept.deleted += self.delete(fd)?;
            if ended {
                break;
            }
            from = to;
            first = false;
        }
        swept.cpu = cpu_time()? - begun;
        Ok(swept)
    }

    /// Deletes the idle flows of a batch.
    fn delete(&mut self, fd: i32) -> Result<u64> {
        if self.idle.is_empty() {
            return Ok(0);
        }
        // SAFETY: as above.
        let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
        attr.batch.keys = self.idle.as_ptr() as u64;
        attr.batch.count = self.idle.len() as u32;
        attr.batch.map_fd = fd as u32;
        // SAFETY: as above.
        unsafe {
            bpf(bpf_cmd::BPF_MAP_DELETE_BATCH, &mut attr).context("cannot delete a batch")?;
            Ok(attr.batch.count.into())
        }
    }
}

/// `bpf(2)`, because aya has no functions for batches.
///
/// # Safety
///
/// The attribute is filled for this command, and its pointers are valid for what the command does.
unsafe fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as libc::c_long,
            &raw mut *attr,
            size_of::<bpf_attr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
