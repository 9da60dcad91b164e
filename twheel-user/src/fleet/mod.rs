//! A fleet: the events of many hosts in ClickHouse.
//!
//! | question | file |
//! |---|---|
//! | which columns there are | `columns.rs` |
//! | the SQL that sets up or migrates a database | `schema.rs` |
//! | which events a question is about: a filter, hosts, a time | `question.rs` |
//! | a row as the event that it was made from | `row.rs` |
//! | who has most flows; why flows ended | `sums.rs` |
//! | which services leak connections | `leaks.rs` |
//! | which hosts are silent, behind or losing events | `hosts.rs` |

mod columns;
pub mod hosts;
pub mod leaks;
pub mod question;
pub mod row;
pub mod schema;
pub mod sums;

pub use self::columns::{Column, EVENTS, EXPORTS};
