//! A fleet: the events of many hosts in ClickHouse.
//!
//! | question | file |
//! |---|---|
//! | which columns there are | `columns.rs` |
//! | the SQL that sets up or migrates a database | `schema.rs` |

mod columns;
pub mod schema;

pub use self::columns::{Column, EVENTS, EXPORTS};
