//! The network namespaces in which to look for sockets and conntrack entries of a flow.

use anyhow::Result;

use super::{namespace::NamespacePath, reset::Resets};
use crate::{
    action::{Action, Actions},
    conntrack::Conntrack,
    sockets::Sockets,
};

/// A network namespace, and the sockets that were opened there.
#[derive(Default)]
pub(super) struct Site {
    /// `None`: the namespace of this process.
    namespace: Option<NamespacePath>,
    sockets: Option<Sockets>,
    conntrack: Option<Conntrack>,
    resets: Option<Resets>,
}

/// Opens a socket in a namespace, unless it is open.
fn opened<'a, T: Send>(
    namespace: Option<&NamespacePath>,
    place: &'a mut Option<T>,
    open: impl FnOnce() -> Result<T> + Send,
) -> Result<&'a mut T> {
    match place {
        Some(opened) => Ok(opened),
        None => {
            let tool = match namespace {
                Some(namespace) => namespace.inside(open)?,
                None => open()?,
            };
            Ok(place.insert(tool))
        }
    }
}

impl Site {
    /// Opens what an action needs in this namespace.
    fn prepare(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Socket => self.sockets().map(drop),
            Action::Conntrack => self.conntrack().map(drop),
            Action::Reset if self.namespace.is_none() => self.resets().map(drop),
            _ => Ok(()),
        }
    }

    pub(super) fn sockets(&mut self) -> Result<&mut Sockets> {
        opened(self.namespace.as_ref(), &mut self.sockets, Sockets::open)
    }

    pub(super) fn conntrack(&mut self) -> Result<&mut Conntrack> {
        opened(
            self.namespace.as_ref(),
            &mut self.conntrack,
            Conntrack::open,
        )
    }

    pub(super) fn resets(&mut self) -> Result<&mut Resets> {
        opened(self.namespace.as_ref(), &mut self.resets, Resets::open)
    }
}

/// The network namespaces in which to look for sockets and conntrack entries; that of this process
/// comes first.
pub struct Sites(pub(super) Vec<Site>);

impl Sites {
    /// The namespace of this process, and `namespaces`.
    ///
    /// What needs more capabilities than a run [keeps](crate::privilege) is opened now, since a
    /// policy that is loaded later may ask for it.
    ///
    /// # Errors
    ///
    /// What an action of `first` needs cannot be opened. These are the actions that are known now.
    pub fn open(namespaces: Vec<NamespacePath>, first: Actions) -> Result<Self> {
        let named = namespaces.into_iter().map(|namespace| Site {
            namespace: Some(namespace),
            ..Site::default()
        });
        let mut places: Vec<_> = std::iter::once(Site::default()).chain(named).collect();
        for place in &mut places {
            for action in [Action::Socket, Action::Conntrack, Action::Reset] {
                let opened = place.prepare(action);
                // An action that a later policy asks for tries again, and fails with that error.
                if first.has(action) {
                    opened?;
                }
            }
        }
        Ok(Self(places))
    }
}
