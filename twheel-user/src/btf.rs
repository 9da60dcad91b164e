//! Where the running kernel has what a program names, by its BTF
//! (`Documentation/bpf/btf.rst`).
//!
//! aya reads all of it into types of its own, which takes tens of milliseconds. Here only what is
//! asked for is looked up.

use std::{fs, io};

/// The kernel's BTF.
pub struct Btf {
    bytes: Vec<u8>,
    /// Where the types begin, by their ids less one.
    types: Vec<u32>,
    /// Where the names begin.
    names: usize,
}

/// Kinds of types.
const STRUCT: u32 = 4;
const UNION: u32 = 5;
/// Bytes of a type, and of a member.
const TYPE: usize = 12;
const MEMBER: usize = 12;
/// How deep a member may lie in structures and unions without names.
const DEPTH: u32 = 8;

impl Btf {
    /// Of the running kernel.
    ///
    /// # Errors
    ///
    /// The kernel was built without it; or it is not as documented.
    pub fn of_kernel() -> io::Result<Self> {
        let bytes = fs::read("/sys/kernel/btf/vmlinux")?;
        let bad = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "the kernel's BTF is of an unknown form",
            )
        };
        Self::new(bytes).ok_or_else(bad)
    }

    /// `None`: it is not as documented.
    fn new(bytes: Vec<u8>) -> Option<Self> {
        const MAGIC: u16 = 0xeb9f;
        let word = |at: usize| number(&bytes, at).map(|it| it as usize);
        if u16::from_ne_bytes(*bytes.first_chunk()?) != MAGIC {
            return None;
        }
        let header = word(4)?;
        let first = header.checked_add(word(8)?)?;
        let end = first.checked_add(word(12)?)?;
        let names = header.checked_add(word(16)?)?;
        let mut types = Vec::new();
        let mut at = first;
        while at < end {
            types.push(at as u32);
            let info = number(&bytes, at + 4)?;
            at = at.checked_add(TYPE + rest(info)?)?;
        }
        Some(Self {
            bytes,
            types,
            names,
        })
    }

    /// The offset of a structure's member, bytes. It may be one of a union, or of another structure
    /// in it, that has no name.
    pub fn offset(&self, structure: &str, member: &str) -> Option<u32> {
        let at = self.types.iter().find(|at| {
            let at = **at as usize;
            kind_of(self.number(at + 4)) == STRUCT && self.is_named(self.number(at), structure)
        });
        self.member(*at?, member, DEPTH)
    }

    /// The offset of a member of a structure or union that begins here.
    fn member(&self, at: u32, name: &str, depth: u32) -> Option<u32> {
        let at = at as usize;
        let info = self.number(at + 4);
        (0..count(info)).find_map(|member| {
            let member = at + TYPE + member * MEMBER;
            let offset = self.number(member + 8);
            // Where the structure has bit fields, their widths are in the highest byte.
            let offset = if info >> 31 == 0 {
                offset
            } else {
                offset & 0xff_ffff
            };
            let within = match self.number(member) {
                0 => {
                    let inner = self
                        .types
                        .get(self.number(member + 4).checked_sub(1)? as usize)?;
                    let kind = kind_of(self.number(*inner as usize + 4));
                    let is_whole = [STRUCT, UNION].contains(&kind) && depth > 0;
                    is_whole.then(|| self.member(*inner, name, depth - 1))??
                }
                found => self.is_named(found, name).then_some(0)?,
            };
            Some(offset / 8 + within)
        })
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let text = self.bytes.get(self.names + offset as usize..);
        let after = text.and_then(|it| it.strip_prefix(name.as_bytes()));
        after.is_some_and(|it| it.first() == Some(&0))
    }

    /// A number of a type.
    fn number(&self, at: usize) -> u32 {
        number(&self.bytes, at).unwrap_or(0)
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn kind_of(info: u32) -> u32 {
    info >> 24 & 0x7f
}

/// The number of its members, values or parameters. It had 16 bits before Linux 7.2, and those after
/// them were 0, as those after a kind's first five.
fn count(info: u32) -> usize {
    (info & 0xff_ffff) as usize
}

/// How many bytes follow a type.
fn rest(info: u32) -> Option<usize> {
    let each = match kind_of(info) {
        // Pointers, declarations, other names, qualifiers, functions, floating-point numbers, tags.
        2 | 7..=12 | 16 | 18 => return Some(0),
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => return Some(4),
        // Arrays.
        3 => return Some(12),
        // Values of enumerations, parameters.
        6 | 13 => 8,
        // Members, variables of sections, values of 64 bits.
        STRUCT | UNION | 15 | 19 => MEMBER,
        _ => return None,
    };
    Some(count(info) * each)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A structure `one` of `a`, and of a union of `b` and `c` after it; and a function `one`.
    fn small() -> Vec<u8> {
        let names = b"\0one\0a\0b\0c\0";
        let types: [[u32; 3]; 8] = [
            [0, UNION << 24 | 2, 8],
            [7, 9, 0],
            [9, 9, 32],
            [1, STRUCT << 24 | 2, 16],
            [5, 9, 0],
            [0, 1, 64],
            [1, 12 << 24, 9],
            [1, 8 << 24, 9],
        ];
        let bytes: Vec<_> = types
            .as_flattened()
            .iter()
            .flat_map(|it| it.to_ne_bytes())
            .collect();
        let mut all = [0x9f_u8, 0xeb, 1, 0].to_vec();
        for word in [
            24,
            0,
            bytes.len() as u32,
            bytes.len() as u32,
            names.len() as u32,
        ] {
            all.extend(word.to_ne_bytes());
        }
        all.extend(bytes);
        all.extend(names);
        all
    }

    #[test]
    fn members_are_found_by_their_names() {
        let btf = Btf::new(small()).unwrap();
        assert_eq!(btf.types.len(), 4);
        let offsets = ["a", "b", "c", "d"].map(|it| btf.offset("one", it));
        assert_eq!(offsets, [Some(0), Some(8), Some(12), None]);
        assert_eq!([btf.offset("two", "a"), btf.offset("on", "a")], [None; 2]);
    }

    #[test]
    fn what_is_cut_off_or_unknown_is_refused() {
        let whole = small();
        for length in 0..24 + 8 * TYPE - 4 {
            assert!(Btf::new(whole[..length].to_vec()).is_none(), "{length}");
        }
        let mut unknown = whole.clone();
        unknown[24 + 7] = 31;
        assert!(Btf::new(unknown).is_none());
        let mut other = whole;
        other[0] = 0;
        assert!(Btf::new(other).is_none());
    }

    #[test]
    fn the_running_kernel_has_it() {
        let btf = Btf::of_kernel().unwrap();
        // The first of what every structure of a socket begins with.
        assert_eq!(btf.offset("sock_common", "skc_daddr"), Some(0));
        assert_eq!(btf.offset("sock", "__sk_common"), Some(0));
    }
}
