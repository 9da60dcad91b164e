//! What tests skip, and what CI allows them to skip.

use std::fmt;

/// Tests that may skip something in CI, and why. If another test does, the run fails there. A name
/// that ends with `::` is a module, and covers all of its tests.
const ALLOWED: [(&str, &str); 8] = [
    ("device::", INTERFACES),
    ("nothing_seen::", INTERFACES),
    ("what_goes_out_by_a_dummy_is_seen", INTERFACES),
    (
        "zones::a_packet_without_a_tag_closes_no_socket_of_a_vlan",
        INTERFACES,
    ),
    (
        "flows_of_a_cpu_that_goes_wait_until_it_is_back",
        "it takes a CPU from all that run beside it, and a virtual machine may have no switch for that",
    ),
    (
        "flows_and_packets_are_those_of_tshark",
        "captures of others are not in this tree; those that the test makes are compared",
    ),
    (
        "recorded::recorded_packets_meet_the_fate_that_the_host_says",
        "captures of others are not in this tree; those of the corpus are sent",
    ),
    (
        "service",
        "it is no test, but the process whose sockets the other tests look for",
    ),
];

const INTERFACES: &str = "a kernel may lack a kind of interface; vm-test has kernels with each, where none may be left out";

/// What a test has skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip {
    /// The test.
    pub test: String,
    /// What was skipped, and why.
    pub what: String,
}

impl Skip {
    /// Whether CI allows it.
    pub fn is_allowed(&self) -> bool {
        ALLOWED.iter().any(|(name, _)| match name.ends_with("::") {
            true => self.test.starts_with(name),
            false => self.test == *name,
        })
    }

    /// Whether a test that has failed has done so for this alone: it lacks a program
    /// (`twheel_tests::netns::tool`).
    pub fn is_for_tool(&self) -> bool {
        self.what.starts_with("there is no ")
    }

    /// Reads the line of a skipped test, if it is one: its name, and the reason.
    pub fn ignored(line: &str) -> Option<Self> {
        let (test, what) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
        let what = what.strip_prefix(", ").unwrap_or("no reason given");
        Some(Self {
            test: test.to_owned(),
            what: what.to_owned(),
        })
    }

    /// Reads the line that says what a test has left out (`twheel_tests::skipped`).
    pub fn left_out(line: &str) -> Option<Self> {
        let (test, what) = line.split_once("skipped: ")?;
        let test = test.strip_prefix("test ").unwrap_or_default();
        Some(Self {
            test: test.strip_suffix(" ... ").unwrap_or("a test").to_owned(),
            what: what.to_owned(),
        })
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.test, self.what)
    }
}

#[cfg(test)]
mod tests {
    use super::Skip;

    fn skip(test: &str, what: &str) -> Option<Skip> {
        let [test, what] = [test, what].map(str::to_owned);
        Some(Skip { test, what })
    }

    #[test]
    fn reads_why_a_test_is_skipped() {
        let line = "test long ... ignored, takes an hour";
        assert_eq!(Skip::ignored(line), skip("long", "takes an hour"));
        assert_eq!(Skip::ignored("test wheel::fires ... ok"), None);
    }

    #[test]
    fn reads_what_a_test_leaves_out() {
        let line = "test a ... skipped: no such tool";
        assert_eq!(Skip::left_out(line), skip("a", "no such tool"));
        assert_eq!(
            Skip::left_out("skipped: no such tool"),
            skip("a test", "no such tool")
        );
        assert_eq!(Skip::left_out("test a ... ok"), None);
    }

    #[test]
    fn what_nobody_has_allowed_is_not() {
        let taken = Skip::left_out(
            "test flows_of_a_cpu_that_goes_wait_until_it_is_back ... skipped: no switch",
        );
        assert!(taken.unwrap().is_allowed());
        let device = Skip::left_out("test device::bond ... skipped: no bond");
        assert!(device.unwrap().is_allowed());
        assert!(
            !Skip::left_out("test a ... skipped: b")
                .unwrap()
                .is_allowed()
        );
        assert!(!Skip::left_out("skipped: b").unwrap().is_allowed());
    }
}
