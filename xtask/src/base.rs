//! What has changed since the commit that a landing is compared with, so that checks of what did not
//! change can be left out.
//!
//! Where that commit cannot be found, everything counts as changed.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    str,
};

use anyhow::{Context, Result, bail};

use crate::sh::{self, say};

/// The variable that names the commit to compare with.
const VARIABLE: &str = "TWHEEL_BASE";
/// Names of the main branch, the best first.
const MAIN: [&str; 2] = ["refs/remotes/origin/main", "refs/heads/main"];
/// No landing takes longer than this, in seconds: on the main branch, an older commit was there
/// before it.
const LANDING: i64 = 24 * 60 * 60;
/// What the loom models in `twheel-common/tests` are built from.
const LOOM: [&str; 3] = ["twheel-common", "Cargo.lock", "Cargo.toml"];

/// The commit that a landing is compared with.
pub struct Base {
    git: Git,
    /// The commit's hash and what it is; `None` if there is none.
    commit: Option<(String, String)>,
}

/// The files that differ from a [`Base`], whether committed or not.
pub struct Changed {
    git: Git,
    /// The base, and the files; `None` if they are unknown.
    known: Option<(String, BTreeSet<String>)>,
    why: String,
}

impl Base {
    /// `TWHEEL_BASE`; else, on a branch, where it left the main branch; else, on the main branch,
    /// the newest commit that was there before this landing began.
    pub fn find() -> Self {
        Self::of(sh::workspace(), env::var(VARIABLE).ok().as_deref())
    }

    fn of(tree: &Path, given: Option<&str>) -> Self {
        let git = Git(tree.to_owned());
        let commit = match given.map(str::trim).filter(|it| !it.is_empty()) {
            // How GitHub names the commit before the first one.
            Some(given) if given.bytes().all(|digit| digit == b'0') => None,
            Some(given) => match git.commit(given) {
                Some(commit) => Some((commit, format!("{VARIABLE}={given}"))),
                // As after a forced push: then everything counts as changed.
                None => {
                    say!("{VARIABLE} names no commit of this repository: {given}.");
                    None
                }
            },
            None => git.base(),
        };
        Self { git, commit }
    }

    /// What has changed since.
    pub fn changed(self) -> Changed {
        let Self { git, commit } = self;
        let files = commit.as_ref().and_then(|(commit, _)| git.changed(commit));
        let why = match (&commit, &files) {
            (Some((commit, what)), Some(files)) => {
                let commit = commit.get(..12).unwrap_or(commit);
                format!("{} files differ from {commit}, {what}", files.len())
            }
            _ => "there is no commit to compare with".to_owned(),
        };
        let known = commit.map(|(commit, _)| commit).zip(files);
        Changed { git, known, why }
    }
}

impl Changed {
    /// Whether it is known what has changed.
    pub fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// Whether one of these files, or a file in one of these directories, has changed; true if that
    /// is unknown.
    pub fn touches(&self, paths: &[&str]) -> bool {
        self.any(|file| paths.iter().any(|path| file.starts_with(path)))
    }

    /// Whether a file for which this is true has changed; true if that is unknown.
    pub fn any(&self, is_meant: impl Fn(&Path) -> bool) -> bool {
        match &self.known {
            Some((_, files)) => files.iter().any(|file| is_meant(Path::new(file))),
            None => true,
        }
    }

    /// What it was compared with, for a line that is printed.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// The differences of these files and directories, as `git diff` writes them. New files are
    /// included.
    pub fn diff(&self, paths: &[&str]) -> Result<String> {
        let (base, _) = self.known.as_ref().context(self.why.clone())?;
        let mut diff = self.git.diff(&[&[base, "--"], paths].concat(), &[0])?;
        let untracked = self.git.untracked().context("git lists no new files")?;
        let is_meant = |file: &&String| paths.iter().any(|path| Path::new(file).starts_with(path));
        for file in untracked.iter().filter(is_meant) {
            diff += &self
                .git
                .diff(&["--no-index", "--", "/dev/null", file], &[0, 1])?;
        }
        Ok(diff)
    }
}

/// Whether the models that loom checks may have changed; if not, they need not be checked again.
pub fn loom_is_touched(changed: &Changed) -> bool {
    changed.touches(&LOOM)
}

/// git, in a working tree.
struct Git(PathBuf);

impl Git {
    fn command(&self) -> Command {
        let mut git = Command::new("git");
        // Where git calls hooks, it names its own repository.
        for variable in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
            git.env_remove(variable);
        }
        git.current_dir(&self.0);
        git
    }

    /// What git answers; `None` if it fails, as where there is no repository.
    fn ask(&self, args: &[&str]) -> Option<String> {
        let mut git = self.command();
        let output = git.args(args).stderr(Stdio::null()).output().ok()?;
        let answer = String::from_utf8(output.stdout).ok()?;
        output.status.success().then_some(answer)
    }

    /// The commit of this name.
    fn commit(&self, name: &str) -> Option<String> {
        let name = format!("{name}^{{commit}}");
        let commit = self.ask(&[
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            &name,
        ])?;
        Some(commit.trim().to_owned())
    }

    /// Without `TWHEEL_BASE`: the commit to compare with, and what it is.
    fn base(&self) -> Option<(String, String)> {
        // Sources may lie unpacked in a repository of something else.
        let top = self.ask(&["rev-parse", "--show-toplevel"])?;
        if fs::canonicalize(top.trim()).ok()? != fs::canonicalize(&self.0).ok()? {
            return None;
        }
        let head = self.commit("HEAD")?;
        let main = MAIN.into_iter().find(|name| self.commit(name).is_some())?;
        let fork = self.ask(&["merge-base", "HEAD", main])?.trim().to_owned();
        if fork != head {
            let main = main.trim_start_matches("refs/").split_once('/')?.1;
            return Some((fork, format!("where this branch left {main}")));
        }
        // HEAD is on the main branch.
        let commits = self.ask(&["log", "--first-parent", "--format=%H %ct", "HEAD"])?;
        let mut commits = commits.lines().filter_map(|line| {
            let (commit, time) = line.split_once(' ')?;
            Some((commit, time.parse::<i64>().ok()?))
        });
        let (_, landed) = commits.next()?;
        let (before, _) = commits.find(|(_, time)| landed - time >= LANDING)?;
        let what = "the newest commit that is a day older";
        Some((before.to_owned(), what.to_owned()))
    }

    /// The files that differ from a commit, or are new.
    fn changed(&self, commit: &str) -> Option<BTreeSet<String>> {
        let mut files = self.untracked()?;
        let args = ["diff", "--name-only", "-z", "--no-renames", "--no-relative"];
        let differing = self.ask(&[&args[..], &["--no-ext-diff", commit, "--"]].concat())?;
        files.extend(differing.split_terminator('\0').map(str::to_owned));
        Some(files)
    }

    /// The files that git does not know and is not told to ignore.
    fn untracked(&self) -> Option<BTreeSet<String>> {
        let files = self.ask(&["ls-files", "-z", "--others", "--exclude-standard"])?;
        Some(files.split_terminator('\0').map(str::to_owned).collect())
    }

    /// A diff in git's usual form, whatever the user has configured. Fails unless git exits with one
    /// of these codes.
    fn diff(&self, args: &[&str], codes: &[i32]) -> Result<String> {
        let mut git = self.command();
        git.args(["diff", "--no-color", "--no-ext-diff", "--no-textconv"])
            .args(["--no-renames", "--no-relative"])
            .args(["--src-prefix=a/", "--dst-prefix=b/"])
            .args(args)
            .stderr(Stdio::inherit());
        let output = git.output().context("cannot run git diff")?;
        if !output.status.code().is_some_and(|it| codes.contains(&it)) {
            bail!("git diff failed ({})", output.status);
        }
        String::from_utf8(output.stdout).context("git diff wrote something not UTF-8")
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::PathBuf,
        process::{self, Command},
    };

    use super::{Base, Changed, Git, loom_is_touched};

    /// A repository for a test, which removes it.
    struct Repository(Git);

    impl Repository {
        fn new(name: &str) -> Self {
            let id = process::id();
            let tree = std::env::temp_dir().join(format!("twheel-base-{name}-{id}"));
            fs::create_dir_all(&tree).unwrap();
            let repository = Self(Git(tree));
            repository.git(&["init", "--quiet", "--initial-branch=main"]);
            repository
        }

        fn tree(&self) -> &PathBuf {
            &self.0.0
        }

        /// git, with what a commit needs whatever the user has configured.
        fn command(&self) -> Command {
            let mut git = self.0.command();
            for setting in ["user.name=t", "user.email=t@t", "commit.gpgsign=false"] {
                git.args(["-c", setting]);
            }
            git
        }

        fn git(&self, args: &[&str]) -> String {
            let output = self.command().args(args).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{args:?}: {error}");
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        }

        fn write(&self, file: &str, text: &str) {
            let path = self.tree().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        /// Commits a change of a file, so many hours after the first commit.
        fn commit(&self, file: &str, hours: u32) -> String {
            self.write(file, &format!("{hours}\n"));
            self.git(&["add", "--all"]);
            let time = format!("{} +0000", 1_700_000_000 + hours * 3600);
            let mut git = self.command();
            git.args(["commit", "--quiet", "--message", file])
                .env("GIT_COMMITTER_DATE", &time)
                .env("GIT_AUTHOR_DATE", &time);
            assert!(git.status().unwrap().success());
            self.git(&["rev-parse", "HEAD"])
        }

        fn base(&self, given: Option<&str>) -> Option<String> {
            let base = Base::of(self.tree(), given);
            base.commit.map(|(commit, _)| commit)
        }

        fn changed(&self) -> Changed {
            Base::of(self.tree(), None).changed()
        }
    }

    impl Drop for Repository {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.tree());
        }
    }

    #[test]
    fn on_the_main_branch_what_was_there_a_day_before_is_the_base() {
        let repository = Repository::new("main");
        repository.commit("a", 0);
        assert_eq!(repository.base(None), None);
        repository.commit("b", 23);
        assert_eq!(repository.base(None), None);
        let before = repository.commit("c", 40);
        repository.commit("d", 60);
        repository.commit("e", 65);
        assert_eq!(repository.base(None), Some(before));
        // What was merged was not on the main branch before.
        let before = repository.commit("f", 100);
        repository.git(&["checkout", "--quiet", "-b", "branch"]);
        repository.commit("g", 110);
        repository.git(&["checkout", "--quiet", "main"]);
        let args = ["merge", "--quiet", "--no-ff", "--message=m", "branch"];
        repository.git(&args);
        repository.commit("h", 130);
        let base = repository.base(None);
        assert_eq!(base, Some(before));
    }

    #[test]
    fn on_a_branch_the_base_is_where_it_began() {
        let repository = Repository::new("branch");
        let first = repository.commit("a", 0);
        repository.git(&["checkout", "--quiet", "-b", "branch"]);
        repository.commit("b", 100);
        repository.commit("c", 200);
        assert_eq!(repository.base(None), Some(first.clone()));
        // The main branch goes on elsewhere.
        repository.git(&["checkout", "--quiet", "main"]);
        let second = repository.commit("d", 201);
        repository.git(&["checkout", "--quiet", "branch"]);
        assert_eq!(repository.base(None), Some(first.clone()));
        let merge = ["merge", "--quiet", "--message=m", "main"];
        repository.git(&merge);
        assert_eq!(repository.base(None), Some(second.clone()));
        // origin's main branch counts more than a local one.
        repository.git(&["update-ref", "refs/remotes/origin/main", &first]);
        assert_eq!(repository.base(None), Some(first));
    }

    #[test]
    fn a_given_base_counts_if_it_exists() {
        let repository = Repository::new("given");
        let first = repository.commit("a", 0);
        repository.commit("b", 100);
        repository.commit("c", 101);
        assert_eq!(repository.base(Some("HEAD~2")), Some(first.clone()));
        assert_eq!(repository.base(Some(&first)), Some(first.clone()));
        assert_eq!(repository.base(Some("")), Some(first));
        assert_eq!(repository.base(Some(&"0".repeat(40))), None);
        assert_eq!(repository.base(Some("nothing")), None);
        assert_eq!(repository.base(Some("--help")), None);
    }

    #[test]
    fn files_that_are_not_committed_count_as_changed() {
        let repository = Repository::new("files");
        for file in ["kept", "twheel-common/src/gone", "src/edited", ".gitignore"] {
            repository.write(file, "built\n");
        }
        repository.commit("old", 0);
        repository.commit("docs/committed", 100);
        repository.write("src/edited", "one line\n");
        repository.write("src/new file", "a new line\n");
        repository.write("built", "ignored\n");
        fs::remove_file(repository.tree().join("twheel-common/src/gone")).unwrap();
        let changed = repository.changed();
        assert!(changed.is_known() && changed.why().starts_with("4 files differ from "));
        for path in [
            "src",
            "src/",
            "src/edited",
            "src/new file",
            "docs/committed",
        ] {
            assert!(changed.touches(&["nothing", path]), "{path}");
        }
        for path in ["kept", "built", "old", "sr", "src/edite", ".gitignore"] {
            assert!(!changed.touches(&[path]), "{path}");
        }
        assert!(changed.touches(&["twheel-common"]) && loom_is_touched(&changed));
        assert!(!changed.touches(&[]));
        let diff = changed.diff(&["src"]).unwrap();
        for line in ["+++ b/src/edited", "-built", "+one line", "+a new line"] {
            assert!(diff.lines().any(|it| it == line), "{line}: {diff}");
        }
        assert!(!diff.contains("committed") && diff.contains("--- /dev/null"));
        assert_eq!(changed.diff(&["kept"]).unwrap(), "");
    }

    #[test]
    fn what_is_unknown_counts_as_changed() {
        let directory = std::env::temp_dir().join(format!("twheel-base-none-{}", process::id()));
        fs::create_dir_all(&directory).unwrap();
        let changed = Base::of(&directory, None).changed();
        assert!(!changed.is_known() && changed.touches(&["anything"]) && changed.touches(&[]));
        assert!(changed.diff(&["src"]).is_err());
        assert_eq!(changed.why(), "there is no commit to compare with");
        fs::remove_dir(&directory).unwrap();
        // Sources in another repository.
        let repository = Repository::new("outer");
        repository.commit("inner/file", 0);
        repository.commit("inner/file", 100);
        let inner = Base::of(&repository.tree().join("inner"), None);
        assert!(!inner.changed().is_known());
    }

    #[test]
    fn a_shallow_clone_has_no_base() {
        let repository = Repository::new("deep");
        repository.commit("a", 0);
        repository.commit("b", 100);
        let clone = std::env::temp_dir().join(format!("twheel-base-shallow-{}", process::id()));
        let from = format!("file://{}", repository.tree().display());
        let to = clone.display().to_string();
        repository.git(&["clone", "--quiet", "--depth=1", &from, &to]);
        let changed = Base::of(&clone, None).changed();
        assert!(!changed.is_known());
        fs::remove_dir_all(&clone).unwrap();
    }
}
