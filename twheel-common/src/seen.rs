//! What has been seen of a flow so far, as bits: its state, its initiator, and which sides have
//! sent.

use crate::{
    key::Direction,
    segment::{datagram, tcp},
};

/// States, with `nf_conntrack`'s names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
pub enum State {
    /// Only a SYN.
    SynSent = 0,
    /// A SYN/ACK that the initiator has not yet acknowledged.
    SynRecv = 1,
    /// The handshake is complete, or was never seen.
    Established = 2,
    /// A FIN from one side.
    FinWait = 3,
    /// That FIN was followed by an ACK.
    CloseWait = 4,
    /// Both sides have sent a FIN.
    LastAck = 5,
    /// Both have, and the last FIN was acknowledged.
    TimeWait = 6,
    /// A RST.
    Close = 7,
    /// A SYN from each side and nothing else (simultaneous open, RFC 9293 section 3.5).
    SynSent2 = 8,
    /// UDP, seen in one direction, or in both for less than two seconds.
    Udp = 9,
    /// UDP, seen in both directions for longer.
    UdpStream = 10,
    /// ICMP or ICMPv6.
    Icmp = 11,
}

impl State {
    /// All states, in the order of their numbers.
    pub const ALL: [Self; 12] = [
        Self::SynSent,
        Self::SynRecv,
        Self::Established,
        Self::FinWait,
        Self::CloseWait,
        Self::LastAck,
        Self::TimeWait,
        Self::Close,
        Self::SynSent2,
        Self::Udp,
        Self::UdpStream,
        Self::Icmp,
    ];

    /// conntrack's name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SynSent => "syn_sent",
            Self::SynRecv => "syn_recv",
            Self::Established => "established",
            Self::FinWait => "fin_wait",
            Self::CloseWait => "close_wait",
            Self::LastAck => "last_ack",
            Self::TimeWait => "time_wait",
            Self::Close => "close",
            Self::SynSent2 => "syn_sent2",
            Self::Udp => "udp",
            Self::UdpStream => "udp_stream",
            Self::Icmp => "icmp",
        }
    }
}

/// The kinds of TCP segments that the state machine distinguishes, in the order of its table's
/// rows.
pub(crate) const SYN: usize = 0;
pub(crate) const SYN_ACK: usize = 1;
pub(crate) const FIN: usize = 2;
pub(crate) const ACK: usize = 3;
pub(crate) const RST: usize = 4;

/// The kind of a segment, as conntrack's `get_conntrack_index` finds it. [`tcp::valid`] has already
/// refused segments that have none of these flags.
#[inline(always)]
pub(crate) fn kind(flags: u8) -> usize {
    if flags & tcp::RST != 0 {
        RST
    } else if flags & tcp::SYN != 0 {
        if flags & tcp::ACK != 0 { SYN_ACK } else { SYN }
    } else if flags & tcp::FIN != 0 {
        FIN
    } else {
        ACK
    }
}

/// What can be seen of flows on this host, and what is required of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Only one direction of each flow is seen here.
    pub one_way: bool,
    /// A connection must begin with a SYN; those that were already open are not tracked.
    pub strict: bool,
}

/// What has been seen of a flow: its [`State`], its initiator, the sides that were seen, and
/// whatever else decides its state. 20 bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(pub u32);

impl Seen {
    pub(crate) const STATE: u32 = 15;
    /// The initiator is the key's high endpoint; else the low one.
    pub(crate) const INITIATOR_HIGH: u32 = 1 << 4;
    /// The key's low endpoint has sent something. The next bit says so of the high endpoint.
    pub(crate) const FROM_LOW: u32 = 1 << 5;
    pub(crate) const FROM_HIGH: u32 = 1 << 6;
    pub(crate) const BOTH: u32 = 3 << 5;
    /// The first segment seen was not part of a handshake.
    pub(crate) const PICKUP: u32 = 1 << 7;
    /// Shift from the bit of a side to the bit that says that this side has sent a FIN.
    pub(crate) const FIN: u32 = 3;

    /// Shift from the bit of a side to the bit that says that its next sequence number is unknown
    /// although the side was seen: the flow was entered for a socket.
    pub(crate) const UNPLACED: u32 = 6;

    /// One side retransmits again and again and gets no answer.
    pub(crate) const STALLED: u32 = 1 << 10;
    /// The flow is in an inbox, or about to be put into one: its next pointer for the inbox is in
    /// use.
    pub(crate) const POSTED: u32 = 1 << 13;
    /// A new connection with the same key has begun, and its time of creation has not been written
    /// yet.
    pub(crate) const STARTING: u32 = 1 << 14;

    /// The flow has ended. Nothing can change this.
    pub const DEAD: Self = Self(1 << 15);

    /// In [`State::Close`]: the RST was near its sender's next sequence number, but not at it. In
    /// [`State::LastAck`]: the high side sent the last FIN. In [`State::SynSent`]: the responder
    /// has acknowledged a number other than the SYN's. In [`State::SynRecv`]: the responder has
    /// sent data.
    pub(crate) const DOUBT: u32 = 1 << 16;
    /// A SYN that may begin another connection waits for its answer. In [`State::LastAck`]: the
    /// first FIN had not been acknowledged when the second one came.
    pub(crate) const CANDIDATE: u32 = 1 << 17;
    /// Shift from the bit of a side to the bit that says that this side went on sending after an
    /// end that is in doubt.
    pub(crate) const GOES_ON: u32 = 13;
    /// Both sides went on.
    pub(crate) const BOTH_GO_ON: u32 = Self::BOTH << Self::GOES_ON;
    /// All four bits that say what of a flow is in doubt.
    pub(crate) const DOUBTS: u32 = 15 << 16;

    /// What the first segment of a flow says. `None` if it is no reason to track a flow: a RST or a
    /// FIN of an unknown flow ends something and begins nothing.
    #[inline(always)]
    pub fn first(direction: Direction, flags: u8, view: View) -> Option<Self> {
        if flags & datagram::ANY != 0 {
            return Self::first_datagram(direction, flags);
        }
        let (state, pickup, from_initiator) = match kind(flags) {
            SYN => (State::SynSent, 0, true),
            _ if view.strict => return None,
            // A SYN/ACK comes from the responder.
            SYN_ACK if view.one_way => (State::SynRecv, 0, false),
            ACK => (State::Established, Self::PICKUP, true),
            _ => return None,
        };
        let from_high = matches!(direction, Direction::FromHigh);
        let initiator = if from_high == from_initiator {
            Self::INITIATOR_HIGH
        } else {
            0
        };
        let seen = Self(state as u32).with(pickup).with(initiator);
        Some(seen.with(side(direction)))
    }

    /// Whether a segment with these flags can be the [first](Self::first) of a flow.
    #[inline(always)]
    pub fn is_first(flags: u8, view: View) -> bool {
        if flags & datagram::ANY != 0 {
            return flags & datagram::ANY != datagram::ANSWER;
        }
        match kind(flags) {
            SYN => true,
            _ if view.strict => false,
            SYN_ACK => view.one_way,
            ACK => true,
            _ => false,
        }
    }

    #[inline(always)]
    fn first_datagram(direction: Direction, flags: u8) -> Option<Self> {
        let state = match flags & datagram::ANY {
            datagram::UDP => State::Udp,
            datagram::QUERY => State::Icmp,
            // An answer to nothing that was seen.
            _ => return None,
        };
        let initiator = match direction {
            Direction::FromLow => 0,
            Direction::FromHigh => Self::INITIATOR_HIGH,
        };
        Some(Self(state as u32).with(initiator).with(side(direction)))
    }

    /// What is known of a flow from a socket in this state, or from conntrack: both sides exist,
    /// and `finished` says which of them have sent a FIN. Their sequence numbers are unknown.
    pub fn of_socket(state: State, initiator: Direction, finished: &[Direction]) -> Self {
        let initiator = match initiator {
            Direction::FromLow => 0,
            Direction::FromHigh => Self::INITIATOR_HIGH,
        };
        let fins = finished.iter().fold(Self(0), |fins, direction| {
            fins.with(side(*direction) << Self::FIN)
        });
        let unplaced = if state as u32 <= State::SynSent2 as u32 {
            Self::BOTH << Self::UNPLACED
        } else {
            0
        };
        Self(state as u32)
            .with(Self::BOTH)
            .with(Self::PICKUP)
            .with(unplaced)
            .with(initiator)
            .with(fins.0)
    }

    /// The bits of these sides, and the bits that say that their next sequence numbers are unknown.
    #[inline(always)]
    pub(crate) const fn places(sides: u32) -> u32 {
        sides | sides << Self::UNPLACED
    }

    #[inline(always)]
    pub(crate) fn with(self, bits: u32) -> Self {
        Self(self.0 | bits)
    }

    /// Whether the side was seen and its next sequence number is known.
    #[inline(always)]
    pub(crate) fn is_placed(self, direction: Direction) -> bool {
        let side = side(direction);
        self.0 & Self::places(side) == side
    }

    /// The same, after both sides have told their next sequence numbers.
    pub fn told(self) -> Self {
        self.without(Self::BOTH << Self::UNPLACED)
    }

    /// Whether no packet has told a sequence number yet: the flow was entered.
    pub fn is_unplaced(self) -> bool {
        !self.is_placed(Direction::FromLow) && !self.is_placed(Direction::FromHigh)
    }

    /// Whether no packet with these flags can change this, whatever its sequence numbers are. That
    /// is so for nearly every packet.
    #[inline(always)]
    pub fn is_kept_by(self, direction: Direction, flags: u8) -> bool {
        let (side, state) = (side(direction), self.0 & Self::STATE);
        if flags & datagram::ANY != 0 {
            // A UDP flow with replies becomes a stream once it is older than two seconds.
            let is_settled = state != State::Udp as u32 || !self.is_replied();
            return is_settled && self.0 & Self::DEAD.with(side).0 == side;
        }
        let asked = Self::DEAD.with(Self::STATE).with(Self::places(side));
        let kept = Self(State::Established as u32).with(side);
        flags & (tcp::SYN | tcp::FIN | tcp::RST) == 0 && self.0 & asked.0 == kept.0
    }

    /// Whether each packet that [changes nothing](Self::is_kept_by) tells the sequence numbers of
    /// both sides anew: nothing is known of the other side except what this one says.
    #[inline(always)]
    pub fn is_told_by(self, direction: Direction, view: View) -> bool {
        let is_open = self.0 & Self::STATE == State::Established as u32;
        !view.one_way
            && is_open
            && self.is_placed(direction)
            && !self.is_placed(direction.reverse())
    }

    #[inline(always)]
    pub(crate) fn without(self, bits: u32) -> Self {
        Self(self.0 & !bits)
    }

    /// The same, but [`is_starting`](Self::is_starting).
    #[inline(always)]
    pub fn starting(self) -> Self {
        self.with(Self::STARTING)
    }

    /// The same, but not [`is_starting`](Self::is_starting).
    #[inline(always)]
    pub fn started(self) -> Self {
        self.without(Self::STARTING)
    }

    /// Whether `created` may still be that of the previous connection.
    #[inline(always)]
    pub fn is_starting(self) -> bool {
        self.0 & Self::STARTING != 0
    }

    /// The same, but [`is_posted`](Self::is_posted).
    #[inline(always)]
    pub fn posted(self) -> Self {
        self.with(Self::POSTED)
    }

    /// The same, but not [`is_posted`](Self::is_posted).
    #[inline(always)]
    pub fn delivered(self) -> Self {
        self.without(Self::POSTED)
    }

    /// The same, but [`is_stalled`](Self::is_stalled) or not, as `stalled` says.
    #[inline(always)]
    pub fn stalled(self, stalled: bool) -> Self {
        match stalled {
            true => self.with(Self::STALLED),
            false => self.without(Self::STALLED),
        }
    }

    /// Whether one side retransmits and gets no answer.
    #[inline(always)]
    pub fn is_stalled(self) -> bool {
        self.0 & Self::STALLED != 0
    }

    /// Whether this is a TCP connection past the handshake that has not ended: its retransmissions
    /// then tell whether the other side still answers.
    #[inline(always)]
    pub fn is_synchronized(self) -> bool {
        let state = self.0 & Self::STATE;
        state >= State::Established as u32 && state <= State::LastAck as u32
    }

    /// Whether the flow is queued for the CPU of its wheel, which must look at it soon.
    #[inline(always)]
    pub fn is_posted(self) -> bool {
        self.0 & Self::POSTED != 0
    }

    /// Whether the flow is past the handshake and no FIN waits for its acknowledgment.
    #[inline(always)]
    pub(crate) fn is_open(self) -> bool {
        let state = self.0 & Self::STATE;
        state == State::Established as u32 || state == State::CloseWait as u32
    }

    /// Whether the flow was reset, or both sides have sent a FIN.
    #[inline(always)]
    pub fn is_closed(self) -> bool {
        let state = self.0 & Self::STATE;
        state >= State::LastAck as u32 && state <= State::Close as u32
    }

    /// Whether a RST was seen.
    #[inline(always)]
    pub fn is_reset(self) -> bool {
        self.0 & Self::STATE == State::Close as u32
    }

    /// Whether packets of both directions were seen.
    #[inline(always)]
    pub fn is_replied(self) -> bool {
        self.0 & Self::BOTH == Self::BOTH
    }

    /// Whether packets of both directions were seen, and the next sequence number of each side is
    /// known.
    #[inline(always)]
    pub fn is_conversation(self) -> bool {
        self.0 & Self::places(Self::BOTH) == Self::BOTH
    }

    /// Whether only SYNs were seen.
    #[inline(always)]
    pub fn is_opening(self) -> bool {
        let state = self.0 & Self::STATE;
        state == State::SynSent as u32 || state == State::SynSent2 as u32
    }

    /// Whether a full table keeps the flow: it is past the handshake and not closed; and both sides
    /// were seen, unless only one is ever seen here (`one_way`).
    #[inline(always)]
    pub fn is_established(self, one_way: bool) -> bool {
        let state = self.0 & Self::STATE;
        let open = state >= State::Established as u32 && state <= State::CloseWait as u32
            || state == State::UdpStream as u32;
        open && (one_way || self.is_replied())
    }

    /// The state.
    pub fn state(self) -> State {
        let state = (self.0 & Self::STATE) as usize;
        State::ALL.get(state).copied().unwrap_or(State::Close)
    }

    /// Whether the first segment seen was not part of a handshake.
    pub fn is_pickup(self) -> bool {
        self.0 & Self::PICKUP != 0
    }

    /// The direction in which the initiator sends.
    #[inline(always)]
    pub fn initiator(self) -> Direction {
        if self.0 & Self::INITIATOR_HIGH != 0 {
            Direction::FromHigh
        } else {
            Direction::FromLow
        }
    }
}

/// The bit of [`Seen`] that says that this sender was seen.
#[inline(always)]
pub(crate) fn side(direction: Direction) -> u32 {
    match direction {
        Direction::FromLow => Seen::FROM_LOW,
        Direction::FromHigh => Seen::FROM_HIGH,
    }
}
