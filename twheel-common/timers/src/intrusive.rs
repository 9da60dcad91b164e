//! Scheme 7, with timers that are parts of the caller's objects.

use alloc::{boxed::Box, vec, vec::Vec};

use crate::{error::Error, hierarchical, levels::Levels, scheme::LAST_TICK};

/// No timer.
const NIL: u32 = u32::MAX;
/// A timer that is not armed has this before it.
const UNARMED: u32 = u32::MAX;
/// Bit of what is before a timer: it is the first of a slot, whose number the other bits are.
const SLOT: u32 = 1 << 31;

/// A timer as part of an object: 16 bytes.
///
/// ```
/// use twheel_timers::Node;
///
/// struct Connection {
///     idle: Node,
///     // …
/// }
///
/// let connection = Connection { idle: Node::new() };
/// assert!(!connection.idle.is_armed());
/// ```
#[derive(Clone, Debug)]
pub struct Node {
    deadline: u64,
    next: u32,
    prev: u32,
}

impl Node {
    /// A timer that is not armed.
    ///
    /// ```
    /// let nodes = vec![twheel_timers::Node::new(); 1000];
    /// assert_eq!(nodes[0].deadline(), None);
    /// ```
    pub const fn new() -> Self {
        Self {
            deadline: 0,
            next: NIL,
            prev: UNARMED,
        }
    }

    /// Whether the timer is armed.
    ///
    /// ```
    /// assert!(!twheel_timers::Node::new().is_armed());
    /// ```
    pub fn is_armed(&self) -> bool {
        self.prev != UNARMED
    }

    /// The tick at which the timer is due, if it is armed.
    ///
    /// ```
    /// use twheel_timers::{Intrusive, Node};
    ///
    /// let (mut wheel, mut nodes) = (Intrusive::new(3, 1024)?, vec![Node::new()]);
    /// wheel.start(&mut nodes, 0, 100, 5);
    /// assert_eq!(nodes[0].deadline(), Some(105));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn deadline(&self) -> Option<u64> {
        self.is_armed().then_some(self.deadline)
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}

/// Where the objects are: finds the timer of each by a number below 2^31 that stays the object's
/// while its timer is armed.
///
/// ```
/// use twheel_timers::{Intrusive, Node, Nodes};
///
/// struct Connection {
///     name: &'static str,
///     idle: Node,
/// }
///
/// struct Connections(Vec<Connection>);
///
/// impl Nodes for Connections {
///     fn node(&self, id: u32) -> Option<&Node> {
///         Some(&self.0.get(id as usize)?.idle)
///     }
///
///     fn node_mut(&mut self, id: u32) -> Option<&mut Node> {
///         Some(&mut self.0.get_mut(id as usize)?.idle)
///     }
/// }
///
/// let open = |name| Connection { name, idle: Node::new() };
/// let mut connections = Connections(vec![open("a"), open("b")]);
/// let mut wheel = Intrusive::new(3, 1024)?;
/// wheel.start(&mut connections, 0, 0, 60);
/// wheel.start(&mut connections, 1, 0, 60);
/// wheel.start(&mut connections, 0, 30, 60);
/// let idle = wheel.expire(&mut connections, 60).unwrap();
/// assert_eq!(connections.0[idle as usize].name, "b");
/// # Ok::<(), twheel_timers::Error>(())
/// ```
pub trait Nodes {
    /// The timer of this object.
    fn node(&self, id: u32) -> Option<&Node>;

    /// The same, to change it.
    fn node_mut(&mut self, id: u32) -> Option<&mut Node>;
}

impl Nodes for [Node] {
    #[inline]
    fn node(&self, id: u32) -> Option<&Node> {
        self.get(id as usize)
    }

    #[inline]
    fn node_mut(&mut self, id: u32) -> Option<&mut Node> {
        self.get_mut(id as usize)
    }
}

impl Nodes for Vec<Node> {
    #[inline]
    fn node(&self, id: u32) -> Option<&Node> {
        self.as_slice().node(id)
    }

    #[inline]
    fn node_mut(&mut self, id: u32) -> Option<&mut Node> {
        self.as_mut_slice().node_mut(id)
    }
}

/// Scheme 7 with lists through the caller's objects, as kernels have it: no key is looked up, no
/// value moves, and nothing is allocated after [`new`](Self::new).
///
/// The slots are those of [`Hierarchical`](crate::Hierarchical), and so is the promise: a timer is
/// handed out at the tick of its deadline, or at the first later one that is driven. A re-arm to a
/// later tick is one store. Use it if the objects stand in a slice, a vector or a slab of yours
/// already: a stop and a re-arm are faster than in the other schemes, an expiry is slower, because
/// a list names its next timer only in the one before.
///
/// All calls take the same objects. A [`Node`] belongs to one wheel, and is
/// [stopped](Self::stop) before its object goes or moves (of `Vec::swap_remove` both objects do):
/// otherwise it is not specified which timers are handed out, and when. Nothing panics then, and
/// each call ends. A clone of an armed node is not a timer: give a cloned object a
/// [new](Node::new) one.
///
/// Objects with two timers each have two wheels, and a type with [`Nodes`] for each:
/// `struct Idle<'a>(&'a mut [Connection])` and `struct Retry<'a>(&'a mut [Connection])`. Intervals
/// are in ticks: [`ticks`](crate::ticks) makes them of a `Duration`. It is no
/// [`Scheme`](crate::Scheme): there is no budget, nor a call that ends all timers. The wheel takes 4
/// bytes and a bit for each slot.
///
/// ```
/// use twheel_timers::{Intrusive, Node};
///
/// let mut nodes = vec![Node::new(); 3];
/// let mut wheel = Intrusive::new(3, 1024)?;
/// wheel.start(&mut nodes, 0, 0, 5);
/// wheel.start(&mut nodes, 2, 0, 7);
/// assert!(wheel.stop(&mut nodes, 2));
/// assert_eq!(wheel.expire(&mut nodes, 4), None);
/// assert_eq!(wheel.expire(&mut nodes, 5), Some(0));
/// assert_eq!(wheel.expire(&mut nodes, 5), None);
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct Intrusive {
    levels: Levels,
    /// The first timer of each slot.
    heads: Box<[u32]>,
    elapsed: u64,
    /// The slot of the hand, while it may not be empty.
    visiting: Option<u32>,
    /// Most timers that can be left in it.
    left: usize,
    armed: usize,
}

impl Intrusive {
    /// This many levels of this many slots, rounded up to a power of two. Deadlines beyond the
    /// range go round in the top level.
    ///
    /// # Errors
    ///
    /// As for [`Hierarchical::new`](crate::Hierarchical::new).
    ///
    /// ```
    /// use twheel_timers::Intrusive;
    ///
    /// assert!(Intrusive::new(2, 4096).is_ok());
    /// assert!(Intrusive::new(9, 2).is_err());
    /// ```
    pub fn new(levels: u32, slots: u32) -> Result<Self, Error> {
        let levels = hierarchical::levels_of(levels, slots)?;
        Ok(Self {
            heads: vec![NIL; levels.slots() as usize].into(),
            levels,
            elapsed: 0,
            visiting: None,
            left: 0,
            armed: 0,
        })
    }

    /// Arms a timer, to be due `interval` ticks after `now`; if it is armed already, from now on at
    /// that tick instead. Whether there is such a timer. A deadline that is not after the latest
    /// tick driven counts as the next tick.
    ///
    /// ```
    /// use twheel_timers::{Intrusive, Node};
    ///
    /// let (mut wheel, mut nodes) = (Intrusive::new(3, 1024)?, vec![Node::new()]);
    /// assert!(wheel.start(&mut nodes, 0, 0, 5));
    /// assert!(wheel.start(&mut nodes, 0, 3, 5));
    /// assert!(!wheel.start(&mut nodes, 1, 0, 5));
    /// assert_eq!((wheel.expire(&mut nodes, 7), wheel.expire(&mut nodes, 8)), (None, Some(0)));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    #[inline]
    pub fn start<N: Nodes + ?Sized>(
        &mut self,
        nodes: &mut N,
        id: u32,
        now: u64,
        interval: u64,
    ) -> bool {
        let deadline = now
            .saturating_add(interval)
            .clamp(self.elapsed.saturating_add(1).min(LAST_TICK), LAST_TICK);
        let Some(node) = nodes.node_mut(id).filter(|_| id < SLOT) else {
            return false;
        };
        if node.is_armed() {
            if deadline >= node.deadline {
                // Found out when its slot comes round.
                node.deadline = deadline;
                return true;
            }
            let Node { next, prev, .. } = *node;
            self.unlink(nodes, next, prev);
        } else {
            self.armed += 1;
        }
        self.place(nodes, id, deadline);
        true
    }

    /// Disarms a timer. Whether it was armed.
    ///
    /// ```
    /// use twheel_timers::{Intrusive, Node};
    ///
    /// let (mut wheel, mut nodes) = (Intrusive::new(3, 1024)?, vec![Node::new()]);
    /// wheel.start(&mut nodes, 0, 0, 5);
    /// assert!(wheel.stop(&mut nodes, 0));
    /// assert!(!wheel.stop(&mut nodes, 0));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    #[inline]
    pub fn stop<N: Nodes + ?Sized>(&mut self, nodes: &mut N, id: u32) -> bool {
        let Some(node) = nodes.node_mut(id).filter(|node| node.is_armed()) else {
            return false;
        };
        let Node { next, prev, .. } = *node;
        node.prev = UNARMED;
        self.unlink(nodes, next, prev);
        self.armed = self.armed.saturating_sub(1);
        true
    }

    /// Disarms a timer that is due at tick `now`, and returns the number of its object; `None` if
    /// there is none. Call it until then. A driver that is late gets timers in the order of their
    /// ticks.
    ///
    /// ```
    /// use twheel_timers::{Intrusive, Node};
    ///
    /// let (mut wheel, mut nodes) = (Intrusive::new(3, 1024)?, vec![Node::new(); 2]);
    /// wheel.start(&mut nodes, 0, 0, 70_000);
    /// wheel.start(&mut nodes, 1, 0, 3);
    /// let mut due = || wheel.expire(&mut nodes, 1_000_000);
    /// assert_eq!([due(), due(), due()], [Some(1), Some(0), None]);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn expire<N: Nodes + ?Sized>(&mut self, nodes: &mut N, now: u64) -> Option<u32> {
        let now = now.min(LAST_TICK);
        loop {
            if let Some(slot) = self.visiting {
                // No timer is put back into this slot: its next turn is a whole round ahead.
                while self.left > 0 {
                    let id = self.heads[slot as usize];
                    let Some(node) = nodes.node_mut(id) else {
                        break;
                    };
                    self.left -= 1;
                    let Node { deadline, next, .. } = *node;
                    let is_due = deadline <= self.elapsed;
                    if is_due {
                        node.prev = UNARMED;
                    }
                    self.heads[slot as usize] = next;
                    if let Some(next) = nodes.node_mut(next) {
                        next.prev = SLOT | slot;
                    }
                    if is_due {
                        self.armed = self.armed.saturating_sub(1);
                        return Some(id);
                    }
                    self.place(nodes, id, deadline);
                }
                self.heads[slot as usize] = NIL;
                self.visiting = None;
            }
            match self.levels.first(self.elapsed) {
                Some((slot, tick)) if tick <= now => {
                    self.levels.vacate(slot);
                    self.elapsed = tick;
                    self.visiting = Some(slot);
                    self.left = self.armed;
                }
                _ => {
                    self.elapsed = now.max(self.elapsed);
                    return None;
                }
            }
        }
    }

    /// The next tick at which [`expire`](Self::expire) has something to do; `None`: not before a
    /// timer is started. It may be earlier than the earliest deadline.
    ///
    /// ```
    /// use twheel_timers::{Intrusive, Node};
    ///
    /// let (mut wheel, mut nodes) = (Intrusive::new(3, 1024)?, vec![Node::new()]);
    /// assert_eq!(wheel.next_tick(), None);
    /// wheel.start(&mut nodes, 0, 0, 5);
    /// assert_eq!(wheel.next_tick(), Some(5));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn next_tick(&self) -> Option<u64> {
        match self.visiting {
            Some(_) => Some(self.elapsed),
            None => self.levels.first(self.elapsed).map(|(_, tick)| tick),
        }
    }

    /// Number of armed timers.
    ///
    /// ```
    /// use twheel_timers::{Intrusive, Node};
    ///
    /// let (mut wheel, mut nodes) = (Intrusive::new(3, 1024)?, vec![Node::new()]);
    /// wheel.start(&mut nodes, 0, 0, 5);
    /// assert_eq!(wheel.len(), 1);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn len(&self) -> usize {
        self.armed
    }

    /// Whether no timer is armed.
    ///
    /// ```
    /// assert!(twheel_timers::Intrusive::new(3, 1024)?.is_empty());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn is_empty(&self) -> bool {
        self.armed == 0
    }

    /// Puts a timer that is in no list in front of the list of its slot.
    #[inline(always)]
    fn place<N: Nodes + ?Sized>(&mut self, nodes: &mut N, id: u32, deadline: u64) {
        let slot = self.levels.slot(self.elapsed, deadline);
        let next = core::mem::replace(&mut self.heads[slot as usize], id);
        if let Some(node) = nodes.node_mut(id) {
            *node = Node {
                deadline,
                next,
                prev: SLOT | slot,
            };
        }
        match nodes.node_mut(next) {
            Some(next) => next.prev = id,
            None => self.levels.occupy(slot),
        }
    }

    /// Takes what stands between these two out of its list.
    #[inline(always)]
    fn unlink<N: Nodes + ?Sized>(&mut self, nodes: &mut N, next: u32, prev: u32) {
        if let Some(next) = nodes.node_mut(next) {
            next.prev = prev;
        }
        if prev & SLOT == 0 {
            if let Some(prev) = nodes.node_mut(prev) {
                prev.next = next;
            }
        } else if let Some(head) = self.heads.get_mut((prev & !SLOT) as usize) {
            *head = next;
            if next == NIL {
                self.levels.vacate(prev & !SLOT);
            }
        }
    }
}
