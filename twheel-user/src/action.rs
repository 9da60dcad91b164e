//! The actions on an expired flow, and their outcomes.

use std::fmt;

use twheel_common::{event::Event, named};

/// An action. Actions are taken in this order. Packets are refused first, so that none reaches a
/// socket between the last check and its end. The RST is sent before the conntrack entry is
/// deleted, because the RST needs the entry to find its way.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Later packets are dropped.
    EnforceDrop = 1,
    /// Later packets are answered with a RST.
    EnforceReset = 2,
    /// Both ends get a RST.
    Reset = 4,
    /// The local socket is closed.
    Socket = 8,
    /// The kernel's conntrack entry is deleted.
    Conntrack = 16,
}

impl Action {
    /// All actions, in order.
    pub const ALL: [Self; 5] = [
        Self::EnforceDrop,
        Self::EnforceReset,
        Self::Reset,
        Self::Socket,
        Self::Conntrack,
    ];

    /// The stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Socket => "socket",
            Self::Conntrack => "conntrack",
            Self::EnforceDrop => "enforce=drop",
            Self::EnforceReset => "enforce=reset",
        }
    }

    /// The action of this name; `enforce` alone drops.
    pub fn from_name(name: &str) -> Option<Self> {
        if name == "enforce" {
            return Some(Self::EnforceDrop);
        }
        Self::ALL.into_iter().find(|action| action.name() == name)
    }

    /// Whether the action refuses later packets.
    pub fn enforces(self) -> bool {
        matches!(self, Self::EnforceDrop | Self::EnforceReset)
    }

    /// The index in [`ALL`](Self::ALL).
    pub fn index(self) -> usize {
        (self as u32).trailing_zeros() as usize
    }
}

/// A set of actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Actions(u32);

impl Actions {
    /// Parses a list with commas, or `none`.
    ///
    /// # Errors
    ///
    /// A name is not an action's, or two actions contradict each other.
    pub fn parse(list: &str) -> Result<Self, String> {
        if list == "none" {
            return Ok(Self::default());
        }
        let action = |name: &str| {
            if name == "none" {
                return Err("`none` stands alone: give `none`, or the actions".to_owned());
            }
            if name.is_empty() {
                return Err("an action is empty: remove the extra comma".to_owned());
            }
            Action::from_name(name).ok_or_else(|| {
                let names = Action::ALL.map(Action::name).join(", ");
                format!("unknown action `{name}`: give `none`, or some of {names}")
            })
        };
        let actions: Self = list.split(',').map(action).collect::<Result<_, _>>()?;
        if actions.iter().filter(|action| action.enforces()).count() > 1 {
            return Err(
                "enforce=drop and enforce=reset exclude each other: give only one".to_owned(),
            );
        }
        Ok(actions)
    }

    /// From the bits that are stored beside a rule's timeouts. Unknown bits are ignored.
    pub fn from_bits(bits: u32) -> Self {
        Action::ALL
            .into_iter()
            .filter(|action| bits & *action as u32 != 0)
            .collect()
    }

    /// The bits to store beside a rule's timeouts.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the set contains an action.
    pub fn has(self, action: Action) -> bool {
        self.0 & action as u32 != 0
    }

    /// The same set, with this action.
    pub fn with(self, action: Action) -> Self {
        Self(self.0 | action as u32)
    }

    /// The actions, in order.
    pub fn iter(self) -> impl Iterator<Item = Action> {
        Action::ALL
            .into_iter()
            .filter(move |action| self.0 & *action as u32 != 0)
    }
}

impl FromIterator<Action> for Actions {
    fn from_iter<I: IntoIterator<Item = Action>>(actions: I) -> Self {
        Self(actions.into_iter().fold(0, |bits, it| bits | it as u32))
    }
}

impl fmt::Display for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (number, action) in self.iter().enumerate() {
            write!(f, "{}{}", if number > 0 { "," } else { "" }, action.name())?;
        }
        Ok(())
    }
}

named! {
    /// What became of an action.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Outcome {
        /// done
        Done = "done",
        /// nothing to do
        Nothing = "nothing",
        /// failed
        Failed = "failed",
        /// not done: the flow is active again
        Back = "back",
        /// not done: the kernel saw activity within the timeout; the flow is tracked again
        Alive = "alive",
        /// not done: packets of only one side were seen, or a FIN was not acknowledged
        OneSided = "one_sided",
        /// not done: its addresses may be those of a flow in another VLAN, zone or network namespace
        OtherZone = "other_zone",
        /// not done: the flow may be active again: some packets found no free record in the table
        Unknown = "unknown",
        /// not done: the policy no longer asks for it
        Revoked = "revoked",
        /// not done: --protect excludes the flow
        Protected = "protected",
        /// not done: the reaper is paused (--reap-max-share)
        Paused = "paused",
        /// not done: the reaper's queue was full, or the run ended first
        Overrun = "overrun",
        /// would be done without --dry-run
        Would = "would",
        /// not done: it has no local socket in a cgroup that the policy names
        OtherCgroup = "other_cgroup",
    }
}

impl Outcome {
    /// Returns `Done` if the action was done before the others were stopped, else `why`.
    pub(crate) fn or(self, why: Self) -> Self {
        match self {
            Self::Done => Self::Done,
            _ => why,
        }
    }
}

/// What the reaper reports.
#[derive(Clone, Debug)]
pub enum News {
    /// The outcome of an action.
    Reaped(Box<Reaped>),
    /// Reaping is paused.
    Paused,
}

/// The outcome of an action, to be reported.
#[derive(Clone, Debug)]
pub struct Reaped {
    /// The end of the flow.
    pub event: Event,
    /// The action.
    pub action: Action,
    /// Its outcome.
    pub outcome: Outcome,
    /// Why it failed.
    pub error: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_actions_are_kept_in_bits_and_in_order() {
        let all: Actions = Action::ALL.into_iter().rev().collect();
        assert_eq!(
            all.to_string(),
            "enforce=drop,enforce=reset,reset,socket,conntrack"
        );
        assert_eq!(Actions::from_bits(all.bits()), all);
        assert_eq!(Actions::from_bits(!all.bits()), Actions::default());
        for action in Action::ALL {
            assert_eq!(Action::from_name(action.name()), Some(action));
            assert_eq!(Action::ALL[action.index()], action);
        }
        assert_eq!(Action::from_name("enforce"), Some(Action::EnforceDrop));
        assert_eq!(Action::from_name("none"), None);
        assert_eq!(Actions::parse("none"), Ok(Actions::default()));
        let parsed = Actions::parse("conntrack,socket,enforce").unwrap();
        assert_eq!(parsed.to_string(), "enforce=drop,socket,conntrack");
        for list in [
            "",
            "socket,",
            "sockets",
            "none,socket",
            "enforce,enforce=reset",
        ] {
            Actions::parse(list).unwrap_err();
        }
        for (list, says) in [
            ("none,reset", "stands alone"),
            ("reset,,socket", "extra comma"),
        ] {
            let error = Actions::parse(list).unwrap_err();
            assert!(error.contains(says), "{list}: {error}");
        }
    }
}
