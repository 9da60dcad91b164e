//! The files of a package, as they will stand below `/`.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::Package;
use crate::sh;

/// A directory with the files of a package.
pub struct Tree {
    /// The directory.
    pub root: PathBuf,
}

impl Tree {
    /// Makes the files that all packages have in common. `zsh`: the directory of its completions.
    pub fn new(package: &Package<'_>, kind: &str, zsh: &str) -> Result<Self> {
        let root = package
            .directory
            .join(format!("{kind}-{}", package.arch.name()));
        let _ = fs::remove_dir_all(&root);
        let tree = Self { root };
        let program = fs::read(package.program)
            .with_context(|| format!("cannot read {}", package.program.display()))?;
        tree.put("usr/bin/twheel", &program, 0o755)?;
        for unit in ["twheel@.service", "twheel-export@.service"] {
            let text = installed(unit)?.replace("/usr/local/bin/", "/usr/bin/");
            tree.put(
                &format!("usr/lib/systemd/system/{unit}"),
                text.as_bytes(),
                0o644,
            )?;
        }
        tree.copy("twheel.sysusers", "usr/lib/sysusers.d/twheel.conf")?;
        for file in ["twheel.toml", "policy.toml"] {
            tree.copy(file, &format!("etc/twheel/{file}"))?;
        }
        for directory in ["grafana", "prometheus", "policies"] {
            for name in names(&dist(directory))? {
                let name = format!("{directory}/{name}");
                tree.copy(&name, &format!("usr/share/twheel/{name}"))?;
            }
        }
        tree.copy(
            "../docs/grafana-dashboard.json",
            "usr/share/twheel/grafana/twheel.json",
        )?;
        let documents = names(&dist("../docs"))?.into_iter();
        for name in documents.filter(|it| it.ends_with(".md")) {
            let text = dist_text(&format!("../docs/{name}"))?;
            tree.put(
                &format!("usr/share/doc/twheel/{name}"),
                text.as_bytes(),
                0o644,
            )?;
        }
        tree.printed(package.native, zsh)?;
        Ok(tree)
    }

    /// What the program prints: man pages, completions, an example of a configuration file.
    fn printed(&self, native: &Path, zsh: &str) -> Result<()> {
        let man = self.root.join("usr/share/man/man1");
        sh::run(Command::new(native).args(["man", "--dir"]).arg(&man))?;
        let mut pages: Vec<_> = fs::read_dir(&man)?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        pages.sort();
        for page in &pages {
            set_mode(page, 0o644)?;
        }
        sh::run(Command::new("gzip").arg("-9n").args(&pages))?;
        // Called by its name, so that the scripts do not name this one's directory.
        let directory = native.parent().context("a program is in a directory")?;
        let path = env::var_os("PATH").unwrap_or_default();
        let path = [directory.to_owned()]
            .into_iter()
            .chain(env::split_paths(&path));
        let path = env::join_paths(path)?;
        let print = |args: &[&str]| {
            let mut sh = Command::new("sh");
            sh.args(["-c", "exec twheel \"$@\"", "sh"]);
            sh::output(sh.args(args).env("PATH", &path))
        };
        for (shell, file) in [
            ("bash", "usr/share/bash-completion/completions/twheel"),
            ("fish", "usr/share/fish/vendor_completions.d/twheel.fish"),
            ("zsh", &format!("{zsh}/_twheel")),
        ] {
            let script = print(&["completions", shell])?;
            self.put(file, script.as_bytes(), 0o644)?;
        }
        let example = print(&["config", "example"])?;
        let file = "usr/share/doc/twheel/examples/twheel.toml";
        self.put(file, example.as_bytes(), 0o644)
    }

    /// Writes a file.
    pub fn put(&self, file: &str, content: &[u8], mode: u32) -> Result<()> {
        let path = self.root.join(file);
        let directory = path.parent().context("files are in directories")?;
        fs::create_dir_all(directory)
            .and_then(|()| fs::write(&path, content))
            .with_context(|| format!("cannot write {}", path.display()))?;
        set_mode(&path, mode)
    }

    /// Copies a file of `dist`.
    pub fn copy(&self, from: &str, to: &str) -> Result<()> {
        self.put(to, installed(from)?.as_bytes(), 0o644)
    }

    /// Writes a file, compressed, and with `.gz` behind its name.
    pub fn put_compressed(&self, file: &str, content: &str) -> Result<()> {
        self.put(file, content.as_bytes(), 0o644)?;
        sh::run(Command::new("gzip").arg("-9n").arg(self.root.join(file)))
    }

    /// All files, relative to the root, in order.
    pub fn files(&self) -> Result<Vec<String>> {
        let mut find = Command::new("find");
        find.args([".", "-type", "f", "-printf", "%P\\n"]);
        let found = sh::output(find.current_dir(&self.root))?;
        let mut files: Vec<_> = found.lines().map(str::to_owned).collect();
        files.sort();
        Ok(files)
    }

    /// Lets directories be read by all, whatever the umask is.
    pub fn open(&self) -> Result<()> {
        let mut find = Command::new("find");
        find.arg(&self.root);
        sh::run(find.args(["-type", "d", "-exec", "chmod", "0755", "{}", "+"]))
    }
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot change {}", path.display()))
}

/// The text of a file of `dist`, which names documents where the package has them.
fn installed(file: &str) -> Result<String> {
    Ok(dist_text(file)?.replace(" docs/", " /usr/share/doc/twheel/"))
}

/// The names in a directory, in order.
fn names(directory: &Path) -> Result<Vec<String>> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let name = |entry: std::io::Result<fs::DirEntry>| {
        Ok(entry?.file_name().to_string_lossy().into_owned())
    };
    let mut names = entries.map(name).collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// A path in `dist`.
pub fn dist(file: &str) -> PathBuf {
    sh::workspace().join("dist").join(file)
}

/// The text of a file of `dist`.
pub fn dist_text(file: &str) -> Result<String> {
    let path = dist(file);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}
