//! The states of a flow: conntrack's, for TCP as `tcp_conntracks` in
//! `net/netfilter/nf_conntrack_proto_tcp.c` moves through them.
//!
//! Where this differs, it is because a flow may be seen in one direction alone, or to keep a live flow from
//! harm; `docs/states.md` lists it.

use crate::{
    flow::Direction,
    numbers::{
        self, EARLY_DATA, END_WINDOW, Positions, accepts_end, advance, fits, fits_first, is_apart,
        near, of,
    },
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
/// 20 bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(pub u32);

impl Seen {
    pub(crate) const STATE: u32 = 15;
    /// The initiator is the key's high endpoint.
    const INITIATOR_HIGH: u32 = 1 << 4;
    /// The key's low endpoint has sent something; the high one's bit is the next.
    const FROM_LOW: u32 = 1 << 5;
    const FROM_HIGH: u32 = 1 << 6;
    const BOTH: u32 = 3 << 5;
    /// The first segment was none of a handshake.
    pub(crate) const PICKUP: u32 = 1 << 7;
    /// How far above the bit of a side that of its FIN is.
    const FIN: u32 = 3;

    /// How far above the bit of a side the one is that says that its position is not known, though it was seen: a flow
    /// that was entered for a socket.
    const UNPLACED: u32 = 6;

    /// One side sends again and again, and nothing comes back.
    const STALLED: u32 = 1 << 10;
    /// Its link to an inbox is in use.
    pub(crate) const POSTED: u32 = 1 << 13;
    /// A new life of the flow has begun, and when is not yet noted.
    pub(crate) const STARTING: u32 = 1 << 14;

    /// The flow has ended: nothing can be added to this.
    pub const DEAD: Self = Self(1 << 15);

    /// In [`State::Close`]: the RST was near its sender's next number, and not at it. In [`State::LastAck`]: the last
    /// FIN is the high side's. In [`State::SynSent`]: the responder has acknowledged another number. In
    /// [`State::SynRecv`]: it has sent data.
    const DOUBT: u32 = 1 << 16;
    /// A SYN that may begin another life waits for its answer. In [`State::LastAck`]: the first FIN was not acknowledged when
    /// the second one came.
    const CANDIDATE: u32 = 1 << 17;
    /// How far above the bit of a side the one is that says that it has gone on since an end that is in doubt.
    const GOES_ON: u32 = 13;
    /// Both have.
    const BOTH_GO_ON: u32 = Self::BOTH << Self::GOES_ON;
    /// What of a flow is in doubt: all four of these bits.
    const DOUBTS: u32 = 15 << 16;

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
            // An answer to nothing.
            _ => return None,
        };
        let initiator = match direction {
            Direction::FromLow => 0,
            Direction::FromHigh => Self::INITIATOR_HIGH,
        };
        Some(Self(state as u32).with(initiator).with(side(direction)))
    }

    /// What is known of a flow from a socket in this state, or from conntrack: both sides were there, and `finished` says
    /// which have sent a FIN. Where they stand is not known.
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

    /// The bits of sides, and those that say that their positions are not known.
    #[inline(always)]
    const fn places(sides: u32) -> u32 {
        sides | sides << Self::UNPLACED
    }

    #[inline(always)]
    fn with(self, bits: u32) -> Self {
        Self(self.0 | bits)
    }

    /// Whether a side was seen and it is known how far it has sent.
    #[inline(always)]
    pub(crate) fn is_placed(self, direction: Direction) -> bool {
        let side = side(direction);
        self.0 & Self::places(side) == side
    }

    #[inline(always)]
    fn next_datagram(self, side: u32) -> Change {
        let seen = self.with(side);
        if seen == self && seen.0 & Self::STATE == State::Udp as u32 {
            // It was replied to, or nobody would have asked.
            let stream = seen.without(Self::STATE).with(State::UdpStream as u32);
            return Change::AddIfItLasts(stream);
        }
        if seen == self {
            Change::Nothing
        } else {
            Change::Add(seen)
        }
    }

    /// Whether a packet with these flags cannot change this, whatever its numbers: nearly every packet.
    #[inline(always)]
    pub fn is_kept_by(self, direction: Direction, flags: u8) -> bool {
        let (side, state) = (side(direction), self.0 & Self::STATE);
        if flags & datagram::ANY != 0 {
            // The answer to a first datagram may come after two seconds.
            let is_settled = state != State::Udp as u32 || !self.is_replied();
            return is_settled && self.0 & Self::DEAD.with(side).0 == side;
        }
        let asked = Self::DEAD.with(Self::STATE).with(Self::places(side));
        let kept = Self(State::Established as u32).with(side);
        flags & (tcp::SYN | tcp::FIN | tcp::RST) == 0 && self.0 & asked.0 == kept.0
    }

    /// Whether each packet by which [this is kept](Self::is_kept_by) says anew how far both sides have come: nothing is
    /// known of the other one but what this one says.
    #[inline(always)]
    pub fn is_told_by(self, direction: Direction, view: View) -> bool {
        let is_open = self.0 & Self::STATE == State::Established as u32;
        !view.one_way
            && is_open
            && self.is_placed(direction)
            && !self.is_placed(direction.reverse())
    }

    /// What a further packet of the flow says.
    #[inline(always)]
    pub fn next(self, segment: &Segment, known: &Known, view: View) -> Change {
        let (direction, flags) = (segment.direction, segment.flags);
        if self.is_kept_by(direction, flags) {
            return Change::Nothing;
        }
        if self == Self::DEAD {
            return Change::Ended;
        }
        if !known.is_own_way {
            return Change::SameWay;
        }
        if flags & datagram::ANY != 0 {
            return self.next_datagram(side(direction));
        }
        match kind(flags) {
            SYN => self.next_syn(segment, known),
            SYN_ACK => self.next_syn_ack(segment, known),
            FIN => self.next_fin(segment, known),
            RST => self.next_reset(segment, known, view),
            _ => self.next_ack(segment, known, view),
        }
    }

    /// What a segment of this host begins, if what was seen of the flow so far was [somebody else's](SideWay::is_disproved_by).
    /// Its SYN/ACK answers a SYN. To be asked before [`next`](Self::next).
    #[inline(always)]
    pub fn anew(self, segment: &Segment) -> Option<Self> {
        let (direction, flags) = (segment.direction, segment.flags);
        if self == Self::DEAD || self.is_replied() || self.is_kept_by(direction, flags) {
            return None;
        }
        if flags & datagram::ANY != 0 {
            return None;
        }
        let view = View {
            one_way: true,
            strict: false,
        };
        let seen = Self::first(direction, flags, view)?;
        let seen = match kind(flags) {
            SYN_ACK => seen.with(Self::BOTH),
            _ => seen,
        };
        Some(seen.posted_as(self))
    }

    /// What the table says.
    #[inline(always)]
    fn of_table(self, segment: &Segment) -> u32 {
        let is_reply = usize::from(segment.direction != self.initiator());
        let row = NEXT[(is_reply << 3 | kind(segment.flags)) & 15];
        (row >> (4 * (self.0 & Self::STATE)) & 15) as u32
    }

    /// In another state, after a segment of this side.
    #[inline(always)]
    fn to(self, state: u32, direction: Direction) -> Self {
        let side = side(direction);
        self.without(Self::STATE)
            .without(side << Self::UNPLACED)
            .with(state)
            .with(side)
    }

    #[inline(always)]
    fn without(self, bits: u32) -> Self {
        Self(self.0 & !bits)
    }

    /// A SYN on a flow that is over may begin another life, one of another number on a flow that opens may be the real
    /// one: both wait for the answer. All others are answered by a challenge, if by anything (RFC 5961, section 4).
    #[inline(always)]
    fn next_syn(self, segment: &Segment, known: &Known) -> Change {
        let state = self.0 & Self::STATE;
        let (opens, is_over) = (state == State::SynSent as u32, self.is_over());
        if opens && segment.direction != self.initiator() {
            return Change::Add(self.to(State::SynSent2 as u32, segment.direction));
        }
        let number = segment.seq.wrapping_add(1);
        if self.is_opening() && number == known.of(segment.direction) {
            // Sent again.
            return Change::Ignored;
        }
        if !is_over && !opens {
            return Change::Ignored;
        }
        let old = match opens {
            true => self.without(Self::DOUBTS),
            false => self,
        };
        let candidate = old.with(Self::CANDIDATE);
        if candidate == self && known.doubt == number {
            // Sent again: who gets no answer has had one chance.
            return Change::Ignored;
        }
        Change::Doubt(candidate, number, false)
    }

    /// Reset, or ended by both sides and acknowledged: another life may begin (RFC 9293, section 3.6.1).
    #[inline(always)]
    fn is_over(self) -> bool {
        let state = self.0 & Self::STATE;
        state == State::TimeWait as u32 || state == State::Close as u32
    }

    #[inline(always)]
    fn next_syn_ack(self, segment: &Segment, known: &Known) -> Change {
        let (state, direction) = (self.0 & Self::STATE, segment.direction);
        let other = direction.reverse();
        let is_candidate = self.0 & Self::CANDIDATE != 0 && (self.is_over() || self.is_opening());
        if is_candidate && segment.ack == known.doubt {
            if self.is_over() {
                let opened = Self(State::SynRecv as u32).with(Self::BOTH);
                return Change::NewGeneration(opened.begun_by(other).posted_as(self));
            }
            if direction != self.initiator() {
                let seen = self
                    .to(State::SynRecv as u32, direction)
                    .without(Self::DOUBTS);
                return Change::Answers(seen);
            }
        }
        let is_opening = state == State::SynSent as u32 || state == State::SynSent2 as u32;
        if is_opening && self.is_placed(other) && segment.ack != known.of(other) {
            return Change::Ignored;
        }
        let next = self.of_table(segment);
        if next == IGNORED as u32 {
            return Change::Ignored;
        }
        let seen = self.to(next, direction);
        self.changed_to(if is_opening {
            seen.without(Self::DOUBTS)
        } else {
            seen
        })
    }

    #[inline(always)]
    fn begun_by(self, initiator: Direction) -> Self {
        match initiator {
            Direction::FromLow => self,
            Direction::FromHigh => self.with(Self::INITIATOR_HIGH),
        }
    }

    #[inline(always)]
    fn changed_to(self, seen: Self) -> Change {
        if seen == self {
            Change::Nothing
        } else {
            Change::Add(seen)
        }
    }

    /// A FIN is borne out by the ACK of its number.
    #[inline(always)]
    fn next_fin(self, segment: &Segment, known: &Known) -> Change {
        if !accepts_end(known.positions, self, segment) {
            return Change::Ignored;
        }
        let direction = segment.direction;
        let fin = side(direction) << Self::FIN;
        if self.0 & fin != 0 {
            let is_pending = self.is_ending() && direction == self.last_fin();
            return match segment.seq == known.of(direction) && segment.end != known.doubt {
                // The one before was somebody's guess.
                true if is_pending => Change::Doubt(self, segment.end, false),
                // Sent again.
                _ => Change::Nothing,
            };
        }
        let next = self.of_table(segment);
        if next == IGNORED as u32 {
            return Change::Ignored;
        }
        if self.is_over() {
            return self.goes_on(segment, known, false);
        }
        let seen = self.to(next, direction).without(Self::DOUBTS);
        let last = match (next == State::LastAck as u32, direction) {
            (true, Direction::FromHigh) => Self::DOUBT,
            _ => 0,
        };
        let is_second = self.0 & Self::STATE == State::FinWait as u32;
        let answers =
            is_second && segment.flags & tcp::ACK != 0 && self.acknowledges_fin(segment, known);
        let first = match is_second && !answers {
            true => Self::CANDIDATE,
            false => 0,
        };
        let seen = seen.with(fin).with(last).with(first);
        Change::Doubt(seen, segment.end, answers)
    }

    /// A RST at its sender's next number counts at once (RFC 5961, section 3.2). One that is near it counts unless both
    /// sides go on; and so does every one where one side is all that was seen: who forges can move its number.
    #[inline(always)]
    fn next_reset(self, segment: &Segment, known: &Known, view: View) -> Change {
        if !accepts_end(known.positions, self, segment) {
            return Change::Ignored;
        }
        let (state, direction) = (self.0 & Self::STATE, segment.direction);
        let other = direction.reverse();
        let is_exact = if state == State::SynSent as u32 && segment.flags & tcp::ACK != 0 {
            // Who has had no answer has nothing to acknowledge.
            direction != self.initiator() && segment.ack == known.of(other)
        } else {
            let is_last = known.doubt == segment.seq && direction == self.last_fin();
            segment.seq == known.of(direction) || self.is_ending() && is_last
        };
        let closed = self.without(Self::STATE).without(Self::DOUBTS);
        let closed = closed.with(State::Close as u32);
        let is_handshake = state <= State::SynRecv as u32 || state == State::SynSent2 as u32;
        // Who has said nothing has the number that the other side waits for. Who alone has said where it is proves nothing
        // by that.
        let is_told = self.is_conversation() || !self.is_placed(direction);
        if is_exact && (is_handshake || !view.one_way && is_told) {
            return self.changed_to(closed);
        }
        if is_handshake {
            return Change::Ignored;
        }
        if self.is_over() || state == State::LastAck as u32 {
            return Change::Nothing;
        }
        // A FIN that nobody has acknowledged is in doubt as well, and is not kept apart from this.
        let fins = match state == State::FinWait as u32 {
            true => Self::BOTH << Self::FIN,
            false => 0,
        };
        Change::Add(closed.without(fins).with(Self::DOUBT))
    }

    #[inline(always)]
    fn next_ack(self, segment: &Segment, known: &Known, view: View) -> Change {
        let (state, direction) = (self.0 & Self::STATE, segment.direction);
        let (side, other) = (side(direction), direction.reverse());
        let is_alone = view.one_way && !self.with(side).is_replied();
        let is_reply = direction != self.initiator();
        if is_alone && self.is_over() && self.0 & Self::CANDIDATE != 0 && segment.seq == known.doubt
        {
            // Whoever goes on after a SYN has had the answer to it, which does not come by here.
            let seen = Self(State::Established as u32).with(side);
            return Change::NewGeneration(seen.begun_by(direction).posted_as(self));
        }
        if is_alone && state <= State::SynRecv as u32 {
            return Change::Add(
                self.to(State::Established as u32, direction)
                    .without(Self::DOUBTS),
            );
        }
        match State::ALL[(state as usize).min(State::ALL.len() - 1)] {
            // Whose answer to a SYN is none of it had a connection before that: it was somebody's guess.
            State::SynSent if is_reply && segment.ack != known.of(other) => {
                if known.is_local {
                    return Change::Places(self.found());
                }
                // It counts if the initiator goes on from there.
                let seen = self.without(Self::DOUBTS).with(Self::DOUBT);
                Change::Doubt(seen, segment.ack, false)
            }
            State::SynSent if !is_reply && self.0 & Self::DOUBT != 0 => {
                match near(segment.seq, known.doubt, END_WINDOW) {
                    true => Change::Places(self.found()),
                    false => Change::Ignored,
                }
            }
            State::SynRecv if !is_reply => {
                let missing = known.of(other).wrapping_sub(segment.ack);
                let early = match self.0 & Self::DOUBT {
                    0 => 0,
                    _ => EARLY_DATA,
                };
                if self.is_placed(other) && missing > early {
                    return Change::Ignored;
                }
                let seen = self.to(State::Established as u32, direction);
                Change::Add(seen.without(Self::DOUBTS))
            }
            // Data before its SYN/ACK is acknowledged.
            State::SynRecv if segment.end != segment.seq => {
                self.changed_to(self.to(state, direction).with(Self::DOUBT))
            }
            State::Established if !view.one_way && !self.is_placed(other) => {
                Change::Places(self.to(state, direction))
            }
            State::Established if !self.fits_first(segment, known) => Change::Ignored,
            State::SynRecv | State::Established | State::CloseWait => {
                self.changed_to(self.to(state, direction))
            }
            State::FinWait | State::LastAck if self.acknowledges_fin(segment, known) => {
                let next = match state == State::FinWait as u32 {
                    true => State::CloseWait,
                    false => State::TimeWait,
                };
                Change::Answers(self.to(next as u32, direction).without(Self::DOUBTS))
            }
            State::FinWait | State::LastAck | State::TimeWait | State::Close => {
                self.goes_on(segment, known, is_alone)
            }
            _ => Change::Ignored,
        }
    }

    /// A connection that was there before the SYN.
    #[inline(always)]
    fn found(self) -> Self {
        let seen = Self(State::Established as u32);
        let seen = seen.with(Self::PICKUP).with(Self::BOTH);
        seen.begun_by(self.initiator()).posted_as(self)
    }

    /// Whether the first segment of a side fits what the other has acknowledged and sent.
    #[inline(always)]
    fn fits_first(self, segment: &Segment, known: &Known) -> bool {
        self.is_placed(segment.direction)
            || !self.is_placed(segment.direction.reverse())
            || fits_first(known.positions, segment)
    }

    /// Whether a segment acknowledges the last FIN, exactly.
    #[inline(always)]
    fn acknowledges_fin(self, segment: &Segment, known: &Known) -> bool {
        let is_last = segment.direction.reverse() == self.last_fin();
        is_last && (segment.ack == known.doubt || !self.is_placed(self.last_fin()))
    }

    /// A FIN waits for its acknowledgment.
    #[inline(always)]
    fn is_ending(self) -> bool {
        let state = self.0 & Self::STATE;
        state == State::FinWait as u32 || state == State::LastAck as u32
    }

    /// The side that sent the last FIN, in [`State::FinWait`] or [`State::LastAck`].
    #[inline(always)]
    fn last_fin(self) -> Direction {
        let is_last_ack = self.0 & Self::STATE == State::LastAck as u32;
        let high = if is_last_ack {
            Self::DOUBT
        } else {
            Self::FROM_HIGH << Self::FIN
        };
        match self.0 & high {
            0 => Direction::FromLow,
            _ => Direction::FromHigh,
        }
    }

    /// A segment of a flow whose end, or next life, is in doubt. If it fits the old life and cannot come after the end,
    /// its side goes on; if both do, the end was none. `is_alone`: one side is all that is seen, and decides.
    #[inline(always)]
    fn goes_on(self, segment: &Segment, known: &Known, is_alone: bool) -> Change {
        let (state, direction) = (self.0 & Self::STATE, segment.direction);
        if !self.is_placed(direction) || !fits(known.positions, self, segment) {
            return Change::Nothing;
        }
        let old = match self.is_ending() {
            true => self,
            false => self.without(Self::CANDIDATE),
        };
        let is_doubted = match self.is_ending() {
            // Behind a FIN its sender has no more to send, and the other side nothing else to acknowledge.
            true if direction == self.last_fin() => {
                let beyond = segment.end.wrapping_sub(known.doubt) as i32 > 0;
                beyond || segment.end == segment.seq && segment.end != known.doubt
            }
            true => segment.ack != known.doubt,
            false => self.0 & Self::DOUBT != 0,
        };
        if !is_doubted {
            return self.changed_to(old);
        }
        let seen = old.with(side(direction) << Self::GOES_ON);
        if !is_alone && seen.0 & Self::BOTH_GO_ON != Self::BOTH_GO_ON {
            return self.changed_to(seen);
        }
        let fins = match state == State::Close as u32 {
            true => self.0,
            // Neither was acknowledged.
            false if self.0 & Self::CANDIDATE != 0 => 0,
            false => self.0 & !(side(self.last_fin()) << Self::FIN),
        } & Self::BOTH << Self::FIN;
        let state = match fins {
            0 => State::Established,
            _ => State::CloseWait,
        };
        let seen = seen.without(Self::STATE).without(Self::DOUBTS);
        let seen = seen.without(Self::BOTH << Self::FIN);
        Change::Add(seen.with(state as u32).with(fins))
    }

    /// The same, but [`is_starting`](Self::is_starting).
    #[inline(always)]
    pub fn starting(self) -> Self {
        self.with(Self::STARTING)
    }

    /// Whether `created` may still be that of the life before.
    #[inline(always)]
    pub fn is_starting(self) -> bool {
        self.0 & Self::STARTING != 0
    }

    /// The same, but [`is_posted`](Self::is_posted).
    #[inline(always)]
    pub fn posted(self) -> Self {
        self.with(Self::POSTED)
    }

    /// The same, and posted if the other is.
    #[inline(always)]
    fn posted_as(self, other: Self) -> Self {
        self.with(other.0 & Self::POSTED)
    }

    /// The same, but not.
    #[inline(always)]
    pub fn delivered(self) -> Self {
        self.without(Self::POSTED)
    }

    /// The same, but [`is_stalled`](Self::is_stalled), or not.
    #[inline(always)]
    pub fn stalled(self, stalled: bool) -> Self {
        match stalled {
            true => self.with(Self::STALLED),
            false => self.without(Self::STALLED),
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
        state >= State::Established as u32 && state <= State::LastAck as u32
    }

    /// Whether the flow is on its way to the CPU of its wheel, which was told to look at it.
    #[inline(always)]
    pub fn is_posted(self) -> bool {
        self.0 & Self::POSTED != 0
    }

    /// Past the handshake, and no FIN waits for its acknowledgment.
    #[inline(always)]
    pub(crate) fn is_open(self) -> bool {
        let state = self.0 & Self::STATE;
        state == State::Established as u32 || state == State::CloseWait as u32
    }

    /// Reset, or ended from both sides.
    #[inline(always)]
    pub fn is_closed(self) -> bool {
        let state = self.0 & Self::STATE;
        state >= State::LastAck as u32 && state <= State::Close as u32
    }

    /// A RST was seen.
    #[inline(always)]
    pub fn is_reset(self) -> bool {
        self.0 & Self::STATE == State::Close as u32
    }

    /// Whether packets of both directions were seen.
    #[inline(always)]
    pub fn is_replied(self) -> bool {
        self.0 & Self::BOTH == Self::BOTH
    }

    /// Whether packets of both directions were seen, and it is known how far each side has sent.
    #[inline(always)]
    pub fn is_conversation(self) -> bool {
        self.0 & Self::places(Self::BOTH) == Self::BOTH
    }

    /// Whether nothing but SYNs were seen.
    #[inline(always)]
    pub fn is_opening(self) -> bool {
        let state = self.0 & Self::STATE;
        state == State::SynSent as u32 || state == State::SynSent2 as u32
    }

    /// What a full table keeps: past the handshake and not closed; and seen from both sides, unless one is all
    /// that anybody sees here (`one_way`).
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

/// What is known of a flow beside [`Seen`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// How far its sides have come.
    pub positions: Positions,
    /// The number behind a FIN that nobody has acknowledged, or behind a SYN that nobody has answered; in an open flow,
    /// behind data that lies behind a gap.
    pub doubt: u32,
    /// The packet came by a way by which its sender's may come: see [`SideWay::allows`]; or nobody asks.
    pub is_own_way: bool,
    /// This host made the packet: nobody outside can have.
    pub is_local: bool,
}

/// A flow that one CPU alone sees: what the packets of a connection come to, one after the other. (The data plane does the
/// same with words that CPUs share.)
#[derive(Clone, Copy, Debug)]
pub struct Tracked {
    /// What was seen.
    pub seen: Seen,
    /// And what else is known.
    pub known: Known,
}

impl Tracked {
    /// A flow of this first segment; `None` if it begins none.
    pub fn first(segment: &Segment, view: View) -> Option<Self> {
        let seen = Seen::first(segment.direction, segment.flags, view)?;
        let known = Known {
            positions: numbers::first(segment),
            doubt: 0,
            is_own_way: true,
            is_local: false,
        };
        Some(Self { seen, known })
    }

    /// A further segment.
    pub fn see(&mut self, segment: &Segment, view: View) -> Change {
        let change = self.seen.next(segment, &self.known, view);
        let before = self.seen;
        match change {
            Change::Ignored | Change::SameWay | Change::Ended | Change::AddIfItLasts(_) => {}
            Change::Nothing if before.is_told_by(segment.direction, view) => {
                self.known.positions = numbers::first(segment);
            }
            Change::Nothing => self.follow(before, segment),
            Change::Add(seen) => {
                self.seen = seen;
                if segment.flags & tcp::RST == 0 {
                    self.follow(before, segment);
                }
            }
            Change::Answers(seen) => {
                self.seen = seen;
                self.set_position(segment.direction.reverse(), segment.ack);
                self.follow(before, segment);
            }
            Change::Places(seen) => {
                self.seen = seen;
                self.known.positions = numbers::first(segment);
            }
            Change::Doubt(seen, number, answers) => {
                self.seen = seen;
                self.known.doubt = number;
                if answers {
                    self.set_position(segment.direction.reverse(), segment.ack);
                }
            }
            Change::NewGeneration(seen) => {
                self.seen = seen;
                self.known.positions = numbers::first(segment);
            }
        }
        change
    }

    /// A further segment, of this host, when what was seen of the flow so far was [somebody else's](SideWay::is_disproved_by).
    pub fn see_disproved(&mut self, segment: &Segment, view: View) -> Change {
        match self.seen.anew(segment) {
            Some(seen) => {
                self.seen = seen;
                self.known.positions = numbers::first(segment);
                Change::NewGeneration(seen)
            }
            None => self.see(segment, view),
        }
    }

    fn follow(&mut self, before: Seen, segment: &Segment) {
        let positions = self.known.positions;
        if let Some(position) = advance(positions, before, segment) {
            self.set_position(segment.direction, position);
        }
        if is_apart(positions, segment) {
            let apart = numbers::apart(positions, self.known.doubt, before, segment, true);
            if let Some(position) = apart.other {
                self.set_position(segment.direction.reverse(), position);
            }
            if let Some(position) = apart.own {
                self.known.doubt = position;
            }
        }
    }

    fn set_position(&mut self, direction: Direction, position: u32) {
        let [low, high] = &mut self.known.positions;
        match direction {
            Direction::FromLow => *low = position,
            Direction::FromHigh => *high = position,
        }
    }
}

/// The bit that says that an interface is in another network namespace than the run. Below it stand ten bits for which one, and
/// then the interface's index there.
const ELSEWHERE: u32 = 1 << 30;
/// Bits of an index in another network namespace.
pub const INDEX_BITS: u32 = 20;
/// Other network namespaces that are watched at once, at most.
pub const MAX_NAMESPACES: u32 = 1 << 10;

/// What is added to the indexes of interfaces of another network namespace, by its number below [`MAX_NAMESPACES`]: so each
/// interface has a number of its own. 0 is added to those of the run's own.
pub const fn elsewhere(namespace: u32) -> u32 {
    ELSEWHERE | namespace << INDEX_BITS
}

/// Whether the number of an interface is that of one in another network namespace.
pub const fn is_elsewhere(interface: u32) -> bool {
    interface & ELSEWHERE != 0
}

/// By which way a packet came here: the index of the interface by which it came in, or 0 if this host made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way(pub u32);

impl Way {
    /// This host made the packet. Nobody outside can have.
    pub const LOCAL: Self = Self(0);
    /// Both ends are here: the index of the loopback interface in every network namespace (`LOOPBACK_IFINDEX`,
    /// `include/net/flow.h`).
    pub const LOOPBACK: Self = Self(1);

    /// Of a packet that was seen on an interface, and had come in by `origin`, or by none if that is 0.
    #[inline(always)]
    pub fn of(interface: u32, origin: u32) -> Self {
        match Self(interface) {
            Self::LOOPBACK => Self::LOOPBACK,
            _ => Self(origin),
        }
    }

    /// Whether nobody outside can have made the packet. Of [another network namespace](elsewhere) whoever is inside may be
    /// somebody else's tenant: what is made there comes by a way like any other.
    #[inline(always)]
    pub fn is_local(self) -> bool {
        self.0 <= Self::LOOPBACK.0
    }
}

/// The [`Way`] by which one side's packets come; the highest bit says that it is the key's high endpoint. Or
/// [`SideWay::ANY`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideWay(pub u32);

impl SideWay {
    /// Nothing is known.
    pub const ANY: Self = Self(u32::MAX);
    /// The highest bit: an index is a positive `int` (`struct net_device`, `include/linux/netdevice.h`).
    const HIGH: u32 = 1 << 31;

    /// Of the side that sent a packet, which came by this way.
    #[inline(always)]
    pub fn of(way: Way, direction: Direction) -> Self {
        match direction {
            Direction::FromLow => Self(way.0),
            Direction::FromHigh => Self(way.0 | Self::HIGH),
        }
    }

    #[inline(always)]
    fn way(self) -> Way {
        Way(self.0 & !Self::HIGH)
    }

    /// Whether it is known of this side.
    #[inline(always)]
    pub fn is_of(self, direction: Direction) -> bool {
        self != Self::ANY && Self::of(self.way(), direction) == self
    }

    /// Whether a packet that claims this direction may come by this way: the side whose way is known sends by that one
    /// (or is this host, and only seems to send by another; where it may have several, `is_lenient`: or by another), and
    /// the other side by others.
    #[inline(always)]
    pub fn allows(self, way: Way, direction: Direction, is_lenient: bool) -> bool {
        let known = self.way();
        if self == Self::ANY || way == Way::LOOPBACK {
            return true;
        }
        if known == Way::LOOPBACK {
            return way.is_local();
        }
        match self.is_of(direction) {
            true => way == known || way.is_local() || is_lenient && !known.is_local(),
            false => way != known,
        }
    }

    /// Whether a packet of this direction, which came by this way, shows that who was taken for its sender was somebody
    /// else: this host sends it, and its packets do not come in.
    #[inline(always)]
    pub fn is_disproved_by(self, way: Way, direction: Direction) -> bool {
        let is_claimed = self.is_of(direction) || way == Way::LOOPBACK;
        self != Self::ANY && !self.way().is_local() && way.is_local() && is_claimed
    }
}

impl Known {
    #[inline(always)]
    fn of(&self, direction: Direction) -> u32 {
        of(self.positions, direction)
    }
}

/// The bit of [`Seen`] for the sender.
#[inline(always)]
fn side(direction: Direction) -> u32 {
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
    /// It came by a way by which its sender's packets do not come.
    SameWay,
    /// The flow is now this.
    Add(Seen),
    /// The same, and this number is in doubt; whether it [answers](Change::Answers), too.
    Doubt(Seen, u32, bool),
    /// The same; the side that it acknowledges has come as far as that.
    Answers(Seen),
    /// The same; both sides have come as far as the segment says: nobody else has said anything.
    Places(Seen),
    /// The flow is now this if it is older than two seconds, else it is what it was: conntrack's
    /// `nf_conntrack_udp_packet` has as much patience before it calls UDP a stream.
    AddIfItLasts(Seen),
    /// The flow is over and another with the same key begins.
    NewGeneration(Seen),
    /// The flow has ended already: it is about to leave the table.
    Ended,
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
