//! `twheel top`: events, and the state that they change. `view.rs` draws it.

mod view;

use std::{
    collections::VecDeque,
    io::{self, IsTerminal},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use nix::sys::signal::{SigSet, Signal};
use ratatui::{
    DefaultTerminal,
    crossterm::{
        cursor,
        event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
        execute, terminal,
    },
};
use twheel_common::counter::Counter;

use super::{
    flows::{Choice, Key},
    owner::{Owned, say_notices},
    select::{Select, Which, interval, known},
    stats,
};
use crate::{
    failure::{Failure, Kind},
    filter::Filter,
    inspect::Reader,
    model::Tracked,
    owner::{Owner, Owners},
    wheels::Wheels,
};

/// Show flows, rates and the wheels live on a terminal
///
/// Keys: / edits the filter, which applies as you type (Enter keeps it, Esc restores the old one); s and S select the next
/// and the previous sort key; r reverses the order; arrows, PgUp, PgDn, Home and End scroll; p pauses; q, Esc and Ctrl-C
/// quit.
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
    /// Interval between refreshes; longer if a refresh takes more than an eighth of it
    #[arg(long, value_parser = interval, default_value = "1s")]
    interval: Duration,
    /// Sort key
    #[arg(long, value_enum, value_name = "KEY", default_value = "expires")]
    sort: Key,
    /// Reverse the order
    #[arg(long)]
    reverse: bool,
}

/// The time between two readings is at least this many times the duration of one, whatever the
/// interval: reading a large table takes a while.
const LOOKS: u32 = 8;

/// An event that the program waits for.
enum Happens {
    Event(Event),
    /// A signal, or the terminal was closed.
    Stop,
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
        let mut app = App {
            filter: self.which.filter_for(&reader)?,
            text: self.which.text(),
            before: None,
            wrong: None,
            key: self.sort,
            reverse: self.reverse,
            skip: 0,
            height: terminal::size()
                .context("cannot read the size of this terminal")?
                .1,
            paused: false,
            gone: None,
            stale: false,
            owners: self.owned.open(Owners::new)?,
            picture: Picture::new(reader)?,
        };

        let (happens, inbox) = mpsc::channel();
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

/// What is shown, and how.
struct App {
    /// The text of the filter, perhaps while it is edited.
    text: String,
    /// The last valid filter.
    filter: Filter,
    /// The text before the edit, while it is edited.
    before: Option<String>,
    /// Why `text` is not a valid filter.
    wrong: Option<String>,
    key: Key,
    reverse: bool,
    /// Number of flows that are scrolled past.
    skip: usize,
    /// Lines of the terminal.
    height: u16,
    paused: bool,
    /// Why nothing new could be read.
    gone: Option<String>,
    /// The flows that are shown must be selected again.
    stale: bool,
    /// What finds owners, if they are asked for.
    owners: Option<Owners>,
    picture: Picture,
}

/// An instance at one moment, and its recent rates.
struct Picture {
    reader: Reader,
    interfaces: String,
    is_running: bool,
    look: stats::Look,
    rates: Option<Rates>,
    /// The rates of the last readings, latest first.
    history: VecDeque<Rates>,
    wheels: Wheels,
    /// The flows to be shown, in order, and those before them that are scrolled past.
    flows: Vec<Tracked>,
    /// The owners of those that are not scrolled past, as far as they are known.
    owners: Vec<Option<Owner>>,
    /// How many flows match the filter.
    passing: u64,
}

/// Rates per second.
#[derive(Clone, Copy)]
struct Rates {
    created: f64,
    expired: f64,
    evicted: f64,
    deleted: f64,
    packets: f64,
}

impl Picture {
    fn new(reader: Reader) -> Result<Self> {
        let now = reader.now()?;
        Ok(Self {
            interfaces: reader.pins().interfaces()?.join(", "),
            is_running: reader.pins().is_running()?,
            look: stats::Look::at(&reader)?,
            rates: None,
            history: VecDeque::new(),
            wheels: Wheels::read(&reader, now)?,
            flows: Vec::new(),
            owners: Vec::new(),
            passing: 0,
            reader,
        })
    }

    /// Reads the next picture.
    fn next(&mut self, reader: Reader) -> Result<()> {
        /// Wider than any terminal.
        const HISTORY: usize = 1024;
        let mut next = Self::new(reader)?;
        let rate = |counter| next.look.rate(&self.look, counter);
        let rates = Rates {
            created: rate(Counter::Created),
            expired: rate(Counter::Expired),
            evicted: rate(Counter::Evicted),
            deleted: rate(Counter::Deleted),
            packets: rate(Counter::Touched) + rate(Counter::Created),
        };
        next.history = std::mem::take(&mut self.history);
        next.history.push_front(rates);
        next.history.truncate(HISTORY);
        next.rates = Some(rates);
        *self = next;
        Ok(())
    }
}

impl App {
    fn run(
        &mut self,
        terminal: &mut DefaultTerminal,
        inbox: &mpsc::Receiver<Happens>,
        select: &Select,
        interval: Duration,
    ) -> Result<()> {
        self.choose()?;
        let mut due = Instant::now() + interval;
        loop {
            terminal
                .draw(|frame| view::draw(self, frame))
                .context("cannot draw")?;
            let mut happened = match inbox.recv_timeout(due - Instant::now()) {
                Ok(happens) => Some(happens),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
            };
            // Handles all input that came meanwhile: each reading takes its time.
            while let Some(happens) = happened {
                if self.handle(happens) {
                    return Ok(());
                }
                happened = inbox.try_recv().ok();
            }
            let now = Instant::now();
            if now >= due && !self.paused {
                self.refresh(select);
            }
            if self.stale {
                self.choose()?;
            }
            if now >= due {
                due = now + interval.max(LOOKS * now.elapsed());
            }
        }
    }

    /// Reads the instance, which may be another one by now.
    fn refresh(&mut self, select: &Select) {
        let looked = Reader::open(select.interface()).and_then(|reader| self.picture.next(reader));
        // The instance may not exist, or be just starting or ending. What was read last stays.
        self.gone = looked.err().map(|error| format!("{error:#}"));
        self.stale |= self.gone.is_none();
    }

    /// Selects the flows that are shown.
    fn choose(&mut self) -> Result<()> {
        let choice = Choice {
            sort: Some(self.key),
            reverse: self.reverse,
            limit: self.skip + usize::from(self.height),
        };
        let picture = &mut self.picture;
        let now = picture.reader.now()?;
        (picture.flows, picture.passing) =
            choice.first(self.key, &picture.reader, &self.filter, now);
        if let Some(owners) = &mut self.owners {
            let shown = picture.flows.iter().skip(self.skip);
            let owner = |it: &Tracked| owners.find(&it.flow, picture.reader.known_as(&it.flow));
            picture.owners = shown.map(owner).collect();
        }
        self.stale = false;
        Ok(())
    }

    /// Handles an event. Returns whether to quit.
    fn handle(&mut self, happens: Happens) -> bool {
        match happens {
            Happens::Stop => return true,
            Happens::Event(Event::Resize(_, height)) => {
                self.height = height;
                self.stale = true;
            }
            Happens::Event(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                return self.key(key);
            }
            Happens::Event(_) => {}
        }
        false
    }

    fn key(&mut self, key: KeyEvent) -> bool {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && key.code == KeyCode::Char('c') {
            return true;
        }
        if self.before.is_some() {
            self.edit(key.code, control);
            return false;
        }
        let page = usize::from(self.height / 2);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('/') => self.before = Some(self.text.clone()),
            KeyCode::Char('s') => self.sort(1),
            KeyCode::Char('S') => self.sort(-1),
            KeyCode::Char('r') => {
                self.reverse = !self.reverse;
                self.stale = true;
            }
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Up => self.scroll(self.skip.saturating_sub(1)),
            KeyCode::Down => self.scroll(self.skip + 1),
            KeyCode::PageUp => self.scroll(self.skip.saturating_sub(page)),
            KeyCode::PageDown => self.scroll(self.skip + page),
            KeyCode::Home => self.scroll(0),
            KeyCode::End => self.scroll(usize::MAX),
            _ => {}
        }
        false
    }

    /// Scrolls past this many flows, but not past the last one.
    fn scroll(&mut self, skip: usize) {
        /// All flows up to the one shown are held in memory. To see flows further behind, use a
        /// filter or reverse the order.
        const MOST: usize = 10_000;
        let last = usize::try_from(self.picture.passing).unwrap_or(MOST);
        self.skip = skip.min(last.saturating_sub(1)).min(MOST);
        self.stale = true;
    }

    /// Selects the sort key that is `by` positions further in the list of the keys that are known
    /// here.
    fn sort(&mut self, by: isize) {
        let known = known(&self.picture.reader);
        let keys: Vec<_> = Key::value_variants()
            .iter()
            .filter(|key| match key {
                Key::Packets | Key::Bytes => known.accounting,
                Key::Rtt => known.rto,
                _ => true,
            })
            .collect();
        let at = keys.iter().position(|key| **key == self.key).unwrap_or(0);
        let next = (at as isize + by).rem_euclid(keys.len() as isize);
        self.key = *keys[next as usize];
        self.stale = true;
    }

    fn edit(&mut self, code: KeyCode, control: bool) {
        /// More than anybody types.
        const LONGEST: usize = 1000;
        match code {
            // An invalid filter is not kept.
            KeyCode::Enter if self.wrong.is_none() => {
                self.before = None;
                return;
            }
            KeyCode::Esc => self.text = self.before.take().unwrap_or_default(),
            KeyCode::Backspace => {
                self.text.pop();
            }
            KeyCode::Char('u') if control => self.text.clear(),
            KeyCode::Char(character) if !control && self.text.len() < LONGEST => {
                self.text.push(character);
            }
            _ => return,
        }
        match Filter::parse(&self.text, known(&self.picture.reader)) {
            Ok(filter) => {
                self.filter = filter;
                self.wrong = None;
                self.skip = 0;
                self.stale = true;
            }
            Err(error) => {
                // Only the first line: the lines below it show where, but here the filter is shown
                // anyway.
                let sentence = error.to_string();
                self.wrong = sentence.lines().next().map(str::to_owned);
            }
        }
    }
}
