//! What `twheel doctor` reports on hosts in good order and on others; and that bars and colours are
//! printed on terminals only, and closed pipes are tolerated.

mod findings;
mod printing;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::SERVER,
    running::Ended,
};

/// A host with the interface [`SERVER`]; there is no host at the other end.
fn host() -> Result<Namespace> {
    require_root();
    let host = Namespace::new("doctor")?;
    host.ip(&format!("link add {SERVER} type veth peer name other"))?;
    Ok(host)
}

/// Runs `doctor --json` on the host. Returns the findings and the exit code.
fn examine(host: &Namespace, args: &[&str]) -> Result<(Vec<Value>, Option<i32>)> {
    let ended = host.twheel_once(&[&["doctor", "--json"], args].concat())?;
    let code = ended.code();
    Ok((findings(&ended)?, code))
}

fn findings(ended: &Ended) -> Result<Vec<Value>> {
    let lines = ended.lines.iter();
    lines
        .map(|line| serde_json::from_str(&line.text).with_context(|| line.text.clone()))
        .collect()
}

/// Checks that exactly one finding of this check has these words in its text, and that it has this
/// status and a remedy with these words.
fn check(
    found: &[Value],
    name: &str,
    status: &str,
    what: &str,
    remedy: Option<&str>,
) -> Result<()> {
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap_or("").to_owned();
    let mut about = found
        .iter()
        .filter(|it| text(it, "check") == name && text(it, "what").contains(what));
    let finding = about
        .next()
        .with_context(|| format!("no finding {name} with {what:?} in {found:#?}"))?;
    ensure!(
        about.next().is_none(),
        "several findings {name} with {what:?} in {found:#?}"
    );
    ensure!(
        text(finding, "status") == status,
        "the status is not {status}: {finding}"
    );
    match remedy {
        Some(remedy) => ensure!(
            text(finding, "remedy").contains(remedy),
            "no remedy {remedy:?} in {finding}"
        ),
        None => ensure!(
            finding["remedy"].is_null(),
            "an unexpected remedy: {finding}"
        ),
    }
    Ok(())
}
