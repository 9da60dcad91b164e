//! Alternatives to twheel, as programs of a separate object: `twheel-ebpf/src/bench/peers.rs`.

use std::{
    fs,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::PathBuf,
    process,
    time::Duration,
};

use anyhow::{Context, Result};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, PerCpuArray},
    programs::Xdp,
};
use aya_obj::generated::{BPF_F_NO_PREALLOC, bpf_attr, bpf_cmd};
use twheel::{bpf, stepper::pin_to};
use twheel_common::flow::FlowKey;
use twheel_tests::order::Order;

use crate::inputs::{self, CPU, Segment, hash_entries};

/// The peers, loaded and attached to nothing.
pub struct Peers {
    bpf: Ebpf,
    order: Order,
    /// The trackers among the loaded programs.
    trackers: Vec<&'static str>,
}

/// The trackers of `twheel-ebpf/src/bench/trackers.rs`: their programs and their tables.
const TRACKERS: [(&str, &str); 3] = [(LRU, "LRU"), (SMALL, "SMALL"), (RESIZABLE, RESIZABLE_TABLE)];
/// Tracks in an LRU hash.
pub const LRU: &str = "peer_lru";
/// Tracks in the kernel's hash map, with the smallest key possible for IPv4.
pub const SMALL: &str = "peer_small";
/// Tracks in the kernel's resizable hash, which kernels before 7.2 do not have.
pub const RESIZABLE: &str = "peer_resizable";
/// The message if the kernel has none.
pub const NO_RESIZABLE: &str = "This kernel has no resizable hash (BPF_MAP_TYPE_RHASH, from 7.2 on), so there is no figure of it.";
const RESIZABLE_TABLE: &str = "RESIZABLE";
/// `BPF_MAP_TYPE_RHASH` of linux/bpf.h.
const RHASH: u32 = 35;

impl Peers {
    /// Loads these programs with maps of these sizes.
    pub fn load(programs: &[&str], sizes: &[(&str, u32)]) -> Result<Self> {
        Self::load_with(EbpfLoader::new(), programs, sizes)
    }

    /// Loads those of these trackers whose table this kernel has, each with capacity for this many
    /// flows.
    pub fn trackers(wanted: &[&str], flows: u32) -> Result<Self> {
        let entries = hash_entries(flows);
        let mut loader = EbpfLoader::new();
        let resizable = match wanted.contains(&RESIZABLE) {
            true => Pinned::resizable(entries)?,
            false => None,
        };
        if let Some(pinned) = &resizable {
            loader.map_pin_path(RESIZABLE_TABLE, pinned.0.clone());
        }
        let is_there = |program| program != RESIZABLE || resizable.is_some();
        let (mut programs, mut sizes, mut trackers) = (Vec::new(), Vec::new(), Vec::new());
        for (program, table) in TRACKERS {
            if wanted.contains(&program) && is_there(program) {
                programs.extend([program.to_owned(), format!("{program}_delete")]);
                sizes.push((table, entries));
                trackers.push(program);
            }
        }
        let programs: Vec<_> = programs.iter().map(String::as_str).collect();
        let peers = Self::load_with(loader, &programs, &sizes)?;
        Ok(Self { trackers, ..peers })
    }

    fn load_with<'a>(
        mut loader: EbpfLoader<'a>,
        programs: &[&str],
        sizes: &[(&'a str, u32)],
    ) -> Result<Self> {
        pin_to(CPU)?;
        let object = inputs::object("TWHEEL_PEERS_OBJECT")?;
        for (map, entries) in sizes {
            loader.map_max_entries(map, *entries);
        }
        let mut bpf = loader.load(&object).context("cannot load the peers")?;
        for program in programs {
            program_of(&mut bpf, program)?
                .load()
                .with_context(|| format!("cannot load {program}"))?;
        }
        Ok(Self {
            order: Order::open(bpf.map("ORDER").context("the object has no map ORDER")?)?,
            bpf,
            trackers: Vec::new(),
        })
    }

    /// Whether this tracker was loaded.
    pub fn has(&self, tracker: &str) -> bool {
        self.trackers.contains(&tracker)
    }

    /// Enters flows into the tables of all loaded trackers.
    pub fn enter(&mut self, flows: &[u32]) -> Result<()> {
        for tracker in self.trackers.clone() {
            self.run(tracker, Segment::Ack, flows)?;
        }
        Ok(())
    }

    /// Removes flows from them.
    pub fn remove(&mut self, flows: &[u32]) -> Result<()> {
        for tracker in self.trackers.clone() {
            self.run(&format!("{tracker}_delete"), Segment::Ack, flows)?;
        }
        Ok(())
    }

    /// A map.
    pub fn map(&self, name: &str) -> Result<&Map> {
        let map = self.bpf.map(name);
        map.with_context(|| format!("the object has no map {name}"))
    }

    /// A map, for writing.
    pub fn map_mut(&mut self, name: &str) -> Result<&mut Map> {
        let map = self.bpf.map_mut(name);
        map.with_context(|| format!("the object has no map {name}"))
    }

    /// How many flows trackers have inserted.
    pub fn inserts(&self) -> Result<u64> {
        self.count("INSERTS")
    }

    /// A counter, summed over all CPUs.
    pub fn count(&self, map: &str) -> Result<u64> {
        let counter = PerCpuArray::<_, u64>::try_from(self.map(map)?)?;
        Ok(counter.get(&0, 0)?.iter().sum())
    }

    /// A program that was loaded.
    pub fn program(&mut self, name: &str) -> Result<&mut Xdp> {
        program_of(&mut self.bpf, name)
    }

    /// Runs a program over a packet of each of these flows. Returns the kernel's time for it.
    pub fn run(&mut self, program: &str, segment: Segment, flows: &[u32]) -> Result<Duration> {
        let program = program_of(&mut self.bpf, program)?;
        self.order.run(program, CPU, &segment.bytes(), flows)
    }
}

fn program_of<'a>(bpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    let program = bpf.program_mut(name);
    let program = program.with_context(|| format!("the object has no program {name}"))?;
    Ok(program.try_into()?)
}

/// A map that is pinned until this is dropped, so that aya uses it as one of the object's.
struct Pinned(PathBuf);

impl Pinned {
    /// Makes the kernel's resizable hash; `None` if the kernel has none.
    fn resizable(entries: u32) -> Result<Option<Self>> {
        // SAFETY: all-zero bytes are a valid `bpf_attr`.
        let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel reads these fields as numbers, and all fields of the union are `Copy`.
        let create = unsafe { &mut attr.__bindgen_anon_1 };
        create.map_type = RHASH;
        create.key_size = size_of::<FlowKey>() as u32;
        create.value_size = size_of::<[u64; 5]>() as u32;
        create.max_entries = entries;
        create.map_flags = BPF_F_NO_PREALLOC;
        // SAFETY: the attribute is filled for this command, and has no pointers.
        let map = match unsafe { bpf::call(bpf_cmd::BPF_MAP_CREATE, &mut attr) } {
            // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
            Ok(map) => unsafe { OwnedFd::from_raw_fd(map) },
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
            Err(error) => {
                return Err(error).context("cannot make a resizable hash");
            }
        };
        let path = PathBuf::from(format!("/sys/fs/bpf/twheel-bench-{}", process::id()));
        let name = std::ffi::CString::new(path.to_string_lossy().as_bytes())?;
        // SAFETY: as above.
        let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
        attr.__bindgen_anon_4.pathname = name.as_ptr() as u64;
        attr.__bindgen_anon_4.bpf_fd = map.as_raw_fd() as u32;
        // SAFETY: the attribute is filled for this command, and the name outlives the call.
        unsafe { bpf::call(bpf_cmd::BPF_OBJ_PIN, &mut attr) }
            .with_context(|| format!("cannot pin a map as {}", path.display()))?;
        Ok(Some(Self(path)))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
