//! What the shells propose: interfaces, instances, network namespaces, groups, actions, states, and
//! the words of filters.

use std::{collections::BTreeSet, env, ffi::OsStr, fs, path::Path};

use clap::CommandFactory;
use clap_complete::{
    CompleteEnv,
    engine::{ArgValueCompleter, CompletionCandidate as Candidate},
};
use nix::net::if_::if_nameindex;
use twheel_common::config::RULES;

use super::Cli;
use crate::{
    action::Action,
    filter::{Field, Knowable, Type},
    history,
    inspect::Reader,
    model::EventKind,
    netns, patterns,
    pins::{self, entries, namespace},
    timeouts,
};

/// The environment variable with which a shell asks for completions.
pub const VARIABLE: &str = "TWHEEL_COMPLETE";

/// Answers a shell that asks for completions, and ends the process; otherwise does nothing.
pub fn answer() {
    CompleteEnv::with_factory(Cli::command)
        .var(VARIABLE)
        .complete();
}

/// One of these words.
fn word(words: impl Fn() -> Vec<Candidate> + Send + Sync + 'static) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| {
        let current = current.to_string_lossy();
        beginning_with(&current, words())
    })
}

/// Words with commas between them, each once. `alone`: those that no other may precede.
fn list(
    alone: &'static [&'static str],
    words: impl Fn() -> Vec<Candidate> + Send + Sync + 'static,
) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| {
        let current = current.to_string_lossy();
        let (before, last) = match current.rfind(',') {
            Some(comma) => current.split_at(comma + 1),
            None => ("", &*current),
        };
        // Of `close=3s`, what is before the sign; of the actions that refuse packets, one suffices.
        let name = |word: &str| word.split('=').next().unwrap_or_default().to_owned();
        let given: Vec<_> = before.split_terminator(',').map(name).collect();
        let is_left = |it: &Candidate| {
            let word = it.get_value().to_string_lossy();
            given.is_empty() || !(alone.contains(&&*word) || given.contains(&name(&word)))
        };
        let proposed = beginning_with(last, words()).into_iter().filter(is_left);
        proposed.map(|it| it.add_prefix(before)).collect()
    })
}

fn beginning_with(begin: &str, mut words: Vec<Candidate>) -> Vec<Candidate> {
    words.retain(|it| it.get_value().to_string_lossy().starts_with(begin));
    words
}

fn candidates<T: Into<std::ffi::OsString>>(words: impl IntoIterator<Item = T>) -> Vec<Candidate> {
    words.into_iter().map(Candidate::new).collect()
}

/// The commands below the one that these words of a command line name.
fn command_names(above: &[String]) -> Vec<Candidate> {
    let mut command = &Cli::command();
    for name in above {
        match command.find_subcommand(name) {
            Some(below) => command = below,
            None => return Vec::new(),
        }
    }
    let commands = command.get_subcommands();
    candidates(commands.map(|it| it.get_name().to_owned()))
}

/// The words after `help` or `man`, and before the one that is completed.
fn commands_before() -> Vec<String> {
    let words = words_before().into_iter();
    let mut after = words.skip_while(|word| !["help", "man"].contains(&word.as_str()));
    after.next();
    after.collect()
}

/// A command of twheel, or one below the command that was named before.
pub(super) fn commands() -> ArgValueCompleter {
    word(|| command_names(&commands_before()))
}

/// The same, or one of these topics.
pub(super) fn commands_or(topics: &'static [&'static str]) -> ArgValueCompleter {
    word(move || {
        let above = commands_before();
        let mut names = command_names(&above);
        if above.is_empty() {
            names.extend(candidates(topics.iter().copied()));
        }
        names.sort();
        names.dedup();
        names
    })
}

/// Interfaces of this network namespace.
fn interface_names() -> Vec<Candidate> {
    let found = if_nameindex();
    let found = found.iter().flat_map(|all| all.iter());
    candidates(found.map(|it| it.name().to_string_lossy().into_owned()))
}

/// An interface of this network namespace.
pub(super) fn interface() -> ArgValueCompleter {
    word(interface_names)
}

/// A list of interfaces of this network namespace.
pub(super) fn excluded() -> ArgValueCompleter {
    list(&[], interface_names)
}

/// A list of interfaces of this network namespace, or all of them.
pub(super) fn interfaces() -> ArgValueCompleter {
    list(&[patterns::ALL], || {
        let mut all = interface_names();
        all.push(Candidate::new(patterns::ALL).help(Some("all except lo".into())));
        all
    })
}

/// Interfaces, each followed by `=`.
pub(super) fn zones() -> ArgValueCompleter {
    word(|| {
        let names = interface_names().into_iter();
        candidates(names.map(|it| format!("{}=", it.get_value().to_string_lossy())))
    })
}

/// Interfaces of the instances in this network namespace.
fn instance_names() -> BTreeSet<String> {
    let (Ok(found), Ok(here)) = (pins::found(), namespace()) else {
        return BTreeSet::new();
    };
    let here = found.into_iter().filter(|it| it.namespace == Some(here));
    here.flat_map(|it| it.interfaces).collect()
}

/// An interface that selects an instance.
pub(super) fn instance() -> ArgValueCompleter {
    word(|| candidates(instance_names()))
}

/// A list of interfaces that select instances.
pub(super) fn instances() -> ArgValueCompleter {
    list(&[], || candidates(instance_names()))
}

/// An interface that selects an instance; or, where the history is read, one in the default
/// directory.
pub(super) fn selected() -> ArgValueCompleter {
    word(|| {
        let mut names = instance_names();
        if !words_before()
            .iter()
            .any(|it| it == "expired" || it == "export")
        {
            return candidates(names);
        }
        for path in entries(Path::new(history::DIRECTORY)).unwrap_or_default() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            names.extend(history::interfaces_of(&path, &name));
        }
        candidates(names)
    })
}

/// Network namespaces.
pub(super) fn namespaces() -> ArgValueCompleter {
    list(&[patterns::ALL], || {
        let mut names = candidates(netns::names().unwrap_or_default());
        names.push(Candidate::new(patterns::ALL));
        names
    })
}

/// A network namespace.
pub(super) fn namespace_name() -> ArgValueCompleter {
    word(|| candidates(netns::names().unwrap_or_default()))
}

/// A group of users.
pub(super) fn group() -> ArgValueCompleter {
    word(|| {
        let groups = fs::read_to_string("/etc/group").unwrap_or_default();
        let names = groups.lines().filter_map(|line| line.split(':').next());
        candidates(names.map(str::to_owned))
    })
}

/// Actions on expired flows.
pub(super) fn actions() -> ArgValueCompleter {
    list(&["none"], || {
        let mut names = vec![Candidate::new("none")];
        names.extend(Action::ALL.map(|action| Candidate::new(action.name())));
        names
    })
}

/// Timeouts by state.
pub(super) fn timeouts() -> ArgValueCompleter {
    list(&["inherit"], || {
        let mut names = vec![Candidate::new("inherit")];
        names.extend(timeouts::NAMES.map(|name| Candidate::new(format!("{name}="))));
        names
    })
}

/// Kinds of events.
pub(super) fn kinds() -> ArgValueCompleter {
    // clap tells the last of a list with commas.
    word(|| {
        let kinds = EventKind::ALL.iter();
        let candidate = |it: &EventKind| Candidate::new(it.name()).help(Some(it.meaning().into()));
        kinds.map(candidate).collect()
    })
}

/// Places among the programs of others.
pub(super) fn places() -> ArgValueCompleter {
    word(|| candidates(["first", "last", "before:", "after:"]))
}

/// A filter, in one word or several.
pub(super) fn filter() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| complete(&words_before(), &current.to_string_lossy()))
}

/// The words of the command line before the one that is completed.
fn words_before() -> Vec<String> {
    let words = env::args_os().skip_while(|word| word != "--").skip(1);
    let mut words: Vec<_> = words
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    // Where the cursor is; a shell that does not tell gives the words up to there.
    let index = env::var("_CLAP_COMPLETE_INDEX").ok();
    let index = index.and_then(|index| index.parse().ok());
    words.truncate(index.unwrap_or(words.len().saturating_sub(1)));
    words
}

/// What may follow in a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// A field, or `not`.
    Field,
    /// An operator.
    Operator(Field),
    /// A value.
    Value(Field),
    /// A value, a comma, or the end of the set.
    Member(Field),
    /// `and`, `or`.
    And,
}

impl Next {
    /// What may follow a word, or a sign.
    fn after(self, token: &str) -> Self {
        match (self, token) {
            (_, "(" | "and" | "or" | "not" | "&&" | "||" | "!") => Self::Field,
            (Self::Value(field) | Self::Member(field), "{" | ",") => Self::Member(field),
            (Self::Member(field), token) if token != "}" => Self::Member(field),
            (Self::Operator(field), _) => Self::Value(field),
            (Self::Field, name) => Field::from_name(name).map_or(Self::And, Self::Operator),
            _ => Self::And,
        }
    }

    /// The words that may follow.
    fn words(self, known: Knowable) -> Vec<Candidate> {
        match self {
            Self::Field => {
                let fields = Field::ALL.iter();
                let fields = fields.filter(|field| field.unknown(known).is_none());
                let meaning = |it: &Field| Some(it.meaning().into());
                let fields = fields.map(|it| Candidate::new(it.name()).help(meaning(it)));
                fields.chain([Candidate::new("not")]).collect()
            }
            Self::Operator(field) => match field.kind() {
                Type::Flag => candidates(["and", "or"]),
                Type::Name(_) | Type::Address => candidates(["==", "!=", "in"]),
                _ => candidates(["==", "!=", "<", "<=", ">", ">=", "in"]),
            },
            Self::Value(field) | Self::Member(field) => match field.kind() {
                Type::Name([]) if field == Field::Iface => interface_names(),
                Type::Name([]) => candidates(rules()),
                Type::Name(names) => candidates(names.iter().copied()),
                _ => Vec::new(),
            },
            Self::And => candidates(["and", "or"]),
        }
    }
}

/// The names of rules in this network namespace's only instance.
fn rules() -> Vec<String> {
    let Ok(reader) = Reader::open(None) else {
        return Vec::new();
    };
    let rules = (1..RULES as u16).filter_map(|number| reader.rule(number));
    rules.map(str::to_owned).collect()
}

/// Completes the last word of a filter. `before`: the words of the command line before it.
fn complete(before: &[String], current: &str) -> Vec<Candidate> {
    const QUOTES: [char; 2] = ['\'', '"'];
    let known = Knowable {
        ended: before
            .iter()
            .any(|it| ["expired", "fleet", "--protect"].contains(&it.as_str())),
        accounting: true,
        rto: true,
    };
    // In one word, the filter begins there. In several, what an earlier word of the command line
    // means decides nothing: after a word that is no field, `and` follows, or a field.
    let text = current.trim_start_matches(QUOTES);
    let tokens = tokens(text);
    let partial = tokens
        .last()
        .copied()
        .filter(|it| text.ends_with(it) && it.chars().all(|sign| !SIGNS.contains(sign)));
    let partial = partial.unwrap_or_default();
    let inner = &tokens[..tokens.len() - usize::from(!partial.is_empty())];
    let next = match inner {
        [] => {
            let first = before.iter().rposition(|it| Field::from_name(it).is_some());
            let words = &before[first.unwrap_or(before.len())..];
            let words = words.iter().flat_map(|word| self::tokens(word));
            words.fold(Next::Field, Next::after)
        }
        inner => inner.iter().fold(Next::Field, |next, it| next.after(it)),
    };
    // Bash tells the word without the quote that begins it; zsh and fish add it themselves.
    let prefix = &text[..text.len() - partial.len()];
    let words = beginning_with(partial, next.words(known)).into_iter();
    words.map(|it| it.add_prefix(prefix)).collect()
}

const SIGNS: &str = "(){},=<>!&|";

/// The words and signs of a filter.
fn tokens(text: &str) -> Vec<&str> {
    let is_operator = |sign: char| "=<>!&|".contains(sign);
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let long = match first {
            '(' | ')' | '{' | '}' | ',' => 1,
            it if is_operator(it) => rest.find(|it| !is_operator(it)).unwrap_or(rest.len()),
            _ => rest
                .find(|it: char| it.is_whitespace() || SIGNS.contains(it))
                .unwrap_or(rest.len()),
        };
        let (token, after) = rest.split_at(long);
        tokens.push(token);
        rest = after.trim_start();
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposed(before: &[&str], current: &str) -> Vec<String> {
        let before: Vec<_> = before.iter().map(|it| (*it).to_owned()).collect();
        let words = complete(&before, current).into_iter();
        words
            .map(|it| it.get_value().to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn a_filter_is_completed_by_what_may_follow() {
        for (before, current, expected) in [
            (&["twheel", "flows"][..], "st", &["state", "stalled"][..]),
            (&["twheel", "flows"], "'st", &["state", "stalled"]),
            (
                &["twheel", "flows"],
                "state ",
                &["state ==", "state !=", "state in"],
            ),
            (
                &["twheel", "flows"],
                "state == est",
                &["state == established"],
            ),
            (&["twheel", "flows"], "state==est", &["state==established"]),
            (&["twheel", "flows", "state", "=="], "est", &["established"]),
            (&["twheel", "flows", "state"], "", &["==", "!=", "in"]),
            (
                &["twheel", "flows", "state", "==", "close"],
                "",
                &["and", "or"],
            ),
            (
                &["twheel", "flows"],
                "state in {close, time",
                &["state in {close, time_wait"],
            ),
            (
                &["twheel", "flows"],
                "not (proto == u",
                &["not (proto == udp"],
            ),
            (
                &["twheel", "flows"],
                "proto == udp and dire",
                &["proto == udp and direction"],
            ),
            (
                &["twheel", "flows"],
                "picked_up ",
                &["picked_up and", "picked_up or"],
            ),
            (&["twheel", "flows"], "idle > 3s o", &["idle > 3s or"]),
            (
                &["twheel", "flows"],
                "idle ",
                &[
                    "idle ==", "idle !=", "idle <", "idle <=", "idle >", "idle >=", "idle in",
                ],
            ),
            (&["twheel", "flows"], "src == ", &[]),
            // What is known of flows that have ended is not known of flows in the table.
            (&["twheel", "flows"], "rea", &[]),
            (&["twheel", "expired"], "rea", &["reason"]),
            (
                &["twheel", "expired"],
                "reason == su",
                &["reason == superseded"],
            ),
            (&["twheel", "run", "--protect"], "exp", &[]),
        ] {
            assert_eq!(proposed(before, current), expected, "{before:?} {current}");
        }
    }

    #[test]
    fn lists_are_completed_after_the_last_comma() {
        let words = |completer: &ArgValueCompleter, current: &str| -> Vec<String> {
            let found = completer.complete(OsStr::new(current)).into_iter();
            found
                .map(|it| it.get_value().to_string_lossy().into_owned())
                .collect()
        };
        assert_eq!(words(&actions(), "reset,so"), ["reset,socket"]);
        assert_eq!(words(&timeouts(), "time"), ["time_wait="]);
        assert_eq!(
            words(&timeouts(), "established=1h,syn_sent2"),
            Vec::<String>::new()
        );
        assert!(words(&interface(), "l").contains(&"lo".to_owned()));
        assert_eq!(words(&interfaces(), "al"), ["all"]);
        assert_eq!(words(&interfaces(), "lo,al"), Vec::<String>::new());
        assert_eq!(words(&excluded(), "al"), Vec::<String>::new());
        // What is in the list, and what excludes it, is not proposed again.
        assert_eq!(
            words(&actions(), "reset,enforce=drop,"),
            ["reset,enforce=drop,socket", "reset,enforce=drop,conntrack"]
        );
        let timeouts = words(&timeouts(), "close=3s,");
        assert!(timeouts.contains(&"close=3s,close_wait=".to_owned()));
        assert!(
            !timeouts
                .iter()
                .any(|it| it == "close=3s,close=" || it == "close=3s,inherit")
        );
        let below = |above: &str| command_names(&[above.to_owned()]);
        assert_eq!(below("policy"), candidates(["check", "load"]));
        assert_eq!(below("run"), []);
        assert!(words(&group(), "roo").contains(&"root".to_owned()));
    }
}
