//! How this kernel runs the programs that userspace runs, tried and not told from its version.
//!
//! Nothing that packets bring may run on a CPU while a step is under way there: both change its wheel, without a lock.
//! Packets come in softirqs ("bottom halves"). A test run holds them off since Linux 6.3 (commit af2d0d09eabe, which
//! distributions have taken into older ones); one of live frames always has, and costs more.
//!
//! With PREEMPT_RT, who holds them off can itself be preempted, and only a lock of the CPU keeps two such sections apart,
//! which newer kernels may be built without (`CONFIG_PREEMPT_RT_NEEDS_BH_LOCK`).

use std::{
    fs,
    os::fd::{AsFd, AsRawFd},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::Map,
    programs::{TestRun, TestRunAttrs, TestRunOptions, Xdp},
    util::online_cpus,
};
use memmap2::{MmapOptions, MmapRaw};
use twheel_common::{packet::ETH_HEADER, probe::Probe};

use crate::{
    cpu::{pin_to, run_ahead},
    failure::{Failure, Kind},
    verifier::refused,
};

/// The object that this program carries.
static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/probe.bpf.o"));

/// How programs are run that are attached to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Stepping {
    /// By plain test runs, which hold bottom halves off
    #[value(skip)]
    TestRuns,
    /// By test runs of live frames, which do so on every kernel, and cost more
    LiveFrames,
}

impl Stepping {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::TestRuns => "test runs",
            Self::LiveFrames => "live frames",
        }
    }
}

/// A CPU is held so long for a timer of a fraction of that.
const FOR_TIMER: Duration = Duration::from_millis(2);
/// A CPU is held at most so long for a thread, which may preempt whoever holds it.
const HOLD: Duration = Duration::from_millis(40);
/// Once somebody else tries to run there, no longer than this.
const AFTER: Duration = Duration::from_millis(5);
/// Trials with a thread, at most.
const TRIES: u32 = 10;
/// Trials with a timer, at most.
const TIMERS: u32 = 20;
/// Trials after which it is believed that nothing runs on a CPU during a test run there.
const QUIET: u32 = 3;

/// A way, and why it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The way.
    pub way: Stepping,
    /// Why.
    pub why: Why,
}

/// Why a way was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Test runs hold softirqs off, or keep them apart.
    Safe,
    /// They do not.
    Unsafe,
    /// That could not be told.
    Untold,
    /// It was asked for.
    Asked,
}

/// Finds the way by trying; or tries the one that is asked for.
///
/// # Errors
///
/// [`Kind::Unsupported`]: there is none that is safe.
pub fn find(asked: Option<Stepping>) -> Result<Found> {
    let mut trial = Trial::new()?;
    let (way, why) = match (asked, is_realtime()) {
        // Also the way that is asked for is as safe as the kernel makes it.
        (Some(way), true) => {
            by_thread(&mut trial)?;
            (way, Why::Asked)
        }
        (Some(way), false) => (way, Why::Asked),
        (None, true) => choose(by_thread(&mut trial)?),
        (None, false) => choose(trial.by_timer()),
    };
    if way == Stepping::LiveFrames {
        trial.check_live_frames()?;
    }
    Ok(Found { way, why })
}

/// `met`: whether test runs let softirqs of their CPU run meanwhile; `None` if that could not be told.
fn choose(met: Option<bool>) -> (Stepping, Why) {
    match met {
        Some(false) => (Stepping::TestRuns, Why::Safe),
        Some(true) => (Stepping::LiveFrames, Why::Unsafe),
        None => (Stepping::LiveFrames, Why::Untold),
    }
}

/// With PREEMPT_RT: whether test runs let two softirqs of a CPU interleave; `None` if that could not be told. Where they
/// do, or may, live frames do not.
///
/// # Errors
///
/// [`Kind::Unsupported`]: live frames do, too, or that could not be told.
fn by_thread(trial: &mut Trial) -> Result<Option<bool>> {
    let test_runs = trial.by_thread(Stepping::TestRuns)?;
    if test_runs == Some(false) {
        return Ok(test_runs);
    }
    match trial.by_thread(Stepping::LiveFrames)? {
        Some(false) => Ok(test_runs),
        Some(true) => Err(unsafe_here(
            "this kernel (PREEMPT_RT) lets two softirqs of a CPU interleave, which twheel's wheels do not survive: \
             boot one with CONFIG_PREEMPT_RT_NEEDS_BH_LOCK, or one without PREEMPT_RT",
        )),
        None => Err(unsafe_here(
            "whether this kernel (PREEMPT_RT) keeps the softirqs of a CPU apart could not be told, because the CPUs are \
             busy: try again",
        )),
    }
}

fn unsafe_here(message: &str) -> anyhow::Error {
    Failure::new(Kind::Unsupported, message.to_owned()).into()
}

/// Whether this is a kernel with PREEMPT_RT, as its build names itself (`init/Makefile`). `/sys/kernel/realtime` is of
/// the patches from before it was merged.
pub fn is_realtime() -> bool {
    let version = fs::read_to_string("/proc/sys/kernel/version");
    version.is_ok_and(|version| version.split_whitespace().any(|it| it == "PREEMPT_RT"))
}

/// The programs, loaded.
struct Trial {
    bpf: Ebpf,
    probe: MmapRaw,
    cpu: u32,
}

impl Trial {
    fn new() -> Result<Self> {
        let bpf = EbpfLoader::new().load(OBJECT);
        let bpf = bpf.context("cannot load the programs that try how programs are run")?;
        let Some(Map::Array(map)) = bpf.map("PROBE") else {
            return Err(anyhow!("the object of the trials has no PROBE"));
        };
        let probe = MmapOptions::new()
            .len(size_of::<Probe>())
            .map_raw(map.fd().as_fd().as_raw_fd())
            .context("cannot map PROBE")?;
        let cpu = online_cpus()
            .map_err(|(path, error)| anyhow!(error).context(format!("cannot read {path}")))?
            .first()
            .copied()
            .unwrap_or(0);
        Ok(Self { bpf, probe, cpu })
    }

    /// Whether a bottom half runs on a CPU during a plain test run there; `None` where that could not be tried.
    ///
    /// A kernel that leaves bottom halves to its thread for them (`ksoftirqd`, while that runs) runs none during the hold,
    /// whether they are held off or not. So a trial counts as quiet only if the bottom half has run by the time that the
    /// call returns: it ran right when it was let, so the thread did not run. One that was met settles it.
    fn by_timer(&mut self) -> Option<bool> {
        load(&mut self.bpf, "probe_timer").ok()?;
        let mut quiet = 0;
        for _ in 0..TIMERS {
            self.begin(FOR_TIMER);
            self.run("probe_timer", Stepping::TestRuns).ok()?;
            if self.field(Field::Started) == 0 {
                return None;
            }
            let at_once = self.field(Field::Entered) == 1;
            let until = Instant::now() + Duration::from_secs(1);
            while self.field(Field::Entered) == 0 && Instant::now() < until {
                thread::sleep(Duration::from_micros(100));
            }
            if self.field(Field::Met) == 1 {
                return Some(true);
            }
            quiet += u32::from(at_once);
            if quiet == QUIET {
                return Some(false);
            }
        }
        None
    }

    /// The kernel runs a program by live frames.
    ///
    /// # Errors
    ///
    /// [`Kind::Unsupported`]: it does not.
    fn check_live_frames(&mut self) -> Result<()> {
        load(&mut self.bpf, "probe_enter")?;
        self.run("probe_enter", Stepping::LiveFrames)
            .map_err(|error| {
                let message = "this kernel has no test runs of live frames (Linux 5.18), by which wheels would be stepped";
                error.context(Failure::new(Kind::Unsupported, message.to_owned()))
            })
    }

    /// Whether a run begins on a CPU during another one there, by a thread that may preempt; `None` if that could not be
    /// told. One such run settles it; that there is none is believed after [`QUIET`] trials.
    fn by_thread(&mut self, stepping: Stepping) -> Result<Option<bool>> {
        load(&mut self.bpf, "probe_hold")?;
        load(&mut self.bpf, "probe_enter")?;
        let mut quiet = 0;
        for _ in 0..TRIES {
            self.begin(HOLD);
            let asks = AtomicBool::new(false);
            let counts = thread::scope(|scope| -> Result<bool> {
                let (this, cpu, asks) = (&*self, self.cpu, &asks);
                let other = scope.spawn(move || -> Result<()> {
                    pin_to(cpu)?;
                    // Without it the thread may come too late, and then the trial does not count.
                    let _ = run_ahead(true);
                    let until = Instant::now() + HOLD * 4;
                    while this.field(Field::Inside) == 0 {
                        if Instant::now() > until {
                            return Ok(());
                        }
                        thread::sleep(Duration::from_micros(200));
                    }
                    asks.store(true, Ordering::SeqCst);
                    this.run("probe_enter", stepping)
                });
                let holder = scope.spawn(move || {
                    pin_to(cpu)?;
                    this.run("probe_hold", stepping)
                });
                // From a CPU that is not held, if there is one.
                let until = Instant::now() + HOLD;
                while !asks.load(Ordering::SeqCst) && Instant::now() < until {
                    thread::sleep(Duration::from_micros(200));
                }
                thread::sleep(AFTER);
                // The thread has asked for all that time, and the CPU was held.
                let counts = asks.load(Ordering::SeqCst) && this.field(Field::Inside) == 1;
                this.set(Field::Leave, 1);
                let joined = |result: thread::Result<Result<()>>| {
                    result.unwrap_or_else(|_| Err(anyhow!("a trial panicked")))
                };
                joined(holder.join())?;
                joined(other.join())?;
                Ok(counts)
            })?;
            if self.field(Field::Met) == 1 {
                return Ok(Some(true));
            }
            quiet += u32::from(counts);
            if quiet == QUIET {
                return Ok(Some(false));
            }
        }
        Ok(None)
    }

    /// Forgets what the last trial has left.
    fn begin(&self, hold: Duration) {
        for field in [
            Field::Leave,
            Field::Inside,
            Field::Entered,
            Field::Met,
            Field::Started,
        ] {
            self.set(field, 0);
        }
        self.set(Field::Hold, hold.as_nanos() as u64);
    }

    fn run(&self, name: &str, stepping: Stepping) -> Result<()> {
        let program: &Xdp = self
            .bpf
            .program(name)
            .with_context(|| format!("the object of the trials has no {name}"))?
            .try_into()?;
        let frame = [0; ETH_HEADER];
        let attrs = match stepping {
            Stepping::TestRuns => TestRunAttrs::new(),
            Stepping::LiveFrames => TestRunAttrs::new().xdp_live_frames(1),
        };
        program
            .test_run(TestRunOptions {
                data_in: Some(&frame),
                attrs,
                ..TestRunOptions::new()
            })
            .with_context(|| format!("cannot run {name}"))?;
        Ok(())
    }

    fn field(&self, field: Field) -> u64 {
        self.place(field).load(Ordering::SeqCst)
    }

    fn set(&self, field: Field, value: u64) {
        self.place(field).store(value, Ordering::SeqCst);
    }

    fn place(&self, field: Field) -> &AtomicU64 {
        const { assert!(size_of::<Probe>() == 8 * 6) };
        // SAFETY: the mapping is as long as a `Probe`, which is words alone, and stays as long as this.
        unsafe { AtomicU64::from_ptr(self.probe.as_mut_ptr().cast::<u64>().add(field as usize)) }
    }
}

/// The words of a [`Probe`].
#[derive(Clone, Copy)]
enum Field {
    Hold = 0,
    Leave = 1,
    Inside = 2,
    Entered = 3,
    Met = 4,
    Started = 5,
}

fn load(bpf: &mut Ebpf, name: &str) -> Result<()> {
    let program: &mut Xdp = bpf
        .program_mut(name)
        .with_context(|| format!("the object of the trials has no {name}"))?
        .try_into()?;
    match program.load() {
        Ok(()) | Err(aya::programs::ProgramError::AlreadyLoaded) => Ok(()),
        Err(error) => Err(refused(name, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs root. A timer finds the CPU held by nobody where the trial holds nothing off.
    #[test]
    fn the_two_ways_are_told_apart() {
        if crate::privilege::missing().is_ok_and(|missing| !missing.is_empty()) {
            return;
        }
        let found = find(None).unwrap();
        let asked = find(Some(Stepping::LiveFrames)).unwrap();
        assert_eq!((asked.way, asked.why), (Stepping::LiveFrames, Why::Asked));
        let mut trial = Trial::new().unwrap();
        if found.way == Stepping::TestRuns && !is_realtime() {
            assert_eq!(trial.by_timer(), Some(false));
        }
        // Nothing else begins while live frames are run, on any kernel that is supported.
        assert_ne!(trial.by_thread(Stepping::LiveFrames).unwrap(), Some(true));
    }
}
