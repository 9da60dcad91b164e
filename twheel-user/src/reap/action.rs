//! What may be done once a flow has expired.

use std::fmt;

/// An action. They are done in this order: where packets are refused none can reach a socket between the last look and
/// its end; and a RST must find its way by the conntrack entry that goes after it.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Later packets are dropped.
    EnforceDrop = 1,
    /// Later packets are answered by a RST.
    EnforceReset = 2,
    /// Both ends get a RST.
    Reset = 4,
    /// The local socket is closed.
    Socket = 8,
    /// The kernel's conntrack entry is deleted.
    Conntrack = 16,
}

impl Action {
    /// All of them, in order.
    pub const ALL: [Self; 5] = [
        Self::EnforceDrop,
        Self::EnforceReset,
        Self::Reset,
        Self::Socket,
        Self::Conntrack,
    ];

    /// Stable name.
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

    /// Whether packets are no longer let through.
    pub fn enforces(self) -> bool {
        matches!(self, Self::EnforceDrop | Self::EnforceReset)
    }

    /// Its place among [`ALL`](Self::ALL).
    pub fn index(self) -> usize {
        (self as u32).trailing_zeros() as usize
    }
}

/// A set of actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Actions(u32);

impl Actions {
    /// A list with commas, or `none`.
    ///
    /// # Errors
    ///
    /// What is no action, or contradicts another.
    pub fn parse(list: &str) -> Result<Self, String> {
        if list == "none" {
            return Ok(Self::default());
        }
        let action = |name: &str| {
            Action::from_name(name).ok_or_else(|| {
                let names = Action::ALL.map(Action::name).join(", ");
                format!("no action is called `{name}`: there are {names}; or none of them, `none`")
            })
        };
        let actions: Self = list.split(',').map(action).collect::<Result<_, _>>()?;
        if actions.iter().filter(|action| action.enforces()).count() > 1 {
            return Err("packets are dropped or answered, not both".to_owned());
        }
        Ok(actions)
    }

    /// From what is kept beside a rule's timeouts; unknown bits are none.
    pub fn from_bits(bits: u32) -> Self {
        Action::ALL
            .into_iter()
            .filter(|action| bits & *action as u32 != 0)
            .collect()
    }

    /// For there.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether an action is one of them.
    pub fn has(self, action: Action) -> bool {
        self.0 & action as u32 != 0
    }

    /// In order.
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
    }
}
