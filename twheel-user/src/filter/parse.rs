//! Parses a text into a checked filter.

use pest::{
    Parser,
    error::{ErrorVariant, InputLocation},
    iterators::Pair,
};
use pest_derive::Parser;

use super::{
    expression::Test,
    field::{Field, Knowable, Type},
    value::{Operator, Value},
};
use crate::policy::network::Network;

#[derive(Parser)]
#[grammar = "filter/filter.pest"]
struct Grammar;

/// Most levels of nested parentheses and negations: more than anybody writes, and few enough not to
/// overflow the stack.
const DEPTH: usize = 64;

/// What is wrong with a filter, and where.
#[derive(Debug)]
pub(super) struct Wrong {
    /// Offset in bytes.
    at: usize,
    what: String,
}

impl Wrong {
    fn at(pair: &Pair<'_, Rule>, what: String) -> Self {
        Self {
            at: pair.as_span().start(),
            what,
        }
    }

    /// A sentence with the column, then the filter on the next line, with a mark below the column.
    pub(super) fn point_at(&self, text: &str) -> String {
        // One line, in which each character is one column wide.
        let line: String = text
            .chars()
            .map(|it| if it.is_control() { ' ' } else { it })
            .collect();
        let before = text.get(..self.at).unwrap_or(text).chars().count();
        format!(
            "filter, column {}: {}\n  {line}\n  {}^",
            before + 1,
            self.what,
            " ".repeat(before)
        )
    }
}

/// Parses a filter that is not empty.
pub(super) fn parse(text: &str, known: Knowable) -> Result<Test, Wrong> {
    check_depth(text)?;
    let mut pairs = Grammar::parse(Rule::filter, text).map_err(|error| {
        let at = match error.location {
            InputLocation::Pos(at) | InputLocation::Span((at, _)) => at,
        };
        if let Some(wrong) = unclosed(text, at) {
            return wrong;
        }
        let expected = match &error.variant {
            ErrorVariant::ParsingError { positives, .. } => {
                let mut names: Vec<_> = positives.iter().map(|rule| name(*rule)).collect();
                names.sort_unstable();
                names.dedup();
                names.retain(|name| !name.is_empty());
                names.join(", or ")
            }
            ErrorVariant::CustomError { message } => message.clone(),
        };
        let what = match expected.as_str() {
            "" => "this is not a filter such as `state == established`".to_owned(),
            expected => format!("expected {expected}"),
        };
        Wrong { at, what }
    })?;
    let filter = pairs.next().into_iter().flat_map(Pair::into_inner);
    let mut any = filter.filter(|pair| pair.as_rule() == Rule::any);
    match any.next() {
        Some(pair) => test(pair, known),
        None => Err(Wrong {
            at: 0,
            what: "this is not a filter such as `state == established`".to_owned(),
        }),
    }
}

/// What is missing, if the filter is wrong at this offset because a brace or a parenthesis was not
/// closed.
fn unclosed(text: &str, at: usize) -> Option<Wrong> {
    let end = text.trim_end().len();
    let missing = |what: &str| {
        let what = what.to_owned();
        Some(Wrong { at: end, what })
    };
    let mut open = Vec::new();
    let mut quoted = false;
    for (place, character) in text.char_indices() {
        quoted ^= character == '"';
        match character {
            '{' | '(' if !quoted => open.push((place, character)),
            '}' | ')' if !quoted => drop(open.pop()),
            _ => {}
        }
    }
    match open.last() {
        // The grammar takes a set as a whole: what is wrong with it is at its beginning.
        Some((place, '{')) if at >= *place => missing("the set ends with `}`: add it"),
        Some((_, '(')) if at >= end => {
            missing("expected `and`, or `or`, or `)`, which ends what began with `(`")
        }
        _ => None,
    }
}

/// Limits the depth before parsing: the grammar is recursive, and so is its parser.
fn check_depth(text: &str) -> Result<(), Wrong> {
    let mut depth = 0usize;
    let mut negations = 0usize;
    let mut quoted = false;
    for (at, character) in text.char_indices() {
        quoted ^= character == '"';
        if quoted {
            continue;
        }
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        negations = match character {
            '!' => negations + 1,
            ' ' => negations,
            _ => 0,
        };
        if depth > DEPTH || negations > DEPTH {
            return Err(Wrong {
                at,
                what: format!(
                    "more than {DEPTH} nested parentheses or negations: give a simpler filter"
                ),
            });
        }
    }
    Ok(())
}

/// The name of a grammar rule, for a message about what was expected.
fn name(rule: Rule) -> &'static str {
    match rule {
        Rule::field | Rule::any | Rule::all | Rule::unary | Rule::test => "a field such as `state`",
        Rule::comparison => "a comparison (== != < <= > >=)",
        Rule::value | Rule::quoted => "a value",
        Rule::list => "a list in braces",
        Rule::within | Rule::word_in => "`in`",
        Rule::word_and | Rule::and => "`and`",
        Rule::word_or | Rule::or => "`or`",
        Rule::EOI => "the end of the filter",
        Rule::not | Rule::word_not | Rule::group => "",
        _ => "",
    }
}

fn test(pair: Pair<'_, Rule>, known: Knowable) -> Result<Test, Wrong> {
    let parts = |pair: Pair<'_, Rule>| -> Result<Vec<Test>, Wrong> {
        let parts = pair.into_inner();
        let parts = parts.filter(|it| !matches!(it.as_rule(), Rule::word_and | Rule::word_or));
        parts.map(|part| test(part, known)).collect()
    };
    match pair.as_rule() {
        Rule::any => parts(pair).map(|tests| one_or(tests, Test::Any)),
        Rule::all => parts(pair).map(|tests| one_or(tests, Test::All)),
        Rule::unary => {
            let mut negated = false;
            let mut inner = Test::All(Vec::new());
            for part in pair.into_inner() {
                match part.as_rule() {
                    Rule::not => negated = !negated,
                    _ => inner = test(part, known)?,
                }
            }
            Ok(if negated {
                Test::Not(inner.into())
            } else {
                inner
            })
        }
        Rule::group => parts(pair).map(|tests| one_or(tests, Test::All)),
        _ => comparison(pair, known),
    }
}

fn one_or(mut tests: Vec<Test>, many: impl Fn(Vec<Test>) -> Test) -> Test {
    match tests.len() {
        1 => tests.remove(0),
        _ => many(tests),
    }
}

/// A condition on one field.
fn comparison(pair: Pair<'_, Rule>, known: Knowable) -> Result<Test, Wrong> {
    let whole = pair.clone();
    let mut field = None;
    let mut operator = None;
    let mut values = Vec::new();
    for part in pair.into_inner() {
        match part.as_rule() {
            Rule::field => field = Some((field_of(&part, known)?, part)),
            Rule::within | Rule::comparison => operator = Some(part),
            Rule::list => values.extend(part.into_inner()),
            _ => values.push(part),
        }
    }
    let Some((field, place)) = field else {
        return Err(Wrong::at(&whole, "expected a field".to_owned()));
    };
    let Some(operator) = operator else {
        return match field.kind() {
            Type::Flag => Ok(Test::Is(field)),
            _ => Err(Wrong {
                at: place.as_span().end(),
                what: format!("expected a comparison of {} with a value", field.name()),
            }),
        };
    };
    if field.kind() == Type::Flag {
        let what = format!("{} is a flag: write `{0}` or `not {0}`", field.name());
        return Err(Wrong::at(&operator, what));
    }
    let values: Vec<_> = values
        .iter()
        .map(|pair| value(field, pair))
        .collect::<Result<_, _>>()?;
    let ordering = match operator.as_str() {
        "!=" => return Ok(Test::Not(Test::OneOf(field, values).into())),
        "<" => Operator::Less,
        "<=" => Operator::AtMost,
        ">=" => Operator::AtLeast,
        ">" => Operator::More,
        // The operators ==, = and in.
        _ => return Ok(Test::OneOf(field, values)),
    };
    match (field.kind(), values.into_iter().next()) {
        (Type::Number(_) | Type::Duration, Some(value)) if !matches!(value, Value::Range(..)) => {
            Ok(Test::Compares(field, ordering, value))
        }
        (Type::Number(_), _) => Err(Wrong::at(
            &operator,
            "a range has no order: use `==`, `!=` or `in`".to_owned(),
        )),
        _ => Err(Wrong::at(
            &operator,
            format!("{} has no order: use `==`, `!=` or `in`", field.name()),
        )),
    }
}

fn field_of(pair: &Pair<'_, Rule>, known: Knowable) -> Result<Field, Wrong> {
    let name = pair.as_str();
    let Some(field) = Field::from_name(name) else {
        let all: Vec<_> = Field::ALL
            .iter()
            .filter(|field| field.unknown(known).is_none())
            .map(|field| field.name())
            .collect();
        let what = format!("unknown field `{name}`: give one of {}", all.join(", "));
        return Err(Wrong::at(pair, what));
    };
    match field.unknown(known) {
        Some(why) => Err(Wrong::at(pair, format!("{name} {why}"))),
        None => Ok(field),
    }
}

fn value(field: Field, pair: &Pair<'_, Rule>) -> Result<Value, Wrong> {
    let text = pair.as_str().trim_matches('"');
    let wrong = |what: String| Wrong::at(pair, what);
    match field.kind() {
        Type::Name([]) => Ok(Value::Name(text.to_owned())),
        Type::Name(names) => {
            if names.iter().any(|name| name.eq_ignore_ascii_case(text)) {
                return Ok(Value::Name(text.to_owned()));
            }
            Err(wrong(format!(
                "unknown {} `{text}`: give one of {}",
                field.name(),
                names.join(", ")
            )))
        }
        Type::Number(most) => number(text, most).ok_or_else(|| {
            let most = match most {
                u64::MAX => String::new(),
                most => format!(" from 0 to {most}"),
            };
            wrong(format!(
                "`{text}` is not a number{most}, nor a range such as 1-9"
            ))
        }),
        Type::Duration => humantime::parse_duration(text)
            .map(Value::Duration)
            .map_err(|_| wrong(format!("`{text}` is not a duration such as 30s or 5m"))),
        Type::Address => Network::parse(text).map(Value::Network).map_err(wrong),
        Type::Flag => Err(wrong("a flag has no value".to_owned())),
    }
}

/// A number or a range of numbers; bytes may have a unit.
fn number(text: &str, most: u64) -> Option<Value> {
    let within = |number: &u64| *number <= most;
    let one = |text: &str| -> Option<u64> {
        let number = match text.parse() {
            Ok(number) => number,
            Err(_) if most == u64::MAX => text.parse::<bytesize::ByteSize>().ok()?.as_u64(),
            Err(_) => return None,
        };
        Some(number).filter(within)
    };
    match text.split_once('-') {
        Some((from, to)) => {
            let (from, to) = (one(from)?, one(to)?);
            (from <= to).then_some(Value::Range(from, to))
        }
        None => one(text).map(Value::Number),
    }
}
