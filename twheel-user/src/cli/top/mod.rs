//! `twheel top`
//!
//! | question | file |
//! |---|---|
//! | the terminal, and what the program waits for | `mod.rs` |
//! | the state, and how events change it | `app.rs`; the filter while it is typed: `edit.rs` |
//! | what was read of the instance | `picture.rs` |
//! | which key does what; the help | `keys.rs`, `help.rs` |
//! | one pass over the table | `scan.rs`; rates: `speed.rs`; groups: `group.rs`; order: `order.rs` |
//! | what is drawn where | `draw.rs` |
//! | the views | `views.rs`; their tables: `flow_table.rs`, `group_table.rs`; their widths: `columns.rs` |
//! | the selected flow | `detail.rs`; its deletion: `deletion.rs` |
//! | the wheels as lines of time | `timeline.rs` |
//! | ended flows by reason | `reasons.rs` |
//! | names of hosts and services | `names.rs` |
//! | colours | `style.rs` |

mod app;
mod columns;
mod deletion;
mod detail;
mod draw;
mod edit;
mod flow_table;
mod group;
mod group_table;
mod help;
mod keys;
mod names;
mod order;
mod picture;
mod reasons;
mod scan;
mod speed;
mod style;
mod timeline;
mod views;

use std::{
    io::{self, IsTerminal},
    net::IpAddr,
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use ratatui::{
    DefaultTerminal,
    crossterm::{
        cursor,
        event::{self, Event},
        execute, terminal,
    },
    layout::Rect,
};

use self::{
    app::{App, Start},
    edit::Edit,
    order::Sort,
};
use super::{
    owner::{Owned, say_notices},
    select::{Select, Which, interval, known},
};
use crate::{
    failure::{Failure, Kind},
    filter::Field,
    history,
    owner::Owners,
};

/// Show flows, rates and the wheels live on a terminal
///
/// Shows bits and packets a second of each flow, if `twheel run` counts them (--accounting); by source, service, state and
/// rule; ended flows by reason; and what the programs cost. `?` explains the keys and columns: / edits the filter, which
/// applies as you type; s selects the sort key; Enter shows all details of the selected flow; d deletes it, after a
/// question; n shows names; q quits.
///
/// The rate of a flow is what was counted between two refreshes. The rate of all flows leaves out flows that ended in
/// between.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel top
  twheel top --sort idle 'state == established and dport == 443'
  twheel top --iface eth0 --interval 5s
  twheel top --owner")]
pub struct Top {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    select: Select,
    #[command(flatten)]
    owned: Owned,
    /// Interval between refreshes; longer if a refresh takes more than a tenth of it
    #[arg(long, value_parser = interval, default_value = "1s")]
    interval: Duration,
    /// Sort key [default: rate with --accounting, else last]
    #[arg(long, value_enum, value_name = "KEY")]
    sort: Option<Sort>,
    /// Reverse the order
    #[arg(long)]
    reverse: bool,
    /// Directory of the histories, for the reasons of ended flows, and for deleted flows if no `twheel run` is running; `off`: there is none
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    history: PathBuf,
}

/// An event that the program waits for.
enum Happens {
    Event(Event),
    /// A signal, or the terminal was closed.
    Stop,
    /// What became of a deletion.
    Deleted(String),
    /// The name of a host, if it has one.
    Named(IpAddr, Option<String>),
}

/// The terminal, while top uses it; restored when this is dropped. (After a panic, ratatui's hook
/// restores it.)
struct Screen(DefaultTerminal);

impl Screen {
    fn open() -> Result<Self> {
        let opened = ratatui::try_init().map(Self);
        opened
            .inspect_err(|_| ratatui::restore())
            .context("cannot draw on this terminal")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal was closed, there is nobody to tell.
        let _ = ratatui::try_restore();
        let _ = execute!(io::stdout(), cursor::Show);
    }
}

impl Top {
    pub(super) fn execute(self) -> Result<()> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Err(Failure::new(
                Kind::Usage,
                "top needs a terminal: without one, use `twheel flows` or `twheel stats --watch --json`",
            )
            .into());
        }
        let reader = self.select.open()?;
        let known = known(&reader);
        if let Some(sort) = self.sort.filter(|sort| !sort.is_known(known)) {
            let name = order::name(&sort);
            let field = match name.as_str() {
                "rtt" => Field::Rtt,
                _ => Field::Bytes,
            };
            let why = field.unknown(known).unwrap_or("is not known");
            return Err(Failure::new(Kind::Usage, format!("--sort {name}: it {why}")).into());
        }
        let (width, height) = terminal::size().context("cannot read the size of this terminal")?;
        let start = Start {
            filter: Edit::new(self.which.text(), self.which.filter_for(&reader)?),
            sort: self.sort,
            reverse: self.reverse,
            owners: self.owned.open(Owners::new)?,
            history: self.history,
            size: Rect::new(0, 0, width, height),
        };
        let (happens, inbox) = mpsc::channel();
        let mut app = App::new(start, reader, happens.clone())?;

        // Before any thread is started, so that all of them leave these signals to the thread that
        // waits for them.
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        signals.thread_block().context("cannot wait for signals")?;
        let stop = happens.clone();
        thread::spawn(move || {
            let _ = signals.wait();
            let _ = stop.send(Happens::Stop);
        });
        let mut screen = Screen::open()?;
        thread::spawn(move || {
            loop {
                let happened = event::read().map_or(Happens::Stop, Happens::Event);
                let ends = matches!(happened, Happens::Stop);
                if happens.send(happened).is_err() || ends {
                    return;
                }
            }
        });
        let ended = app.run(&mut screen.0, &inbox, &self.select, self.interval);
        drop(screen);
        say_notices(app.owners.as_ref());
        ended
    }
}
