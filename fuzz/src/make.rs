//! Makes packets that no sender sends: built of valid and invalid parts, and then damaged.

/// xorshift64*: the packets are the same in each run.
pub struct Random(pub u64);

impl Random {
    /// A number less than `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as usize % bound
    }

    /// True once in `times` calls, on average.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// One of these values.
    pub fn one_of<T: Copy>(&mut self, some: &[T]) -> T {
        some[self.below(some.len())]
    }

    fn byte(&mut self) -> u8 {
        self.below(256) as u8
    }
}

/// EtherTypes of tags. The old one (0x9100) and MACsec occur once each.
const TAGS: [[u8; 2]; 12] = [
    [0x81, 0],
    [0x81, 0],
    [0x81, 0],
    [0x81, 0],
    [0x81, 0],
    [0x88, 0xa8],
    [0x88, 0xa8],
    [0x88, 0xa8],
    [0x88, 0xa8],
    [0x88, 0xa8],
    [0x91, 0],
    [0x88, 0xe5],
];
/// Extension headers; some have other forms, and some numbers are no extension headers.
const EXTENSIONS: [u8; 14] = [0, 43, 44, 44, 51, 60, 135, 139, 140, 253, 254, 50, 59, 4];
/// Flags that stacks send, and a few others.
const FLAGS: [u8; 12] = [
    0x02, 0x12, 0x10, 0x10, 0x18, 0x11, 0x04, 0x14, 0x22, 0x31, 0xc2, 0x03,
];
/// Values on which parsers tend to fail.
const EDGES: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 17, 0x1f, 0x7f, 0xfe, 0xff];

/// A random packet, damaged in places. There are few addresses, so that packets share flows.
pub fn packet(random: &mut Random, frame: &mut Vec<u8>) {
    frame.clear();
    if random.once_in(50) {
        let length = random.below(200);
        frame.extend((0..length).map(|_| random.byte()));
    } else {
        build(random, frame);
    }
    while random.once_in(2) {
        damage(random, frame);
    }
}

/// A packet whose lengths are consistent, whatever its content.
fn build(random: &mut Random, frame: &mut Vec<u8>) {
    frame.extend([2; 6]);
    frame.extend([4; 6]);
    if random.once_in(6) {
        for _ in 0..1 + random.below(3) {
            let tag = random.one_of(&TAGS);
            frame.extend(tag);
            // No VLAN, one of a few, or any.
            let any = [random.byte(), random.byte()];
            let few = random.one_of(&[Some(0), Some(0), Some(1), Some(2), None]);
            let [high, _] = any;
            frame.extend(few.map_or(any, |vlan| [high & 0xf0, vlan]));
        }
    }
    let v6 = random.once_in(2);
    frame.extend(if v6 { [0x86, 0xdd] } else { [0x08, 0] });
    let icmp = if v6 { 58 } else { 1 };
    let proto = if random.once_in(12) {
        random.one_of(&[59 - icmp, 50, 51])
    } else {
        random.one_of(&[6, 6, 6, 17, icmp])
    };
    let ip = frame.len();
    if v6 {
        ipv6(random, frame, proto);
    } else {
        ipv4(random, frame, proto);
    }
    match proto {
        6 => tcp(random, frame),
        17 => udp(random, frame),
        _ => icmp_query(random, frame, v6),
    }
    let length = frame.len() - ip;
    if v6 {
        frame[ip + 4..ip + 6].copy_from_slice(&(length as u16 - 40).to_be_bytes());
    } else {
        frame[ip + 2..ip + 4].copy_from_slice(&(length as u16).to_be_bytes());
    }
    // Padding, as Ethernet adds it.
    if random.once_in(4) {
        frame.resize(frame.len() + random.below(20), 0);
    }
}

fn ipv4(random: &mut Random, frame: &mut Vec<u8>, proto: u8) {
    let options = if random.once_in(4) {
        random.below(11)
    } else {
        0
    };
    let fragment = match random.below(12) {
        0 => [0x20, 0],
        1 => [0x20 | random.byte() & 0x1f, random.byte()],
        2 => [0, random.one_of(&EDGES)],
        _ => [0x40, 0],
    };
    frame.extend([0x45 + options as u8, 0, 0, 0, 0, 1]);
    frame.extend(fragment);
    let authenticated = random.once_in(6);
    let next = if authenticated { 51 } else { proto };
    frame.extend([64, next, 0, 0]);
    frame.extend([10, 0, 0, random.below(4) as u8]);
    frame.extend([10, 0, 0, random.below(4) as u8]);
    for _ in 0..options * 4 {
        frame.push(random.one_of(&[1, 1, 0, 7, 0xff]));
    }
    if authenticated {
        let at = frame.len();
        extension(random, frame, 51);
        frame[at] = proto;
    }
}

fn ipv6(random: &mut Random, frame: &mut Vec<u8>, proto: u8) {
    frame.extend([0x60, 0, 0, 0, 0, 0, 0, 64]);
    let mut link = frame.len() - 2;
    for _ in 0..2 {
        // An IPv6 address, or an IPv4 address mapped into one.
        let prefix = random.one_of(&[
            [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff],
        ]);
        frame.extend(prefix);
        frame.extend([10, 0, 0, random.below(4) as u8]);
    }
    if random.once_in(2) {
        let headers = random.one_of(&[1, 1, 2, 2, 3, 4, 7, 8, 9, 10]);
        for _ in 0..headers {
            // Mostly a header after which others may follow.
            let kinds = if random.once_in(8) { 14 } else { 11 };
            let kind = random.one_of(&EXTENSIONS[..kinds]);
            frame[link] = kind;
            link = frame.len();
            extension(random, frame, kind);
        }
    }
    frame[link] = proto;
}

fn extension(random: &mut Random, frame: &mut Vec<u8>, kind: u8) {
    match kind {
        44 => {
            let word =
                random.one_of(&[[0, 0], [0, 1], [0, 7], [0, 8], [0, 0x20], [0, 0x41], [1, 1]]);
            frame.extend([0, random.one_of(&EDGES), word[0], word[1], 0, 0, 0, 1]);
        }
        51 => {
            let words = random.one_of(&[4, 4, 1, 0, 2]);
            frame.extend([0, words as u8]);
            frame.resize(frame.len() + (words + 2) * 4 - 2, 0);
        }
        _ => {
            let words = random.one_of(&[0, 0, 0, 1, 3]);
            frame.extend([0, words as u8]);
            frame.resize(frame.len() + (words + 1) * 8 - 2, 0);
        }
    }
}

fn ports(random: &mut Random, frame: &mut Vec<u8>) {
    for _ in 0..2 {
        frame.extend([0, random.below(16) as u8]);
    }
}

fn tcp(random: &mut Random, frame: &mut Vec<u8>) {
    ports(random, frame);
    for _ in 0..8 {
        frame.push(random.one_of(&EDGES));
    }
    let stamped = random.once_in(3);
    let options = if stamped {
        3 + random.below(8)
    } else if random.once_in(3) {
        random.below(11)
    } else {
        0
    };
    frame.extend([0x50 + (options as u8) * 16, random.one_of(&FLAGS)]);
    frame.extend([4, random.byte(), 0, 0, 0, 0]);
    let end = frame.len() + options * 4;
    if stamped {
        frame.extend([1, 1, 8, 10, 0, 0, 0, random.byte(), 0, 0, 0, random.byte()]);
    }
    while frame.len() < end {
        // Also lengths of 0 and 1, and lengths beyond the end.
        let kind = random.one_of(&[1, 2, 3, 4, 5, 8, 0, 30]);
        frame.extend([kind, random.one_of(&EDGES)]);
    }
    frame.resize(end + random.below(30), 7);
}

fn udp(random: &mut Random, frame: &mut Vec<u8>) {
    ports(random, frame);
    let data = random.below(30);
    let length = match random.below(8) {
        0 => 0,
        1 => random.below(8),
        2 => 8 + data + 1 + random.below(60_000),
        3 => 8 + random.below(data + 1),
        _ => 8 + data,
    };
    frame.extend((length as u16).to_be_bytes());
    frame.resize(frame.len() + 2 + data, 7);
}

fn icmp_query(random: &mut Random, frame: &mut Vec<u8>, v6: bool) {
    let kind = if v6 {
        random.one_of(&[128, 129, 128, 129, 1, 135])
    } else {
        random.one_of(&[8, 0, 8, 0, 13, 14, 15, 16, 17, 18, 3])
    };
    frame.extend([kind, random.below(2) as u8, 0, 0, 0, random.byte(), 0, 1]);
    let data = random.one_of(&[0, 4, 12, 12, 20]);
    frame.resize(frame.len() + data, 7);
}

/// Damages a frame in one way, as no sender would.
pub fn damage(random: &mut Random, frame: &mut Vec<u8>) {
    if frame.is_empty() {
        return frame.push(random.byte());
    }
    let length = frame.len();
    let at = random.below(length);
    // Prefers headers to data, and other headers to Ethernet addresses.
    let early = random.below(length.min(80));
    match random.below(10) {
        0 => frame.truncate(at),
        1 => frame.truncate(early),
        2 => frame[early] = random.byte(),
        3 => frame[early] = random.one_of(&EDGES),
        4 => frame[early] ^= 1 << random.below(8),
        5 => frame[at] = random.one_of(&EDGES),
        6 => {
            let value = random.below(256) as u16;
            let field = random.one_of(&[
                value,
                0,
                1,
                0xffff,
                length as u16,
                (length as u16).wrapping_sub(14),
            ]);
            let end = (early + 2).min(length);
            frame[early..end].copy_from_slice(&field.to_be_bytes()[..end - early]);
        }
        7 => {
            let tag = random.one_of(&TAGS);
            let at = length.min(12);
            frame.splice(at..at, [tag[0], tag[1], 0, 7]);
        }
        8 => {
            let until = (early + 1 + random.below(8)).min(length);
            frame.drain(early..until);
        }
        _ => {
            let bytes = [random.byte(), random.one_of(&EDGES), 0, 0, 0, 0, 0, 0];
            frame.splice(early..early, bytes[..1 + random.below(8)].iter().copied());
        }
    }
}
