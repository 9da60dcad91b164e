//! The model: a flow in plain fields, and what a segment changes in them.

use twheel_common::{
    flow::Direction::{self, *},
    numbers::{Positions, accepts_end},
    packet::{
        Segment, datagram,
        tcp::{ACK, FIN, RST, SYN},
    },
    state::{
        Change, Known, Seen,
        State::{self, *},
        View,
    },
};

/// [`Seen`] with a field for each thing that it stores. Pairs have the low side first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    pub state: State,
    pub initiator: Direction,
    pub seen: [bool; 2],
    pub pickup: bool,
    pub fins: [bool; 2],
    pub unplaced: [bool; 2],
    pub stalled: bool,
    pub posted: bool,
    pub starting: bool,
    /// In `Close`: the RST did not have the exact number. In `LastAck`: the last FIN is the high
    /// side's.
    pub doubt: bool,
    /// In `LastAck`: the first FIN was not acknowledged before the second. Otherwise: a SYN waits
    /// for its answer.
    candidate: bool,
    goes_on: [bool; 2],
}

const NEW: Model = Model {
    state: SynSent,
    initiator: FromLow,
    seen: [false; 2],
    pickup: false,
    fins: [false; 2],
    unplaced: [false; 2],
    stalled: false,
    posted: false,
    starting: false,
    doubt: false,
    candidate: false,
    goes_on: [false; 2],
};

impl Model {
    pub fn read(Seen(bits): Seen) -> Self {
        let bit = |number: u32| bits >> number & 1 != 0;
        let two = |number| [bit(number), bit(number + 1)];
        assert!(bits >> 20 == 0 && !bit(15));
        assert_eq!(Seen::DEAD, Seen(1 << 15));
        Self {
            state: State::ALL[(bits & 15) as usize],
            initiator: if bit(4) { FromHigh } else { FromLow },
            seen: two(5),
            pickup: bit(7),
            fins: two(8),
            stalled: bit(10),
            unplaced: two(11),
            posted: bit(13),
            starting: bit(14),
            doubt: bit(16),
            candidate: bit(17),
            goes_on: two(18),
        }
    }

    pub fn write(&self) -> Seen {
        let bits = [
            (self.initiator == FromHigh, 4),
            (self.seen[0], 5),
            (self.seen[1], 6),
            (self.pickup, 7),
            (self.fins[0], 8),
            (self.fins[1], 9),
            (self.stalled, 10),
            (self.unplaced[0], 11),
            (self.unplaced[1], 12),
            (self.posted, 13),
            (self.starting, 14),
            (self.doubt, 16),
            (self.candidate, 17),
            (self.goes_on[0], 18),
            (self.goes_on[1], 19),
        ];
        let bits = bits.iter().map(|(is_set, bit)| u32::from(*is_set) << bit);
        Seen(self.state as u32 + bits.sum::<u32>())
    }

    pub fn first(segment: &Segment, view: View) -> Option<Self> {
        let (me, flags) = (segment.direction, segment.flags);
        let begins = |state, initiator, pickup| {
            let mut seen = [false; 2];
            seen[me as usize] = true;
            Some(Self {
                state,
                initiator,
                seen,
                pickup,
                ..NEW
            })
        };
        match flags {
            datagram::UDP => begins(Udp, me, false),
            datagram::QUERY => begins(Icmp, me, false),
            datagram::ANSWER => None,
            _ if flags & (RST | FIN) != 0 => None,
            _ if flags & (SYN | ACK) == SYN => begins(SynSent, me, false),
            _ if view.strict => None,
            _ if flags & SYN == 0 => begins(Established, me, true),
            _ if view.one_way => begins(SynRecv, me.reverse(), false),
            _ => None,
        }
    }

    pub fn of_socket(state: State, initiator: Direction, fins: [bool; 2]) -> Self {
        Self {
            state,
            initiator,
            fins,
            seen: [true; 2],
            pickup: true,
            unplaced: [!matches!(state, Udp | UdpStream | Icmp); 2],
            ..NEW
        }
    }

    fn is_placed(&self, direction: Direction) -> bool {
        self.seen[direction as usize] && !self.unplaced[direction as usize]
    }

    /// The effect of a side's segment: the side was seen, and its position is known.
    fn to(&self, state: State, direction: Direction) -> Self {
        let mut next = *self;
        next.state = state;
        next.seen[direction as usize] = true;
        next.unplaced[direction as usize] = false;
        next
    }

    fn certain(self) -> Self {
        Self {
            doubt: false,
            candidate: false,
            goes_on: [false; 2],
            ..self
        }
    }

    fn is_over(&self) -> bool {
        matches!(self.state, TimeWait | Close)
    }

    fn is_ending(&self) -> bool {
        matches!(self.state, FinWait | LastAck)
    }

    fn last_fin(&self) -> Direction {
        let is_high = match self.state {
            LastAck => self.doubt,
            _ => self.fins[1],
        };
        if is_high { FromHigh } else { FromLow }
    }

    fn acknowledges_fin(&self, segment: &Segment, known: &Known) -> bool {
        segment.direction != self.last_fin()
            && (segment.ack == known.doubt || !self.is_placed(self.last_fin()))
    }

    fn changed(&self, next: Self) -> Change {
        match next == *self {
            true => Change::Nothing,
            false => Change::Add(next.write()),
        }
    }

    /// Whether the packet cannot change the state, so that the packet path need not check.
    pub fn is_kept_by(&self, me: Direction, flags: u8) -> bool {
        let is_replied = self.seen == [true; 2];
        if flags & datagram::ANY != 0 {
            return self.seen[me as usize] && !(self.state == Udp && is_replied);
        }
        flags & (SYN | FIN | RST) == 0 && self.state == Established && self.is_placed(me)
    }

    /// Whether one side alone gives both sides' positions.
    pub fn is_told_by(&self, me: Direction, view: View) -> bool {
        let is_open = self.state == Established && !view.one_way;
        is_open && self.is_placed(me) && !self.is_placed(me.reverse())
    }

    /// What a segment of this host begins, if all packets so far were somebody else's.
    pub fn anew(&self, segment: &Segment) -> Option<Seen> {
        let (me, flags) = (segment.direction, segment.flags);
        if self.is_kept_by(me, flags) || self.seen == [true; 2] || flags & datagram::ANY != 0 {
            return None;
        }
        let mut next = Self {
            initiator: me,
            posted: self.posted,
            ..NEW
        };
        next.seen[me as usize] = true;
        match flags & (SYN | ACK) {
            _ if flags & RST != 0 => return None,
            SYN => next.state = SynSent,
            flags if flags & SYN != 0 => {
                (next.state, next.initiator) = (SynRecv, me.reverse());
                next.seen = [true; 2];
            }
            _ if segment.flags & FIN != 0 => return None,
            _ => (next.state, next.pickup) = (Established, true),
        }
        Some(next.write())
    }

    pub fn next(&self, segment: &Segment, known: &Known, view: View) -> Change {
        let (me, flags) = (segment.direction, segment.flags);
        let is_replied = self.seen == [true; 2];
        if self.is_kept_by(me, flags) {
            return Change::Nothing;
        }
        if !known.is_own_way {
            return Change::SameWay;
        }
        if flags & datagram::ANY != 0 {
            let mut next = *self;
            next.seen[me as usize] = true;
            if self.state == Udp && is_replied {
                next.state = UdpStream;
                return Change::AddIfItLasts(next.write());
            }
            return self.changed(next);
        }
        let is_end = flags & (FIN | RST) != 0 && flags & (SYN | RST) != SYN;
        if is_end && !accepts_end(known.positions, self.write(), segment) {
            return Change::Ignored;
        }
        match flags & (SYN | FIN | RST | ACK) {
            flags if flags & RST != 0 => self.next_reset(segment, known, view),
            flags if flags & (SYN | ACK) == SYN => self.next_syn(segment, known),
            flags if flags & SYN != 0 => self.next_syn_ack(segment, known),
            flags if flags & FIN != 0 => self.next_fin(segment, known),
            _ => self.next_ack(segment, known, view),
        }
    }

    fn next_syn(&self, segment: &Segment, known: &Known) -> Change {
        let number = segment.seq.wrapping_add(1);
        let is_same = number == next_of(known.positions, segment.direction);
        match self.state {
            SynSent if segment.direction != self.initiator => {
                Change::Add(self.to(SynSent2, segment.direction).write())
            }
            SynSent if is_same => Change::Ignored,
            SynSent | TimeWait | Close if self.candidate && known.doubt == number => {
                Change::Ignored
            }
            SynSent | TimeWait | Close => {
                let candidate = Self {
                    candidate: true,
                    doubt: self.doubt && self.state != SynSent,
                    goes_on: match self.state {
                        SynSent => [false; 2],
                        _ => self.goes_on,
                    },
                    ..*self
                };
                Change::Doubt(candidate.write(), number, false)
            }
            _ => Change::Ignored,
        }
    }

    fn next_syn_ack(&self, segment: &Segment, known: &Known) -> Change {
        let (me, them) = (segment.direction, segment.direction.reverse());
        let is_reply = me != self.initiator;
        let is_opening = matches!(self.state, SynSent | SynSent2);
        let is_answer = self.candidate && segment.ack == known.doubt;
        if is_answer && self.is_over() {
            let next = Self {
                state: SynRecv,
                seen: [true; 2],
                initiator: them,
                posted: self.posted,
                ..NEW
            };
            return Change::NewGeneration(next.write());
        }
        if is_answer && is_opening && is_reply {
            return Change::Answers(self.to(SynRecv, me).certain().write());
        }
        let is_exact = segment.ack == next_of(known.positions, them);
        match self.state {
            SynSent | SynSent2 if self.is_placed(them) && !is_exact => Change::Ignored,
            SynSent if is_reply => self.changed(self.to(SynRecv, me).certain()),
            SynSent2 => self.changed(self.to(SynRecv, me).certain()),
            // The initiator sends its segment again after a simultaneous open.
            SynRecv if !is_reply => self.changed(self.to(SynRecv, me)),
            _ => Change::Ignored,
        }
    }

    fn next_fin(&self, segment: &Segment, known: &Known) -> Change {
        let me = segment.direction;
        if self.fins[me as usize] {
            let is_last = self.is_ending() && me == self.last_fin();
            let is_other = segment.end != known.doubt;
            return match segment.seq == next_of(known.positions, me) && is_other && is_last {
                true => Change::Doubt(self.write(), segment.end, false),
                false => Change::Nothing,
            };
        }
        let next = match self.state {
            SynRecv | Established => FinWait,
            FinWait | CloseWait | LastAck => LastAck,
            TimeWait | Close => return self.goes_on(segment, known, false),
            _ => return Change::Ignored,
        };
        let answers = self.state == FinWait
            && segment.flags & ACK != 0
            && self.acknowledges_fin(segment, known);
        let mut seen = self.to(next, me).certain();
        seen.fins[me as usize] = true;
        seen.doubt = next == LastAck && me == FromHigh;
        seen.candidate = self.state == FinWait && !answers;
        Change::Doubt(seen.write(), segment.end, answers)
    }

    fn next_reset(&self, segment: &Segment, known: &Known, view: View) -> Change {
        let (me, them) = (segment.direction, segment.direction.reverse());
        let is_exact = if self.state == SynSent && segment.flags & ACK != 0 {
            me != self.initiator && segment.ack == next_of(known.positions, them)
        } else {
            let is_behind_fin =
                self.is_ending() && me == self.last_fin() && segment.seq == known.doubt;
            segment.seq == next_of(known.positions, me) || is_behind_fin
        };
        let mut closed = Self {
            state: Close,
            ..self.certain()
        };
        match self.state {
            SynSent | SynRecv | SynSent2 if is_exact => Change::Add(closed.write()),
            SynSent | SynRecv | SynSent2 => Change::Ignored,
            _ if is_exact && !view.one_way && (self.is_placed(them) || !self.is_placed(me)) => {
                self.changed(closed)
            }
            TimeWait | Close | LastAck => Change::Nothing,
            _ => {
                if self.state == FinWait {
                    closed.fins = [false; 2];
                }
                closed.doubt = true;
                Change::Add(closed.write())
            }
        }
    }

    fn next_ack(&self, segment: &Segment, known: &Known, view: View) -> Change {
        let (me, them) = (segment.direction, segment.direction.reverse());
        let is_reply = me != self.initiator;
        let is_alone = view.one_way && !self.seen[them as usize];
        let same = self.to(self.state, me);
        match self.state {
            TimeWait | Close if is_alone && self.candidate && segment.seq == known.doubt => {
                let mut seen = [false; 2];
                seen[me as usize] = true;
                let next = Self {
                    state: Established,
                    seen,
                    initiator: me,
                    posted: self.posted,
                    ..NEW
                };
                Change::NewGeneration(next.write())
            }
            SynSent | SynRecv if is_alone => {
                Change::Add(self.to(Established, me).certain().write())
            }
            SynSent if is_reply && segment.ack != next_of(known.positions, them) => {
                if known.is_local {
                    return Change::Places(self.found().write());
                }
                let next = Self {
                    doubt: true,
                    ..self.certain()
                };
                Change::Doubt(next.write(), segment.ack, false)
            }
            SynSent if !is_reply && self.doubt => {
                let ahead = segment.seq.wrapping_sub(known.doubt);
                if ahead.wrapping_add(1 << 18) > 2 << 18 {
                    return Change::Ignored;
                }
                Change::Places(self.found().write())
            }
            SynRecv if !is_reply => {
                let missing = next_of(known.positions, them).wrapping_sub(segment.ack);
                let most = if self.doubt { 16_384 } else { 0 };
                match self.is_placed(them) && missing > most {
                    true => Change::Ignored,
                    false => Change::Add(self.to(Established, me).certain().write()),
                }
            }
            SynRecv if segment.end != segment.seq => {
                let next = Self {
                    doubt: true,
                    ..same
                };
                self.changed(next)
            }
            Established if !view.one_way && !self.is_placed(them) => Change::Places(same.write()),
            Established if !self.fits_first(segment, known) => Change::Ignored,
            SynRecv | Established | CloseWait => self.changed(same),
            FinWait if self.acknowledges_fin(segment, known) => {
                Change::Answers(self.to(CloseWait, me).certain().write())
            }
            LastAck if self.acknowledges_fin(segment, known) => {
                Change::Answers(self.to(TimeWait, me).certain().write())
            }
            FinWait | LastAck | TimeWait | Close => self.goes_on(segment, known, is_alone),
            _ => Change::Ignored,
        }
    }

    fn found(&self) -> Self {
        Self {
            state: Established,
            pickup: true,
            seen: [true; 2],
            initiator: self.initiator,
            posted: self.posted,
            ..NEW
        }
    }

    fn fits_first(&self, segment: &Segment, known: &Known) -> bool {
        let (me, them) = (segment.direction, segment.direction.reverse());
        let ahead = segment.seq.wrapping_sub(next_of(known.positions, me));
        self.is_placed(me)
            || !self.is_placed(them)
            || ahead.wrapping_add(1 << 18) <= (1 << 24) + (1 << 18)
                && segment.flags & ACK != 0
                && acknowledges(segment.ack, next_of(known.positions, them))
    }

    fn fits(&self, segment: &Segment, known: &Known) -> bool {
        let (me, them) = (segment.direction, segment.direction.reverse());
        let ahead = segment.seq.wrapping_sub(next_of(known.positions, me));
        ahead.wrapping_add(1 << 18) <= 2 << 18
            && segment.flags & ACK != 0
            && (!self.is_placed(them) || acknowledges(segment.ack, next_of(known.positions, them)))
    }

    fn goes_on(&self, segment: &Segment, known: &Known, is_alone: bool) -> Change {
        let me = segment.direction;
        if !self.is_placed(me) || !self.fits(segment, known) {
            return Change::Nothing;
        }
        let mut seen = *self;
        let is_against_end = match self.is_ending() {
            true if me == self.last_fin() => {
                let is_behind = (segment.end.wrapping_sub(known.doubt) as i32) > 0;
                is_behind || segment.seq == segment.end && segment.end != known.doubt
            }
            true => segment.ack != known.doubt,
            false => {
                seen.candidate = false;
                self.doubt
            }
        };
        if !is_against_end {
            return self.changed(seen);
        }
        seen.goes_on[me as usize] = true;
        if seen.goes_on != [true; 2] && !is_alone {
            return self.changed(seen);
        }
        // The FINs or the RST were forged.
        match (self.state, self.candidate) {
            (Close, _) => {}
            (_, true) => seen.fins = [false; 2],
            (_, false) => seen.fins[self.last_fin() as usize] = false,
        }
        seen.state = match seen.fins {
            [false, false] => Established,
            _ => CloseWait,
        };
        Change::Add(seen.certain().write())
    }
}

pub fn next_of(positions: Positions, direction: Direction) -> u32 {
    positions[direction as usize]
}

fn acknowledges(ack: u32, sent: u32) -> bool {
    sent.wrapping_sub(ack).wrapping_add(1 << 20) <= (1 << 26) + (1 << 20)
}
