//! Walks through the states of flows, beside a model that says the same in plain fields: each segment changes what the model
//! says, and nothing else.
#![allow(missing_docs)]

use twheel_common::{
    flow::{Direction, Direction::*},
    numbers::{self, Positions, accepts_end, advance},
    packet::{
        Segment, datagram,
        tcp::{ACK, FIN, RST, SYN},
    },
    state::{Change, Known, Seen, State, State::*, View},
    tracked::Tracked,
};

/// [`Seen`], a field for each thing that it says. What is said of sides is first of the low one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Model {
    state: State,
    initiator: Direction,
    seen: [bool; 2],
    pickup: bool,
    fins: [bool; 2],
    unplaced: [bool; 2],
    stalled: bool,
    posted: bool,
    starting: bool,
    /// `Close`: by a RST beside its number. `LastAck`: the last FIN is the high side's.
    doubt: bool,
    /// `LastAck`: the first FIN was not acknowledged before the second. Else: a SYN waits for its answer.
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
    fn read(Seen(bits): Seen) -> Self {
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

    fn write(&self) -> Seen {
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

    fn first(segment: &Segment, view: View) -> Option<Self> {
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

    fn of_socket(state: State, initiator: Direction, fins: [bool; 2]) -> Self {
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

    /// What a side's segment leaves: the side was seen, and where it is is known.
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

    /// Whether the packet path need not ask.
    fn is_kept_by(&self, me: Direction, flags: u8) -> bool {
        let is_replied = self.seen == [true; 2];
        if flags & datagram::ANY != 0 {
            return self.seen[me as usize] && !(self.state == Udp && is_replied);
        }
        flags & (SYN | FIN | RST) == 0 && self.state == Established && self.is_placed(me)
    }

    /// Whether one side alone says how far both have come.
    fn is_told_by(&self, me: Direction, view: View) -> bool {
        let is_open = self.state == Established && !view.one_way;
        is_open && self.is_placed(me) && !self.is_placed(me.reverse())
    }

    /// What a segment of this host begins, if what was seen so far was somebody else's.
    fn anew(&self, segment: &Segment) -> Option<Seen> {
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

    fn next(&self, segment: &Segment, known: &Known, view: View) -> Change {
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
        let is_same = number == of(known.positions, segment.direction);
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
        let is_exact = segment.ack == of(known.positions, them);
        match self.state {
            SynSent | SynSent2 if self.is_placed(them) && !is_exact => Change::Ignored,
            SynSent if is_reply => self.changed(self.to(SynRecv, me).certain()),
            SynSent2 => self.changed(self.to(SynRecv, me).certain()),
            // Sent again by the initiator, of two that have opened at once.
            SynRecv if !is_reply => self.changed(self.to(SynRecv, me)),
            _ => Change::Ignored,
        }
    }

    fn next_fin(&self, segment: &Segment, known: &Known) -> Change {
        let me = segment.direction;
        if self.fins[me as usize] {
            let is_last = self.is_ending() && me == self.last_fin();
            let is_other = segment.end != known.doubt;
            return match segment.seq == of(known.positions, me) && is_other && is_last {
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
            me != self.initiator && segment.ack == of(known.positions, them)
        } else {
            let is_behind_fin =
                self.is_ending() && me == self.last_fin() && segment.seq == known.doubt;
            segment.seq == of(known.positions, me) || is_behind_fin
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
            SynSent if is_reply && segment.ack != of(known.positions, them) => {
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
                let missing = of(known.positions, them).wrapping_sub(segment.ack);
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
        let ahead = segment.seq.wrapping_sub(of(known.positions, me));
        self.is_placed(me)
            || !self.is_placed(them)
            || ahead.wrapping_add(1 << 18) <= (1 << 24) + (1 << 18)
                && segment.flags & ACK != 0
                && acknowledges(segment.ack, of(known.positions, them))
    }

    fn fits(&self, segment: &Segment, known: &Known) -> bool {
        let (me, them) = (segment.direction, segment.direction.reverse());
        let ahead = segment.seq.wrapping_sub(of(known.positions, me));
        ahead.wrapping_add(1 << 18) <= 2 << 18
            && segment.flags & ACK != 0
            && (!self.is_placed(them) || acknowledges(segment.ack, of(known.positions, them)))
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
        // The end was none.
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

fn of(positions: Positions, direction: Direction) -> u32 {
    positions[direction as usize]
}

fn acknowledges(ack: u32, sent: u32) -> bool {
    sent.wrapping_sub(ack).wrapping_add(1 << 20) <= (1 << 26) + (1 << 20)
}

/// What is known after a segment that had this effect on a flow.
fn follow(
    before: Seen,
    mut known: Known,
    segment: &Segment,
    change: Change,
    is_told: bool,
) -> Known {
    let (me, them) = (
        segment.direction as usize,
        segment.direction.reverse() as usize,
    );
    let follows = match change {
        Change::Ignored | Change::SameWay | Change::Ended | Change::AddIfItLasts(_) => false,
        Change::Nothing if is_told => {
            known.positions = numbers::first(segment);
            false
        }
        Change::Nothing => true,
        Change::Add(_) => segment.flags & RST == 0,
        Change::Answers(_) => {
            known.positions[them] = segment.ack;
            true
        }
        Change::Doubt(_, number, answers) => {
            known.doubt = number;
            if answers {
                known.positions[them] = segment.ack;
            }
            false
        }
        Change::Places(_) | Change::NewGeneration(_) => {
            known.positions = numbers::first(segment);
            false
        }
    };
    if follows {
        let positions = known.positions;
        if let Some(position) = advance(positions, before, segment) {
            known.positions[me] = position;
        }
        if numbers::is_apart(positions, segment) {
            let apart = numbers::apart(positions, known.doubt, before, segment, true);
            known.positions[them] = apart.other.unwrap_or(known.positions[them]);
            known.doubt = apart.own.unwrap_or(known.doubt);
        }
    }
    known
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let drawn = (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32;
        ((u64::from(drawn) * u64::from(limit)) >> 32) as u32
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u32) as usize]
    }

    fn is_one_in(&mut self, many: u32) -> bool {
        self.below(many) == 0
    }

    fn direction(&mut self) -> Direction {
        self.one_of(&[FromLow, FromHigh])
    }

    /// A segment whose numbers are those of the flow, near them, at the bounds, or anything.
    fn segment(&mut self, known: &Known, datagrams: bool) -> Segment {
        const OFF: [u32; 18] = [
            0,
            0,
            0,
            0,
            0,
            0,
            1,
            2,
            100,
            16_384,
            16_385,
            1 << 18,
            (1 << 18) + 1,
            1 << 20,
            (1 << 20) + 1,
            1 << 24,
            1 << 26,
            (1 << 26) + 1,
        ];
        let direction = self.direction();
        let mut number = |of: u32| {
            let off = self.one_of(&OFF);
            let of = if self.is_one_in(4) { known.doubt } else { of };
            match self.below(8) {
                0 => self.below(u32::MAX),
                1..4 => of.wrapping_sub(off),
                _ => of.wrapping_add(off),
            }
        };
        let mut seq = number(of(known.positions, direction));
        let ack = number(of(known.positions, direction.reverse()));
        let length = self.one_of(&[0, 0, 1, 100]);
        let flags = match datagrams {
            true => self.one_of(&[datagram::UDP, datagram::QUERY, datagram::ANSWER]),
            false => self.one_of(&[
                SYN,
                SYN | ACK,
                FIN | ACK,
                FIN,
                RST,
                RST | ACK,
                ACK,
                ACK,
                ACK,
                ACK,
                ACK,
                0,
            ]),
        };
        // A SYN or FIN that is sent again ends where it ended.
        if flags & (SYN | FIN) != 0 && self.is_one_in(3) {
            seq = seq.wrapping_sub(1);
        }
        let counted = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        Segment {
            direction,
            flags,
            seq,
            ack,
            end: seq.wrapping_add(length).wrapping_add(counted),
            ..Segment::NONE
        }
    }
}

/// Whether all that is asked of what was seen is what the model says.
fn assert_answers(seen: Seen, model: &Model) {
    let is_tcp = !matches!(model.state, Udp | UdpStream | Icmp);
    let is_replied = model.seen == [true; 2];
    assert_eq!(seen.state(), model.state);
    assert_eq!(seen.initiator(), model.initiator);
    assert_eq!(seen.is_pickup(), model.pickup);
    assert_eq!(seen.is_posted(), model.posted);
    assert_eq!(seen.is_starting(), model.starting);
    assert_eq!(seen.is_stalled(), model.stalled);
    assert_eq!(seen.is_replied(), is_replied);
    assert_eq!(
        seen.is_conversation(),
        is_replied && model.unplaced == [false; 2]
    );
    assert_eq!(seen.is_reset(), model.state == Close);
    assert_eq!(
        seen.is_closed(),
        matches!(model.state, LastAck | TimeWait | Close)
    );
    assert_eq!(
        seen.is_opening(),
        is_tcp && matches!(model.state, SynSent | SynSent2)
    );
    assert_eq!(
        seen.is_synchronized(),
        matches!(model.state, Established | FinWait | CloseWait | LastAck)
    );
    let is_open = matches!(model.state, Established | FinWait | CloseWait | UdpStream);
    assert_eq!(seen.is_established(true), is_open);
    assert_eq!(seen.is_established(false), is_open && is_replied);
    let with = |change: fn(&mut Model)| {
        let mut model = *model;
        change(&mut model);
        model.write()
    };
    assert_eq!(seen.posted(), with(|it| it.posted = true));
    assert_eq!(seen.delivered(), with(|it| it.posted = false));
    assert_eq!(seen.starting(), with(|it| it.starting = true));
    assert_eq!(seen.stalled(true), with(|it| it.stalled = true));
    assert_eq!(seen.stalled(false), with(|it| it.stalled = false));
}

/// A flow's beginning: its first segment, or a socket.
fn begin(random: &mut Random, view: View, datagrams: bool) -> Option<Tracked> {
    let positions = [random.below(u32::MAX), random.below(u32::MAX)];
    let mut known = Known {
        positions,
        doubt: random.below(u32::MAX),
        is_own_way: true,
        is_local: false,
    };
    if !random.is_one_in(3) {
        let segment = random.segment(&known, datagrams);
        let seen = Seen::first(segment.direction, segment.flags, view);
        let model = Model::first(&segment, view);
        assert_eq!(
            seen,
            model.map(|model| model.write()),
            "{segment:?} {view:?}"
        );
        let flow = Tracked::first(&segment, view)?;
        known.positions = numbers::first(&segment);
        known.doubt = 0;
        assert_eq!((Some(flow.seen), flow.known), (seen, known));
        return Some(flow);
    }
    let states = match datagrams {
        true => &State::ALL[9..],
        false => &State::ALL[..9],
    };
    let (state, initiator) = (random.one_of(states), random.direction());
    let fins = match datagrams {
        true => [false; 2],
        false => [random.is_one_in(3), random.is_one_in(3)],
    };
    let finished: Vec<_> = [FromLow, FromHigh]
        .into_iter()
        .filter(|it| fins[*it as usize])
        .collect();
    let seen = Seen::of_socket(state, initiator, &finished);
    assert_eq!(seen, Model::of_socket(state, initiator, fins).write());
    Some(Tracked { seen, known })
}

#[test]
fn every_change_is_the_models() {
    const WALKS: u32 = 200_000;
    let mut random = Random(1);
    // How often there was which change, and in which state.
    let (mut changes, mut states) = ([0; 9], [0; 12]);
    for walk in 0..WALKS {
        let view = View {
            one_way: walk & 1 != 0,
            strict: walk & 6 == 6,
        };
        let datagrams = walk % 16 == 0;
        let Some(mut flow) = begin(&mut random, view, datagrams) else {
            continue;
        };
        for _ in 0..24 {
            if random.is_one_in(16) {
                flow.seen = flow.seen.posted();
            }
            if random.is_one_in(16) {
                flow.seen = flow.seen.stalled(!flow.seen.is_stalled());
            }
            if random.is_one_in(16) {
                flow.seen = flow.seen.starting();
            }
            let segment = random.segment(&flow.known, datagrams);
            flow.known.is_own_way = !random.is_one_in(8);
            flow.known.is_local = random.is_one_in(4);
            let is_disproved = random.is_one_in(32);
            let (before, known) = (flow.seen, flow.known);
            let model = Model::read(before);
            assert_eq!(model.write(), before);
            assert_answers(before, &model);
            assert_eq!(
                before.is_kept_by(segment.direction, segment.flags),
                model.is_kept_by(segment.direction, segment.flags)
            );
            let (change, anew) = match is_disproved {
                true => (flow.see_disproved(&segment, view), model.anew(&segment)),
                false => (flow.see(&segment, view), None),
            };
            let expected = match anew {
                Some(seen) => Change::NewGeneration(seen),
                None => model.next(&segment, &known, view),
            };
            assert_eq!(change, expected, "{model:?} {known:?} {segment:?} {view:?}");
            let is_told = model.is_told_by(segment.direction, view);
            let after = follow(before, known, &segment, change, is_told);
            assert_eq!(flow.known, after);
            states[model.state as usize] += 1;
            let (number, seen) = match change {
                Change::Nothing => (0, before),
                Change::Ignored => (1, before),
                Change::SameWay => (2, before),
                Change::AddIfItLasts(seen) => {
                    // Older than two seconds.
                    flow.seen = if random.is_one_in(2) { seen } else { before };
                    (3, flow.seen)
                }
                Change::Add(seen) => (4, seen),
                Change::Doubt(seen, ..) => (5, seen),
                Change::Answers(seen) => (6, seen),
                Change::Places(seen) => (7, seen),
                Change::NewGeneration(seen) => (8, seen),
                Change::Ended => panic!("nobody has ended it"),
            };
            changes[number] += 1;
            assert_eq!(flow.seen, seen);
        }
        assert_eq!(
            Seen::DEAD.next(&random.segment(&flow.known, datagrams), &flow.known, view),
            Change::Ended
        );
    }
    assert!(changes.iter().all(|often| *often > 1_000), "{changes:?}");
    assert!(states.iter().all(|often| *often > 10_000), "{states:?}");
}

#[test]
fn states_have_conntracks_names() {
    let names = State::ALL.map(State::name);
    assert_eq!(
        names,
        [
            "syn_sent",
            "syn_recv",
            "established",
            "fin_wait",
            "close_wait",
            "last_ack",
            "time_wait",
            "close",
            "syn_sent2",
            "udp",
            "udp_stream",
            "icmp"
        ]
    );
}
