//! How packets change the state of a flow. The states are conntrack's; TCP moves through them as in
//! `tcp_conntracks` in `net/netfilter/nf_conntrack_proto_tcp.c`.
//!
//! There are differences, because a flow may be seen in only one direction, and to protect live
//! flows from forged packets; `docs/states.md` lists them.

use crate::{
    key::Direction,
    numbers::{EARLY_DATA, END_WINDOW, Positions, accepts_end, fits, fits_first, near, next_of},
    seen::{FIN, RST, SYN, SYN_ACK, kind, side},
    segment::{Segment, datagram, tcp},
};

pub use crate::{
    seen::{Seen, State, View},
    way::{INDEX_BITS, MAX_NAMESPACES, SideWay, Way, elsewhere, is_elsewhere},
};

/// In the table: the packet does not change the flow's state, and does not keep the flow alive.
const IGNORED: u64 = 15;

/// Packs a row of conntrack's table: the state that follows each of SS SR ES FW CW LA TW CL S2.
const fn row(next: [u64; 9]) -> u64 {
    let mut packed = 0;
    let mut state = 0;
    while state < 9 {
        packed |= next[state] << (4 * state);
        state += 1;
    }
    packed
}

/// conntrack's table, indexed by `[reply][kind]`, padded to a power of two.
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

/// What a segment changes of [`Seen`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing. The segment keeps the flow alive.
    Nothing,
    /// Nothing. The segment does not belong to the connection, and does not keep the flow alive.
    Ignored,
    /// Nothing. The segment did not come by its sender's way.
    SameWay,
    /// The flow becomes this.
    Add(Seen),
    /// The flow becomes this, and this number is in doubt. The flag says whether the segment also
    /// [answers](Change::Answers) the other side.
    Doubt(Seen, u32, bool),
    /// The flow becomes this, and the acknowledgment number is the next sequence number of the side
    /// that it acknowledges.
    Answers(Seen),
    /// The flow becomes this, and both next sequence numbers are taken from the segment: no other
    /// source for them exists.
    Places(Seen),
    /// The flow becomes this if it is older than two seconds, else it stays as it was. conntrack's
    /// `nf_conntrack_udp_packet` waits as long before it calls UDP a stream.
    AddIfItLasts(Seen),
    /// The connection is over, and another one with the same key begins.
    NewGeneration(Seen),
    /// The flow has ended already and is about to leave the table.
    Ended,
}

/// What is known of a flow besides [`Seen`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The next sequence number of each side.
    pub positions: Positions,
    /// The number after a FIN that is not yet acknowledged, or after a SYN that is not yet
    /// answered. In an open flow: the number after data that lies beyond a gap.
    pub doubt: u32,
    /// The packet came by a way that its sender's packets may come by (see [`SideWay::allows`]), or
    /// ways are not checked.
    pub is_own_way: bool,
    /// This host made the packet, so nobody outside can have forged it.
    pub is_local: bool,
}

impl Known {
    #[inline(always)]
    fn next(&self, direction: Direction) -> u32 {
        next_of(self.positions, direction)
    }
}

impl Seen {
    #[inline(always)]
    fn next_datagram(self, side: u32) -> Change {
        let seen = self.with(side);
        if seen == self && seen.0 & Self::STATE == State::Udp as u32 {
            // A reply was seen: without one, this function would not have been called.
            let stream = seen.without(Self::STATE).with(State::UdpStream as u32);
            return Change::AddIfItLasts(stream);
        }
        if seen == self {
            Change::Nothing
        } else {
            Change::Add(seen)
        }
    }

    /// What a further packet changes of the flow.
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

    /// What a segment of this host begins if all that was seen of the flow before was
    /// [forged](SideWay::is_disproved_by). A SYN/ACK of this host answers a SYN, so it counts for
    /// both sides. Call this before [`next`](Self::next).
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

    /// The next state as the table has it.
    #[inline(always)]
    fn of_table(self, segment: &Segment) -> u32 {
        let is_reply = usize::from(segment.direction != self.initiator());
        let row = NEXT[(is_reply << 3 | kind(segment.flags)) & 15];
        (row >> (4 * (self.0 & Self::STATE)) & 15) as u32
    }

    /// The same in another state, after a segment of this side.
    #[inline(always)]
    fn to(self, state: u32, direction: Direction) -> Self {
        let side = side(direction);
        self.without(Self::STATE)
            .without(side << Self::UNPLACED)
            .with(state)
            .with(side)
    }

    /// A SYN may begin another connection if the flow is over. A SYN with another number may be the
    /// genuine one if the flow is still opening. Both wait for their answer. Any other SYN is at
    /// most answered by a challenge ACK (RFC 5961, section 4).
    #[inline(always)]
    fn next_syn(self, segment: &Segment, known: &Known) -> Change {
        let state = self.0 & Self::STATE;
        let (opens, is_over) = (state == State::SynSent as u32, self.is_over());
        if opens && segment.direction != self.initiator() {
            return Change::Add(self.to(State::SynSent2 as u32, segment.direction));
        }
        let number = segment.seq.wrapping_add(1);
        if self.is_opening() && number == known.next(segment.direction) {
            // A retransmission.
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
            // A retransmission: a SYN without an answer keeps the flow alive only once.
            return Change::Ignored;
        }
        Change::Doubt(candidate, number, false)
    }

    /// Whether the flow was reset, or ended by both sides and acknowledged. Another connection may
    /// then begin (RFC 9293, section 3.6.1).
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
        if is_opening && self.is_placed(other) && segment.ack != known.next(other) {
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

    /// A FIN takes effect for good once its number is acknowledged.
    #[inline(always)]
    fn next_fin(self, segment: &Segment, known: &Known) -> Change {
        if !accepts_end(known.positions, self, segment) {
            return Change::Ignored;
        }
        let direction = segment.direction;
        let fin = side(direction) << Self::FIN;
        if self.0 & fin != 0 {
            let is_pending = self.is_ending() && direction == self.last_fin();
            return match segment.seq == known.next(direction) && segment.end != known.doubt {
                // The earlier FIN was a forger's guess.
                true if is_pending => Change::Doubt(self, segment.end, false),
                // A retransmission.
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

    /// A RST at its sender's next sequence number counts at once (RFC 5961, section 3.2). One that
    /// is only near it counts unless both sides go on sending. The same holds for every RST if only
    /// one side was seen, because a forger can move the next sequence number of such a flow.
    #[inline(always)]
    fn next_reset(self, segment: &Segment, known: &Known, view: View) -> Change {
        if !accepts_end(known.positions, self, segment) {
            return Change::Ignored;
        }
        let (state, direction) = (self.0 & Self::STATE, segment.direction);
        let other = direction.reverse();
        let is_exact = if state == State::SynSent as u32 && segment.flags & tcp::ACK != 0 {
            // The initiator acknowledges nothing in this state: it has had no answer.
            direction != self.initiator() && segment.ack == known.next(other)
        } else {
            let is_last = known.doubt == segment.seq && direction == self.last_fin();
            segment.seq == known.next(direction) || self.is_ending() && is_last
        };
        let closed = self.without(Self::STATE).without(Self::DOUBTS);
        let closed = closed.with(State::Close as u32);
        let is_handshake = state <= State::SynRecv as u32 || state == State::SynSent2 as u32;
        // A side that has sent nothing has the number that the other side expects. If only this
        // side has told its number, its RST at that number proves nothing.
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
        // An unacknowledged FIN is in doubt as well. It is not kept separately: if the RST is taken
        // back, so is the FIN.
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
            // The sender that goes on after its SYN has had the answer, which is not seen here.
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
            // A responder that acknowledges something other than the SYN had a connection already:
            // the SYN was a forger's guess.
            State::SynSent if is_reply && segment.ack != known.next(other) => {
                if known.is_local {
                    return Change::Places(self.found());
                }
                // It counts if the initiator goes on from that number.
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
                let missing = known.next(other).wrapping_sub(segment.ack);
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
            // The responder sends data before its SYN/ACK is acknowledged.
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

    /// A connection that was open before the SYN.
    #[inline(always)]
    fn found(self) -> Self {
        let seen = Self(State::Established as u32);
        let seen = seen.with(Self::PICKUP).with(Self::BOTH);
        seen.begun_by(self.initiator()).posted_as(self)
    }

    /// Whether the first segment seen of a side fits what the other side has acknowledged and sent.
    #[inline(always)]
    fn fits_first(self, segment: &Segment, known: &Known) -> bool {
        self.is_placed(segment.direction)
            || !self.is_placed(segment.direction.reverse())
            || fits_first(known.positions, segment)
    }

    /// Whether a segment acknowledges exactly the last FIN.
    #[inline(always)]
    fn acknowledges_fin(self, segment: &Segment, known: &Known) -> bool {
        let is_last = segment.direction.reverse() == self.last_fin();
        is_last && (segment.ack == known.doubt || !self.is_placed(self.last_fin()))
    }

    /// Whether a FIN waits for its acknowledgment.
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

    /// A segment of a flow whose end, or whose next connection, is in doubt. If the segment fits
    /// the old connection and cannot come after its end, the segment's side goes on. Once both
    /// sides go on, the end is taken back. `is_alone`: only one side is seen, and it decides alone.
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
            // After its FIN a side has no more to send, and the other side nothing else to
            // acknowledge.
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
            // Neither FIN was acknowledged.
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

    /// The same, and queued if the other is.
    #[inline(always)]
    fn posted_as(self, other: Self) -> Self {
        self.with(other.0 & Self::POSTED)
    }
}
