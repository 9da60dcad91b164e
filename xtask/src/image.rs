//! `cargo xtask image`: an OCI image of the static programs, as an archive, without a registry and
//! without a container engine.
//!
//! An image is a few JSON documents and tar files, named by their SHA-256
//! (<https://github.com/opencontainers/image-spec>). What is written here has no time but that of the
//! commit, no user and no order of a directory in it: the same programs give the same archive.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    str::FromStr,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{
    sh::{self, say},
    statics,
};

/// The name under which engines load the image, before the version.
const NAME: &str = "localhost/twheel";
/// Where the program is in the image.
const PROGRAM: &str = "usr/bin/twheel";
/// Users and groups: `--group twheel` finds the group, and events have names.
const PASSWD: &str = "root:x:0:0:root:/:/usr/bin/twheel\ntwheel:x:65532:65532::/:/usr/bin/twheel\n";
const GROUP: &str = "root:x:0:\ntwheel:x:65532:\n";
/// Bytes of a block of a tar file.
const BLOCK: usize = 512;

/// What goes into the image.
#[derive(Args)]
pub struct Options {
    /// A static program and its architecture, amd64 or arm64; once for each [default: both are built]
    #[arg(long, value_name = "ARCH=FILE")]
    program: Vec<Program>,
    /// The archive [default: target/image/twheel-VERSION.oci.tar]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// An architecture, by its names in OCI and in ELF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arch {
    name: &'static str,
    machine: u16,
}

const ARCHITECTURES: [Arch; 2] = [
    Arch {
        name: "amd64",
        machine: 62,
    },
    Arch {
        name: "arm64",
        machine: 183,
    },
];

/// A program for an architecture.
#[derive(Clone, Debug)]
pub struct Program {
    arch: Arch,
    file: PathBuf,
}

impl Program {
    /// A program that was built for an architecture.
    pub fn new(arch: statics::Arch, file: PathBuf) -> Self {
        let arch = match arch {
            statics::Arch::X86_64 => ARCHITECTURES[0],
            statics::Arch::Aarch64 => ARCHITECTURES[1],
        };
        Self { arch, file }
    }
}

impl FromStr for Program {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, file) = text
            .split_once('=')
            .ok_or("give ARCH=FILE, such as amd64=twheel")?;
        let arch = ARCHITECTURES.into_iter().find(|arch| arch.name == name);
        Ok(Self {
            arch: arch.ok_or("the architecture is amd64 or arm64")?,
            file: file.into(),
        })
    }
}

/// Makes the archive, and prints its path.
pub fn image(options: &Options) -> Result<()> {
    let path = options.output.clone().unwrap_or_else(|| {
        let name = format!("image/{}", file_name());
        sh::target(&name)
    });
    if options.program.is_empty() {
        let mut built = Vec::new();
        for arch in statics::Arch::ALL {
            built.push(Program::new(arch, statics::build(arch)?));
        }
        make(&built, &path)?;
    } else {
        make(&options.program, &path)?;
    }
    println!("{}", path.display());
    Ok(())
}

/// The usual name of the archive.
pub fn file_name() -> String {
    format!("twheel-{}.oci.tar", env!("CARGO_PKG_VERSION"))
}

/// Makes the archive of these programs.
pub fn make(of: &[Program], path: &Path) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let mut programs = BTreeMap::new();
    for Program { arch, file } in of {
        let program = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        is_fit(&program, *arch).with_context(|| format!("{}", file.display()))?;
        let before = programs.insert(arch.name, program);
        ensure!(before.is_none(), "two programs for {}", arch.name);
    }
    let archive = archive(&programs, version, epoch()?)?;
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    fs::write(path, &archive).with_context(|| format!("cannot write {}", path.display()))?;
    say!(
        "The image is {NAME}:{version}; its archive has the SHA-256 {}.",
        digest(&archive)
    );
    Ok(())
}

/// Seconds since 1970 of the image: `SOURCE_DATE_EPOCH`, or the time of the commit.
fn epoch() -> Result<u64> {
    let seconds = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(given) => given,
        Err(_) => statics::epoch()?,
    };
    let seconds = seconds.trim();
    seconds
        .parse()
        .with_context(|| format!("{seconds:?} is no number of seconds"))
}

/// Fails if this is no static program for the architecture. In an image without a C library no other
/// starts.
fn is_fit(program: &[u8], arch: Arch) -> Result<()> {
    let number = |at: usize, bytes: usize| -> Result<u64> {
        let found = program.get(at..at + bytes).context("ends in its headers")?;
        Ok(found
            .iter()
            .rev()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    // 64 bits, the lowest byte first.
    ensure!(
        program.starts_with(b"\x7fELF\x02\x01"),
        "is no 64-bit ELF program"
    );
    ensure!(
        number(18, 2)? == u64::from(arch.machine),
        "is no program for {}",
        arch.name
    );
    let (headers, size) = (
        usize::try_from(number(32, 8)?)?,
        usize::try_from(number(54, 2)?)?,
    );
    for header in 0..usize::try_from(number(56, 2)?)? {
        const INTERPRETER: u64 = 3;
        ensure!(
            number(headers + header * size, 4)? != INTERPRETER,
            "is linked dynamically: build a static one, for musl"
        );
    }
    Ok(())
}

/// The archive of an image layout with one index, and an image for each program.
fn archive(programs: &BTreeMap<&str, Vec<u8>>, version: &str, epoch: u64) -> Result<Vec<u8>> {
    let created = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(epoch));
    let created = created.to_string();
    let mut blobs = Blobs::default();
    let mut manifests = Vec::new();
    for (arch, program) in programs {
        let layer = layer(program, epoch)?;
        let config = json!({
            "created": created,
            "architecture": arch,
            "os": "linux",
            "config": {
                "Entrypoint": [format!("/{PROGRAM}")],
                "Cmd": ["--help"],
                "Env": ["PATH=/usr/bin"],
                "Labels": labels(version, &created),
                "StopSignal": "SIGTERM",
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", digest(&layer))]},
            "history": [{"created": created, "created_by": "cargo xtask image"}],
        });
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blobs.add_json("application/vnd.oci.image.config.v1+json", &config),
            "layers": [blobs.add("application/vnd.oci.image.layer.v1.tar+gzip", gzip(&layer)?)],
            "annotations": labels(version, &created),
        });
        let mut descriptor =
            blobs.add_json("application/vnd.oci.image.manifest.v1+json", &manifest);
        descriptor["platform"] = json!({"architecture": arch, "os": "linux"});
        manifests.push(descriptor);
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
        "annotations": labels(version, &created),
    });
    let mut descriptor = blobs.add_json("application/vnd.oci.image.index.v1+json", &index);
    descriptor["annotations"] = json!({
        // The first is for containerd, the second for podman and skopeo.
        "io.containerd.image.name": format!("{NAME}:{version}"),
        "org.opencontainers.image.ref.name": format!("{NAME}:{version}"),
    });
    let layout = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [descriptor],
    });

    let mut tar = Tar::new(epoch);
    tar.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    tar.file("index.json", 0o644, layout.to_string().as_bytes())?;
    tar.directory("blobs")?;
    tar.directory("blobs/sha256")?;
    for (digest, blob) in &blobs.0 {
        tar.file(&format!("blobs/sha256/{digest}"), 0o644, blob)?;
    }
    Ok(tar.end())
}

/// What registries show of an image.
fn labels(version: &str, created: &str) -> Value {
    json!({
        "org.opencontainers.image.created": created,
        "org.opencontainers.image.description":
            "Tracks network flows in the kernel and reports how they end",
        "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
        "org.opencontainers.image.title": "twheel",
        "org.opencontainers.image.version": version,
    })
}

/// The files of the image, as a tar file.
fn layer(program: &[u8], epoch: u64) -> Result<Vec<u8>> {
    let mut tar = Tar::new(epoch);
    tar.directory("etc")?;
    tar.file("etc/group", 0o644, GROUP.as_bytes())?;
    tar.file("etc/passwd", 0o644, PASSWD.as_bytes())?;
    for directory in [
        "usr",
        "usr/bin",
        "usr/share",
        "usr/share/licenses",
        "usr/share/licenses/twheel",
    ] {
        tar.directory(directory)?;
    }
    tar.file(PROGRAM, 0o755, program)?;
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let licence =
            fs::read(sh::workspace().join(name)).with_context(|| format!("cannot read {name}"))?;
        tar.file(
            &format!("usr/share/licenses/twheel/{name}"),
            0o644,
            &licence,
        )?;
    }
    Ok(tar.end())
}

/// The documents and layers of an image, by their digests.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    /// Adds one, and returns what refers to it.
    fn add(&mut self, media_type: &str, blob: Vec<u8>) -> Value {
        let digest = digest(&blob);
        let descriptor = json!({
            "mediaType": media_type,
            "digest": format!("sha256:{digest}"),
            "size": blob.len(),
        });
        self.0.insert(digest, blob);
        descriptor
    }

    fn add_json(&mut self, media_type: &str, document: &Value) -> Value {
        self.add(media_type, document.to_string().into_bytes())
    }
}

/// The SHA-256, in hexadecimal digits.
fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// Compresses by gzip, without a name or a time.
fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = Command::new("gzip");
    gzip.args(["-9", "--no-name"]);
    let mut gzip = gzip
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run gzip")?;
    let mut stdin = gzip.stdin.take().context("gzip has no standard input")?;
    let output = std::thread::scope(|scope| {
        // Beside the reader, else both could wait.
        let writer = scope.spawn(move || stdin.write_all(bytes));
        let output = gzip.wait_with_output();
        writer
            .join()
            .map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        anyhow::Ok(output?)
    })?;
    if !output.status.success() {
        bail!("gzip failed ({})", output.status);
    }
    Ok(output.stdout)
}

/// A tar file (POSIX.1-1988, "ustar"), all of which belongs to root.
struct Tar {
    bytes: Vec<u8>,
    /// The time of each file, in seconds since 1970.
    epoch: u64,
}

impl Tar {
    fn new(epoch: u64) -> Self {
        Self {
            bytes: Vec::new(),
            epoch,
        }
    }

    fn directory(&mut self, path: &str) -> Result<()> {
        self.header(&format!("{path}/"), 0o755, b'5', 0)
    }

    fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.header(path, mode, b'0', content.len())?;
        self.bytes.extend(content);
        self.bytes
            .resize(self.bytes.len().next_multiple_of(BLOCK), 0);
        Ok(())
    }

    fn header(&mut self, path: &str, mode: u32, kind: u8, size: usize) -> Result<()> {
        let mut block = [0; BLOCK];
        let mut put =
            |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
        ensure!(path.len() <= 100, "{path} is too long for a tar file");
        put(0, path);
        put(100, &format!("{mode:07o}"));
        put(108, "0000000");
        put(116, "0000000");
        let size = format!("{size:011o}");
        ensure!(size.len() == 11, "{path} is too large for a tar file");
        put(124, &size);
        put(136, &format!("{:011o}", self.epoch));
        put(148, "        ");
        put(257, "ustar\x0000");
        put(265, "root");
        put(297, "root");
        block[156] = kind;
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend(block);
        Ok(())
    }

    /// The whole file: two empty blocks end it.
    fn end(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 2 * BLOCK, 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs, process::Command};

    use serde_json::Value;

    use super::{ARCHITECTURES, archive, digest, is_fit};
    use crate::sh;

    /// The head of a program with one program header, of this type.
    fn program(machine: u16, header: u32) -> Vec<u8> {
        let mut program = vec![0; 120];
        program[..6].copy_from_slice(b"\x7fELF\x02\x01");
        program[18..20].copy_from_slice(&machine.to_le_bytes());
        program[32] = 64;
        program[54] = 56;
        program[56] = 1;
        program[64..68].copy_from_slice(&header.to_le_bytes());
        program
    }

    #[test]
    fn only_static_programs_of_the_architecture_are_taken() {
        let [amd64, arm64] = ARCHITECTURES;
        assert!(is_fit(&program(62, 1), amd64).is_ok());
        assert!(is_fit(&program(183, 1), arm64).is_ok());
        let refusal = |program: &[u8]| is_fit(program, amd64).unwrap_err().to_string();
        assert_eq!(refusal(&program(183, 1)), "is no program for amd64");
        assert!(refusal(&program(62, 3)).starts_with("is linked dynamically"));
        assert_eq!(refusal(b"#!/bin/sh"), "is no 64-bit ELF program");
        assert_eq!(refusal(&program(62, 1)[..64]), "ends in its headers");
    }

    /// Unpacks an archive with tar, as others would, and follows its references from the index to the
    /// files.
    #[test]
    fn an_archive_is_the_same_again_and_each_reference_leads_somewhere() {
        let programs = BTreeMap::from([("amd64", program(62, 1)), ("arm64", program(183, 1))]);
        let made = archive(&programs, "1.2.3", 1_795_604_166).unwrap();
        assert!(made == archive(&programs, "1.2.3", 1_795_604_166).unwrap());

        let directory = std::env::temp_dir().join(format!("twheel-image-{}", std::process::id()));
        let path = |name: &str| directory.join(name);
        let unpack = |archive: &str, into: &str| {
            fs::create_dir_all(path(into)).unwrap();
            let mut tar = Command::new("tar");
            tar.args(["-C", into, "--no-same-owner", "-xf", archive]);
            sh::run(tar.current_dir(&directory)).unwrap();
        };
        fs::create_dir_all(&directory).unwrap();
        fs::write(path("archive"), &made).unwrap();
        unpack("archive", "layout");
        let blob = |descriptor: &Value| {
            let name = descriptor["digest"].as_str().unwrap();
            let hash = name.strip_prefix("sha256:").unwrap();
            let blob = fs::read(path("layout/blobs/sha256").join(hash)).unwrap();
            assert_eq!(digest(&blob), hash);
            assert_eq!(descriptor["size"], blob.len());
            blob
        };
        let document = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();

        let layout = document(&fs::read(path("layout/index.json")).unwrap());
        let index = document(&blob(&layout["manifests"][0]));
        for (number, (arch, program)) in programs.iter().enumerate() {
            let descriptor = &index["manifests"][number];
            assert_eq!(descriptor["platform"]["architecture"], *arch);
            let manifest = document(&blob(descriptor));
            let config = document(&blob(&manifest["config"]));
            assert_eq!(config["architecture"], *arch);
            assert_eq!(config["created"], "2026-11-25T10:56:06Z");
            fs::write(path("layer.gz"), blob(&manifest["layers"][0])).unwrap();
            let mut gunzip = Command::new("gunzip");
            sh::run(gunzip.arg("-f").arg(path("layer.gz"))).unwrap();
            let layer = fs::read(path("layer")).unwrap();
            let diff = &config["rootfs"]["diff_ids"][0];
            assert_eq!(*diff, format!("sha256:{}", digest(&layer)));
            unpack("layer", arch);
            let entry = config["config"]["Entrypoint"][0].as_str().unwrap();
            let found = fs::read(path(arch).join(&entry[1..])).unwrap();
            assert!(found == *program);
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
