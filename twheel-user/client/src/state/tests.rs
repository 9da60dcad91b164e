use std::{
    net::{TcpListener, TcpStream},
    os::fd::AsFd as _,
    thread::sleep,
};

use super::*;
use crate::{offload::LONGEST, protocol::life};

/// Connections, and timers of them with a twheel that is played by a test.
struct Lab {
    state: State,
    streams: Vec<TcpStream>,
    begun: Instant,
}

impl Lab {
    fn new() -> Self {
        let begun = Instant::now();
        let mut state = State::new(begun);
        state.connected(1);
        Self {
            state,
            streams: Vec::new(),
            begun,
        }
    }

    /// A connection, by its number.
    fn connect(&mut self) -> usize {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        self.streams.extend([stream, listener.accept().unwrap().0]);
        self.streams.len() - 2
    }

    fn start(&mut self, connection: usize, timeout: u64) -> Tag {
        let socket = Socket::new(self.streams[connection].as_fd()).unwrap();
        let mut options = Options::new(Duration::from_millis(timeout));
        options.life = life::DATA_IN | life::DATA_OUT;
        self.state.start(socket, options, Some(0), Instant::now())
    }

    fn restart(&mut self, timer: Tag, timeout: u64) {
        let timeout = Some(Duration::from_millis(timeout));
        assert!(self.state.restart(timer, timeout, Instant::now()));
    }

    /// twheel ends, and starts with a table of this number.
    fn restart_twheel(&mut self, table: u64) {
        self.state.disconnected(Instant::now());
        self.state.connected(table);
    }

    /// What is sent now: its number, operations and timeouts.
    fn sent(&mut self) -> (u64, Vec<(Op, u32)>) {
        let Some((number, packet)) = self.state.packet(Instant::now()) else {
            return (0, Vec::new());
        };
        self.state.sent(number, &packet);
        let asked = |it: &Waiting| (it.asked.op, it.request.timeout);
        (number, packet.iter().map(asked).collect())
    }

    /// twheel keeps the timer of a connection, or answers with an error number.
    fn answer(&mut self, number: u64, connections: &[usize], (id, error): (u64, i32)) {
        let reply = |connection: &usize| Reply {
            error: error as u32,
            reserved: 0,
            id,
            cookie: Socket::new(self.streams[*connection].as_fd())
                .unwrap()
                .cookie(),
            token: 0,
        };
        let replies: Vec<_> = connections.iter().map(reply).collect();
        self.state.replied(number, &replies, Instant::now());
    }

    /// A timer that twheel keeps with this id.
    fn offloaded(&mut self, id: u64) -> (usize, Tag) {
        let connection = self.connect();
        let timer = self.start(connection, 60_000);
        let (number, sent) = self.sent();
        assert_eq!(sent, [(Op::Start, 60_000)]);
        self.answer(number, &[connection], (id, 0));
        assert_eq!(self.state.is_offloaded(timer), Some(true));
        (connection, timer)
    }
}

/// Else the id may be that of a later timer of the same connection.
#[test]
fn a_stop_and_a_restart_name_the_timer_that_they_mean() {
    let mut lab = Lab::new();
    let (_, first) = lab.offloaded(7);
    let (_, second) = lab.offloaded(8);
    lab.restart(second, 1_000);
    assert!(lab.state.stop(first));
    // One that is stopped before twheel has answered.
    let connection = lab.connect();
    let third = lab.start(connection, 60_000);
    let mut requests = Vec::new();
    let mut send = |lab: &mut Lab| {
        let (number, packet) = lab.state.packet(Instant::now()).unwrap();
        lab.state.sent(number, &packet);
        requests.extend(packet.iter().map(|it| it.request));
        number
    };
    let number = send(&mut lab);
    assert!(lab.state.stop(third));
    lab.answer(number, &[connection; 3], (9, 0));
    send(&mut lab);
    let named = requests.iter().filter(|it| it.flags == TAGGED);
    let named: Vec<_> = named.map(|it| (it.op, it.tag)).collect();
    let (stop, restart) = (Op::Stop as u8, Op::Restart as u8);
    assert_eq!(named, [(restart, second), (stop, first), (stop, third)]);
}

#[test]
fn what_waits_asks_for_what_is_wanted_when_it_is_sent() {
    let mut lab = Lab::new();
    let connection = lab.connect();
    let timer = lab.start(connection, 50);
    lab.restart(timer, 60_000);
    let (number, sent) = lab.sent();
    assert_eq!(sent, [(Op::Start, 60_000)]);
    lab.answer(number, &[connection], (7, 0));
    // twheel knows of it.
    assert_eq!(lab.sent().1, []);
    for timeout in [1_000, 2_000, 3_000] {
        lab.restart(timer, timeout);
    }
    assert_eq!(lab.sent().1, [(Op::Restart, 3_000)]);
    lab.restart(timer, 4_000);
    assert_eq!(lab.sent().1, [(Op::Restart, 4_000)]);
}

#[test]
fn what_was_stopped_meanwhile_is_not_asked_for() {
    let mut lab = Lab::new();
    let connection = lab.connect();
    let first = lab.start(connection, 1_000);
    assert!(lab.state.stop(first));
    lab.start(connection, 2_000);
    assert_eq!(lab.sent().1, [(Op::Start, 2_000)]);
}

#[test]
fn another_table_hears_of_no_earlier_registration() {
    let mut lab = Lab::new();
    let (connection, timer) = lab.offloaded(7);
    lab.restart_twheel(2);
    lab.restart(timer, 3_000);
    let (number, sent) = lab.sent();
    assert_eq!(sent, [(Op::Start, 3_000)]);
    // Sent before it is answered, a restart would be another's.
    lab.restart(timer, 4_000);
    assert_eq!(lab.sent().1, []);
    lab.answer(number, &[connection], (9, 0));
    assert_eq!(lab.sent().1, [(Op::Restart, 4_000)]);
}

#[test]
fn a_timer_that_was_restarted_is_reclaimed_and_then_restarted() {
    let mut lab = Lab::new();
    let (connection, timer) = lab.offloaded(7);
    lab.restart_twheel(1);
    assert_eq!(lab.sent().1, [(Op::Reclaim, 60_000)]);
    // By an older time than that of the restart it could be over.
    let longest = LONGEST.as_millis() as u32;
    for timeout in [3_000_u32, 4_000] {
        lab.restart_twheel(1);
        lab.restart(timer, timeout.into());
        let (number, sent) = lab.sent();
        assert_eq!(sent, [(Op::Reclaim, longest)]);
        lab.answer(number, &[connection], (7, 0));
        assert_eq!(lab.sent().1, [(Op::Restart, timeout)]);
    }
}

#[test]
fn a_restart_holds_also_if_twheel_then_refuses_the_timer() {
    let mut lab = Lab::new();
    let (connection, timer) = lab.offloaded(7);
    lab.restart_twheel(2);
    let (number, _) = lab.sent();
    lab.restart(timer, 1_000);
    lab.answer(number, &[connection], (0, libc::EDQUOT));
    assert_eq!(lab.state.is_offloaded(timer), Some(false));
    assert!(lab.state.due().unwrap() < lab.begun + Duration::from_secs(10));
}

#[test]
fn all_timers_of_a_socket_have_their_turn() {
    let mut lab = Lab::new();
    let connection = lab.connect();
    let first = lab.start(connection, 1_000);
    let (number, _) = lab.sent();
    assert!(lab.state.stop(first));
    lab.start(connection, 2_000);
    lab.start(connection, 3_000);
    assert_eq!(lab.sent().1, []);
    lab.answer(number, &[connection], (7, 0));
    let (_, sent) = lab.sent();
    assert_eq!(
        sent,
        [(Op::Stop, 0), (Op::Start, 2_000), (Op::Start, 3_000)]
    );
}

#[test]
fn what_twheel_had_no_room_to_read_is_sent_again() {
    let mut lab = Lab::new();
    let (connection, timer) = lab.offloaded(7);
    let (_, other) = lab.offloaded(8);
    assert!(lab.state.stop(other));
    lab.restart(timer, 3_000);
    let sent = lab.sent();
    assert_eq!(sent.1[1], (Op::Restart, 3_000));
    lab.answer(sent.0, &[connection], (0, libc::EMFILE));
    let again = lab.state.packet(Instant::now()).unwrap().1;
    let asked: Vec<_> = again
        .iter()
        .map(|it| (it.asked.op, it.request.id))
        .collect();
    assert_eq!(asked, [(Op::Stop, 8), (Op::Restart, 7)]);
}

#[test]
fn a_timer_of_which_twheel_says_nothing_expires_here() {
    let mut lab = Lab::new();
    let connection = lab.connect();
    let timer = lab.start(connection, 20);
    let (number, _) = lab.sent();
    let patience = lab.begun + Duration::from_secs(10);
    while lab.state.done.is_empty() && Instant::now() < patience {
        sleep(Duration::from_millis(5));
        lab.state.expire(Instant::now(), |_, _| {});
    }
    let done = lab.state.done.pop_front().unwrap();
    assert_eq!(done.timer, timer);
    assert!(done.ended.unwrap().idle >= Duration::from_millis(20));
    // What twheel keeps of it, it is to forget.
    lab.answer(number, &[connection], (7, 0));
    assert_eq!(lab.sent().1, [(Op::Stop, 0)]);
}

#[test]
fn two_packets_are_on_their_way_at_most() {
    let mut lab = Lab::new();
    let timers: Vec<_> = (0..3).map(|id| lab.offloaded(id)).collect();
    let mut numbers = Vec::new();
    for (_, timer) in &timers {
        lab.restart(*timer, 1_000);
        numbers.extend(Some(lab.sent()).filter(|(_, sent)| !sent.is_empty()));
    }
    assert_eq!(numbers.len(), 2);
    lab.answer(numbers[0].0, &[timers[0].0], (0, 0));
    assert_eq!(lab.sent().1, [(Op::Restart, 1_000)]);
}
