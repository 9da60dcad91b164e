//! Receives the packets of programs. One at a time of each program: the answers have the order of the
//! packets. A packet with which something was passed is received by a thread of the program's user.

use std::os::fd::AsFd as _;

use nix::sys::epoll::{EpollEvent, EpollFlags};
use twheel_client::protocol::SOCKETS;

use super::{
    closing::{Inspected, Packet},
    ends::take_all,
    program::Waiting,
    server::{FIRST, Thread},
    table::Table as _,
};

/// Most packets that are received from a program before the others have their turn.
const TURN: usize = 8;
/// Requests after which the others have it, too.
const ENOUGH: usize = 256;
/// Most packets that are answered before others have their turn.
const PACKETS: usize = 16;

impl Thread {
    /// Something has come from a program, or it can be sent something, or it has gone.
    pub(super) fn ready(&mut self, place: usize, flags: EpollFlags) {
        let Some(Some(program)) = self.programs.get(place) else {
            return;
        };
        match program.is_stalled || program.is_receiving {
            true if flags.contains(EpollFlags::EPOLLHUP) => self.end(place),
            true => {}
            false => self.serve(place),
        }
    }

    /// Asks those programs for more again whose users' descriptors were closed.
    pub(super) fn resume(&mut self) {
        for place in 0..self.programs.len() {
            if let Some(Some(program)) = self.programs.get_mut(place)
                && program.is_stalled
                && !self.closers.is_behind(program.peer.uid)
            {
                program.is_stalled = false;
                self.watch(place);
            }
        }
    }

    /// Awaits what a program is to do next.
    pub(super) fn watch(&self, place: usize) {
        let Some(Some(program)) = self.programs.get(place) else {
            return;
        };
        let awaits = match program {
            _ if program.is_behind() => EpollFlags::EPOLLOUT,
            _ if program.is_stalled || program.is_receiving => EpollFlags::empty(),
            _ => EpollFlags::EPOLLIN,
        };
        let mut event = EpollEvent::new(awaits, place as u64 + FIRST);
        // Fails only if the descriptor is not watched.
        let _ = self.epoll.modify(program, &mut event);
    }

    fn serve(&mut self, place: usize) {
        let mut answered = 0;
        for _ in 0..TURN {
            let Some(Some(program)) = self.programs.get_mut(place) else {
                return;
            };
            // A program that does not read its answers is not asked for more. And what was looked at
            // comes first: it has descriptors.
            if program.is_behind() || self.inspected.len() >= PACKETS {
                return;
            }
            if self.closers.is_behind(program.peer.uid) {
                program.is_stalled = true;
                return self.watch(place);
            }
            let (number, requests, passes) = match program.peek(&mut self.buffer) {
                Waiting::Nothing => return,
                Waiting::End => return self.end(place),
                Waiting::Packet {
                    number,
                    requests,
                    passes,
                } => (number, requests, passes),
            };
            let mut packet = Packet {
                place,
                program: program.number,
                number,
                seen: u64::MAX,
                requests,
            };
            if passes {
                self.read_clock();
                packet.seen = self.registry.table().now();
                // The answers have the order of the packets, so the next one waits.
                return self.serve_passed(packet);
            }
            program.let_go();
            answered += packet.requests.as_ref().map_or(1, Vec::len);
            self.answer_all(&packet, &[]);
            if answered >= ENOUGH {
                return;
            }
        }
    }

    /// Answers a program's first packet, with which something was passed, or has it looked at.
    fn serve_passed(&mut self, packet: Packet) {
        let place = packet.place;
        let Some(Some(program)) = self.programs.get_mut(place) else {
            return;
        };
        let read = self.reader.as_ref().and_then(|it| it.read(program.as_fd()));
        let files = read.as_ref().map_or(SOCKETS, Vec::len);
        let all = read.and_then(|it| it.into_iter().collect::<Option<Vec<_>>>());
        if packet.requests.is_err() || all.is_some() {
            self.closers.let_go(place, program, files);
            let all: Vec<_> = all.into_iter().flatten().map(Ok).collect();
            self.answer_all(&packet, &all);
        } else {
            self.closers.inspect(program, packet, files);
        }
        self.watch(place);
    }

    /// Goes on with programs whose first packets were received.
    pub(super) fn take_received(&mut self) {
        for taken in take_all(&self.shared.received) {
            if let Some(rest) = taken.rest {
                self.closers.close_rest(rest);
            }
            let place = taken.place;
            if let Some(Some(program)) = self.programs.get_mut(place)
                && program.number == taken.program
            {
                program.is_receiving = false;
                self.watch(place);
            }
        }
    }

    pub(super) fn take_inspected(&mut self) {
        self.inspected.extend(take_all(&self.shared.inspected));
    }

    /// Answers packets whose sockets were looked at.
    pub(super) fn answer_some(&mut self) {
        for _ in 0..PACKETS {
            let Some(inspected) = self.inspected.pop_front() else {
                return;
            };
            let Inspected {
                packet,
                sockets,
                rest,
            } = inspected;
            self.closers.close_rest(rest);
            let place = packet.place;
            let Some(Some(program)) = self.programs.get_mut(place) else {
                continue;
            };
            if program.number == packet.program {
                program.is_receiving = false;
                self.answer_all(&packet, &sockets);
                self.watch(place);
            }
        }
    }
}
