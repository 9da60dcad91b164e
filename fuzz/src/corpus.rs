//! The corpus from which the fuzzer starts. The fuzzer found these inputs itself;
//! `cargo xtask fuzz --keep` adds to them.

/// The inputs in hexadecimal, one per line, minimised by the fuzzer.
const KEPT: &str = include_str!("../corpus.hex");

/// The inputs.
pub fn kept() -> impl Iterator<Item = Vec<u8>> {
    KEPT.lines().map(|line| {
        let digit = |byte| {
            char::from(byte)
                .to_digit(16)
                .expect("corpus.hex is hexadecimal") as u8
        };
        let pairs = line.as_bytes().chunks_exact(2);
        pairs
            .map(|pair| digit(pair[0]) << 4 | digit(pair[1]))
            .collect()
    })
}
