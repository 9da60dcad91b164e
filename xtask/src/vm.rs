//! `cargo xtask vm-test`: Debian's kernels in a virtual machine, and the tests in there.
//!
//! The machine has no disk: an initramfs holds the kernel's modules, the programs and what they link to. The processor
//! is emulated (TCG), so neither KVM nor a processor's features are needed, and it is some ten times slower.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    run, setup,
    sh::{self, say},
    toolchain,
};

/// Debian's packages of kernels, the newest first: backported, and the stock one of its release.
const KERNELS: [&str; 2] = ["linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64"];
/// The README's requirement, which the program checks: older ones are to be refused.
const OLDEST: (u32, u32) = (6, 12);
/// Tests of attaching, touching, expiring, adopting.
const TESTS: [&str; 1] = ["namespaces"];
/// What tests call, beside the programs that are built.
const PROGRAMS: [&str; 4] = [
    "/usr/bin/kmod",
    "/bin/ip",
    "/usr/bin/nsenter",
    "/usr/sbin/nft",
];
/// The program with every option that adds to what the kernel must verify.
const EVERYTHING: &str = "timeout -s INT 30 /bin/twheel run --iface lo --mode generic --proto tcp,udp,icmp \
                          --accounting --rto on --reap enforce=reset --i-know-this-drops-traffic \
                          --history off >/tmp/all 2>&1\ngrep attached /tmp/all || code=1\n";
/// `twheel`'s exit code where the host lacks something.
const LACKING: i32 = 4;
/// Seconds that a machine may take.
const LIMIT: &str = "900";
/// Ends the machine's output: the exit code of what was run.
const ENDED: &str = "vm: ended ";

/// Boots each kernel, or the one named, and runs the tests there.
pub fn test(kernel: Option<&str>) -> Result<()> {
    setup::vm()?;
    let built = run::build(None)?;
    let tests = TESTS
        .iter()
        .map(|test| executable(test))
        .collect::<Result<Vec<_>>>()?;
    let mut tested = 0;
    for package in KERNELS
        .iter()
        .filter(|it| kernel.is_none_or(|kernel| kernel == **it))
    {
        let kernel = Kernel::fetch(package)?;
        let new_enough = kernel.version()? >= OLDEST;
        let script = if new_enough {
            let run = |test: &PathBuf| {
                let name = test.file_name().unwrap_or_default().display();
                format!("/bin/{name} --test-threads=1 || code=$?\n")
            };
            let tests: String = tests.iter().map(run).collect();
            format!("code=0\n/bin/twheel doctor || code=$?\n{EVERYTHING}{tests}")
        } else {
            let (major, minor) = OLDEST;
            format!(
                "/bin/twheel run --iface lo --mode generic >/tmp/refused 2>&1\ncode=$?\ncat /tmp/refused\n\
                 grep -qF 'kernel {} is too old: twheel needs {major}.{minor} or newer' /tmp/refused || code=1\n",
                kernel.release
            )
        };
        say!(
            "Booting Debian's {}; this usually takes {}.",
            kernel.release,
            if new_enough { "4 min" } else { "20 s" }
        );
        let code = boot(&kernel, &built, &tests, &script)?;
        if new_enough {
            ensure!(code == 0, "the tests fail on {}", kernel.release);
            println!("{}: the tests pass", kernel.release);
        } else {
            ensure!(
                code == LACKING,
                "{} is too old, and the program did not say so, or ended with {code}, not {LACKING}",
                kernel.release
            );
            println!("{}: refused by name, as too old", kernel.release);
        }
        tested += 1;
    }
    ensure!(
        tested > 0,
        "no such kernel: there are {}",
        KERNELS.join(", ")
    );
    Ok(())
}

/// A kernel and its modules, unpacked.
struct Kernel {
    root: PathBuf,
    release: String,
}

impl Kernel {
    /// From Debian; once.
    fn fetch(package: &str) -> Result<Self> {
        let depends = sh::output(Command::new("apt-cache").args(["depends", package]))?;
        let image = depends
            .lines()
            .find_map(|line| line.trim().strip_prefix("Depends: "))
            .with_context(|| format!("there is no package {package}"))?;
        let cache = toolchain::cache()?.join("vm");
        let root = cache.join(image);
        if !root.join("boot").exists() {
            fs::create_dir_all(&cache)
                .with_context(|| format!("cannot make {}", cache.display()))?;
            say!("Fetching {image} with apt-get; this usually takes 10 s.");
            let mut download = Command::new("apt-get");
            sh::run(
                download
                    .args(["download", "-qq", "-o", "APT::Sandbox::User=root", image])
                    .current_dir(&cache),
            )?;
            let deb = fs::read_dir(&cache)?
                .flatten()
                .map(|entry| entry.path())
                .find(|path| {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    name.starts_with(image) && name.ends_with(".deb")
                })
                .context("apt-get has fetched nothing")?;
            // What was unpacked in part is not found by the next run.
            let partial = cache.join("partial");
            let _ = fs::remove_dir_all(&partial);
            sh::run(Command::new("dpkg-deb").arg("-x").args([&deb, &partial]))?;
            fs::remove_file(deb)?;
            fs::rename(partial, &root)?;
        }
        let release = image.trim_start_matches("linux-image-").to_owned();
        Ok(Self { root, release })
    }

    fn version(&self) -> Result<(u32, u32)> {
        let mut numbers = self.release.split('.').map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
            _ => bail!("{} is no kernel's release", self.release),
        }
    }
}

/// Builds a binary of the tests.
fn executable(test: &str) -> Result<PathBuf> {
    let mut cargo = sh::cargo();
    cargo.args("test --quiet --release --no-run --message-format=json".split(' '));
    let messages = sh::output(cargo.args(["-p", "twheel-tests", "--test", test]))?;
    let path = messages.lines().find_map(|line| {
        let (_, path) = line.split_once("\"executable\":\"")?;
        let path = Path::new(path.split('"').next()?);
        let name = path.file_name()?.to_str()?;
        name.starts_with(test).then(|| path.to_owned())
    });
    path.with_context(|| format!("cargo has built no {test}"))
}

/// Boots, shows what the machine prints, and says with what it ended.
fn boot(kernel: &Kernel, built: &run::Built, tests: &[PathBuf], script: &str) -> Result<i32> {
    let dir = sh::target("vm");
    let root = dir.join("root");
    let _ = fs::remove_dir_all(&root);
    for directory in [
        "proc", "sys", "dev", "tmp", "run", "etc", "bin", "lib", "var/lib",
    ] {
        fs::create_dir_all(root.join(directory))?;
    }
    symlink("/run", root.join("var/run"))?;
    for program in PROGRAMS.map(Path::new).into_iter() {
        install(&root, program, program)?;
    }
    install(&root, Path::new("/bin/busybox"), Path::new("/bin/busybox"))?;
    fs::create_dir_all(root.join("sbin"))?;
    for (link, to) in [
        ("sbin/modprobe", "/usr/bin/kmod"),
        ("bin/sh", "busybox"),
        ("bin/mount", "busybox"),
    ] {
        symlink(to, root.join(link))?;
    }
    install(&root, &built.twheel, Path::new("/bin/twheel"))?;
    for test in tests {
        let to = Path::new("/bin").join(test.file_name().context("a test has no name")?);
        install(&root, test, &to)?;
    }
    install(&root, &built.objects.twheel, Path::new("/twheel.bpf.o"))?;
    let modules = root.join("lib");
    sh::run(
        Command::new("cp")
            .arg("-a")
            .args([&kernel.root.join("lib/modules"), &modules]),
    )?;
    sh::run(
        Command::new("/sbin/depmod")
            .arg("-b")
            .arg(&root)
            .arg(&kernel.release),
    )?;
    let init = root.join("init");
    fs::write(
        &init,
        format!(
            "#!/bin/busybox sh\n\
             export PATH=/bin:/sbin:/usr/bin:/usr/sbin TWHEEL_BIN=/bin/twheel TWHEEL_BPF_OBJECT=/twheel.bpf.o\n\
             mount -t proc proc /proc\nmount -t sysfs sys /sys\nmount -t devtmpfs dev /dev\n\
             mount -t tmpfs tmp /tmp\nmount -t tmpfs run /run\nmount -t bpf bpf /sys/fs/bpf\n\
             /bin/ip link set lo up\n{script}echo \"{ENDED}$code\"\n/bin/busybox poweroff -f\n"
        ),
    )?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    let initrd = dir.join("initrd.gz");
    let pack = "find . | cpio --quiet -o -H newc | gzip -1";
    let file = fs::File::create(&initrd)?;
    sh::run(
        Command::new("sh")
            .args(["-c", pack])
            .current_dir(&root)
            .stdout(file),
    )?;

    let image = kernel
        .root
        .join("boot")
        .join(format!("vmlinuz-{}", kernel.release));
    let mut qemu = Command::new("timeout");
    qemu.args([LIMIT, "qemu-system-x86_64"])
        .args("-accel tcg,thread=multi -cpu max,la57=off -smp 2 -m 3G".split(' '))
        .args("-nographic -no-reboot -nic none".split(' '))
        .args(["-append", "console=ttyS0 quiet panic=-1"])
        .arg("-kernel")
        .arg(image)
        .arg("-initrd")
        .arg(initrd)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut qemu = qemu.spawn().context("cannot run qemu-system-x86_64")?;
    let mut code = None;
    let serial = BufReader::new(qemu.stdout.take().context("qemu has no output")?);
    for line in serial.split(b'\n') {
        let line = line.context("cannot read the machine's output")?;
        let line = String::from_utf8_lossy(&line);
        println!("{}", line.trim_end());
        if let Some((_, ended)) = line.split_once(ENDED) {
            code = ended.trim().parse().ok();
        }
    }
    qemu.wait()?;
    code.context("the machine did not come to an end, or not within its time")
}

/// Copies a program into the machine, without what only debuggers read, and what it is linked to.
fn install(root: &Path, from: &Path, to: &Path) -> Result<()> {
    let place = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    let copy = |from: &Path, to: &Path| -> Result<()> {
        let to = place(to);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    };
    copy(from, to)?;
    // Prints nothing that has a path for what is linked to nothing.
    let ldd = Command::new("ldd")
        .arg(from)
        .output()
        .context("cannot run ldd")?;
    for word in String::from_utf8_lossy(&ldd.stdout).split_whitespace() {
        if word.starts_with('/') && !word.ends_with(':') {
            copy(Path::new(word), Path::new(word))?;
        }
    }
    if from.starts_with(sh::target("")) && to.starts_with("/bin") {
        sh::run(Command::new("strip").arg(place(to)))?;
    }
    Ok(())
}
