//! What the kernel's verifier says of a program that it refuses.

use std::{env, fs, io, path::PathBuf, process};

use aya::programs::ProgramError;

use crate::{
    failure::{Failure, Kind},
    host,
};

/// The most instructions that the verifier processes (`BPF_COMPLEXITY_LIMIT_INSNS`,
/// `include/linux/bpf.h`).
const LIMIT: u32 = 1_000_000;
/// How much of the end of a log is kept, in bytes.
const LOG_BYTES: usize = 1 << 20;

/// The error for a program that the kernel refuses. The verifier's log is long, so it goes to a
/// file.
pub(crate) fn refused(name: &str, error: ProgramError) -> anyhow::Error {
    let ProgramError::LoadError {
        verifier_log,
        io_error,
    } = &error
    else {
        return anyhow::Error::new(error).context(format!("cannot load the program {name}"));
    };
    let log = verifier_log.to_string();
    let instructions: Option<u32> = log
        .rsplit_once("processed ")
        .and_then(|(_, text)| text.split_whitespace().next()?.parse().ok());
    let why = match (instructions, io_error.raw_os_error()) {
        (Some(LIMIT..), _) => "the kernel allows one million".to_owned(),
        // The log's buffer is full, not a disk.
        (_, Some(libc::ENOSPC)) => "the verifier's log was too long".to_owned(),
        _ => io_error.to_string(),
    };
    let instructions = match instructions {
        Some(number) => format!(" after {number} instructions"),
        None => String::new(),
    };
    let kept = match keep_log(name, &log) {
        Ok(Some(path)) => format!("the verifier's log is in {}", path.display()),
        Ok(None) => "the verifier wrote no log".to_owned(),
        Err(error) => format!("the verifier's log could not be written: {error}"),
    };
    Failure::new(
        Kind::Unsupported,
        format!(
            "kernel {} refuses the program {name}{instructions} ({why}): {kept}; please report it",
            host::release()
        ),
    )
    .into()
}

/// Writes the log to a file: in the state directory that systemd provides (the service has a
/// private /tmp, which disappears with it), otherwise to a new file in the directory for temporary
/// files. `None`: there is nothing to write.
fn keep_log(name: &str, log: &str) -> io::Result<Option<PathBuf>> {
    if log.is_empty() {
        return Ok(None);
    }
    let log = &log.as_bytes()[log.len().saturating_sub(LOG_BYTES)..];
    if let Some(directories) = env::var_os("STATE_DIRECTORY")
        && let Some(directory) = env::split_paths(&directories).next()
    {
        let path = directory.join(format!("{name}.log"));
        fs::write(&path, log)?;
        return Ok(Some(path));
    }
    let file = format!("twheel-{name}-{}.log", process::id());
    let path = env::temp_dir().join(file);
    // Must be a new file: everybody may write in that directory, so an existing one may be another
    // user's.
    io::Write::write_all(&mut fs::File::create_new(&path)?, log)?;
    Ok(Some(path))
}
