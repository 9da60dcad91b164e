//! The crates that twheel is made of: whether they may be used, and a list of them for whoever runs
//! it (a software bill of materials, SBOM).

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::{Value, json};

use crate::{
    sh::{self, say},
    statics::{self, Arch},
    toolchain, zig,
};

/// A tool from crates.io.
struct Tool {
    name: &'static str,
    version: &'static str,
    usually: &'static str,
}

const DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
    usually: "4 min",
};
const CYCLONEDX: Tool = Tool {
    name: "cargo-cyclonedx",
    version: "0.5.9",
    usually: "2 min",
};

impl Tool {
    /// The program, which is built once.
    fn path(&self) -> Result<PathBuf> {
        let tools = toolchain::cache()?.join("tools");
        let path = tools.join("bin").join(self.name);
        let says = |path: &Path| {
            let mut version = Command::new(path);
            sh::output(version.args([self.name.trim_start_matches("cargo-"), "--version"]))
        };
        if path.exists() && says(&path)?.trim().ends_with(self.version) {
            return Ok(path);
        }
        say!(
            "Building {} {} into {}; this usually takes {}.",
            self.name,
            self.version,
            tools.display(),
            self.usually
        );
        toolchain::build_tool(self.name, self.version, |_| {})?;
        Ok(path)
    }
}

/// What of the crates is checked.
#[derive(Args)]
pub struct Options {
    /// Leave out the advisories of RustSec, whose list is on GitHub
    #[arg(long)]
    without_advisories: bool,
}

/// Checks licences, sources and duplicates by `deny.toml`, and the advisories of RustSec.
pub fn deny(options: &Options) -> Result<()> {
    let mut deny = Command::new(DENY.path()?);
    deny.current_dir(sh::workspace())
        .args(["--all-features", "--locked", "check"])
        .args(["bans", "licenses", "sources"]);
    if !options.without_advisories {
        deny.arg("advisories");
    }
    sh::run(&mut deny)
}

/// Writes the list of what is in a static program, in the format of CycloneDX
/// (<https://cyclonedx.org/docs/1.5/json/>).
///
/// cargo-cyclonedx knows the crates. The C library, the runtime of C++ and the standard library of
/// Rust come with the compilers: they are added here. The same commit gives the same bytes.
pub fn sbom(arch: Arch, to: &Path) -> Result<()> {
    let tool = CYCLONEDX.path()?;
    // It writes beside each manifest, so it works on a copy.
    let copy = sh::target("sbom").join(arch.name());
    let _ = fs::remove_dir_all(&copy);
    statics::copy_sources(&copy)?;
    let target = statics::triple(arch);
    let mut cyclonedx = Command::new(tool);
    cyclonedx
        .current_dir(&copy)
        .args(["cyclonedx", "--quiet", "--format", "json"])
        .args(["--manifest-path", "twheel-user/Cargo.toml"])
        .args(["--features", statics::FEATURES, "--target", &target])
        .args(["--spec-version", "1.5", "--override-filename", "sbom"])
        .env("SOURCE_DATE_EPOCH", statics::epoch()?);
    sh::run(&mut cyclonedx)?;
    // Identifiers name the directory of the sources.
    let copy_name = copy.to_str().context("the target directory is not UTF-8")?;
    let list_of = |package: &str| {
        let written = copy.join(package).join("sbom.json");
        let text = fs::read_to_string(&written);
        let text = text.with_context(|| format!("cargo-cyclonedx has no list of {package}"))?;
        let list: Value = serde_json::from_str(&text.replace(copy_name, "/sources"))?;
        anyhow::Ok(list)
    };
    let list = with_toolchain(
        with_inner(list_of("twheel-user")?, &list_of("twheel-ebpf")?)?,
        toolchain::with_sources()?.release(),
    )?;
    let text = format!("{}\n", serde_json::to_string_pretty(&list)?);
    fs::write(to, text).with_context(|| format!("cannot write {}", to.display()))?;
    fs::remove_dir_all(&copy).context("cannot remove the copy of the sources")
}

/// The list of a program, with that of another one which it contains.
fn with_inner(mut list: Value, inner: &Value) -> Result<Value> {
    let name = |list: &Value| list["metadata"]["component"]["bom-ref"].clone();
    let (outer_name, inner_name) = (name(&list), name(inner));
    for (part, key) in [("components", "bom-ref"), ("dependencies", "ref")] {
        let own = (part == "components").then(|| inner["metadata"]["component"].clone());
        let more = inner[part].as_array().context("a list has no components")?;
        let all = list[part].as_array_mut();
        let all = all.context("a list has no components")?;
        for entry in own.iter().chain(more) {
            if !all.iter().any(|it| it[key] == entry[key]) {
                all.push(entry.clone());
            }
        }
    }
    let edges = list["dependencies"].as_array_mut();
    let mut edges = edges.into_iter().flatten();
    let edge = edges.find(|it| it["ref"] == outer_name);
    let edge = edge.context("a list does not say what its program needs")?;
    let needs = edge["dependsOn"].as_array_mut();
    needs
        .context("a list does not say what its program needs")?
        .push(inner_name);
    Ok(list)
}

/// The list, with what comes with the compilers.
fn with_toolchain(mut list: Value, rust: &str) -> Result<Value> {
    let components = list["components"].as_array_mut();
    let components = components.context("the list has no components")?;
    for name in ["aya", "aya-ebpf"] {
        ensure!(
            components.iter().any(|it| it["name"] == name),
            "the list of components has no {name}"
        );
    }
    for (name, version, licence) in [
        ("rust-std", rust, "MIT OR Apache-2.0"),
        (
            "zig (musl, libc++, libunwind)",
            zig::version(),
            "MIT AND (Apache-2.0 WITH LLVM-exception)",
        ),
    ] {
        components.push(json!({
            "type": "library",
            "bom-ref": format!("toolchain:{name}"),
            "name": name,
            "version": version,
            "scope": "required",
            "licenses": [{"expression": licence}],
        }));
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_what_is_in_the_object_inside() {
        let list = |name: &str, of: &[&str]| {
            json!({
                "metadata": {"component": {"bom-ref": name}},
                "components": of.iter().map(|it| json!({"bom-ref": it})).collect::<Vec<_>>(),
                "dependencies": [{"ref": name, "dependsOn": of}],
            })
        };
        let whole = with_inner(list("user", &["a", "b"]), &list("ebpf", &["b", "c"])).unwrap();
        let refs: Vec<_> = whole["components"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| &it["bom-ref"])
            .collect();
        assert_eq!(refs, ["a", "b", "ebpf", "c"]);
        assert_eq!(
            whole["dependencies"],
            json!([
                {"ref": "user", "dependsOn": ["a", "b", "ebpf"]},
                {"ref": "ebpf", "dependsOn": ["b", "c"]},
            ])
        );
        assert!(with_inner(json!({}), &list("ebpf", &[])).is_err());
    }

    #[test]
    fn a_list_has_the_compilers_libraries() {
        let list = json!({"components": [{"name": "aya"}, {"name": "aya-ebpf"}]});
        let list = with_toolchain(list, "1.96.0").unwrap();
        let names: Vec<_> = list["components"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| &it["name"])
            .collect();
        assert_eq!(
            names,
            [
                "aya",
                "aya-ebpf",
                "rust-std",
                "zig (musl, libc++, libunwind)"
            ]
        );
        assert!(with_toolchain(json!({"components": [{"name": "aya"}]}), "1.96.0").is_err());
        assert!(with_toolchain(json!({"components": []}), "1.96.0").is_err());
        assert!(with_toolchain(json!({}), "1.96.0").is_err());
    }
}
