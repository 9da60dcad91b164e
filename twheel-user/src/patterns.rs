//! Selects interfaces by name, by pattern, or all of them: for `--iface`, `--exclude` and `--zone`.

use anyhow::Result;
use glob::Pattern;

use crate::failure::{Failure, Kind};

/// Every interface but the loopback interface.
pub const ALL: &str = "all";
/// How many interfaces a run with a pattern can watch at once.
pub const ROOM: usize = 1024;
/// The longest pattern, in bytes: it becomes the name of a directory.
const LONGEST: usize = 64;

/// A name or pattern, and so the interfaces that it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The interface of this name.
    Name(String),
    /// The interfaces whose names match.
    Pattern(Pattern),
    /// All interfaces but the loopback interface.
    All,
}

impl Asked {
    /// Reads a name or a pattern.
    ///
    /// # Errors
    ///
    /// What is wrong with the pattern.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == ALL {
            return Ok(Self::All);
        }
        if !text.contains(['*', '?', '[']) {
            return Ok(Self::Name(text.to_owned()));
        }
        if text.len() > LONGEST {
            return Err(format!(
                "{}: a pattern has at most {LONGEST} characters",
                text.escape_debug()
            ));
        }
        if text.contains(|it: char| it == '/' || it.is_control()) {
            return Err(format!(
                "{}: no interface has such a name: leave out slashes and control characters",
                text.escape_debug()
            ));
        }
        // A single star: the glob library gives two stars a meaning for directories.
        let mut one_star = text.to_owned();
        while one_star.contains("**") {
            one_star = one_star.replace("**", "*");
        }
        match Pattern::new(&one_star) {
            Ok(pattern) => Ok(Self::Pattern(pattern)),
            Err(error) => Err(format!(
                "{text}: {}: * stands for any characters, ? for one, [ab] for one of these",
                error.msg
            )),
        }
    }

    /// The text as the user gave it.
    pub fn text(&self) -> &str {
        match self {
            Self::Name(name) => name,
            Self::Pattern(pattern) => pattern.as_str(),
            Self::All => ALL,
        }
    }

    /// Whether it may stand for several interfaces.
    pub fn is_pattern(&self) -> bool {
        !matches!(self, Self::Name(_))
    }

    /// Whether it stands for this interface. An interface whose name reads like a pattern matches
    /// itself.
    pub fn matches(&self, interface: &str) -> bool {
        match self {
            Self::Name(name) => name == interface,
            Self::Pattern(pattern) => pattern.matches(interface) || pattern.as_str() == interface,
            Self::All => interface != "lo",
        }
    }

    /// Whether some interface could match both. For two patterns, only the parts before their first
    /// special characters are compared.
    fn may_meet(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Name(name), other) | (other, Self::Name(name)) => other.matches(name),
            (Self::All, _) | (_, Self::All) => true,
            (Self::Pattern(one), Self::Pattern(two)) => {
                let (one, two) = (literal(one.as_str()), literal(two.as_str()));
                one.starts_with(two) || two.starts_with(one)
            }
        }
    }
}

/// The part of a pattern before its first special character.
fn literal(pattern: &str) -> &str {
    pattern.split(['*', '?', '[']).next().unwrap_or_default()
}

/// Splits lists at commas, except at those in brackets; each part once, without the blanks around it.
fn split(texts: &[String]) -> Vec<&str> {
    let mut parts: Vec<&str> = Vec::new();
    for text in texts {
        let mut in_brackets = false;
        let pieces = text.split(|it| {
            in_brackets = match it {
                '[' => true,
                ']' => false,
                _ => in_brackets,
            };
            it == ',' && !in_brackets
        });
        for piece in pieces.map(str::trim) {
            if !parts.contains(&piece) {
                parts.push(piece);
            }
        }
    }
    parts
}

/// Reads the values of an option.
///
/// # Errors
///
/// [`Kind::Usage`]: an invalid pattern, or an empty name.
pub fn parse(option: &str, texts: &[String]) -> Result<Vec<Asked>> {
    let refused = |why: String| Failure::new(Kind::Usage, format!("{option} {why}"));
    let parts = split(texts);
    let parse = |part: &&str| match part.is_empty() {
        true => Err(refused(
            "has an empty name: give a name, or remove the extra comma".to_owned(),
        )),
        false => Asked::parse(part).map_err(refused),
    };
    Ok(parts.iter().map(parse).collect::<Result<_, _>>()?)
}

/// The interfaces that a run watches.
#[derive(Clone, Debug)]
pub struct Selection {
    asked: Vec<Asked>,
    excluded: Vec<Asked>,
    /// In several network namespaces: then a name, too, may stand for several interfaces.
    is_everywhere: bool,
}

impl Selection {
    /// From the values of `--iface` and `--exclude`.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: a value cannot be read, or a name is both given and excluded.
    pub fn new(interfaces: &[String], exclude: &[String]) -> Result<Self> {
        let new = Self {
            asked: parse("--iface", interfaces)?,
            excluded: parse("--exclude", exclude)?,
            is_everywhere: false,
        };
        for name in new.names() {
            check_name(name)?;
        }
        if let Some(excluded) = new.excluded.iter().find(|it| it.text().contains('/')) {
            let message = format!(
                "--exclude {}: no interface has such a name: give it without its network namespace",
                excluded.text()
            );
            return Err(Failure::new(Kind::Usage, message).into());
        }
        for asked in &new.asked {
            let excluded = new.excluded.iter().find(|it| match asked {
                Asked::Name(name) => it.matches(name),
                pattern => it.text() == pattern.text() || **it == Asked::Pattern(any()),
            });
            if let Some(excluded) = excluded {
                let message = format!(
                    "--exclude {} leaves nothing of --iface {}: leave one of the two out",
                    excluded.text(),
                    asked.text()
                );
                return Err(Failure::new(Kind::Usage, message).into());
            }
        }
        Ok(new)
    }

    /// The same selection in several network namespaces, none of which need have an interface of a
    /// given name.
    pub fn everywhere(self) -> Self {
        Self {
            is_everywhere: true,
            ..self
        }
    }

    /// Whether it selects in several network namespaces.
    pub fn is_everywhere(&self) -> bool {
        self.is_everywhere
    }

    /// Whether it has a pattern, so that the selected interfaces may change.
    pub fn has_pattern(&self) -> bool {
        self.patterns().next().is_some()
    }

    /// The names, in the order given.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let is_name = |it: &&Asked| !self.is_pattern(it);
        self.asked.iter().filter(is_name).map(Asked::text)
    }

    /// The patterns, in the order given.
    pub fn patterns(&self) -> impl Iterator<Item = &Asked> {
        self.asked.iter().filter(|it| self.is_pattern(it))
    }

    fn is_pattern(&self, asked: &Asked) -> bool {
        self.is_everywhere || asked.is_pattern()
    }

    /// All names and patterns, as the user gave them.
    pub fn texts(&self) -> Vec<String> {
        self.asked.iter().map(|it| it.text().to_owned()).collect()
    }

    /// The least number of interfaces to expect; with a pattern, several.
    pub fn count(&self) -> usize {
        self.asked.len() + usize::from(self.has_pattern())
    }

    /// Whether it selects an interface.
    pub fn matches(&self, interface: &str) -> bool {
        let matches = |it: &Asked| it.matches(interface);
        self.asked.iter().any(matches) && !self.excludes(interface)
    }

    /// Whether it selects an interface by a pattern, and not by its name alone.
    pub fn matches_pattern(&self, interface: &str) -> bool {
        self.patterns().any(|it| it.matches(interface)) && !self.excludes(interface)
    }

    fn excludes(&self, interface: &str) -> bool {
        self.excluded.iter().any(|it| it.matches(interface))
    }

    /// Whether a name or pattern may stand for one of the selected interfaces.
    pub fn may_have(&self, other: &Asked) -> bool {
        if let Asked::Name(name) = other {
            // An interface of another network namespace: `blue/eth0`.
            let inner = name.rsplit_once('/').filter(|_| self.is_everywhere);
            return self.matches(inner.map_or(name, |(_, name)| name));
        }
        self.asked.iter().any(|it| it.may_meet(other))
    }
}

/// Fails if no interface can have this name: waiting for one would never end. A slash stands between
/// a network namespace and its interface.
fn check_name(name: &str) -> Result<()> {
    /// The kernel's longest name (`IFNAMSIZ`, without the zero at its end).
    const LONGEST: usize = 15;
    let why = if name.contains('/') {
        return Ok(());
    } else if name.len() > LONGEST {
        format!("the name of an interface has at most {LONGEST} characters")
    } else if name.contains(|it: char| it.is_whitespace() || it == ':') {
        "the name of an interface has no blanks and no colons".to_owned()
    } else {
        return Ok(());
    };
    let message = format!("--iface {}: {why}", name.escape_debug());
    Err(Failure::new(Kind::Usage, message).into())
}

fn any() -> Pattern {
    Pattern::new("*").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|it| (*it).to_owned()).collect()
    }

    fn selection(interfaces: &[&str], exclude: &[&str]) -> Result<Selection> {
        Selection::new(&texts(interfaces), &texts(exclude))
    }

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, matching, others) in [
            (
                "veth*",
                &["veth", "veth0", "veth.1"][..],
                &["eth0", "Veth0"][..],
            ),
            ("v**h", &["vh", "veth"], &["veth0"]),
            ("eth?", &["eth0", "eth*"], &["eth", "eth10"]),
            ("eth[0-2,x]", &["eth1", "ethx", "eth,"], &["eth3"]),
            ("eth[!0]", &["eth1"], &["eth0"]),
            ("a[*]", &["a*", "a[*]"], &["ab"]),
            ("all", &["eth0", "all"], &["lo"]),
            ("eth0", &["eth0"], &["eth00"]),
        ] {
            let asked = Asked::parse(pattern).unwrap();
            for name in matching {
                assert!(asked.matches(name), "{pattern} {name}");
            }
            for name in others {
                assert!(!asked.matches(name), "{pattern} {name}");
            }
        }
        for bad in ["eth[", "eth[]", "a/*", "a\n*", &"?".repeat(65)] {
            assert!(Asked::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn lists_and_patterns_are_merged() {
        let merged = selection(&["a, b", " b", "c[x,y]*", "d "], &["c?9"]).unwrap();
        assert_eq!(merged.texts(), ["a", "b", "c[x,y]*", "d"]);
        assert_eq!(merged.names().collect::<Vec<_>>(), ["a", "b", "d"]);
        assert!(merged.has_pattern() && merged.count() > 4);
        assert!(merged.matches("cx") && merged.matches("cy1") && merged.matches("d"));
        assert!(!merged.matches("cx9") && !merged.matches("cz"));
        assert!(merged.matches_pattern("cx") && !merged.matches_pattern("a"));
        assert_eq!(selection(&["a"], &[]).unwrap().count(), 1);
        for (interfaces, exclude) in [
            (&["a,,b"][..], &[][..]),
            (&["a"], &["a*"]),
            (&["a,b*"], &["b*"]),
            (&["all"], &["*"]),
            (&["all"], &["["]),
            (&[""], &[]),
            (&[","], &[]),
            (&["a"], &[" "]),
            (&["0123456789abcdef"], &[]),
            (&["a b"], &[]),
            (&["a:0"], &[]),
        ] {
            assert!(selection(interfaces, exclude).is_err(), "{interfaces:?}");
        }
        assert!(selection(&["0123456789abcde"], &[]).is_ok());
    }

    #[test]
    fn a_zone_is_of_something_that_is_watched() {
        let of = |interfaces: &[&str], zone: &str| {
            let asked = Asked::parse(zone).unwrap();
            selection(interfaces, &["veth9"]).unwrap().may_have(&asked)
        };
        assert!(of(&["vrf*"], "vrf*") && of(&["vrf*"], "vrf7") && of(&["vrf*"], "v*"));
        assert!(of(&["all"], "vrf*") && of(&["vrf7"], "vrf*") && of(&["eth0"], "all"));
        assert!(!of(&["veth*"], "vrf*") && !of(&["eth0"], "vrf*") && !of(&["veth*"], "eth0"));
        assert!(!of(&["veth*"], "veth9") && !of(&["all"], "lo"));
    }
}
