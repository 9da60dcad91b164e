//! The state that events change.

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::PathBuf,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use ratatui::{
    DefaultTerminal,
    crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
    layout::Rect,
};

use super::{
    Happens, deletion, draw,
    edit::Edit,
    group::{Group, Groups},
    help,
    keys::{Act, act},
    names::Names,
    order::{GroupSort, Sort, further},
    picture::Picture,
    reasons::Reasons,
    scan::{Row, scan},
    views::View,
};
use crate::{
    cli::{
        first::First,
        select::{Select, known},
    },
    cost::{Cost, CostReading, Meter},
    inspect::Reader,
    model::Birth,
    owner::{Owner, Owners},
};

/// The time between two readings is at least this many times the duration of one, whatever the
/// interval: reading a large table takes a while.
const LOOKS: u32 = 10;
/// All flows up to the one shown are held in memory. To see flows further behind, use a filter or
/// reverse the order.
const MOST: usize = 10_000;

/// What is shown, and how.
pub struct App {
    pub filter: Edit,
    pub view: View,
    pub sort: Sort,
    pub group_sort: GroupSort,
    pub reverse: bool,
    /// The selected row, from the first one on.
    pub at: usize,
    /// What the user has selected: it stays selected when the rows change their order.
    selected: Option<Selected>,
    /// Number of rows that are scrolled past.
    pub skip: usize,
    /// Number of columns that are scrolled past.
    pub across: usize,
    pub size: Rect,
    pub is_paused: bool,
    /// Why nothing new could be read.
    pub gone: Option<String>,
    /// The rows must be selected again.
    is_stale: bool,
    pub shows_wheels: bool,
    pub shows_details: bool,
    /// The help is shown, from this line on.
    pub help: Option<usize>,
    /// The flow that the user is asked about: is it to be deleted?
    pub question: Option<Row>,
    /// What became of the last request.
    pub message: Option<String>,
    pub shows_owners: bool,
    /// What finds owners, if they were asked for.
    pub owners: Option<Owners>,
    /// The owners of the flows on the screen.
    shown_owners: HashMap<Birth, Owner>,
    /// The names, if they are asked for.
    pub names: Option<Names>,
    /// The ended flows by reason, once they were asked for.
    pub reasons: Option<Reasons>,
    /// What the programs cost, while that is shown; or why it cannot be shown.
    pub costs: Option<Result<Costs, String>>,
    /// Where histories are.
    pub history: PathBuf,
    /// Where threads send what they found.
    pub answers: Sender<Happens>,
    pub picture: Picture,
}

/// What the user has selected.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Selected {
    Flow(Birth),
    Group(Group),
}

/// What the programs cost since the last look.
pub struct Costs {
    _meter: Meter,
    last: CostReading,
    pub costs: Vec<Cost>,
}

impl Costs {
    fn start(reader: &Reader) -> Result<Self> {
        Ok(Self {
            _meter: Meter::start()?,
            last: CostReading::new(reader.pins())?,
            costs: Vec::new(),
        })
    }

    fn look(&mut self, reader: &Reader) -> Result<()> {
        let next = CostReading::new(reader.pins())?;
        self.costs = next.since(&self.last);
        self.last = next;
        Ok(())
    }
}

/// What the user may choose at the start.
pub struct Start {
    pub filter: Edit,
    pub sort: Option<Sort>,
    pub reverse: bool,
    pub owners: Option<Owners>,
    pub history: PathBuf,
    pub size: Rect,
}

impl App {
    /// Shows an instance.
    pub fn new(start: Start, reader: Reader, answers: Sender<Happens>) -> Result<Self> {
        let known = known(&reader);
        let usual = Sort::usual(known);
        Ok(Self {
            filter: start.filter,
            view: View::Flows,
            sort: start.sort.filter(|it| it.is_known(known)).unwrap_or(usual),
            group_sort: match known.accounting {
                true => GroupSort::Rate,
                false => GroupSort::Flows,
            },
            reverse: start.reverse,
            at: 0,
            selected: None,
            skip: 0,
            across: 0,
            size: start.size,
            is_paused: false,
            gone: None,
            is_stale: false,
            shows_wheels: true,
            shows_details: false,
            help: None,
            question: None,
            message: None,
            shows_owners: start.owners.is_some(),
            owners: start.owners,
            shown_owners: HashMap::new(),
            names: None,
            reasons: None,
            costs: None,
            history: start.history,
            answers,
            picture: Picture::new(reader)?,
        })
    }

    /// Runs until the user quits.
    pub fn run(
        &mut self,
        terminal: &mut DefaultTerminal,
        inbox: &Receiver<Happens>,
        select: &Select,
        interval: Duration,
    ) -> Result<()> {
        self.choose(true)?;
        let mut due = Instant::now() + interval;
        loop {
            self.look_up();
            terminal
                .draw(|frame| draw::draw(self, frame))
                .context("cannot draw")?;
            let mut happened = match inbox.recv_timeout(due - Instant::now()) {
                Ok(happens) => Some(happens),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            // Handles all input that came meanwhile: each reading takes its time.
            while let Some(happens) = happened {
                if self.handle(happens) {
                    return Ok(());
                }
                happened = inbox.try_recv().ok();
            }
            let now = Instant::now();
            let is_due = now >= due;
            let mut is_new = false;
            if is_due && !self.is_paused {
                is_new = self.refresh(select);
            }
            if self.is_stale || is_new {
                self.choose(is_new)?;
            }
            if is_due {
                due = now + interval.max(LOOKS * now.elapsed());
            }
        }
    }

    /// Reads the instance, which may be another one by now. Returns whether there is one.
    fn refresh(&mut self, select: &Select) -> bool {
        let looked = Reader::open(select.interface()).and_then(|reader| self.picture.next(reader));
        // The instance may not exist, or be just starting or ending. What was read last stays.
        self.gone = looked.err().map(|error| format!("{error:#}"));
        if let Some(reasons) = &mut self.reasons {
            reasons.look();
        }
        let reader = &self.picture.reader;
        if let Some(Ok(costs)) = &mut self.costs
            && let Err(error) = costs.look(reader)
        {
            self.gone.get_or_insert(format!("{error:#}"));
        }
        self.gone.is_none()
    }

    /// Selects what is shown. `is_new`: the table is read for a new look, from which rates follow.
    fn choose(&mut self, is_new: bool) -> Result<()> {
        let now = self.picture.reader.now()?;
        let picture = &mut self.picture;
        let limit = (self.skip + 2 * usize::from(self.size.height)).min(MOST);
        let mut first = First::new(self.sort, self.reverse, limit);
        let mut groups = Groups::new(self.view);
        let view = self.view;
        picture.sums = scan(
            &picture.reader,
            self.filter.filter(),
            now,
            (&mut picture.speeds, is_new),
            |row| match view {
                View::Flows => first.take(row.index, row),
                _ if view.has_groups() => groups.take(&row),
                _ => {}
            },
        );
        picture.flows = first.sorted().collect();
        (picture.groups, picture.group_count) = groups.sorted(self.group_sort, self.reverse);
        self.is_stale = false;
        self.settle();
        Ok(())
    }

    /// What can be selected in a row.
    fn selectable(&self, at: usize) -> Option<Selected> {
        match self.view {
            View::Flows => {
                let row = self.picture.flows.get(at)?;
                Some(Selected::Flow(row.tracked.flow.birth))
            }
            _ => Some(Selected::Group(self.picture.groups.get(at)?.0)),
        }
    }

    /// How many rows are known.
    fn rows(&self) -> usize {
        match self.view {
            View::Flows => self.picture.flows.len(),
            _ => self.picture.groups.len(),
        }
    }

    /// How many rows there are, known or not.
    fn all_rows(&self) -> usize {
        match self.view {
            View::Flows => usize::try_from(self.picture.sums.matching).unwrap_or(MOST),
            _ => self.picture.groups.len(),
        }
    }

    /// Finds the selected row again, and keeps it on the screen.
    fn settle(&mut self) {
        let rows = self.rows();
        if let Some(selected) = self.selected {
            let found = (0..rows).find(|at| self.selectable(*at) == Some(selected));
            // Otherwise another one takes its place: what was selected has ended or is far away.
            self.at = found.unwrap_or(self.at);
        }
        self.at = self.at.min(rows.saturating_sub(1));
        if self.selected.is_some() {
            self.selected = self.selectable(self.at);
        }
        let fit = draw::rows(self).max(1);
        // The screen is full if there are enough rows.
        self.skip = self.skip.min(self.all_rows().saturating_sub(fit));
        self.skip = self.skip.min(self.at);
        self.skip = self.skip.max((self.at + 1).saturating_sub(fit));
    }

    /// Finds the owners and names of what is on the screen.
    fn look_up(&mut self) {
        let fit = draw::rows(self).max(1);
        let picture = &self.picture;
        let flows = picture.flows.iter().skip(self.skip).take(fit);
        if let Some(owners) = self.owners.as_mut().filter(|_| self.shows_owners) {
            let flows = flows.clone().map(|row| &row.tracked.flow);
            let found = flows.filter_map(|flow| {
                Some((
                    flow.birth,
                    owners.find(flow, picture.reader.known_as(flow))?,
                ))
            });
            self.shown_owners = found.collect();
        }
        if let Some(names) = &mut self.names {
            match self.view {
                View::Flows => flows.for_each(|row| {
                    names.want(row.tracked.flow.src.ip());
                    names.want(row.tracked.flow.dst.ip());
                }),
                _ => {
                    let groups = picture.groups.iter().skip(self.skip).take(fit);
                    groups.for_each(|(group, _)| {
                        if let Group::Source(address) = group {
                            names.want(*address);
                        }
                    });
                }
            }
        }
    }

    /// The owner of a flow on the screen, if it is known.
    pub fn owner(&self, row: &Row) -> Option<&Owner> {
        let is_wanted = self.shows_owners;
        self.shown_owners
            .get(&row.tracked.flow.birth)
            .filter(|_| is_wanted)
    }

    /// An endpoint, with names if they are asked for.
    pub fn endpoint(&self, proto: &'static str, endpoint: SocketAddr) -> String {
        match &self.names {
            Some(names) => names.endpoint(proto, endpoint),
            None => endpoint.to_string(),
        }
    }

    /// The selected flow, or the one that the user is asked about.
    pub fn flow(&self) -> Option<&Row> {
        match (&self.question, self.view) {
            (Some(row), _) => Some(row),
            (None, View::Flows) => self.picture.flows.get(self.at),
            _ => None,
        }
    }

    /// Handles an event. Returns whether to quit.
    fn handle(&mut self, happens: Happens) -> bool {
        match happens {
            Happens::Stop => return true,
            Happens::Deleted(said) => {
                self.message = Some(said);
                self.is_stale = true;
            }
            Happens::Named(address, name) => {
                if let Some(names) = &mut self.names {
                    names.learn(address, name);
                }
            }
            Happens::Event(Event::Resize(width, height)) => {
                self.size = Rect::new(0, 0, width, height);
                self.is_stale = true;
            }
            Happens::Event(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                return self.key(key);
            }
            Happens::Event(_) => {}
        }
        false
    }

    fn key(&mut self, key: KeyEvent) -> bool {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return true;
        }
        if self.filter.is_open() {
            if self.filter.key(key, known(&self.picture.reader)) {
                (self.at, self.skip, self.selected) = (0, 0, None);
                self.is_stale = true;
            }
            return false;
        }
        if let Some(row) = self.question {
            self.answer(key.code, &row);
            return false;
        }
        if let Some(from) = self.help {
            let most = help::lines().len().saturating_sub(1);
            self.help = match key.code {
                KeyCode::Up => Some(from.saturating_sub(1)),
                KeyCode::Down => Some((from + 1).min(most)),
                KeyCode::PageUp => Some(from.saturating_sub(self.page())),
                KeyCode::PageDown => Some((from + self.page()).min(most)),
                _ => None,
            };
            return false;
        }
        self.message = None;
        match act(key) {
            Some(Act::Quit) => return true,
            Some(act) => self.act(act),
            None => {}
        }
        false
    }

    fn page(&self) -> usize {
        usize::from(self.size.height / 2).max(1)
    }

    /// The answer to the question whether to delete a flow.
    fn answer(&mut self, code: KeyCode, row: &Row) {
        match code {
            KeyCode::Char('y' | 'Y') => {
                self.message = Some("deleting".to_owned());
                let pins = self.picture.reader.pins().clone();
                deletion::start(pins, row, &self.history, &self.answers);
            }
            KeyCode::Char('n' | 'N') | KeyCode::Esc => {
                self.message = Some("not deleted".to_owned());
            }
            _ => return,
        }
        self.question = None;
    }

    fn act(&mut self, act: Act) {
        let page = self.page() as isize;
        match act {
            // The caller has done it.
            Act::Quit => {}
            Act::Help => self.help = Some(0),
            Act::Filter => self.filter.open(),
            Act::Sort(by) => self.next_sort(by),
            Act::Reverse => {
                self.reverse = !self.reverse;
                self.is_stale = true;
            }
            Act::Pause => self.is_paused = !self.is_paused,
            Act::Open => self.open(),
            Act::Delete => match (self.view, self.flow().copied()) {
                (View::Flows, Some(row)) => self.question = Some(row),
                (View::Flows, None) => self.message = Some("there is no flow".to_owned()),
                _ => self.message = Some("press 1, and select the flow to delete".to_owned()),
            },
            Act::Names => {
                self.names = match self.names {
                    Some(_) => None,
                    None => Some(Names::new(&self.answers)),
                };
            }
            Act::Owners => {
                self.shows_owners = !self.shows_owners;
                self.owners.get_or_insert_with(|| Owners::new(Vec::new()));
            }
            Act::Wheels => self.shows_wheels = !self.shows_wheels,
            Act::Show(view) => self.show(view),
            Act::Further(by) => self.show(self.view.further(by)),
            Act::Move(by) => self.select(self.at.saturating_add_signed(by)),
            Act::Page(by) => self.select(self.at.saturating_add_signed(by * page)),
            Act::First => {
                self.select(0);
                // The first row stays selected, whatever it is.
                self.selected = None;
            }
            Act::Last => self.select(usize::MAX),
            Act::Across(by) => {
                let most = draw::most_across(self);
                self.across = self.across.saturating_add_signed(by).min(most);
            }
        }
        // What is stale is settled when it has been chosen anew.
        if !self.is_stale {
            self.settle();
        }
    }

    fn next_sort(&mut self, by: isize) {
        let known = known(&self.picture.reader);
        match self.view {
            View::Flows => self.sort = further(self.sort, by, |it: Sort| it.is_known(known)),
            _ if self.view.has_groups() => {
                let is_known = |it: GroupSort| it.is_known(known);
                self.group_sort = further(self.group_sort, by, is_known);
            }
            _ => return,
        }
        (self.at, self.skip, self.selected) = (0, 0, None);
        self.is_stale = true;
    }

    /// Selects a row, but none after the last one.
    fn select(&mut self, at: usize) {
        self.at = at.min(self.all_rows().saturating_sub(1)).min(MOST - 1);
        self.selected = None;
        if self.at >= self.rows() {
            // Flows that were not read yet.
            self.skip = (self.at + 1).saturating_sub(draw::rows(self));
            self.is_stale = true;
        } else {
            self.selected = self.selectable(self.at);
        }
    }

    /// Shows all details of a flow, or the flows of a group.
    fn open(&mut self) {
        if self.view == View::Flows {
            self.shows_details = !self.shows_details;
            return;
        }
        let Some((group, _)) = self
            .picture
            .groups
            .get(self.at)
            .filter(|_| self.view.has_groups())
        else {
            return;
        };
        match group.filter(&self.picture.reader) {
            Some(more) => {
                self.filter.narrow(&more, known(&self.picture.reader));
                self.show(View::Flows);
            }
            None => self.message = Some("no filter selects flows without a rule".to_owned()),
        }
    }

    fn show(&mut self, view: View) {
        self.view = view;
        (self.at, self.skip, self.across, self.selected) = (0, 0, 0, None);
        self.is_stale = true;
        // Measuring takes time of every program, so it lasts only as long as somebody looks.
        let reader = &self.picture.reader;
        self.costs = (view == View::Cost)
            .then(|| Costs::start(reader).map_err(|error| format!("{error:#}")));
        if view == View::Reasons && self.reasons.is_none() {
            let name = reader.pins().lasting_name();
            self.reasons = Some(Reasons::start(&self.history, &name));
        }
    }
}
