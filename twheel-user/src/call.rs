//! Runs the programs that userspace calls: the stepper, and those that delete, enter and sweep
//! flows. They are attached to no interface. Their argument is passed as the "packet", and they
//! write their answer over it.
//!
//! No packet may be processed on the CPU meanwhile (`docs/design.md`). Where a plain test run
//! disables softirqs, a plain test run is used, and the kernel copies the "packet" back. Elsewhere
//! a test run on live frames is used, which always disables them. The kernel copies nothing back
//! from it, so the program leaves its answer in a map.

use std::{
    hash::{BuildHasher, RandomState},
    os::fd::AsFd,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use anyhow::{Context, Result, anyhow};
use aya::{
    maps::{HashMap, Map, MapData, MapError},
    programs::{ProgramError, TestRun, TestRunAttrs, TestRunOptions, Xdp},
    util::online_cpus,
};
use twheel_common::{
    packet::ETH_HEADER,
    step::{Answer, Call, Delete, Enter, MAX_DELETES, Step, Sweep},
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::{bpf, cpu::pin_to, pins::Pins, stepping::Stepping};

/// Minimum capacity of the map of answers where programs are run by live frames. Elsewhere it has
/// one entry.
pub const MIN_ANSWERS: u32 = 64;

/// The map in which programs that are run by live frames leave their answers.
pub struct Answers(HashMap<MapData, u64, Answer>);

/// How programs are run that leave their answers in this map, `CALLS`.
pub fn stepping(calls: &MapData) -> Result<Stepping> {
    Ok(match calls.info()?.max_entries() {
        MIN_ANSWERS.. => Stepping::LiveFrames,
        _ => Stepping::TestRuns,
    })
}

/// Whether a program was loaded with this map `CALLS`, and not with that of another run.
pub fn answers_in(program: &Xdp, calls: &MapData) -> Result<bool> {
    let maps = bpf::maps_of(program.fd()?.as_fd()).context("cannot read the maps of a program")?;
    Ok(maps.contains(&calls.info()?.id()))
}

impl Answers {
    /// Opens the map `CALLS`; `None` if programs are run by plain test runs.
    pub fn open(map: MapData) -> Result<Option<Self>> {
        if stepping(&map)? == Stepping::TestRuns {
            return Ok(None);
        }
        let map = HashMap::try_from(Map::LruHashMap(map))?;
        Ok(Some(Self(map)))
    }
}

/// A program that userspace runs, and where it leaves its answer.
pub struct Callable {
    program: Xdp,
    answers: Option<Answers>,
}

impl Callable {
    /// From a program and the map `CALLS` of its data plane.
    pub fn new(program: Xdp, calls: MapData) -> Result<Self> {
        let answers = Answers::open(calls)?;
        Ok(Self { program, answers })
    }

    /// Calls the stepper once. The calling thread must be pinned to the wheel's CPU.
    pub fn step(&self, budget: u32) -> Result<Step> {
        step(&self.program, self.answers.as_ref(), budget)
    }

    /// Low 32 bits of the data plane's clock, in units, as the sweeping program returns them.
    pub fn now(&self) -> Result<u32> {
        let call = self.sweep(Sweep::default());
        Ok(call.context("cannot read the data plane's clock")?.now)
    }

    /// Calls the sweeping program once, on the CPU that the calling thread is pinned to.
    pub fn sweep(&self, call: Sweep) -> Result<Sweep> {
        sweep(&self.program, self.answers.as_ref(), call)
    }

    /// Enters a flow, on the current CPU.
    pub fn enter(&self, call: Enter) -> Result<()> {
        run(&self.program, self.answers.as_ref(), &mut [call])
            .context("cannot run the program that adds a flow")
    }

    /// Deletes flows from the wheel of the CPU that the calling thread is pinned to. Each entry's
    /// outcome says what happened. A flow that had a packet since it was chosen stays.
    pub fn delete(&self, entries: &mut [Delete]) -> Result<()> {
        delete(&self.program, self.answers.as_ref(), entries)
    }
}

/// Calls `act` for each CPU in turn, on a thread that is pinned to it, with the sweeping program and
/// the number of CPUs.
pub fn on_each_cpu(
    pins: &Pins,
    mut act: impl FnMut(&Callable, usize) -> Result<()> + Send,
) -> Result<()> {
    let cpus = online_cpus()
        .map_err(|(path, error)| anyhow!(error).context(format!("cannot read {path}")))?;
    for &cpu in &cpus {
        let (act, cpus) = (&mut act, cpus.len());
        // On a thread of its own, so that the CPU affinity of this thread stays as it is.
        thread::scope(|scope| {
            let on_cpu = || {
                pin_to(cpu)?;
                act(&pins.callable("twheel_sweep")?, cpus)
            };
            let ended = scope.spawn(on_cpu).join();
            ended.unwrap_or_else(|_| Err(anyhow!("the sweeping thread panicked")))
        })?;
    }
    Ok(())
}

/// As [`Callable::step`].
pub fn step(program: &Xdp, answers: Option<&Answers>, budget: u32) -> Result<Step> {
    let mut call = [Step {
        budget,
        ..Step::default()
    }];
    run(program, answers, &mut call).context("cannot run the stepper")?;
    Ok(call[0])
}

/// As [`Callable::sweep`].
pub fn sweep(program: &Xdp, answers: Option<&Answers>, call: Sweep) -> Result<Sweep> {
    let mut call = [call];
    run(program, answers, &mut call).context("cannot run the sweeping program")?;
    Ok(call[0])
}

/// As [`Callable::delete`].
pub fn delete(program: &Xdp, answers: Option<&Answers>, entries: &mut [Delete]) -> Result<()> {
    for entries in entries.chunks_mut(MAX_DELETES) {
        run(program, answers, entries).context("cannot run the deleting program")?;
    }
    Ok(())
}

/// Runs a program with its argument as the "packet", and stores its answer there.
fn run<T>(program: &Xdp, answers: Option<&Answers>, call: &mut [T]) -> Result<()>
where
    T: FromBytes + IntoBytes,
{
    const {
        assert!(
            size_of::<T>() >= ETH_HEADER,
            "the kernel takes no shorter packet"
        )
    };
    match answers {
        None => Ok(plain(program, call.as_mut_bytes())?),
        Some(answers) => live(program, answers, call.as_mut_bytes()),
    }
}

fn plain(program: &Xdp, call: &mut [u8]) -> Result<(), ProgramError> {
    let argument = call.to_vec();
    program.test_run(TestRunOptions {
        data_in: Some(&argument),
        data_out: Some(call),
        ..TestRunOptions::new()
    })?;
    Ok(())
}

/// Runs the program on one live frame. Never on more: between two frames the kernel may
/// leave the section in which softirqs are disabled.
fn live(program: &Xdp, answers: &Answers, call: &mut [u8]) -> Result<()> {
    let number = number();
    let mut frame = Call {
        argument: Answer::new_zeroed(),
        number,
    };
    frame.argument.as_mut_bytes()[..call.len()].copy_from_slice(call);
    program.test_run(TestRunOptions {
        data_in: Some(frame.as_bytes()),
        attrs: TestRunAttrs::new().xdp_live_frames(1),
        ..TestRunOptions::new()
    })?;
    let answer = match answers.0.get(&number, 0) {
        Ok(answer) => answer,
        Err(MapError::KeyNotFound) => {
            anyhow::bail!(
                "the program's result was overwritten: too many programs run at once: try again"
            )
        }
        Err(error) => return Err(error).context("cannot read the program's result"),
    };
    call.copy_from_slice(&answer.as_bytes()[..call.len()]);
    Ok(())
}

/// A number that no other call has.
fn number() -> u64 {
    static NEXT: LazyLock<AtomicU64> =
        LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(std::process::id())));
    NEXT.fetch_add(1, Ordering::Relaxed)
}
