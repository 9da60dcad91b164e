//! What programs ask for.

use std::{hash::Hasher as _, slice, time::Duration};

use anyhow::{Context as _, Result};
use aya::maps::{Array, Map};
use siphasher::sip::SipHasher24;
use twheel_client::protocol::{Action, ENDPOINTS, Op, Reply, Request, TAGGED, life};
use twheel_common::{
    key::{Direction, FlowKey},
    offload::Life,
    point::Point,
    seen::Seen,
    state::State,
    step::Enter,
};

use super::{
    closing::Packet,
    registry::{Id, Refusal, Start},
    rights::Passed,
    server::Thread,
    table::Table as _,
    watched::key,
};
use crate::{data_plane::random_keys, pins::Pins};

/// Requests, at most, that are answered with one reading of the clock.
const CLOCKED: usize = 256;

/// The bits of a token that are made of its flow's key; the others are of the registration.
const OF_KEY: u64 = 0xffff;

impl Thread {
    /// Answers a packet. `sockets`: those that came with it.
    pub(super) fn answer_all(&mut self, packet: &Packet, sockets: &[Result<Passed, i32>]) {
        let place = packet.place;
        let replies = match &packet.requests {
            Err(error) => vec![refusal(*error)],
            Ok(requests) => {
                let mut sockets = sockets.iter();
                let mut replies = Vec::with_capacity(requests.len());
                for some in requests.chunks(CLOCKED) {
                    self.read_clock();
                    let waited = self.waited(packet);
                    replies.extend(some.iter().map(|request| {
                        let mut request = *request;
                        request.idle = request.idle.saturating_add(waited);
                        let done = self.answer(place, &request, &mut sockets);
                        done.unwrap_or_else(refusal)
                    }));
                }
                replies
            }
        };
        self.shared.counts.reply(&replies);
        if let Some(Some(program)) = self.programs.get_mut(place) {
            program.reply(packet.number, &replies);
        }
        self.flush_one(place);
    }

    /// For how long a packet has waited since it was seen, milliseconds. Timers begin then: what has
    /// come meanwhile, the table knows.
    fn waited(&self, packet: &Packet) -> u32 {
        let units = self.registry.table().now().saturating_sub(packet.seen);
        // One less: it is not to be more than it was.
        let waited = self.clock.duration(units.saturating_sub(1)).as_millis();
        u32::try_from(waited).unwrap_or(u32::MAX)
    }

    /// Does what is asked for. An error is an error number of Linux.
    fn answer(
        &mut self,
        place: usize,
        request: &Request,
        sockets: &mut slice::Iter<'_, Result<Passed, i32>>,
    ) -> Result<Reply, i32> {
        let owner = place as u16;
        let done = |id: Id| Reply {
            id: id.0,
            ..refusal(0)
        };
        let id = Id(request.id);
        let op = Op::from_raw(request.op).ok_or(libc::EOPNOTSUPP)?;
        if matches!(op, Op::Restart | Op::Stop)
            && request.flags & TAGGED != 0
            && self.registry.tag(id, owner) != Some(request.tag)
        {
            return Err(libc::ENOENT);
        }
        match op {
            Op::Start => self.start(owner, request, sockets),
            Op::Reclaim => self.reclaim(owner, request),
            Op::Restart => {
                let timeout = match request.timeout {
                    0 => None,
                    timeout => Some(self.units(timeout)?),
                };
                let has = self
                    .registry
                    .restart(id, owner, timeout, self.idle(request));
                has.then(|| done(id)).ok_or(libc::ENOENT)
            }
            Op::Stop => {
                if !self.registry.stop(id, owner) {
                    return Err(libc::ENOENT);
                }
                self.give_back(place, 1);
                Ok(done(id))
            }
        }
    }

    fn start(
        &mut self,
        owner: u16,
        request: &Request,
        sockets: &mut slice::Iter<'_, Result<Passed, i32>>,
    ) -> Result<Reply, i32> {
        // Taken first: the next start has the next one, whatever becomes of this.
        let (local, remote, cookie) = if request.flags == ENDPOINTS {
            let (local, remote) = request.endpoints();
            if !self.peer(owner).ok_or(libc::ENOTCONN)?.is_admin {
                return Err(libc::EPERM);
            }
            (local, remote, 0)
        } else {
            let passed = sockets.next().copied().ok_or(libc::EBADF)??;
            (passed.local, passed.remote, passed.cookie)
        };
        let (key, direction) = key(local, remote);
        let start = self.checked(owner, request, (key, direction), cookie)?;
        let mut started = self.registry.start(&start);
        if started == Err(Refusal::Unknown) {
            self.enter(&key, direction, local.port() > remote.port())?;
            started = self.registry.start(&start);
            if started == Err(Refusal::Unknown) {
                // The table has no room for the flow.
                return Err(libc::ENOSPC);
            }
        }
        let id = started.map_err(number)?;
        self.take(owner);
        Ok(self.registered(id, cookie, owner, &key))
    }

    fn reclaim(&mut self, owner: u16, request: &Request) -> Result<Reply, i32> {
        let (id, cookie) = (Id(request.id), request.cookie);
        if cookie == 0 && !self.peer(owner).ok_or(libc::ENOTCONN)?.is_admin {
            return Err(libc::EPERM);
        }
        let differs = |key: &FlowKey| request.token ^ self.registered(id, cookie, owner, key).token;
        if differs(&FlowKey::NONE) & !OF_KEY != 0 {
            return Err(libc::EPERM);
        }
        let flow = self.registry.table().flow(id.record());
        let flow = flow.ok_or(libc::ENOENT)?;
        // Other connections have the same record and generation, sooner or later.
        if differs(&flow.key) != 0 {
            return Err(libc::EPERM);
        }
        let start = self.checked(owner, request, (flow.key, id.local()), cookie)?;
        let id = self.registry.reclaim(id, &start).map_err(number)?;
        self.take(owner);
        Ok(self.registered(id, cookie, owner, &flow.key))
    }

    /// Checks all fields of a start but the connection.
    fn checked(
        &self,
        owner: u16,
        request: &Request,
        (key, local): (FlowKey, Direction),
        cookie: u64,
    ) -> Result<Start, i32> {
        if request.flags & !ENDPOINTS != 0 || request.life == 0 || request.life & !life::ALL != 0 {
            return Err(libc::EINVAL);
        }
        self.has_room(owner)?;
        Ok(Start {
            key,
            cookie,
            tag: request.tag,
            timeout: self.units(request.timeout)?,
            local,
            life: life_of(request.life, local),
            action: Action::from_raw(request.action).ok_or(libc::EINVAL)?,
            owner,
            idle: self.idle(request),
        })
    }

    /// Checks that a program may have one registration more, and its user.
    fn has_room(&self, owner: u16) -> Result<(), i32> {
        let program = self.programs.get(usize::from(owner));
        let program = program.and_then(Option::as_ref).ok_or(libc::ENOTCONN)?;
        let of_user = self.users.get(&program.peer.uid).copied().unwrap_or(0);
        match program.held < self.program_limit && of_user < self.limit {
            true => Ok(()),
            false => Err(libc::EDQUOT),
        }
    }

    /// For how long a connection has been idle when a timer begins, units.
    fn idle(&self, request: &Request) -> u32 {
        let idle = Duration::from_millis(request.idle.into());
        // One less: it is not to be more than it was.
        let units = self.clock.units_ceil(idle).saturating_sub(1);
        u32::try_from(units).unwrap_or(u32::MAX)
    }

    /// A timeout in units, given in milliseconds.
    fn units(&self, timeout: u32) -> Result<u32, i32> {
        let timeout = Duration::from_millis(timeout.into());
        if timeout.is_zero() || timeout > LONGEST {
            return Err(libc::EINVAL);
        }
        u32::try_from(self.clock.timeout(timeout)).map_err(|_| libc::EINVAL)
    }

    /// Enters a flow that no packet has begun. The end with the higher port is taken for its
    /// initiator.
    fn enter(&self, key: &FlowKey, local: Direction, is_ours: bool) -> Result<(), i32> {
        let initiator = if is_ours { local } else { local.reverse() };
        let entered = self.enter.enter(Enter {
            addresses: key.addresses(),
            ports: key.ports(),
            seen: Seen::of_socket(State::Established, initiator, &[]).0,
            rule: 0,
            idle: 0,
            origin: Enter::packed_origin(Point::NONE, is_ours),
        });
        entered.map_err(|error| {
            log::debug!("cannot enter a flow: {error:#}");
            libc::EIO
        })
    }

    fn registered(&self, id: Id, cookie: u64, owner: u16, key: &FlowKey) -> Reply {
        let uid = self.peer(owner).map_or(u32::MAX, |peer| peer.uid);
        Reply {
            id: id.0,
            cookie,
            token: token(self.secret, [id.0, cookie, uid.into()], key),
            ..refusal(0)
        }
    }
}

/// The token of a registration (its id, cookie and user) of a flow with this key.
fn token(secret: [u64; 2], registration: [u64; 3], key: &FlowKey) -> u64 {
    let [a, b, c, d] = key.addresses();
    let of_key = [registration[2], a, b, c, d, key.ports()];
    mac(secret, &registration) & !OF_KEY | mac(secret, &of_key) & OF_KEY
}

/// A number that only this instance can compute.
fn mac([one, two]: [u64; 2], of: &[u64]) -> u64 {
    let mut hasher = SipHasher24::new_with_keys(one, two);
    of.iter().for_each(|word| hasher.write_u64(*word));
    hasher.finish()
}

/// Keys that only this instance knows, and later runs that adopt its table.
pub(super) fn secret(pins: &Pins) -> Result<[u64; 2]> {
    let map = Map::Array(pins.map("OFFLOAD_KEY")?);
    let mut map = Array::<_, [u64; 2]>::try_from(map).context("OFFLOAD_KEY is another map")?;
    let mut keys = map.get(&0, 0).context("cannot read OFFLOAD_KEY")?;
    if keys == [0; 2] {
        keys = random_keys()?;
        map.set(0, keys, 0).context("cannot write OFFLOAD_KEY")?;
    }
    Ok(keys)
}

/// The longest timeout: fewer units of any clock than the wheel has ticks.
pub(super) const LONGEST: Duration = Duration::from_secs(10 * 86_400);

/// The answer to what is refused with an error number; 0: that of which nothing is to be told.
pub(super) fn refusal(error: i32) -> Reply {
    Reply {
        error: error as u32,
        reserved: 0,
        id: 0,
        cookie: 0,
        token: 0,
    }
}

/// The error number of a refusal.
fn number(refusal: Refusal) -> i32 {
    match refusal {
        Refusal::Unknown => libc::ENOENT,
        Refusal::Ending => libc::ENOTCONN,
        Refusal::Taken => libc::EEXIST,
        Refusal::OtherEnd => libc::EBUSY,
        Refusal::Full => libc::ENOSPC,
    }
}

/// What counts as life of a connection, by the side of the program's own socket.
fn life_of(bits: u8, local: Direction) -> Life {
    let parts = [
        (life::DATA_OUT, Life::data(local)),
        (life::DATA_IN, Life::data(local.reverse())),
        (life::ANY, Life::ANY),
    ];
    let of = parts.into_iter().filter(|(bit, _)| bits & bit != 0);
    Life(of.fold(0, |life, (_, part)| life | part.0))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn a_token_tells_registrations_users_and_keys_apart() {
        let key = |port| key(ends(port), ends(443)).0;
        let of = |registration, port| token([1, 2], registration, &key(port));
        let first = of([1, 2, 3], 5_000);
        assert_eq!(first, of([1, 2, 3], 5_000));
        for other in [[9, 2, 3], [1, 9, 3], [1, 2, 9]] {
            assert_ne!((first ^ of(other, 5_000)) & !OF_KEY, 0, "{other:?}");
        }
        // The same record, generation and socket cookie, but another connection.
        let differs = first ^ of([1, 2, 3], 5_001);
        assert_ne!(differs & OF_KEY, 0);
        assert_eq!(differs & !OF_KEY, 0);
        assert_ne!(first, token([1, 3], [1, 2, 3], &key(5_000)));
    }

    fn ends(port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], port))
    }
}
