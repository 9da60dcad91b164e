//! The loaded eBPF object: its maps and programs, and what userspace does with them.

mod adopt;
mod counters;
mod sizes;

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result, bail};
use aya::{
    Ebpf, EbpfError, EbpfLoader,
    maps::{Array, Map, MapData, MapError, RingBuf},
    programs::{Program, ProgramError, SchedClassifier, Xdp},
    sys::SyscallError,
};
use twheel_common::{
    config::{CLOCK_VIRTUAL, Config, Meta, SEATS, UNRULED},
    counter::Counters,
    enforce::{HELD, MAX_SOURCES, MAX_TOMBS},
    rule::{Rule, Timeouts},
    step::{Delete, Step, Sweep},
};
use zerocopy::IntoBytes;

pub use self::{
    adopt::{OBJECT, check_adoptable, meta},
    counters::{UserCounters, counted, counters, counters_of_places},
};
use self::{
    adopt::{adoptable, wanted_meta},
    sizes::{cpus, details, places, wakes_bytes},
};
pub use crate::ring::Events;
use crate::{
    call::{self, Answers, MIN_ANSWERS},
    clock::Clock,
    flows::Flows,
    model::Measure,
    pins::{Instance, PROGRAMS},
    stepping::Stepping,
    verifier::refused,
};

/// Timer visits per call of the stepper: enough to make the cost of the call itself small, few
/// enough to disable softirqs for no longer than a burst of packets does.
pub const STEP_BUDGET: u32 = 256;

/// Minimum capacity for interfaces: an adopting run may have more of them than the run before.
const LEAST_ROOM: u32 = 16;

/// Size of the ring of events in production, bytes: it holds some 7,200 events.
pub const RING_BYTES: u32 = 1 << 20;

/// What to load.
pub struct Load<'a> {
    /// The BPF object: [`OBJECT`], or that of the benchmarks.
    pub object: &'a [u8],
    /// Configuration of the data plane.
    pub config: Config,
    /// The timeouts of flows that match no rule.
    pub rule: Rule,
    /// Capacity for interfaces. 0: there is a single interface, and flows need not say on which
    /// they are.
    pub room: u32,
    /// Its clock.
    pub clock: Clock,
    /// Size of the ring of events, bytes, a power of two and at least a page.
    pub ring_bytes: u32,
    /// How the programs that are attached to no interface are run.
    pub stepping: Stepping,
    /// aya-log's level: 0 is off, 1 errors, … 5 traces.
    pub log_level: u8,
    /// Secret of the hash, for tests; `None`: random.
    pub secret: Option<[u64; 11]>,
    /// Capacities of maps that only the benchmarks' object has.
    pub others: Vec<(&'static str, u32)>,
    /// Programs that are loaded only when they are [demanded](DataPlane::demand), because verifying
    /// one takes time.
    pub later: &'a [&'static str],
}

/// The programs for incoming packets, of which each interface needs one.
pub const INCOMING: &[&str] = &["twheel_xdp", "twheel_ingress"];

impl<'a> Load<'a> {
    /// Loads as in production, with the timeouts of the configuration.
    pub fn new(object: &'a [u8], (config, rule): (Config, Rule), clock: Clock) -> Self {
        Self {
            object,
            config,
            rule,
            room: 0,
            clock,
            ring_bytes: RING_BYTES,
            stepping: Stepping::TestRuns,
            log_level: 0,
            secret: None,
            others: Vec::new(),
            later: &["twheel_ingress"],
        }
    }
}

/// The loaded data plane.
pub struct DataPlane {
    bpf: Ebpf,
    answers: Option<Answers>,
    config: Config,
    clock: Clock,
    adopted: bool,
}

impl DataPlane {
    /// Loads the object over the instance's pinned maps, or over new ones.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`](crate::failure::Kind::Pins) if the pinned maps were made for something else.
    /// [`Kind::Unsupported`](crate::failure::Kind::Unsupported) if the verifier refuses a program;
    /// the message names the file with the verifier's log.
    pub fn load(load: &Load<'_>, instance: &Instance) -> Result<Self> {
        let keys = load.secret.map_or_else(random_keys, Ok)?;
        let wanted = wanted_meta(&load.config, load.clock, keys);
        let (wanted, adopted) = match adoptable(&instance.pins(), &wanted, load.object)? {
            Some(meta) => (meta, true),
            None => {
                instance.clear()?;
                (wanted, false)
            }
        };
        // Flows keep saying where they are counted once an instance has watched several interfaces.
        let had = match adopted {
            true => counted(&instance.pins())?,
            false => Vec::new(),
        };
        let was_watched = had.iter().any(|it| *it != 0);
        let places = match had.len() {
            0 => places(load.room.max(LEAST_ROOM))?,
            // Adopted maps keep their size.
            places => places as u32,
        };
        let details = details(load.config.max_flows)?;
        let extra = |asked| match asked {
            0 => 1,
            _ => wanted.hash.records() as u32,
        };
        let of_details = |asked| match asked {
            0 => 1,
            _ => details,
        };
        // Does not depend on what is adopted, unless flows are enforced for good.
        let tombs = match load.config.enforce.is_for_good() {
            false => HELD,
            true => MAX_TOMBS,
        };
        let is_enforced = load.config.enforce.is_on();
        let sources = if is_enforced { MAX_SOURCES } else { 1 };
        let answers = match load.stepping {
            Stepping::TestRuns => 1,
            // In an LRU map each CPU takes up to 128 free entries for itself (`LOCAL_FREE_TARGET`
            // in `kernel/bpf/bpf_lru_list.c`). In a smaller map the CPUs would evict one another's
            // newest entries.
            Stepping::LiveFrames => MIN_ANSWERS.max(cpus()? * 512),
        };
        let config = Config {
            live: (load.stepping == Stepping::LiveFrames).into(),
            details,
            watched: (load.room > 0 || was_watched).into(),
            ..load.config
        };
        let mut loader = EbpfLoader::new();
        loader
            .default_map_pin_directory(instance.path())
            .map_max_entries("FLOWS", wanted.hash.lines() as u32)
            .map_max_entries("DETAILS", details)
            .map_max_entries("EXTRAS", details)
            .map_max_entries("ACCOUNTS", extra(load.config.accounting))
            .map_max_entries("UPDATES", of_details(load.config.active_timeout))
            .map_max_entries("RTOS", extra(load.config.rto.on))
            .map_max_entries("OFFLOADS", of_details(load.config.offload))
            .map_max_entries("TOMBSTONES", tombs)
            .map_max_entries("ANSWERS", sources)
            .map_max_entries("INBOXES", cpus()?)
            .map_max_entries("CALLS", answers)
            .map_max_entries("SLOTS", load.config.geometry.slots() + 1)
            .map_max_entries("EVENTS", load.ring_bytes)
            .map_max_entries("WAKES", wakes_bytes()?)
            // Twice as many: for interfaces that are stacked on watched ones, and for those of an
            // earlier run.
            .map_max_entries("WATCHED", 2 * places)
            .map_max_entries("SEATED", if config.watched == 0 { 1 } else { SEATS })
            .map_max_entries("COUNTERS", places)
            .map_max_entries("COUNTED", places)
            .map_max_entries("LABELS", places)
            .override_global("CONFIG", &config, true)
            .override_global("HASH", &wanted.hash, true)
            .override_global("AYA_LOG_LEVEL", &load.log_level, false);
        for (map, entries) in &load.others {
            loader.map_max_entries(map, *entries);
        }
        let bpf = loader.load(load.object).map_err(explain_load)?;
        let mut plane = Self {
            bpf,
            answers: None,
            config,
            clock: load.clock,
            adopted,
        };
        plane.answers = Answers::open(plane.open("CALLS")?)?;
        plane.set_rule(0, &load.rule)?;
        plane.set_rule(UNRULED, &load.rule)?;
        if !adopted {
            // Written last: if `META` is filled, the other maps are complete.
            let mut meta = Array::<_, Meta>::try_from(plane.map_mut("META")?)?;
            meta.set(0, wanted, 0).context("cannot write META")?;
        }
        for (name, program) in plane.bpf.programs_mut() {
            if !load.later.contains(&name) {
                load_program(name, program)?;
            }
        }
        Ok(plane)
    }

    /// Loads a program that was left for later, unless it is already loaded, and pins it.
    ///
    /// # Errors
    ///
    /// [`Kind::Unsupported`](crate::failure::Kind::Unsupported) if the verifier refuses it.
    pub fn demand(&mut self, name: &str, instance: &Instance) -> Result<()> {
        let program = self
            .bpf
            .program_mut(name)
            .with_context(|| format!("the object has no program {name}"))?;
        if program.fd().is_ok() {
            return Ok(());
        }
        load_program(name, program)?;
        if let Some(instructions) = program.info()?.verified_instruction_count() {
            log::debug!("{name}: {instructions} instructions verified");
        }
        pin_program(name, program, instance)
    }

    /// Pins the loaded programs and their map of answers, in place of those that an earlier run
    /// pinned.
    ///
    /// # Errors
    ///
    /// A pin cannot be made, or replaced.
    pub fn pin_programs(&mut self, instance: &Instance) -> Result<()> {
        // A process that opens an old program and this map tries again (`Pins::callable`).
        let calls = self.open("CALLS")?;
        replace_pin("CALLS", instance, |path| Ok(calls.pin(path)?))?;
        self.each_pinned(|name, program| match program.fd() {
            Ok(_) => pin_program(name, program, instance),
            Err(_) => Ok(()),
        })
    }

    /// Removes the pins of programs that no interface needs, which an earlier run made.
    ///
    /// # Errors
    ///
    /// A pin cannot be removed.
    pub fn unpin_others(&mut self, instance: &Instance) -> Result<()> {
        self.each_pinned(|name, program| match program.fd() {
            Ok(_) => Ok(()),
            Err(_) => remove_pin(name, instance).map(drop),
        })
    }

    fn each_pinned(&mut self, act: impl Fn(&str, &mut Program) -> Result<()>) -> Result<()> {
        for name in PROGRAMS {
            let program = self
                .bpf
                .program_mut(name)
                .with_context(|| format!("the object has no program {name}"))?;
            act(name, program)?;
        }
        Ok(())
    }

    /// The same for tests, benchmarks and trials: no pins are left when this returns.
    pub fn load_unpinned(load: &Load<'_>) -> Result<Self> {
        /// How many this process has loaded: each gets a name of its own, which must be short enough
        /// for an interface.
        static LOADED: AtomicU32 = AtomicU32::new(0);
        let number = LOADED.fetch_add(1, Ordering::Relaxed);
        let instance = Instance::open(&[format!("{}-{number}", process::id())])?;
        let plane = Self::load(load, &instance);
        let removed = instance.remove();
        let plane = plane?;
        removed.context("cannot remove the pins of what was loaded")?;
        Ok(plane)
    }

    /// How many instructions the kernel's verifier processed for each loaded program
    /// (`verified_insns` of `struct bpf_prog_info`), by name. Empty if the kernel does not tell.
    pub fn verified(&self) -> Result<BTreeMap<String, u32>> {
        let mut verified = BTreeMap::new();
        for (name, program) in self.bpf.programs() {
            if program.fd().is_err() {
                continue;
            }
            if let Some(number) = program.info()?.verified_instruction_count() {
                verified.insert(name.to_owned(), number);
            }
        }
        Ok(verified)
    }

    /// Whether the maps were adopted.
    pub fn adopted(&self) -> bool {
        self.adopted
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// How to read its records.
    pub fn measure(&self) -> Measure {
        Measure {
            clock: self.clock,
            one_way: self.config.one_way != 0,
        }
    }

    /// The loaded object.
    pub fn bpf(&self) -> &Ebpf {
        &self.bpf
    }

    /// The loaded object, mutable, for the logger.
    pub fn bpf_mut(&mut self) -> &mut Ebpf {
        &mut self.bpf
    }

    /// An XDP program by name.
    pub fn xdp(&mut self, name: &str) -> Result<&mut Xdp> {
        let program = self.bpf.program_mut(name);
        Ok(program
            .with_context(|| format!("the object has no program {name}"))?
            .try_into()?)
    }

    /// A classifier by name.
    pub fn classifier(&mut self, name: &str) -> Result<&mut SchedClassifier> {
        let program = self.bpf.program_mut(name);
        Ok(program
            .with_context(|| format!("the object has no program {name}"))?
            .try_into()?)
    }

    /// Calls the stepper once, on the CPU of this thread, which must be pinned to it.
    pub fn step(&self, budget: u32) -> Result<Step> {
        call::step(self.called("twheel_step")?, self.answers.as_ref(), budget)
    }

    /// Deletes flows from the wheel of this thread's CPU: see [`call::delete`].
    pub fn delete(&self, entries: &mut [Delete]) -> Result<()> {
        let program = self.called("twheel_delete")?;
        call::delete(program, self.answers.as_ref(), entries)
    }

    /// Calls the sweeping program once, on the CPU of this thread: see [`call::sweep`].
    pub fn sweep(&self, call: Sweep) -> Result<Sweep> {
        let program = self.called("twheel_sweep")?;
        call::sweep(program, self.answers.as_ref(), call)
    }

    fn called(&self, name: &str) -> Result<&Xdp> {
        let program = self.bpf.program(name);
        Ok(program
            .with_context(|| format!("the object has no program {name}"))?
            .try_into()?)
    }

    /// The flow table, for reading.
    pub fn flows(&self) -> Result<Flows> {
        Flows::map(
            self.map("FLOWS")?,
            self.map("DETAILS")?,
            self.map("EXTRAS")?,
        )
    }

    /// How many records of the table are in use: by flows, and by flows that are just being entered.
    pub fn tracked(&self) -> Result<u64> {
        let tracked = Array::<_, u64>::try_from(self.map("TRACKED")?)?;
        tracked.get(&0, 0).context("cannot read TRACKED")
    }

    /// Takes the ring of events. It can be taken once.
    pub fn take_events(&mut self) -> Result<Events> {
        match self.take_map("EVENTS")? {
            Map::RingBuf(map) => Events::open(map),
            _ => bail!("the map EVENTS has an unexpected type"),
        }
    }

    /// Takes the ring of wake-up calls for sleeping steppers. It can be taken once.
    pub fn take_wakes(&mut self) -> Result<RingBuf<MapData>> {
        Ok(RingBuf::try_from(self.take_map("WAKES")?)?)
    }

    /// The counters, summed over all CPUs.
    pub fn counters(&self) -> Result<Counters> {
        counters(self.map("COUNTERS")?)
    }

    /// Sets virtual time, in units.
    pub fn set_clock(&mut self, now: u64) -> Result<()> {
        assert_eq!(
            self.config.clock, CLOCK_VIRTUAL,
            "the data plane does not use virtual time"
        );
        let mut clock = Array::<_, u64>::try_from(self.map_mut("CLOCK")?)?;
        clock.set(0, now, 0).context("cannot set virtual time")
    }

    /// Sets the timeouts of a rule; 0 stands for flows without a rule. Flows follow at their next
    /// timer visit.
    pub fn set_timeouts(&mut self, rule: u16, timeouts: &Timeouts) -> Result<()> {
        let of = Rule {
            timeouts: *timeouts,
            ..self.rule(rule)?
        };
        self.set_rule(rule, &of)
    }

    fn set_rule(&mut self, number: u16, rule: &Rule) -> Result<()> {
        let mut map = Array::<_, Rule>::try_from(self.map_mut("TIMEOUTS")?)?;
        map.set(number.into(), *rule, 0)
            .context("cannot set timeouts")
    }

    fn rule(&self, number: u16) -> Result<Rule> {
        let map = Array::<_, Rule>::try_from(self.map("TIMEOUTS")?)?;
        map.get(&number.into(), 0).context("cannot read timeouts")
    }

    /// The timeouts of a rule.
    pub fn timeouts(&self, rule: u16) -> Result<Timeouts> {
        Ok(self.rule(rule)?.timeouts)
    }

    /// Opens a map again, for writing.
    pub fn open(&self, name: &str) -> Result<MapData> {
        let data = match self.map(name)? {
            Map::Array(data)
            | Map::PerCpuArray(data)
            | Map::HashMap(data)
            | Map::LruHashMap(data)
            | Map::LpmTrie(data) => data,
            _ => bail!("the map {name} has an unexpected type"),
        };
        // Not by the map's id, which takes capabilities that the running twheel has dropped.
        let fd = data.fd().as_fd().try_clone_to_owned();
        let open = || Ok::<_, anyhow::Error>(MapData::from_fd(fd?)?);
        open().with_context(|| format!("cannot open {name}"))
    }

    /// A map, for reading.
    pub fn map(&self, name: &str) -> Result<&Map> {
        self.bpf
            .map(name)
            .with_context(|| format!("the object has no map {name}"))
    }

    /// Memory that the kernel accounts for all maps, in bytes: `memlock` in each map's `fdinfo`.
    pub fn memory(&self) -> Result<HashMap<String, u64>> {
        self.bpf
            .maps()
            .map(|(name, map)| Ok((name.to_owned(), memlock(map)?)))
            .collect()
    }

    fn map_mut(&mut self, name: &str) -> Result<&mut Map> {
        self.bpf
            .map_mut(name)
            .with_context(|| format!("the object has no map {name}"))
    }

    fn take_map(&mut self, name: &str) -> Result<Map> {
        self.bpf
            .take_map(name)
            .with_context(|| format!("the map {name} does not exist, or was taken already"))
    }
}

fn load_program(name: &str, program: &mut Program) -> Result<()> {
    let loaded = match program {
        Program::Xdp(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        _ => bail!("the program {name} has an unexpected type"),
    };
    loaded.map_err(|error| refused(name, error))
}

fn pin_program(name: &str, program: &mut Program, instance: &Instance) -> Result<()> {
    replace_pin(name, instance, |path| Ok(program.pin(path)?))
}

/// Pins something. If this name is taken, the new pin replaces the old one in one step, so that
/// other processes always find one of the two.
pub(crate) fn replace_pin(
    name: &str,
    instance: &Instance,
    pin: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    // A process that was killed here may have left a pin of this name.
    let new = remove_pin(&format!("{name}_new"), instance)?;
    let path = instance.object(name);
    pin(&new)
        .and_then(|()| Ok(fs::rename(&new, &path)?))
        .with_context(|| format!("cannot pin {}", path.display()))
}

/// Removes the pin of a program, if it exists. Returns its path.
pub(crate) fn remove_pin(name: &str, instance: &Instance) -> Result<PathBuf> {
    let path = instance.object(name);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot replace {}", path.display()))
        }
        _ => Ok(path),
    }
}

/// Random keys from the kernel's generator.
pub(crate) fn random_keys<const COUNT: usize>() -> Result<[u64; COUNT]> {
    let mut keys = [0; COUNT];
    io::Read::read_exact(
        &mut std::fs::File::open("/dev/urandom").context("cannot open /dev/urandom")?,
        keys.as_mut_bytes(),
    )
    .context("cannot read /dev/urandom")?;
    Ok(keys)
}

fn explain_load(error: EbpfError) -> anyhow::Error {
    let no_memory = matches!(
        &error,
        EbpfError::MapError(MapError::CreateError { io_error, .. })
            if matches!(io_error.raw_os_error(), Some(libc::ENOMEM | libc::E2BIG))
    );
    let error = anyhow::Error::new(error);
    if no_memory {
        return error
            .context("the kernel has not enough memory for the table: give a smaller --max-flows");
    }
    error.context("cannot load the eBPF object")
}

/// Memory that the kernel accounts for a map, in bytes.
pub fn memlock(map: &Map) -> Result<u64> {
    use std::os::fd::AsRawFd;
    let data = match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::PerCpuArray(data)
        | Map::RingBuf(data)
        | Map::PerCpuHashMap(data)
        | Map::LruHashMap(data)
        | Map::LpmTrie(data) => data,
        _ => bail!("a map has an unexpected type"),
    };
    let path = format!("/proc/self/fdinfo/{}", data.fd().as_fd().as_raw_fd());
    let info = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    info.lines()
        .find_map(|line| line.strip_prefix("memlock:"))
        .and_then(|bytes| bytes.trim().parse().ok())
        .with_context(|| format!("{path} has no memlock"))
}

/// The errno of a program error, if the kernel gave one.
pub fn errno(error: &ProgramError) -> Option<i32> {
    match error {
        ProgramError::SyscallError(SyscallError { io_error, .. }) => io_error.raw_os_error(),
        _ => None,
    }
}
