//! What the screen shows below the rates and wheels.

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Each flow.
    Flows,
    /// Flows by the initiator's address.
    Sources,
    /// Flows by protocol and the responder's port.
    Services,
    /// Flows by state.
    States,
    /// Flows by policy rule.
    Rules,
    /// Ended flows by reason.
    Reasons,
    /// What the programs cost.
    Cost,
}

impl View {
    /// All, in the order of their keys.
    pub const ALL: [Self; 7] = [
        Self::Flows,
        Self::Sources,
        Self::Services,
        Self::States,
        Self::Rules,
        Self::Reasons,
        Self::Cost,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flows => "flows",
            Self::Sources => "sources",
            Self::Services => "services",
            Self::States => "states",
            Self::Rules => "rules",
            Self::Reasons => "reasons",
            Self::Cost => "cost",
        }
    }

    /// What it shows.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Flows => "each flow",
            Self::Sources => "flows by the initiator's address",
            Self::Services => "flows by protocol and port of the responder",
            Self::States => "flows by state",
            Self::Rules => "flows by policy rule",
            Self::Reasons => "ended flows by reason",
            Self::Cost => "what the programs cost: ns a packet, share of a CPU",
        }
    }

    /// The digit that shows it.
    pub fn digit(self) -> usize {
        Self::ALL.iter().position(|it| *it == self).unwrap_or(0) + 1
    }

    /// The view of a digit.
    pub fn of_digit(digit: char) -> Option<Self> {
        let at = digit.to_digit(10)?.checked_sub(1)?;
        Self::ALL.get(at as usize).copied()
    }

    /// The view that is `by` positions further.
    pub fn further(self, by: isize) -> Self {
        let at = self.digit() as isize - 1 + by;
        Self::ALL[at.rem_euclid(Self::ALL.len() as isize) as usize]
    }

    /// Whether it shows flows in groups.
    pub fn has_groups(self) -> bool {
        matches!(
            self,
            Self::Sources | Self::Services | Self::States | Self::Rules
        )
    }
}
