//! `dist/kubernetes`: the manifests and the chart are what the API of Kubernetes accepts, both make the
//! same objects, and `twheel run` takes the options that they give it.

mod agent;

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use twheel_tests::skipped;

/// By this variable `cargo xtask test` says where the tools are.
const TOOLS: &str = "TWHEEL_KUBERNETES_TOOLS";
/// The versions of Kubernetes whose API must accept the manifests: those of the package with the
/// schemas, from the first one with `appArmorProfile`.
const VERSIONS: [&str; 8] = [
    "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37",
];
/// The directories that kustomize builds, and the values with which the chart makes the same.
const VARIANTS: [(&str, Option<&str>); 5] = [
    ("base", None),
    ("overlays/export-kafka", Some("export-kafka")),
    ("overlays/netns", Some("netns")),
    ("overlays/prometheus", Some("prometheus")),
    ("overlays/reap", Some("reap")),
];

/// The directory of the tools. `None`: they are not installed, which is reported as a skipped test.
fn tools() -> Option<PathBuf> {
    let tools = std::env::var_os(TOOLS).map(PathBuf::from);
    let found = tools.filter(|tools| tools.join("bin/helm").exists());
    if found.is_none() {
        skipped(format_args!(
            "{TOOLS} names no environment with kubectl and helm: `cargo xtask test` makes one"
        ));
    }
    found
}

/// A path below `dist`.
fn dist(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../dist")
        .join(path)
}

/// The standard output of a command that must succeed, given this standard input.
fn output(mut command: Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    let mut stdin = child.stdin.take().context("no standard input")?;
    let ended = thread::scope(|scope| {
        // Beside the reader, else both could wait; a command that reads nothing closes the pipe.
        scope.spawn(move || stdin.write_all(input.as_bytes()));
        child.wait_with_output()
    })?;
    if !ended.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&ended.stderr));
    }
    Ok(String::from_utf8(ended.stdout)?)
}

/// What kustomize makes of a directory.
fn kustomized(tools: &Path, directory: &str) -> Result<String> {
    let mut kubectl = Command::new(tools.join("bin/kubectl"));
    kubectl
        .arg("kustomize")
        .arg(dist("kubernetes").join(directory));
    output(kubectl, "")
}

/// What the chart makes of values, and of others that are set on the command line.
fn charted(tools: &Path, values: Option<&str>, set: &[&str]) -> Result<String> {
    let mut helm = Command::new(tools.join("bin/helm"));
    helm.args(["template", "twheel", "--namespace", "twheel"])
        .arg(dist("kubernetes/chart"));
    if let Some(values) = values {
        let file = format!("kubernetes/chart/examples/{values}.yaml");
        helm.arg("--values").arg(dist(&file));
    }
    for set in set {
        helm.args(["--set-json", set]);
    }
    output(helm, "")
}

/// The objects in manifests, and what is wrong with each.
fn parsed(tools: &Path, manifests: &str) -> Result<Vec<(Value, Vec<String>)>> {
    let mut python = Command::new(tools.join("bin/python"));
    python
        .args(["-c", include_str!("manifests.py")])
        .args(VERSIONS);
    output(python, manifests)?
        .lines()
        .map(|line| {
            let mut line: Value = serde_json::from_str(line)?;
            let errors = serde_json::from_value(line["errors"].take())?;
            Ok((line["object"].take(), errors))
        })
        .collect()
}

/// The objects in manifests that are right, by their kinds.
fn objects(tools: &Path, manifests: &str) -> Result<BTreeMap<String, Value>> {
    let mut objects = BTreeMap::new();
    for (object, errors) in parsed(tools, manifests)? {
        ensure!(errors.is_empty(), "{errors:#?}");
        let kind = object["kind"].as_str().context("no kind")?.to_owned();
        ensure!(
            objects.insert(kind, object).is_none(),
            "two objects of a kind"
        );
    }
    Ok(objects)
}

#[test]
fn the_api_of_kubernetes_accepts_them() -> Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    for (directory, values) in VARIANTS {
        let found = objects(&tools, &kustomized(&tools, directory)?).context(directory)?;
        ensure!(found.contains_key("DaemonSet"), "{directory}: {found:?}");
        objects(&tools, &charted(&tools, values, &[])?).context(directory)?;
    }
    // What no overlay has.
    let set = [
        r#"imagePullSecrets=[{"name":"registry"}]"#,
        r#"metrics.address="[$(POD_IP)]""#,
        r#"podMonitor={"enabled":true,"labels":{"release":"prometheus"}}"#,
        r#"export={"enabled":true,"args":["syslog","--to=tcp:logs.example:514"],"secretName":"twheel"}"#,
        r#"extraCapabilities=["NET_RAW"]"#,
        r#"affinity={"nodeAffinity":{}}"#,
        r#"priorityClassName="system-node-critical""#,
        r#"podAnnotations={"a":"b"}"#,
        r#"policy="reap = []""#,
    ];
    let found = objects(&tools, &charted(&tools, None, &set)?)?;
    let pod = &found["DaemonSet"]["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["env"][0]["name"], "POD_IP");
    assert_eq!(pod["containers"][0]["env"][1]["value"], "[$(POD_IP)]");
    assert_eq!(found["ConfigMap"]["data"]["policy.toml"], "reap = []\n");
    Ok(())
}

#[test]
fn helm_finds_nothing_wrong_with_the_chart() -> Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let mut lint = Command::new(tools.join("bin/helm"));
    lint.args(["lint", "--strict"])
        .arg(dist("kubernetes/chart"));
    output(lint, "")?;
    Ok(())
}

#[test]
fn a_manifest_that_is_wrong_is_noticed() -> Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let right = kustomized(&tools, "base")?;
    for (from, to) in [
        ("hostNetwork: true", "hostNetwrok: true"),
        ("hostNetwork: true", "hostNetwork: 1"),
        ("containerPort: 9435", "containerPort: metrics"),
    ] {
        ensure!(right.contains(from), "{right}");
        let wrong = parsed(&tools, &right.replace(from, to))?;
        let errors: usize = wrong.iter().map(|(_, errors)| errors.len()).sum();
        ensure!(errors >= VERSIONS.len(), "{to}: {wrong:?}");
    }
    Ok(())
}

/// The objects without what only one of the two tools adds: labels that name it, what makes pods
/// restart when the configuration changes, and the namespace itself.
fn comparable(mut objects: BTreeMap<String, Value>) -> Result<BTreeMap<String, Value>> {
    objects.remove("Namespace");
    let name = objects["ConfigMap"]["metadata"]["name"].clone();
    let name = name.as_str().context("no name")?;
    ensure!(name == "twheel" || name.starts_with("twheel-"), "{name}");
    for object in objects.values_mut() {
        let labels = object["metadata"]["labels"].as_object_mut();
        let labels = labels.context("no labels")?;
        labels.remove("app.kubernetes.io/managed-by");
        labels.remove("helm.sh/chart");
        let text = object
            .to_string()
            .replace(&format!(r#""name":"{name}""#), r#""name":"twheel""#);
        *object = serde_json::from_str(&text)?;
    }
    let template = &mut objects.get_mut("DaemonSet").context("no DaemonSet")?["spec"]["template"];
    let metadata = template["metadata"]
        .as_object_mut()
        .context("no metadata")?;
    metadata.remove("annotations");
    let pod = &mut template["spec"];
    for list in ["containers", "volumes"] {
        sort(&mut pod[list])?;
    }
    for container in pod["containers"].as_array_mut().context("no containers")? {
        sort(&mut container["volumeMounts"])?;
    }
    Ok(objects)
}

/// Sorts things by their names: their order means nothing, and kustomize puts what it adds first.
fn sort(list: &mut Value) -> Result<()> {
    let list = list.as_array_mut().context("no list")?;
    list.sort_by_key(|it| it["name"].as_str().map(str::to_owned));
    Ok(())
}

#[test]
fn the_chart_makes_what_kustomize_makes() -> Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    for (directory, values) in VARIANTS {
        let plain = comparable(objects(&tools, &kustomized(&tools, directory)?)?)?;
        let chart = comparable(objects(&tools, &charted(&tools, values, &[])?)?)?;
        ensure!(
            plain.keys().eq(chart.keys()),
            "{directory}: {:?} and {:?}",
            plain.keys(),
            chart.keys()
        );
        for (kind, object) in &plain {
            let other = &chart[kind];
            ensure!(
                object == other,
                "{directory}: {kind} differs.\nkustomize: {object:#}\nchart: {other:#}"
            );
        }
    }
    Ok(())
}

/// Each overlay is compared, and each example of values.
#[test]
fn each_variant_is_tested_here() -> Result<()> {
    let names = |directory: &str| -> Result<Vec<String>> {
        let entries = fs::read_dir(dist(directory))?;
        let names = entries.map(|it| Ok(it?.file_name().into_string().unwrap_or_default()));
        let mut names: Vec<_> = names.collect::<Result<_>>()?;
        names.sort();
        Ok(names)
    };
    let overlays = VARIANTS
        .iter()
        .filter_map(|(name, _)| name.strip_prefix("overlays/"));
    ensure!(names("kubernetes/overlays")?.iter().eq(overlays));
    let values = VARIANTS.iter().filter_map(|(_, values)| *values);
    let values = values.map(|name| format!("{name}.yaml"));
    ensure!(names("kubernetes/chart/examples")?.into_iter().eq(values));
    Ok(())
}

/// kustomize reads no file outside its directory, so the policy is there twice.
#[test]
fn the_policy_is_that_of_the_examples() -> Result<()> {
    let [here, there] = [
        "kubernetes/base/policy.toml",
        "policies/kubernetes-node.toml",
    ]
    .map(|path| fs::read_to_string(dist(path)));
    ensure!(
        here? == there?,
        "dist/kubernetes/base/policy.toml differs from dist/policies/kubernetes-node.toml: copy it"
    );
    Ok(())
}

#[test]
fn versions_are_those_of_the_program() -> Result<()> {
    let Some(tools) = tools() else { return Ok(()) };
    let version = env!("CARGO_PKG_VERSION");
    let chart = fs::read_to_string(dist("kubernetes/chart/Chart.yaml"))?;
    for line in [
        format!("version: {version}"),
        format!("appVersion: \"{version}\""),
    ] {
        ensure!(chart.lines().any(|it| it == line), "Chart.yaml: no {line}");
    }
    for (directory, _) in VARIANTS {
        for (kind, object) in objects(&tools, &kustomized(&tools, directory)?)? {
            let label = &object["metadata"]["labels"]["app.kubernetes.io/version"];
            ensure!(
                kind == "Namespace" || label == version,
                "{directory}: {kind}: {label}"
            );
            let containers = &object["spec"]["template"]["spec"]["containers"];
            for container in containers.as_array().into_iter().flatten() {
                let image = format!("localhost/twheel:{version}");
                ensure!(container["image"] == image, "{directory}: {container}");
            }
        }
    }
    Ok(())
}
