//! How long the machine's CPUs are held up: a host that has other things to do leaves a virtual machine without them for
//! hundreds of milliseconds at times, and does not always say so (`steal` in `proc(5)`).

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long a watcher sleeps.
const NAP: Duration = Duration::from_millis(2);

/// A thread on each CPU, which sleeps and looks how much later it wakes.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// Nanoseconds.
    longest: AtomicU64,
}

impl Watch {
    /// Begins. As root its threads go before all that are not of real time, and see nothing but the host.
    pub fn start() -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared::default());
        let threads = (0..cpus)
            .map(|cpu| {
                let shared = shared.clone();
                thread::spawn(move || {
                    go_first(cpu);
                    shared.watch();
                })
            })
            .collect();
        Self { shared, threads }
    }

    /// Ends. Returns the longest time that any CPU was held up.
    pub fn stop(self) -> Duration {
        self.shared.stop.store(true, Relaxed);
        for thread in self.threads {
            // It panics nowhere.
            let _ = thread.join();
        }
        Duration::from_nanos(self.shared.longest.load(Relaxed))
    }
}

impl Shared {
    fn watch(&self) {
        let mut last = Instant::now();
        while !self.stop.load(Relaxed) {
            thread::sleep(NAP);
            let now = Instant::now();
            let held_up = (now - last).saturating_sub(NAP);
            self.longest.fetch_max(held_up.as_nanos() as u64, Relaxed);
            last = now;
        }
    }
}

/// Binds this thread to a CPU and, if that is allowed, puts it before all that are not of real time.
fn go_first(cpu: usize) {
    let param = libc::sched_param { sched_priority: 1 };
    // SAFETY: a set of no CPUs is all zeros, `CPU_SET` stays within it, and the kernel reads a set and a parameter that live
    // through the calls.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &param);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        thread,
        time::{Duration, Instant},
    };

    use super::{Watch, go_first};

    #[test]
    fn a_cpu_that_is_taken_is_seen() {
        // SAFETY: it cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            // Past libtest, which would keep it.
            let test = "tests::a_cpu_that_is_taken_is_seen";
            let _ = writeln!(
                std::io::stdout(),
                "test {test} ... skipped: threads of real time take root"
            );
            return;
        }
        let watch = Watch::start();
        thread::sleep(Duration::from_millis(20));
        // Of the same priority: the watcher waits.
        let taken = thread::spawn(|| {
            go_first(0);
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(60) {}
        });
        taken.join().unwrap();
        thread::sleep(Duration::from_millis(20));
        let longest = watch.stop();
        assert!(longest > Duration::from_millis(50), "{longest:?}");
    }
}
