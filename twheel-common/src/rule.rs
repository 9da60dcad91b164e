//! What a rule sets for its flows: timeouts, and what is done once they have expired.

use crate::seen::{Seen, State};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The timeouts of a policy file. The discriminant is the timeout's index in arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeoutName {
    /// TCP: a SYN has been seen.
    SynSent = 0,
    /// TCP: a SYN/ACK has been seen.
    SynRecv,
    /// TCP: the handshake is over.
    Established,
    /// TCP: one side has sent a FIN.
    FinWait,
    /// TCP: and the other side has answered with an ACK.
    CloseWait,
    /// TCP: both sides have sent a FIN.
    LastAck,
    /// TCP: and an ACK came after that.
    TimeWait,
    /// TCP: a RST has been seen.
    Close,
    /// TCP: established as far as one direction shows; the other direction was not seen.
    Unreplied,
    /// UDP, one direction seen.
    Udp,
    /// UDP, both directions seen.
    UdpStream,
    /// ICMP.
    Icmp,
    /// TCP: one side's retransmissions are not answered. Upper limit for the timeout of the flow's
    /// state.
    Retrans,
}

/// How many timeouts a rule may set.
pub const TIMEOUTS: usize = 13;

impl TimeoutName {
    /// The names in a policy file, by discriminant.
    pub const NAMES: [&'static str; TIMEOUTS] = [
        State::SynSent.name(),
        State::SynRecv.name(),
        State::Established.name(),
        State::FinWait.name(),
        State::CloseWait.name(),
        State::LastAck.name(),
        State::TimeWait.name(),
        State::Close.name(),
        "unreplied",
        State::Udp.name(),
        State::UdpStream.name(),
        State::Icmp.name(),
        "retrans",
    ];

    /// All timeouts, by discriminant.
    pub const ALL: [Self; TIMEOUTS] = [
        Self::SynSent,
        Self::SynRecv,
        Self::Established,
        Self::FinWait,
        Self::CloseWait,
        Self::LastAck,
        Self::TimeWait,
        Self::Close,
        Self::Unreplied,
        Self::Udp,
        Self::UdpStream,
        Self::Icmp,
        Self::Retrans,
    ];

    /// The name in a policy file.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// The timeout of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|timeout| timeout.name() == name)
    }
}

/// What a rule sets for its flows; number 0 stands for flows without a rule. A value of the map
/// `TIMEOUTS`: 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Rule {
    /// How long its flows may be idle.
    pub timeouts: Timeouts,
    /// Other properties.
    pub flags: RuleFlags,
    /// What is done once a flow has expired, as bits that only userspace interprets.
    pub actions: u32,
}

const _: () = assert!(size_of::<Rule>() == 64);

impl Rule {
    /// The same rule where only one direction is seen: see [`Timeouts::one_way`].
    pub fn one_way(mut self, unreplied: bool) -> Self {
        self.timeouts = self.timeouts.one_way(unreplied);
        self.flags = self.flags.with(RuleFlags::ONE_WAY);
        self
    }

    /// Whether the rule is for where only one direction is seen.
    pub fn is_one_way(&self) -> bool {
        self.flags.has(RuleFlags::ONE_WAY)
    }

    /// Whether the policy no longer has the rule.
    pub fn is_gone(&self) -> bool {
        self.flags.has(RuleFlags::GONE)
    }

    /// Whether nothing was done to its expired flows by the policy before.
    pub fn was_spared(&self) -> bool {
        self.flags.has(RuleFlags::SPARED)
    }
}

/// Flags of a [`Rule`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct RuleFlags(u32);

impl RuleFlags {
    /// The policy no longer has the rule.
    pub const GONE: Self = Self(1);
    /// Only one direction of each flow is seen here.
    pub const ONE_WAY: Self = Self(2);
    /// Nothing was done to the rule's expired flows by the policy before, and nothing is done until
    /// the table has been swept: flows that still have the rule may have another one by then.
    pub const SPARED: Self = Self(4);

    /// Whether all flags of `other` are set.
    #[inline(always)]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags and those of `other`.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These flags without those of `other`.
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// Timeouts of a rule, in clock units, by number: those of the states up to [`State::Close`], and
/// the constants of this type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Timeouts(pub [u32; Timeouts::COUNT]);

impl Timeouts {
    /// Established, as far as one direction shows.
    pub const UNREPLIED: usize = 8;
    /// UDP.
    pub const UDP: usize = 9;
    /// UDP in both directions.
    pub const UDP_STREAM: usize = 10;
    /// ICMP.
    pub const ICMP: usize = 11;
    /// One side's retransmissions are not answered: the flow's timeout is at most this.
    pub const RETRANS: usize = 12;
    /// A RST came before any other answer: conntrack removes such a flow at once.
    pub const REFUSED: usize = 13;
    /// Number of timeouts.
    pub const COUNT: usize = 14;

    /// The number of the timeout for these state bits.
    #[inline(always)]
    pub fn number(seen: Seen) -> usize {
        let state = seen.0 & Seen::STATE;
        if state == State::SynSent2 as u32 {
            return State::SynSent as usize;
        }
        if !seen.is_replied() {
            if state == State::Established as u32 {
                return Self::UNREPLIED;
            }
            if state == State::Close as u32 && seen.0 & Seen::DOUBT == 0 {
                return Self::REFUSED;
            }
        }
        state as usize
    }

    /// The same timeouts where only one direction is seen: an established flow counts as replied
    /// to, unless `unreplied` says otherwise, and a RST is no refusal.
    pub fn one_way(mut self, unreplied: bool) -> Self {
        if !unreplied {
            self.0[Self::UNREPLIED] = self.0[State::Established as usize];
        }
        self.0[Self::REFUSED] = self.0[State::Close as usize];
        self
    }

    /// The longest of the timeouts.
    pub fn longest(&self) -> u32 {
        self.0.into_iter().max().unwrap_or(0)
    }

    /// The timeout for these state bits.
    #[inline(always)]
    pub fn timeout(&self, seen: Seen) -> u32 {
        let timeout = self.0.get(Self::number(seen)).copied().unwrap_or(0);
        let most = self.0[Self::RETRANS];
        if seen.is_stalled() && most < timeout {
            most
        } else {
            timeout
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_found_by_their_names() {
        for (place, timeout) in TimeoutName::ALL.into_iter().enumerate() {
            assert_eq!(timeout as usize, place);
            assert_eq!(TimeoutName::from_name(timeout.name()), Some(timeout));
        }
        assert_eq!(TimeoutName::from_name("syn"), None);
    }

    #[test]
    fn a_rule_is_gone_or_for_one_way_by_its_flags() {
        let rule = Rule::default();
        assert!(!rule.is_gone() && !rule.is_one_way());
        let one_way = rule.one_way(false).one_way(false);
        assert!(one_way.is_one_way() && !one_way.is_gone());
        let gone = Rule {
            flags: one_way.flags.with(RuleFlags::GONE),
            ..one_way
        };
        assert!(gone.is_one_way() && gone.is_gone() && !gone.was_spared());
        assert!(!rule.flags.with(RuleFlags::GONE).has(RuleFlags::ONE_WAY));
        let spared = Rule {
            flags: gone.flags.with(RuleFlags::SPARED),
            ..gone
        };
        assert!(spared.was_spared() && spared.is_gone());
        assert_eq!(spared.flags.without(RuleFlags::SPARED), gone.flags);
    }

    #[test]
    fn the_longest_timeout_is_none_of_what_else_a_rule_has() {
        let mut rule = Rule {
            actions: u32::MAX,
            ..Rule::default()
        };
        assert_eq!(rule.timeouts.longest(), 0);
        rule.timeouts.0[Timeouts::UDP] = 7;
        rule.timeouts.0[Timeouts::REFUSED] = 5;
        assert_eq!(rule.timeouts.longest(), 7);
    }
}
