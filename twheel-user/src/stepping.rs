//! Finds how this kernel can run the stepper program: by trial, not by the kernel's version.
//!
//! While a step runs on a CPU, no packet may be processed there: both change the CPU's wheel,
//! without a lock. Packets are processed in softirqs ("bottom halves"). A test run disables them
//! since Linux 6.3 (commit af2d0d09eabe, which distributions have backported). A test run of live
//! frames has always disabled them, but costs more.
//!
//! With PREEMPT_RT, a thread that has disabled bottom halves can itself be preempted. Only a lock
//! per CPU keeps two such sections apart, and newer kernels may be built without it
//! (`CONFIG_PREEMPT_RT_NEEDS_BH_LOCK`).

use std::{
    fs,
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
use twheel_common::{packet::ETH_HEADER, probe::Probe};

use crate::{
    cpu::{pin_to, run_ahead},
    failure::{Failure, Kind},
    mapped::Mapped,
    verifier::refused,
};

/// The object file with the trial programs, embedded in this program.
static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/probe.bpf.o"));

/// How to run programs that are attached to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Stepping {
    /// Plain test runs, which disable softirqs
    #[value(skip)]
    TestRuns,
    /// Test runs of live frames: work on every kernel, but cost more
    LiveFrames,
}

impl Stepping {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::TestRuns => "test runs",
            Self::LiveFrames => "live frames",
        }
    }
}

/// How long a program holds a CPU while a timer of a fraction of that time fires.
const FOR_TIMER: Duration = Duration::from_millis(2);
/// How long, at most, a program holds a CPU while a thread tries to preempt it.
const HOLD: Duration = Duration::from_millis(40);
/// How long the program is held once that thread tries to run.
const AFTER: Duration = Duration::from_millis(5);
/// Most trials with a thread.
const TRIES: u32 = 10;
/// Most trials with a timer.
const TIMERS: u32 = 20;
/// Quiet trials that are needed to conclude that nothing else runs on a CPU during a test run
/// there.
const QUIET: u32 = 3;

/// How to run the stepper program, and why that was chosen.
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
    /// Test runs disable softirqs, or keep them apart.
    Safe,
    /// Test runs do neither.
    Unsafe,
    /// The trials could not tell.
    Untold,
    /// The user chose it.
    Asked,
}

/// Finds the way by trial, or checks the one that the user chose.
///
/// # Errors
///
/// [`Kind::Unsupported`]: this kernel has no safe way.
pub fn find(asked: Option<Stepping>) -> Result<Found> {
    let mut trial = Trial::new()?;
    let (way, why) = match (asked, is_realtime()) {
        // With PREEMPT_RT the chosen way needs a trial, too: the kernel may be unsafe either way.
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

/// `met`: whether softirqs of the CPU run during a test run there; `None` if the trials could not
/// tell.
fn choose(met: Option<bool>) -> (Stepping, Why) {
    match met {
        Some(false) => (Stepping::TestRuns, Why::Safe),
        Some(true) => (Stepping::LiveFrames, Why::Unsafe),
        None => (Stepping::LiveFrames, Why::Untold),
    }
}

/// With PREEMPT_RT: whether two softirqs of a CPU interleave during test runs; `None` if the trials
/// could not tell. Unless test runs are safe, it also checks that live frames are.
///
/// # Errors
///
/// [`Kind::Unsupported`]: softirqs interleave during live frames, too, or the trials could not
/// tell.
fn by_thread(trial: &mut Trial) -> Result<Option<bool>> {
    let test_runs = trial.by_thread(Stepping::TestRuns)?;
    if test_runs == Some(false) {
        return Ok(test_runs);
    }
    match trial.by_thread(Stepping::LiveFrames)? {
        Some(false) => Ok(test_runs),
        Some(true) => Err(unsafe_here(
            "this kernel (PREEMPT_RT) lets two softirqs of a CPU interleave, which would corrupt \
             twheel's wheels: boot a kernel with CONFIG_PREEMPT_RT_NEEDS_BH_LOCK, or one without \
             PREEMPT_RT",
        )),
        None => Err(unsafe_here(
            "twheel could not find out whether this kernel (PREEMPT_RT) lets two softirqs of a CPU \
             interleave, because the CPUs are busy: try again",
        )),
    }
}

fn unsafe_here(message: &str) -> anyhow::Error {
    Failure::new(Kind::Unsupported, message.to_owned()).into()
}

/// Whether this kernel has PREEMPT_RT, from its version string (`init/Makefile`).
/// `/sys/kernel/realtime` exists only with the out-of-tree patches from before the merge.
pub fn is_realtime() -> bool {
    let version = fs::read_to_string("/proc/sys/kernel/version");
    version.is_ok_and(|version| version.split_whitespace().any(|it| it == "PREEMPT_RT"))
}

/// The trial programs, loaded.
struct Trial {
    bpf: Ebpf,
    probe: Mapped,
    cpu: u32,
}

impl Trial {
    fn new() -> Result<Self> {
        let bpf = EbpfLoader::new().load(OBJECT);
        let bpf = bpf.context("cannot load the trial programs")?;
        let Some(Map::Array(map)) = bpf.map("PROBE") else {
            return Err(anyhow!(
                "the object file of the trial programs has no map PROBE"
            ));
        };
        let probe = Mapped::new(map.fd(), size_of::<Probe>()).context("cannot map PROBE")?;
        let cpu = online_cpus()
            .map_err(|(path, error)| anyhow!(error).context(format!("cannot read {path}")))?
            .first()
            .copied()
            .unwrap_or(0);
        Ok(Self { bpf, probe, cpu })
    }

    /// Whether a bottom half runs on a CPU during a plain test run there; `None` if the trials
    /// could not tell.
    ///
    /// If the kernel leaves bottom halves to `ksoftirqd`, while that thread runs, none runs during
    /// the hold, whether they are disabled or not. So a trial counts as quiet only if the bottom
    /// half has run by the time that the call returns: it then ran as soon as it was allowed to, so
    /// `ksoftirqd` did not run. A single bottom half that runs during the hold settles the
    /// question.
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

    /// Checks that the kernel can run a program with live frames.
    ///
    /// # Errors
    ///
    /// [`Kind::Unsupported`]: it cannot.
    fn check_live_frames(&mut self) -> Result<()> {
        load(&mut self.bpf, "probe_enter")?;
        self.run("probe_enter", Stepping::LiveFrames)
            .map_err(|error| {
                let message = "this kernel has no test runs of live frames (Linux 5.18), which \
                               twheel needs to step its wheels: boot a newer kernel";
                error.context(Failure::new(Kind::Unsupported, message.to_owned()))
            })
    }

    /// Whether a thread that may preempt can begin a run on a CPU during another run there; `None`
    /// if the trials could not tell. One such run settles the question; [`QUIET`] trials without
    /// one settle it, too.
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
                    // If this fails, the thread may come too late, and then the trial does not
                    // count.
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
                // This thread watches from a CPU that is not held, if there is one.
                let until = Instant::now() + HOLD;
                while !asks.load(Ordering::SeqCst) && Instant::now() < until {
                    thread::sleep(Duration::from_micros(200));
                }
                thread::sleep(AFTER);
                // The trial counts if the other thread tried to run all that time, while the CPU
                // was held.
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

    /// Resets the fields of the last trial.
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
            .with_context(|| {
                format!("the object file of the trial programs has no program {name}")
            })?
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
        self.probe.word(field as usize)
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
        .with_context(|| format!("the object file of the trial programs has no program {name}"))?
        .try_into()?;
    match program.load() {
        Ok(()) | Err(aya::programs::ProgramError::AlreadyLoaded) => Ok(()),
        Err(error) => Err(refused(name, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs root. Checks that the trials can tell the two ways apart.
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
        // During live frames nothing else begins, on any supported kernel.
        assert_ne!(trial.by_thread(Stepping::LiveFrames).unwrap(), Some(true));
    }
}
