//! Names of hosts and services, on request.
//!
//! A name server may take seconds to answer, so threads ask, and the screen shows addresses
//! meanwhile.

use std::{
    collections::HashMap,
    fs,
    net::{IpAddr, SocketAddr},
    num::NonZeroUsize,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, SyncSender, sync_channel},
    },
    thread,
};

use dns_lookup::lookup_addr;
use lru::LruCache;

use super::Happens;

/// Most hosts whose names are remembered; those that were not shown for longest are forgotten
/// first.
const HOSTS: NonZeroUsize = NonZeroUsize::new(1 << 12).unwrap();
/// Most hosts that wait to be asked for. Others are asked for when they are shown again.
const WAITING: usize = 256;
/// Threads that ask.
const THREADS: usize = 4;
/// The names of services, as `getservbyport` has them.
const SERVICES: &str = "/etc/services";

/// The names that are known.
pub struct Names {
    /// `None`: asked for, or there is no name.
    hosts: LruCache<IpAddr, Option<String>>,
    ask: SyncSender<IpAddr>,
    services: HashMap<(&'static str, u16), String>,
}

impl Names {
    /// Answers arrive as [`Happens::Named`].
    pub fn new(answers: &Sender<Happens>) -> Self {
        let (ask, asked) = sync_channel(WAITING);
        let asked = Arc::new(Mutex::new(asked));
        for _ in 0..THREADS {
            let (asked, answers) = (asked.clone(), answers.clone());
            // They end when nobody can ask any more. One that still waits for an answer then ends
            // with the process.
            thread::spawn(move || answer(&asked, &answers));
        }
        Self {
            hosts: LruCache::new(HOSTS),
            ask,
            services: services(&fs::read_to_string(SERVICES).unwrap_or_default()),
        }
    }

    /// Asks for the name of a host, unless that was done.
    pub fn want(&mut self, address: IpAddr) {
        if self.hosts.get(&address).is_none() && self.ask.try_send(address).is_ok() {
            self.hosts.put(address, None);
        }
    }

    /// An answer arrived.
    pub fn learn(&mut self, address: IpAddr, name: Option<String>) {
        self.hosts.put(address, name);
    }

    /// The name of a host, or its address.
    pub fn host(&self, address: IpAddr) -> String {
        let name = self.hosts.peek(&address).cloned().flatten();
        name.unwrap_or_else(|| address.to_string())
    }

    /// The name of a service, if it has one.
    pub fn service(&self, proto: &'static str, port: u16) -> Option<&str> {
        self.services.get(&(proto, port)).map(String::as_str)
    }

    /// An endpoint with the names that are known.
    pub fn endpoint(&self, proto: &'static str, endpoint: SocketAddr) -> String {
        let host = match self.hosts.peek(&endpoint.ip()) {
            Some(Some(name)) => name.clone(),
            _ if endpoint.is_ipv6() => format!("[{}]", endpoint.ip()),
            _ => endpoint.ip().to_string(),
        };
        match self.service(proto, endpoint.port()) {
            Some(service) => format!("{host}:{service}"),
            None => format!("{host}:{}", endpoint.port()),
        }
    }
}

fn answer(asked: &Mutex<Receiver<IpAddr>>, answers: &Sender<Happens>) {
    loop {
        let next = asked.lock().map(|asked| asked.recv());
        let Ok(Ok(address)) = next else {
            return;
        };
        let name = lookup_addr(&address).ok();
        // Without a name, the answer is the address. Whoever answers may put anything into a name.
        let name = name.filter(|it| it.parse::<IpAddr>().is_err());
        let name = name.map(|it| it.escape_debug().to_string());
        if answers.send(Happens::Named(address, name)).is_err() {
            return;
        }
    }
}

/// The services of a file as `services(5)` describes it: `https 443/tcp aliases # comment`.
fn services(text: &str) -> HashMap<(&'static str, u16), String> {
    let mut services = HashMap::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_ascii_whitespace();
        if let (Some(name), Some(place)) = (words.next(), words.next())
            && let Some((port, proto)) = place.split_once('/')
            && let Ok(port) = port.parse()
            && let Some(proto) = ["tcp", "udp"].into_iter().find(|it| *it == proto)
        {
            // The first one counts.
            let name = name.escape_debug().to_string();
            services.entry((proto, port)).or_insert(name);
        }
    }
    services
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_names() {
        let text = "# comment\nhttps\t443/tcp # http over TLS\ndomain 53/tcp\ndomain  53/udp dns\n\
                    other 53/udp\nbad 70000/tcp\nbad/tcp\n\nsctp 9/sctp\n";
        let services = services(text);
        assert_eq!(services[&("tcp", 443)], "https");
        assert_eq!(services[&("udp", 53)], "domain");
        assert_eq!(services.len(), 3, "{services:?}");
    }
}
