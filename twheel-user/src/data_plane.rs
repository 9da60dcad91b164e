//! The eBPF object, loaded: maps, programs, and what userspace does with them.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use aya::{
    Ebpf, EbpfError, EbpfLoader, include_bytes_aligned,
    maps::{Array, Map, MapData, MapError, MapInfo, PerCpuArray, PerCpuValues, RingBuf},
    programs::{Program, ProgramError, SchedClassifier, Xdp},
    sys::SyscallError,
    util::nr_cpus,
};
use twheel_common::{
    config::{CLOCK_VIRTUAL, Config, Features, LAYOUT, Meta, SEATS, UNRULED},
    counter::{Counter, Counters, LOADER},
    enforce::{HELD, MAX_SOURCES, MAX_TOMBS},
    pool::{CHAIN, SHELF},
    rule::{Rule, Timeouts},
    step::{Answer, Delete, Step, Sweep},
    table::Hash,
    wheel::Geometry,
};

pub use crate::ring::Events;
use crate::{
    call::{self, Answers, MIN_ANSWERS},
    clock::Clock,
    failure::{Failure, Kind},
    flows::Flows,
    pins::{Instance, PROGRAMS, Pins},
    stepping::Stepping,
    verifier::refused,
    watched,
};

/// The object that this program carries.
pub static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/twheel.bpf.o"));

/// Visits of a stepper's call: enough to make the cost of the call small, few enough to keep bottom
/// halves off for no longer than a packet burst does.
pub const STEP_BUDGET: u32 = 256;

/// Interfaces for which there is always room: a run that is adopted may have more of them than the one before.
const LEAST_ROOM: u32 = 16;

/// Size of production's ring of events: room for some 7,200.
pub const RING_BYTES: u32 = 1 << 20;

/// What to load.
pub struct Load<'a> {
    /// The object: [`OBJECT`], or that of the benches.
    pub object: &'a [u8],
    /// Configuration of the data plane.
    pub config: Config,
    /// What flows of no rule are given.
    pub rule: Rule,
    /// Interfaces for which there is room. 0: there is one, of which there is nothing to say.
    pub room: u32,
    /// Its clock.
    pub clock: Clock,
    /// Size of the ring of events, bytes, a power of two and at least a page.
    pub ring_bytes: u32,
    /// How programs are run that are attached to nothing.
    pub stepping: Stepping,
    /// aya-log's level: 0 is off, 1 errors, … 5 traces.
    pub log_level: u8,
    /// Secret of the hash, for tests; `None`: random.
    pub secret: Option<[u64; 11]>,
    /// Entries of maps that only the object of the benches has.
    pub others: Vec<(&'static str, u32)>,
    /// Programs that are loaded when they are [asked for](DataPlane::demand): to verify one takes time.
    pub later: &'a [&'static str],
}

/// The programs of which an interface needs one.
pub const INCOMING: &[&str] = &["twheel_xdp", "twheel_ingress"];

impl<'a> Load<'a> {
    /// As production loads it, with the timeouts that come with the configuration.
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
    /// Loads the object over the maps that the instance has pinned, or over new ones.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`] if the pinned maps were made for something else. [`Kind::Unsupported`] if the verifier refuses a program,
    /// and names the file that has its log.
    pub fn load(load: &Load<'_>, instance: &Instance) -> Result<Self> {
        let keys = load.secret.map_or_else(random_keys, Ok)?;
        let wanted = wanted_meta(&load.config, load.clock, keys);
        let (wanted, adopted) = match adoptable(&instance.pins(), &wanted)? {
            Some(meta) => (meta, true),
            None => {
                instance.clear()?;
                (wanted, false)
            }
        };
        // Once several interfaces were watched, flows say where they are counted.
        let had = match adopted {
            true => counted(&instance.pins())?,
            false => Vec::new(),
        };
        let was_watched = had.iter().any(|it| *it != 0);
        let places = match had.len() {
            0 => watched::places(load.room.max(LEAST_ROOM))?,
            // The maps are as large as they are.
            places => places as u32,
        };
        let details = details(load.config.max_flows)?;
        let extra = |asked| match asked {
            0 => 1,
            _ => wanted.hash.records() as u32,
        };
        // Not a matter of what is adopted, unless it is for good.
        let tombs = match load.config.enforce.is_for_good() {
            false => HELD,
            true => MAX_TOMBS,
        };
        let sources = match load.config.enforce.is_on() {
            false => 1,
            true => MAX_SOURCES,
        };
        let answers = match load.stepping {
            Stepping::TestRuns => 1,
            // Of an LRU map each CPU takes up to 128 free entries for itself (`LOCAL_FREE_TARGET` in
            // `kernel/bpf/bpf_lru_list.c`). In a smaller one they take the newest from one another.
            Stepping::LiveFrames => MIN_ANSWERS.max(cpus()? * 512),
        };
        if adopted {
            drop_calls(instance, answers)?;
        }
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
            .map_max_entries("RTOS", extra(load.config.rto.on))
            .map_max_entries("EXPIRED", tombs)
            .map_max_entries("ANSWERS", sources)
            .map_max_entries("INBOXES", cpus()?)
            .map_max_entries("CALLS", answers)
            .map_max_entries("SLOTS", load.config.geometry.slots() + 1)
            .map_max_entries("EVENTS", load.ring_bytes)
            .map_max_entries("WAKES", wakes_bytes()?)
            .map_max_entries("WATCHED", places)
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
            // Last, so that maps with it are whole.
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

    /// Loads a program that was left for later, unless it is loaded, and pins it.
    ///
    /// # Errors
    ///
    /// [`Kind::Unsupported`] if the verifier refuses it.
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

    /// Pins the programs that are loaded, in place of those that an earlier loader pinned.
    ///
    /// # Errors
    ///
    /// A pin cannot be made, or replaced.
    pub fn pin_programs(&mut self, instance: &Instance) -> Result<()> {
        self.each_pinned(|name, program| match program.fd() {
            Ok(_) => pin_program(name, program, instance),
            Err(_) => Ok(()),
        })
    }

    /// Removes the pins of programs that no interface has needed: an earlier loader's.
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

    /// The same for whoever measures or tests: no pins are left when this returns. The name is one that nobody
    /// else has.
    pub fn load_unpinned(load: &Load<'_>, name: &str) -> Result<Self> {
        let instance = Instance::open(&[format!("{name}-{}", std::process::id())])?;
        let plane = Self::load(load, &instance);
        let removed = instance.remove();
        let plane = plane?;
        removed.context("cannot remove the pins of what was loaded")?;
        Ok(plane)
    }

    /// What the kernel's verifier went through for each program, instructions (`verified_insns` of
    /// `struct bpf_prog_info`), by name, of those that are loaded. Empty where the kernel does not tell.
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

    /// Whether the maps were there before.
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

    /// The loaded object.
    pub fn bpf(&self) -> &Ebpf {
        &self.bpf
    }

    /// The loaded object, for the logger.
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

    /// One call of the stepper on the CPU of this thread, which must be pinned to it.
    pub fn step(&self, budget: u32) -> Result<Step> {
        call::step(self.called("twheel_step")?, self.answers.as_ref(), budget)
    }

    /// Deletes flows of the wheel of this thread's CPU: see [`call::delete`].
    pub fn delete(&self, entries: &mut [Delete]) -> Result<()> {
        let program = self.called("twheel_delete")?;
        call::delete(program, self.answers.as_ref(), entries)
    }

    /// One call of the program that sweeps on the CPU of this thread: see [`call::sweep`].
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

    /// The room in the table that is taken: flows, and those that are just entering.
    pub fn tracked(&self) -> Result<u64> {
        let tracked = Array::<_, u64>::try_from(self.map("TRACKED")?)?;
        tracked.get(&0, 0).context("cannot read TRACKED")
    }

    /// Takes the ring of events; once.
    pub fn take_events(&mut self) -> Result<Events> {
        match self.take_map("EVENTS")? {
            Map::RingBuf(map) => Events::open(map),
            _ => bail!("EVENTS is a map of a type that is not expected"),
        }
    }

    /// Takes the ring of calls to sleeping steppers; once.
    pub fn take_wakes(&mut self) -> Result<RingBuf<MapData>> {
        Ok(RingBuf::try_from(self.take_map("WAKES")?)?)
    }

    /// The counters, summed over all CPUs.
    pub fn counters(&self) -> Result<Counters> {
        counters(self.map("COUNTERS")?)
    }

    /// Sets virtual time, units.
    pub fn set_clock(&mut self, now: u64) -> Result<()> {
        assert_eq!(
            self.config.clock, CLOCK_VIRTUAL,
            "the data plane reads another clock"
        );
        let mut clock = Array::<_, u64>::try_from(self.map_mut("CLOCK")?)?;
        clock.set(0, now, 0).context("cannot set virtual time")
    }

    /// Sets how long flows of a rule may be idle; 0 is no rule. Flows follow when they are next visited.
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

    /// How long flows of a rule may be idle.
    pub fn timeouts(&self, rule: u16) -> Result<Timeouts> {
        Ok(self.rule(rule)?.timeouts)
    }

    /// Opens a map again, for whoever writes there.
    pub fn open(&self, name: &str) -> Result<MapData> {
        let data = match self.map(name)? {
            Map::Array(data)
            | Map::PerCpuArray(data)
            | Map::HashMap(data)
            | Map::LruHashMap(data)
            | Map::LpmTrie(data) => data,
            _ => bail!("{name} is a map of a type that is not expected"),
        };
        // Not by its number, which takes more than a run keeps.
        let fd = data.fd().as_fd().try_clone_to_owned();
        let open = || Ok::<_, anyhow::Error>(MapData::from_fd(fd?)?);
        open().with_context(|| format!("cannot open {name}"))
    }

    /// A map, for whoever reads it.
    pub fn map(&self, name: &str) -> Result<&Map> {
        self.bpf
            .map(name)
            .with_context(|| format!("the object has no map {name}"))
    }

    /// Memory that the kernel accounts for all maps, bytes: `memlock` of each map's `fdinfo`.
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
            .with_context(|| format!("the map {name} is not there"))
    }
}

fn load_program(name: &str, program: &mut Program) -> Result<()> {
    let loaded = match program {
        Program::Xdp(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        _ => bail!("the object has a program {name} of a type that is not expected"),
    };
    loaded.map_err(|error| refused(name, error))
}

fn pin_program(name: &str, program: &mut Program, instance: &Instance) -> Result<()> {
    let path = remove_pin(name, instance)?;
    program
        .pin(&path)
        .with_context(|| format!("cannot pin {}", path.display()))
}

/// Removes the pin of a program, if it is there. Returns where it is.
pub(crate) fn remove_pin(name: &str, instance: &Instance) -> Result<PathBuf> {
    let path = instance.object(name);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot replace {}", path.display()))
        }
        _ => Ok(path),
    }
}

/// What an instance's maps were made for.
///
/// # Errors
///
/// [`Kind::Pins`]: they are laid out in another way than this version reads them.
pub fn meta(pins: &Pins) -> Result<Meta> {
    let (path, data) = (pins.object("META"), pins.map("META")?);
    if data.info()?.value_size() as usize != size_of::<Meta>() {
        return Err(other_layout(&path).into());
    }
    let map = Array::<_, Meta>::try_from(Map::Array(data))?;
    let meta = map.get(&0, 0).context("cannot read META")?;
    match meta.layout {
        LAYOUT => Ok(meta),
        _ => Err(other_layout(&path).into()),
    }
}

fn other_layout(path: &Path) -> Failure {
    let path = path.parent().unwrap_or(path);
    Failure::new(
        Kind::Pins,
        format!(
            "the pins at {} were made by another version of twheel, whose maps this one cannot read: use that one, or \
             run `twheel detach` first",
            path.display()
        ),
    )
}

/// The interface that each place of the map `COUNTERS` is of, or 0.
pub fn counted(pins: &Pins) -> Result<Vec<u32>> {
    let map = Array::<_, u32>::try_from(Map::Array(pins.map("COUNTED")?))?;
    (0..map.len())
        .map(|place| map.get(&place, 0).context("cannot read COUNTED"))
        .collect()
}

/// The counters of the map `COUNTERS`, summed over all places and CPUs.
pub fn counters(map: &Map) -> Result<Counters> {
    Ok(Counters::sum(counters_of_places(map)?.iter().flatten()))
}

/// The counters of the map `COUNTERS`, of each place and there of each CPU that this host may have.
pub fn counters_of_places(map: &Map) -> Result<Vec<Vec<Counters>>> {
    let per_cpu = PerCpuArray::<_, Counters>::try_from(map)?;
    (0..per_cpu.len())
        .map(|place| {
            let cpus = per_cpu.get(&place, 0).context("cannot read the counters")?;
            Ok(cpus.iter().copied().collect())
        })
        .collect()
}

/// What the loader counts. It stands beside what the programs count, and outlives the run like that.
pub struct LoaderCounters(Mutex<Unwritten>);

struct Unwritten {
    map: PerCpuArray<MapData, Counters>,
    /// What could not be written yet.
    more: Counters,
}

impl LoaderCounters {
    /// Of pinned maps. Whoever holds their instance has one: a counter is read and then written.
    pub fn open(pins: &Pins) -> Result<Self> {
        let map = Map::PerCpuArray(pins.map("COUNTERS")?);
        Ok(Self(Mutex::new(Unwritten {
            map: PerCpuArray::try_from(map)?,
            more: Counters::default(),
        })))
    }

    /// What was counted, by earlier runs as well.
    pub fn get(&self, counter: Counter) -> Result<u64> {
        let unwritten = self.lock();
        Ok(unwritten.read()?[0].get(counter) + unwritten.more.get(counter))
    }

    /// Adds to a counter.
    pub fn add(&self, counter: Counter, number: u64) {
        let mut unwritten = self.lock();
        unwritten.more.0[counter as usize] += number;
        if let Err(error) = unwritten.write() {
            log::error!("cannot count {}, tried again: {error:#}", counter.name());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Unwritten> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Unwritten {
    /// Of each CPU; the loader's are the first one's.
    fn read(&self) -> Result<Vec<Counters>> {
        let cpus = self.map.get(&LOADER, 0);
        let cpus = cpus.context("cannot read the counters")?;
        Ok(cpus.iter().copied().collect())
    }

    fn write(&mut self) -> Result<()> {
        let mut cpus = self.read()?;
        cpus[0].add(&self.more);
        let cpus = PerCpuValues::try_from(cpus)?;
        let written = self.map.set(LOADER, cpus, 0);
        written.context("cannot write the counters")?;
        self.more = Counters::default();
        Ok(())
    }
}

/// What maps are made for.
fn wanted_meta(config: &Config, clock: Clock, keys: [u64; 11]) -> Meta {
    Meta {
        layout: LAYOUT,
        tick: config.tick,
        unit_ns: clock.unit().subsec_nanos(),
        geometry: config.geometry,
        max_flows: config.max_flows,
        features: Features::of(config),
        hash: Hash::new(keys, config.max_flows),
    }
}

/// Fails if a run with this configuration could not go on with what is pinned.
///
/// # Errors
///
/// [`Kind::Pins`]: it was made for another configuration, or by another version.
pub fn check_adoptable(pins: &Pins, config: &Config, clock: Clock) -> Result<()> {
    let keys = Default::default();
    adoptable(pins, &wanted_meta(config, clock, keys)).map(drop)
}

/// What pinned maps were made for, if they can be adopted. `None`: there are none, or their loader died before it had
/// set all up.
fn adoptable(pins: &Pins, wanted: &Meta) -> Result<Option<Meta>> {
    let meta = match MapData::from_pin(pins.object("META")) {
        Ok(map) => {
            check_pinned(pins)?;
            Array::<_, Meta>::try_from(Map::Array(map))?
                .get(&0, 0)
                .context("cannot read META")?
        }
        Err(MapError::SyscallError(SyscallError { io_error, .. }))
            if io_error.kind() == io::ErrorKind::NotFound =>
        {
            Meta::default()
        }
        Err(error) => return Err(error).context("cannot open the pinned META"),
    };
    if meta.layout == 0 {
        return Ok(None);
    }
    if meta.layout != LAYOUT {
        return Err(other_layout(&pins.object("META")).into());
    }
    // The secret of the hash is the table's own.
    let hash = Hash {
        keys: meta.hash.keys,
        ..wanted.hash
    };
    if meta != (Meta { hash, ..*wanted }) {
        let options = |meta: &Meta| {
            let tick = Duration::from_nanos(u64::from(meta.tick) * u64::from(meta.unit_ns));
            let Geometry { levels, bits, .. } = meta.geometry;
            let scheme = meta.geometry.scheme_name();
            format!(
                "--max-flows {} --tick {} --scheme {scheme} --slots {} --levels {levels}{}{}{}{}",
                meta.max_flows,
                humantime::format_duration(tick),
                1u64 << bits,
                match meta.features.has(Features::ACCOUNTING) {
                    false => "",
                    true => " --accounting",
                },
                match meta.features.has(Features::RTO) {
                    false => "",
                    true => " --rto on",
                },
                match meta.features.has(Features::ENFORCE) {
                    false => "",
                    true => " --i-know-this-drops-traffic",
                },
                match meta.features.has(Features::VLANS) {
                    false => " --vlan ignore",
                    true => "",
                },
            )
        };
        return Err(Failure::new(
            Kind::Pins,
            format!(
                "the pins at {} were made with {}, not {}: run with those, or run `twheel detach` first",
                pins.path().display(),
                options(&meta),
                options(wanted),
            ),
        )
        .into());
    }
    Ok(Some(meta))
}

/// From the kernel's generator.
fn random_keys() -> Result<[u64; 11]> {
    let mut bytes = [0; 88];
    io::Read::read_exact(
        &mut std::fs::File::open("/dev/urandom").context("cannot open /dev/urandom")?,
        &mut bytes,
    )
    .context("cannot read /dev/urandom")?;
    let mut words = bytes.as_chunks().0.iter().copied().map(u64::from_ne_bytes);
    Ok(std::array::from_fn(|_| words.next().unwrap_or_default()))
}

/// aya opens a pin without a look at it: a map of another type or size would be accepted silently.
fn check_pinned(pins: &Pins) -> Result<()> {
    use aya::maps::MapType;
    use twheel_common::{
        config::{NAME_BYTES, Watched},
        enforce::Tomb,
        event::Staged,
        flow::{Account, FlowKey},
        policy::{Ends, Header, PortClasses, Rules},
        pool::Shelf,
        rto::Timers,
        table::{Details, Extras, Line},
        wheel::{Heads, Wheel},
    };
    let size = |bytes: usize| bytes as u32;
    let shapes = [
        ("FLOWS", MapType::Array, 4, size(size_of::<Line>())),
        ("DETAILS", MapType::Array, 4, size(size_of::<Details>())),
        ("EXTRAS", MapType::Array, 4, size(size_of::<Extras>())),
        ("DEPOT", MapType::Array, 4, 8),
        ("SHELF", MapType::PerCpuArray, 4, size(size_of::<Shelf>())),
        ("ACCOUNTS", MapType::Array, 4, size(size_of::<Account>())),
        ("RTOS", MapType::Array, 4, size(size_of::<Timers>())),
        ("TIMEOUTS", MapType::Array, 4, size(size_of::<Rule>())),
        ("INBOXES", MapType::Array, 4, 64),
        ("ACTIVE", MapType::Array, 4, 4),
        ("POLICIES", MapType::Array, 4, size(size_of::<Header>())),
        ("PORTS", MapType::Array, 4, size(size_of::<PortClasses>())),
        ("CLASSES", MapType::Array, 4, size(size_of::<Rules>())),
        ("INTERFACES", MapType::Hash, 8, size(size_of::<Rules>())),
        ("SOURCES", MapType::LpmTrie, 24, size(size_of::<Ends>())),
        (
            "DESTINATIONS",
            MapType::LpmTrie,
            24,
            size(size_of::<Ends>()),
        ),
        ("NUMBERS", MapType::Array, 4, 512),
        ("NAMES", MapType::Array, 4, NAME_BYTES as u32),
        ("TRACKED", MapType::Array, 4, 8),
        (
            "EXPIRED",
            MapType::LruHash,
            size(size_of::<FlowKey>()),
            size(size_of::<Tomb>()),
        ),
        ("WHEEL", MapType::PerCpuArray, 4, size(size_of::<Wheel>())),
        ("SLOTS", MapType::PerCpuArray, 4, size(size_of::<Heads>())),
        ("EVENTS", MapType::RingBuf, 0, 0),
        ("STAGED", MapType::PerCpuArray, 4, size(size_of::<Staged>())),
        ("WAKES", MapType::RingBuf, 0, 0),
        (
            "COUNTERS",
            MapType::PerCpuArray,
            4,
            size(size_of::<Counters>()),
        ),
        ("WATCHED", MapType::Hash, 4, size(size_of::<Watched>())),
        ("SEATED", MapType::Array, 4, 8),
        ("COUNTED", MapType::Array, 4, 4),
        ("LABELS", MapType::Array, 4, size(watched::LABEL_BYTES)),
        ("ZONES", MapType::Array, 4, 4),
        ("PLACE", MapType::PerCpuArray, 4, 8),
        ("META", MapType::Array, 4, size(size_of::<Meta>())),
        ("CLOCK", MapType::Array, 4, 8),
    ];
    for (name, kind, key_size, value_size) in shapes {
        let info = MapInfo::from_pin(pins.object(name));
        let matches = info.is_ok_and(|info| {
            info.map_type().is_ok_and(|found| found == kind)
                && info.key_size() == key_size
                && info.value_size() == value_size
        });
        if !matches {
            return Err(Failure::new(
                Kind::Pins,
                format!(
                    "{} is not the map that this version of twheel makes: run `twheel detach` first",
                    pins.object(name).display()
                ),
            )
            .into());
        }
    }
    Ok(())
}

/// Removes the pin of the map of answers if it is not of this size, which says how programs are called. It holds nothing
/// that anybody waits for longer than a call takes.
fn drop_calls(instance: &Instance, answers: u32) -> Result<()> {
    let pin = instance.object("CALLS");
    let is_fit = MapInfo::from_pin(&pin).is_ok_and(|info| {
        info.max_entries() == answers
            && info.key_size() == 8
            && info.value_size() as usize == size_of::<Answer>()
    });
    if is_fit {
        return Ok(());
    }
    match fs::remove_file(&pin) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", pin.display()))
        }
        _ => Ok(()),
    }
}

/// CPUs that a record of the flow table can name.
const MAX_CPUS: usize = 1 << 12;

/// Details for so many flows, whichever CPU's they are: those that lie on shelves are nobody's. Whole chains.
fn details(max_flows: u32) -> Result<u32> {
    let most = u64::from(max_flows) + u64::from(cpus()?) * u64::from(SHELF);
    Ok(most.next_multiple_of(CHAIN.into()).min(1 << 30) as u32)
}

/// CPUs that this host may have.
fn cpus() -> Result<u32> {
    let cpus = nr_cpus().map_err(|(path, error)| {
        anyhow::Error::new(error).context(format!("cannot read {path}"))
    })?;
    if cpus > MAX_CPUS {
        return Err(Failure::new(
            Kind::Unsupported,
            format!("this host may have {cpus} CPUs: twheel can tell {MAX_CPUS} apart"),
        )
        .into());
    }
    Ok(cpus as u32)
}

/// Room for every CPU to call its stepper several times before anybody listens.
fn wakes_bytes() -> Result<u32> {
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)?.unwrap_or(4096) as u32;
    Ok((cpus()? * 8 * 16).next_power_of_two().max(page))
}

fn explain_load(error: EbpfError) -> anyhow::Error {
    let no_memory = matches!(
        &error,
        EbpfError::MapError(MapError::CreateError { io_error, .. })
            if matches!(io_error.raw_os_error(), Some(libc::ENOMEM | libc::E2BIG))
    );
    let error = anyhow::Error::new(error);
    if no_memory {
        return error.context("the kernel has no memory for the table: give a smaller --max-flows");
    }
    error.context("cannot load the eBPF object")
}

/// What the kernel charges for a map, bytes.
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
        _ => bail!("a map of a type that is not expected"),
    };
    let path = format!("/proc/self/fdinfo/{}", data.fd().as_fd().as_raw_fd());
    let info = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    info.lines()
        .find_map(|line| line.strip_prefix("memlock:"))
        .and_then(|bytes| bytes.trim().parse().ok())
        .with_context(|| format!("{path} has no memlock"))
}

/// The errno of a program error, where the kernel gave one.
pub fn errno(error: &ProgramError) -> Option<i32> {
    match error {
        ProgramError::SyscallError(SyscallError { io_error, .. }) => io_error.raw_os_error(),
        _ => None,
    }
}
