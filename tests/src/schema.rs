//! Checks the lines that commands print against `docs/events.schema.json`.

use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use jsonschema::Validator;
use serde_json::Value;

static VALIDATOR: LazyLock<Validator> = LazyLock::new(|| {
    let schema = include_str!("../../docs/events.schema.json");
    let schema: Value = serde_json::from_str(schema).expect("the schema is JSON");
    jsonschema::validator_for(&schema).expect("the schema is a schema")
});

/// Checks a line. Text for people is not checked.
///
/// # Errors
///
/// It is an object that is not as the schema has it.
pub fn check(line: &str) -> Result<()> {
    if !line.starts_with('{') {
        return Ok(());
    }
    let value: Value = serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))?;
    let errors: Vec<_> = VALIDATOR
        .iter_errors(&value)
        .map(|error| error.to_string())
        .collect();
    if !errors.is_empty() {
        bail!("not as docs/events.schema.json has it: {errors:?}: {line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_something_wrong_is_refused() {
        let good = r#"{"schema":1,"event":"run","time":"2026-11-25T10:00:00.000000Z","host":"gw1","instance":"eth0@host.5","seq":1,"what":"summary","flows":0}"#;
        check(good).unwrap();
        check("1 flow deleted").unwrap();
        for (from, to) in [
            ("\"schema\":1", "\"schema\":2"),
            ("\"event\":\"run\"", "\"event\":\"ran\""),
            ("000000Z", "000Z"),
            (",\"seq\":1", ""),
            ("\"summary\"", "\"summed\""),
            ("\"flows\":0", "\"flows\":null"),
            ("\"flows\":0", "\"more\":0"),
            ("}", "},"),
        ] {
            let bad = good.replace(from, to);
            assert_ne!(bad, good);
            check(&bad).unwrap_err();
        }
    }
}
