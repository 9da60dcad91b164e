//! The position of twheel's programs among other programs on the same hook: `--order`.

use std::{collections::HashMap, fmt, str::FromStr};

use aya::programs::loaded_programs;

/// How much of a program's name the kernel keeps, bytes.
const NAME_BYTES: usize = 15;

/// The position of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Before all others.
    First,
    /// After all others.
    Last,
    /// Before this one.
    Before(Anchor),
    /// After this one.
    After(Anchor),
}

/// A program that is not twheel's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// By its program id.
    Id(u32),
    /// By its name; a clsact filter by the filter's name.
    Name(String),
}

/// A program on a hook beside twheel's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    /// Its program's id; a filter may have none.
    pub id: Option<u32>,
    /// Its name, if known.
    pub name: Option<String>,
}

/// A position in a list of other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// Before all.
    First,
    /// After all.
    Last,
    /// Before this one.
    Before(usize),
    /// After this one.
    After(usize),
}

/// The names of programs by their ids. Reading them needs `CAP_SYS_ADMIN`, which the running twheel
/// drops, so only programs that were loaded before that have names here.
#[derive(Clone, Debug, Default)]
pub struct ProgramNames(HashMap<u32, String>);

impl ProgramNames {
    /// Reads the names of the loaded programs; none if this user may not see them.
    pub fn read() -> Self {
        let programs = loaded_programs().flatten();
        let named = programs.filter_map(|it| Some((it.id(), it.name_as_str()?.to_owned())));
        Self(named.collect())
    }

    /// The name of a program.
    pub fn get(&self, id: u32) -> Option<&str> {
        self.0.get(&id).map(String::as_str)
    }

    /// Describes a program in messages.
    pub fn describe(&self, id: u32) -> String {
        self.other(id).to_string()
    }

    /// The program as an entry in a list of others.
    pub fn other(&self, id: u32) -> Other {
        Other {
            id: Some(id),
            name: self.get(id).map(str::to_owned),
        }
    }
}

impl fmt::Display for Other {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.name, self.id) {
            (Some(name), Some(id)) => write!(f, "{} (id {id})", name.escape_debug()),
            (Some(name), None) => write!(f, "{}", name.escape_debug()),
            (None, Some(id)) => write!(f, "id {id}"),
            (None, None) => write!(f, "a filter without a name"),
        }
    }
}

/// Lists programs in messages.
pub fn list(others: &[Other]) -> String {
    match others {
        [] => "none".to_owned(),
        _ => others
            .iter()
            .map(Other::to_string)
            .collect::<Vec<_>>()
            .join(", "),
    }
}

impl Anchor {
    fn is(&self, other: &Other) -> bool {
        match self {
            Self::Id(id) => other.id == Some(*id),
            Self::Name(name) => other.name.as_deref().is_some_and(|other| {
                let kept = name.as_bytes().get(..NAME_BYTES);
                other == name || kept == Some(other.as_bytes())
            }),
        }
    }
}

impl Order {
    /// The program before or after which twheel's comes.
    pub fn anchor(&self) -> Option<&Anchor> {
        match self {
            Self::First | Self::Last => None,
            Self::Before(anchor) | Self::After(anchor) => Some(anchor),
        }
    }

    /// Whether the program before or after which twheel's comes is among these; `true` if the order
    /// names none.
    pub fn is_met(&self, others: &[Other]) -> bool {
        let anchor = self.anchor();
        anchor.is_none_or(|anchor| others.iter().any(|it| anchor.is(it)))
    }

    /// The position among others, which are in their order. If several have the anchor's name, it
    /// is before, or after, all of them; if none has it, it is the first position.
    pub fn position(&self, others: &[Other]) -> Position {
        let place = match self {
            Self::First => None,
            Self::Last => Some(Position::Last),
            Self::Before(anchor) => {
                let found = others.iter().position(|it| anchor.is(it));
                found.map(Position::Before)
            }
            Self::After(anchor) => {
                let found = others.iter().rposition(|it| anchor.is(it));
                found.map(Position::After)
            }
        };
        place.unwrap_or(Position::First)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, anchor) = match self {
            Self::First => return f.write_str("first"),
            Self::Last => return f.write_str("last"),
            Self::Before(anchor) => ("before", anchor),
            Self::After(anchor) => ("after", anchor),
        };
        match anchor {
            Anchor::Id(id) => write!(f, "{word}:id:{id}"),
            Anchor::Name(name) => write!(f, "{word}:{name}"),
        }
    }
}

impl FromStr for Order {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let anchor = |name: &str| match name.strip_prefix("id:") {
            _ if name.is_empty() || name.chars().any(char::is_control) => {
                Err("give the name of a program, or id:N".to_owned())
            }
            Some(id) => id.parse().map(Anchor::Id).map_err(|_| {
                format!("`{id}` is not the id of a program: `bpftool prog` lists them")
            }),
            None => Ok(Anchor::Name(name.to_owned())),
        };
        match text.split_once(':') {
            None if text == "first" => Ok(Self::First),
            None if text == "last" => Ok(Self::Last),
            Some(("before", name)) => anchor(name).map(Self::Before),
            Some(("after", name)) => anchor(name).map(Self::After),
            _ => Err(
                "give first, last, before:NAME or after:NAME, where NAME is a program's, or id:N"
                    .to_owned(),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_as_they_are_written() {
        for text in [
            "first",
            "last",
            "before:cil_from_netdev",
            "after:id:12",
            "before:a:b",
        ] {
            let order: Order = text.parse().unwrap();
            assert_eq!(order.to_string(), text);
        }
        for text in [
            "",
            "First",
            "first:x",
            "before",
            "before:",
            "after:id:",
            "after:id:x",
            "beside:x",
            "before:a\nb",
        ] {
            assert!(text.parse::<Order>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_place_is_beside_the_one_named() {
        let other = |id: u32, name: &str| Other {
            id: Some(id),
            name: Some(name.to_owned()),
        };
        let others = [
            other(3, "guard"),
            other(4, "a_name_that_is_"),
            other(5, "guard"),
        ];
        for (order, position, is_met) in [
            ("first", Position::First, true),
            ("last", Position::Last, true),
            ("before:guard", Position::Before(0), true),
            ("after:guard", Position::After(2), true),
            ("after:id:4", Position::After(1), true),
            // Longer than what the kernel keeps of a name.
            ("before:a_name_that_is_longer", Position::Before(1), true),
            ("before:a_name", Position::First, false),
            ("after:id:6", Position::First, false),
        ] {
            let order: Order = order.parse().unwrap();
            assert_eq!(order.position(&others), position, "{order}");
            assert_eq!(order.is_met(&others), is_met, "{order}");
        }
        assert_eq!(list(&others[..1]), "guard (id 3)");
        assert_eq!(list(&[]), "none");
    }
}
