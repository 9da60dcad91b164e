//! The states of a flow: conntrack's, for TCP as `tcp_conntracks` in
//! `net/netfilter/nf_conntrack_proto_tcp.c` moves through them.
//!
//! Where this differs, it is because a flow may be seen in one direction alone, or to keep a live flow from
//! harm; `docs/states.md` lists it.

use crate::{
    flow::Direction,
    packet::{Segment, datagram, tcp},
};

/// States, with the names of `nf_conntrack`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
pub enum State {
    /// A SYN and nothing else.
    SynSent = 0,
    /// A SYN/ACK, not yet answered.
    SynRecv = 1,
    /// The handshake is over, or was never seen.
    Established = 2,
    /// A FIN from one side.
    FinWait = 3,
    /// That FIN was followed by an ACK.
    CloseWait = 4,
    /// A FIN from the other side too.
    LastAck = 5,
    /// And an ACK.
    TimeWait = 6,
    /// A RST.
    Close = 7,
    /// A SYN from both sides and nothing else (simultaneous open, RFC 9293 section 3.5).
    SynSent2 = 8,
    /// UDP, one way or hardly more.
    Udp = 9,
    /// UDP, both ways for a while.
    UdpStream = 10,
    /// ICMP or ICMPv6.
    Icmp = 11,
}

impl State {
    /// All of them, in the order of their numbers.
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

/// Of the table: the packet is of no account to the flow's state, and does not keep it alive.
const IGNORED: u64 = 15;

/// A row of conntrack's table: the state that follows each of SS SR ES FW CW LA TW CL S2.
const fn row(next: [u64; 9]) -> u64 {
    let mut packed = 0;
    let mut state = 0;
    while state < 9 {
        packed |= next[state] << (4 * state);
        state += 1;
    }
    packed
}

/// conntrack's table: `[reply][kind]`, padded to a power of two.
static NEXT: [u64; 16] = {
    const SS: u64 = State::SynSent as u64;
    const SR: u64 = State::SynRecv as u64;
    const ES: u64 = State::Established as u64;
    const FW: u64 = State::FinWait as u64;
    const CW: u64 = State::CloseWait as u64;
    const LA: u64 = State::LastAck as u64;
    const TW: u64 = State::TimeWait as u64;
    const CL: u64 = State::Close as u64;
    const S2: u64 = State::SynSent2 as u64;
    const IG: u64 = IGNORED;
    const RESET: u64 = row([CL; 9]);
    const NONE: u64 = row([IG; 9]);
    [
        // From the initiator.    SS  SR  ES  FW  CW  LA  TW  CL  S2
        /* syn     */
        row([SS, IG, IG, IG, IG, IG, SS, SS, S2]),
        /* syn/ack */ row([IG, SR, IG, IG, IG, IG, IG, IG, SR]),
        /* fin     */ row([IG, FW, FW, LA, LA, LA, TW, CL, IG]),
        /* ack     */ row([IG, ES, ES, CW, CW, TW, TW, CL, IG]),
        /* rst     */ RESET,
        NONE,
        NONE,
        NONE,
        // From the responder.
        /* syn     */
        row([S2, IG, IG, IG, IG, IG, SS, SS, S2]),
        /* syn/ack */ row([SR, IG, IG, IG, IG, IG, IG, IG, SR]),
        /* fin     */ row([IG, FW, FW, LA, LA, LA, TW, CL, IG]),
        /* ack     */ row([IG, SR, ES, CW, CW, TW, TW, CL, IG]),
        /* rst     */ RESET,
        NONE,
        NONE,
        NONE,
    ]
};

/// What the rows of the table are for.
const SYN: usize = 0;
const SYN_ACK: usize = 1;
const FIN: usize = 2;
const ACK: usize = 3;
const RST: usize = 4;

/// conntrack's `get_conntrack_index`. A segment without any of these flags is none that
/// [`tcp::valid`] lets through.
#[inline(always)]
fn kind(flags: u8) -> usize {
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

/// What has been seen of a flow: its [`State`], who began it, who was seen, and what else decides on it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(pub u16);

impl Seen {
    const STATE: u16 = 15;
    /// The initiator is the key's high endpoint.
    const INITIATOR_HIGH: u16 = 1 << 4;
    /// The key's low endpoint has sent something; the high one's bit is the next.
    const FROM_LOW: u16 = 1 << 5;
    const FROM_HIGH: u16 = 1 << 6;
    const BOTH: u16 = Self::FROM_LOW | Self::FROM_HIGH;
    /// The first segment was none of a handshake.
    const PICKUP: u16 = 1 << 7;
    /// How far above the bit of a side that of its FIN is.
    const FIN: u32 = 3;

    /// How far above the bit of a side the one is that says that its position is not known, though it was seen: a flow
    /// that was entered for a socket.
    const UNPLACED: u32 = 6;

    /// One side sends again and again, and nothing comes back.
    const STALLED: u16 = 1 << 10;
    /// Its link to an inbox is in use.
    pub(crate) const POSTED: u16 = 1 << 13;
    /// A new life of the flow has begun, and when is not yet noted.
    pub(crate) const STARTING: u16 = 1 << 14;

    /// The flow has ended: nothing can be added to this.
    pub const DEAD: Self = Self(1 << 15);

    /// What the first segment of a flow says, or `None` where it is no reason to track one: a RST
    /// or a FIN of a flow that is not known is the end of something, not its beginning.
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
        Some(Self(state as u16 | pickup | initiator | side(direction)))
    }

    #[inline(always)]
    fn first_datagram(direction: Direction, flags: u8) -> Option<Self> {
        let state = match flags & datagram::ANY {
            datagram::UDP => State::Udp,
            datagram::QUERY => State::Icmp,
            // An answer to nothing.
            _ => return None,
        };
        let initiator = match direction {
            Direction::FromLow => 0,
            Direction::FromHigh => Self::INITIATOR_HIGH,
        };
        Some(Self(state as u16 | initiator | side(direction)))
    }

    /// What is known of a flow from a socket in this state, or from conntrack: both sides were there, and `finished` says
    /// which have sent a FIN. Where they stand is not known.
    pub fn of_socket(state: State, initiator: Direction, finished: &[Direction]) -> Self {
        let initiator = match initiator {
            Direction::FromLow => 0,
            Direction::FromHigh => Self::INITIATOR_HIGH,
        };
        let fins = finished
            .iter()
            .fold(0, |fins, direction| fins | side(*direction) << Self::FIN);
        let unplaced = if state as u16 <= State::SynSent2 as u16 {
            Self::BOTH << Self::UNPLACED
        } else {
            0
        };
        Self(state as u16 | Self::BOTH | Self::PICKUP | unplaced | initiator | fins)
    }

    /// Whether a side was seen and it is known how far it has sent.
    #[inline(always)]
    fn is_placed(self, direction: Direction) -> bool {
        let side = side(direction);
        self.0 & (side | side << Self::UNPLACED) == side
    }

    #[inline(always)]
    fn next_datagram(self, side: u16) -> Change {
        let seen = Self(self.0 | side);
        if seen.is_replied() && seen.0 & Self::STATE == State::Udp as u16 {
            let stream = Self(seen.0 & !Self::STATE | State::UdpStream as u16);
            if seen == self {
                return Change::AddIfItLasts(stream);
            }
        }
        if seen == self {
            Change::Nothing
        } else {
            Change::Add(seen)
        }
    }

    /// What a further segment of the flow says. Whether a FIN or RST is the peer's is
    /// [`accepts_end`]'s to say.
    #[inline(always)]
    pub fn next(self, direction: Direction, flags: u8, view: View) -> Change {
        let side = side(direction);
        let established = State::Established as u16;
        // Nearly every packet.
        if flags & (tcp::SYN | tcp::FIN | tcp::RST | datagram::ANY) == 0
            && self.0 & (Self::STATE | Self::DEAD.0 | side | side << Self::UNPLACED)
                == established | side
        {
            return Change::Nothing;
        }
        if self == Self::DEAD {
            return Change::Ended;
        }
        if flags & datagram::ANY != 0 {
            return self.next_datagram(side);
        }
        let kind = kind(flags);
        let state = self.0 & Self::STATE;
        let from_high = matches!(direction, Direction::FromHigh);
        let reply = from_high != (self.0 & Self::INITIATOR_HIGH != 0);
        if kind == SYN && (state == State::TimeWait as u16 || state == State::Close as u16) {
            // Port reuse: the old connection is over (RFC 9293, section 3.6.1).
            return match Self::first(direction, flags, view) {
                Some(seen) => Change::NewGeneration(Self(seen.0 | self.0 & Self::POSTED)),
                None => Change::Ignored,
            };
        }
        let alone = view.one_way && (self.0 | side) & Self::BOTH != Self::BOTH;
        let fin = side << Self::FIN;
        let next = if kind == ACK && alone && state <= State::SynRecv as u16 {
            // The other direction does not come by here. Whoever has begun or answered a handshake and goes
            // on has had the answer to that.
            State::Established as u64
        } else if kind == FIN && self.0 & fin != 0 {
            // Sent again.
            u64::from(state)
        } else {
            NEXT[(usize::from(reply) << 3 | kind) & 15] >> (4 * state) & 15
        };
        if next == IGNORED {
            return Change::Ignored;
        }
        let mut added = 0;
        if kind != RST {
            added |= side;
        }
        if kind == FIN {
            added |= fin;
        }
        let unplaced = added & Self::BOTH;
        let seen = Self(self.0 & !(Self::STATE | unplaced << Self::UNPLACED) | next as u16 | added);
        if seen == self && kind == SYN {
            // Sent again: who gets no answer has had one chance.
            Change::Ignored
        } else if seen == self {
            Change::Nothing
        } else {
            Change::Add(seen)
        }
    }

    /// The same, but [`is_starting`](Self::is_starting).
    #[inline(always)]
    pub fn starting(self) -> Self {
        Self(self.0 | Self::STARTING)
    }

    /// Whether `created` may still be that of the life before.
    #[inline(always)]
    pub fn is_starting(self) -> bool {
        self.0 & Self::STARTING != 0
    }

    /// The same, but [`is_posted`](Self::is_posted).
    #[inline(always)]
    pub fn posted(self) -> Self {
        Self(self.0 | Self::POSTED)
    }

    /// The same, but not.
    #[inline(always)]
    pub fn delivered(self) -> Self {
        Self(self.0 & !Self::POSTED)
    }

    /// The same, but [`is_stalled`](Self::is_stalled), or not.
    #[inline(always)]
    pub fn stalled(self, stalled: bool) -> Self {
        if stalled {
            Self(self.0 | Self::STALLED)
        } else {
            Self(self.0 & !Self::STALLED)
        }
    }

    /// Whether one side's retransmissions are not answered.
    #[inline(always)]
    pub fn is_stalled(self) -> bool {
        self.0 & Self::STALLED != 0
    }

    /// TCP past the handshake, and neither over nor reset: retransmissions tell whether anybody is there.
    #[inline(always)]
    pub fn is_synchronized(self) -> bool {
        let state = self.0 & Self::STATE;
        state >= State::Established as u16 && state <= State::LastAck as u16
    }

    /// Whether the flow is on its way to the CPU of its wheel, which was told to look at it.
    #[inline(always)]
    pub fn is_posted(self) -> bool {
        self.0 & Self::POSTED != 0
    }

    /// Reset, or ended from both sides.
    #[inline(always)]
    pub fn is_closed(self) -> bool {
        let state = self.0 & Self::STATE;
        state >= State::LastAck as u16 && state <= State::Close as u16
    }

    /// A RST was seen.
    #[inline(always)]
    pub fn is_reset(self) -> bool {
        self.0 & Self::STATE == State::Close as u16
    }

    /// Whether packets of both directions were seen.
    #[inline(always)]
    pub fn is_replied(self) -> bool {
        self.0 & Self::BOTH == Self::BOTH
    }

    /// Whether packets of both directions were seen, and it is known how far each side has sent.
    #[inline(always)]
    pub fn is_conversation(self) -> bool {
        self.0 & (Self::BOTH | Self::BOTH << Self::UNPLACED) == Self::BOTH
    }

    /// Whether nothing but SYNs were seen.
    #[inline(always)]
    pub fn is_opening(self) -> bool {
        let state = self.0 & Self::STATE;
        state == State::SynSent as u16 || state == State::SynSent2 as u16
    }

    /// What a full table keeps: past the handshake and not closed; and seen from both sides, unless one is all
    /// that anybody sees here (`one_way`).
    #[inline(always)]
    pub fn is_established(self, one_way: bool) -> bool {
        let state = self.0 & Self::STATE;
        let open = state >= State::Established as u16 && state <= State::CloseWait as u16
            || state == State::UdpStream as u16;
        open && (one_way || self.is_replied())
    }

    /// The state.
    pub fn state(self) -> State {
        let state = usize::from(self.0 & Self::STATE);
        State::ALL.get(state).copied().unwrap_or(State::Close)
    }

    /// The first segment seen was none of a handshake.
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

/// How much can be seen of flows, and is asked of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// One direction is all that is seen here.
    pub one_way: bool,
    /// A flow begins with a SYN, or is none.
    pub strict: bool,
}

/// The bit of [`Seen`] for the sender.
#[inline(always)]
fn side(direction: Direction) -> u16 {
    match direction {
        Direction::FromLow => Seen::FROM_LOW,
        Direction::FromHigh => Seen::FROM_HIGH,
    }
}

/// What a segment does to [`Seen`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The segment says nothing new, and keeps the flow alive.
    Nothing,
    /// It is none that belongs here, and does not.
    Ignored,
    /// The flow is now this.
    Add(Seen),
    /// The flow is now this if it is older than two seconds, else it is what it was: conntrack's
    /// `nf_conntrack_udp_packet` has as much patience before it calls UDP a stream.
    AddIfItLasts(Seen),
    /// The flow is over and another with the same key begins.
    NewGeneration(Seen),
    /// The flow has ended already: it is about to leave the table.
    Ended,
}

/// The highest sequence number that each side has sent, and the one behind it: what the other expects next. The key's
/// low endpoint first.
pub type Positions = [u32; 2];

/// How far from what its sender has sent a FIN or RST may lie: ahead, if segments were lost before they came by here;
/// behind, for a FIN that is sent again, and for a RST that answers a segment (it has no ACK): that has the number which
/// the other side waits for, and what it has missed may have come by here. A forger who does not know has to try 2^13
/// times.
pub const END_WINDOW: u32 = 1 << 18;
/// How far a segment may be ahead of the last: a window and what was lost of it.
const FORWARD: u32 = 1 << 24;
/// How far its acknowledgment may be behind what the other side has sent: what is in flight.
const IN_FLIGHT: u32 = 1 << 26;
/// And how far ahead of it: what did not come by here.
const UNSEEN: u32 = 1 << 20;

/// One side's. (Not by an index: the compiler would make that an OR to a pointer, which the verifier refuses.)
#[inline(always)]
fn of([low, high]: Positions, direction: Direction) -> u32 {
    let both = u64::from(low) | u64::from(high) << 32;
    (both >> (32 * direction as u32)) as u32
}

/// Whether a is within a distance of b, on the circle of sequence numbers.
#[inline(always)]
fn near(a: u32, b: u32, distance: u32) -> bool {
    a.wrapping_sub(b).wrapping_add(distance) <= 2 * distance
}

/// Where a segment brings its sender to, if it does: forward, and acknowledging what the other side has
/// sent. (One that is forged would have to guess both.)
#[inline(always)]
pub fn advance(positions: Positions, seen: Seen, segment: &Segment) -> Option<u32> {
    let ahead = segment.end.wrapping_sub(of(positions, segment.direction));
    // Nearly every packet that brings no data.
    if ahead == 0 {
        return None;
    }
    let other = segment.direction.reverse();
    let first = !seen.is_placed(segment.direction) || segment.flags & tcp::SYN != 0;
    let answers = segment.flags & tcp::ACK == 0
        || !seen.is_placed(other)
        || acknowledges(segment.ack, of(positions, other));
    (answers && (first || ahead <= FORWARD)).then_some(segment.end)
}

/// Whether an acknowledgment is one of what the other side has sent up to here.
#[inline(always)]
fn acknowledges(ack: u32, sent: u32) -> bool {
    sent.wrapping_sub(ack).wrapping_add(UNSEEN) <= IN_FLIGHT + UNSEEN
}

/// Whether a FIN or RST lies inside the window known from the flow (RFC 9293 section 3.5.3; RFC 5961 section 3). One
/// whose sender was not seen must acknowledge what the other has sent, or have the number that this has acknowledged.
#[inline(always)]
pub fn accepts_end(positions: Positions, seen: Seen, segment: &Segment) -> bool {
    let other = segment.direction.reverse();
    let is_reset = segment.flags & tcp::RST != 0;
    let has_ack = segment.flags & tcp::ACK != 0;
    let handshake = seen.0 & Seen::STATE == State::SynSent as u16;
    let is_known = seen.is_placed(segment.direction);
    if is_known && !(handshake && has_ack) {
        let ahead = segment.seq.wrapping_sub(of(positions, segment.direction));
        if is_reset && has_ack {
            // Of whoever gives up: behind lies an old duplicate.
            return ahead <= END_WINDOW;
        }
        let answers =
            is_reset || !seen.is_placed(other) || acknowledges(segment.ack, of(positions, other));
        return ahead.wrapping_add(END_WINDOW) <= 2 * END_WINDOW && answers;
    }
    if is_reset && !has_ack {
        // Somebody who knows nothing of the connection answers with what was acknowledged.
        return seen.0 & Seen::PICKUP != 0
            && near(segment.seq, of(positions, segment.direction), END_WINDOW);
    }
    let sent = of(positions, other);
    if is_reset {
        near(segment.ack, sent, END_WINDOW)
    } else {
        acknowledges(segment.ack, sent)
    }
}

/// Timeouts of a rule, in clock units, by number: those of the states up to [`State::Close`], and the
/// constants of this type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts(pub [u32; 16]);

impl Timeouts {
    /// Established, as far as can be told from one direction.
    pub const UNREPLIED: usize = 8;
    /// UDP.
    pub const UDP: usize = 9;
    /// UDP in both directions.
    pub const UDP_STREAM: usize = 10;
    /// ICMP.
    pub const ICMP: usize = 11;
    /// One side's retransmissions are not answered: no timeout of such a flow is longer.
    pub const RETRANS: usize = 12;
    /// A RST before anything else came back: conntrack forgets the flow at once.
    pub const REFUSED: usize = 13;
    /// No timeout: not 0 if the rule is gone, and its flows are no rule's.
    pub const GONE: usize = 14;
    /// No timeout: what is done once such a flow has expired, in bits that userspace alone knows.
    pub const REAP: usize = 15;

    /// The number of the timeout of a flow of which this was seen.
    #[inline(always)]
    pub fn number(seen: Seen) -> usize {
        let state = seen.0 & Seen::STATE;
        if state == State::SynSent2 as u16 {
            return State::SynSent as usize;
        }
        if !seen.is_replied() {
            if state == State::Established as u16 {
                return Self::UNREPLIED;
            }
            if state == State::Close as u16 {
                return Self::REFUSED;
            }
        }
        usize::from(state)
    }

    /// The same where one direction is all that is seen: a flow that is established is as good as replied to,
    /// unless `unreplied` says otherwise, and a RST refuses nothing.
    pub fn one_way(mut self, unreplied: bool) -> Self {
        if !unreplied {
            self.0[Self::UNREPLIED] = self.0[State::Established as usize];
        }
        self.0[Self::REFUSED] = self.0[State::Close as usize];
        self
    }

    /// Whether they are for where one direction is all that is seen.
    pub fn is_one_way(&self) -> bool {
        self.0[Self::REFUSED] != 0
    }

    /// The timeout of a flow of which this was seen.
    #[inline(always)]
    pub fn of(&self, seen: Seen) -> u32 {
        let timeout = self.0[Self::number(seen) & 15];
        let most = self.0[Self::RETRANS];
        if seen.is_stalled() && most < timeout {
            most
        } else {
            timeout
        }
    }
}
