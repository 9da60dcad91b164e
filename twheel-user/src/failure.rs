//! Failures that have an exit code of their own.

use std::{fmt, io};

/// What kind of failure; the discriminant is the exit code of `twheel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Anything that is not named below.
    Other = 1,
    /// Arguments that cannot be used (clap uses the same code).
    Usage = 2,
    /// The caller lacks capabilities.
    Permission = 3,
    /// The host lacks something: the kernel is too old, bpffs is not mounted.
    Unsupported = 4,
    /// The interface is unknown, or another program uses it.
    Interface = 5,
    /// There are pins that cannot be adopted, or none where some are needed.
    Pins = 6,
}

/// A failure of a [`Kind`], in one sentence that says what to do.
#[derive(Debug)]
pub struct Failure {
    kind: Kind,
    message: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// The exit code for an error: that of the outermost [`Failure`] in its chain of contexts.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let failure = error.downcast_ref::<Failure>();
    failure.map_or(Kind::Other, |failure| failure.kind) as u8
}

/// Whether the reader of standard output has closed it, which is not a failure.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let json = cause.downcast_ref::<serde_json::Error>();
        io.or(json.and_then(serde_json::Error::io_error_kind)) == Some(io::ErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_found_at_any_depth() {
        let failure = || Failure::new(Kind::Pins, "pins in the way");
        let cases = [
            anyhow::Error::new(failure()),
            anyhow::Error::new(failure())
                .context("inner")
                .context("outer"),
            anyhow::anyhow!("cause").context(failure()).context("outer"),
        ];
        for error in cases {
            assert_eq!(exit_code(&error), Kind::Pins as u8, "{error:#}");
        }
        assert_eq!(exit_code(&anyhow::anyhow!("other")), Kind::Other as u8);
    }

    #[test]
    fn a_broken_pipe_is_found_below_its_contexts() {
        let error = |kind| anyhow::Error::new(io::Error::from(kind)).context("cannot write");
        assert!(is_broken_pipe(&error(io::ErrorKind::BrokenPipe)));
        assert!(!is_broken_pipe(&error(io::ErrorKind::StorageFull)));
        assert!(!is_broken_pipe(&anyhow::anyhow!("other")));
    }
}
