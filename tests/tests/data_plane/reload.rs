//! A new policy: live flows get the rules that new flows would, and what protects them goes on.

use std::{collections::BTreeMap, time::Duration};

use twheel::{
    model::{self, Birth, Origin},
    names::Names,
    policy::{Policy, Query, Verdict, forecast::Move, mapped},
    watched::Watch,
};
use twheel_common::{
    counter::Counter,
    flow::FlowKey,
    packet::{Protocols, Wanted, parse_any},
    point::Point,
    policy::{Hook, Protocol},
    step::Enter,
};
use twheel_tests::plane::{ACK, INTERFACE, Plane, SYN, Setup, frame};

use crate::{Random, datagram, tagged};

/// A data plane that tells zones apart and sees all protocols in both directions.
fn setup() -> Setup {
    Setup {
        room: 1,
        one_way: false,
        protocols: Protocols::TCP.with(Protocols::UDP).with(Protocols::ICMP),
        ..Setup::default()
    }
}

/// What a test knows of a flow.
#[derive(Clone)]
struct Begun {
    frame: Vec<u8>,
    hook: Hook,
    zone: u16,
}

impl Begun {
    fn tcp(client: u32) -> Self {
        Self::new(frame(client, false, SYN))
    }

    fn new(frame: Vec<u8>) -> Self {
        Self {
            frame,
            hook: Hook::Ingress,
            zone: 0,
        }
    }

    fn in_vlans(self, vlans: &[u16]) -> Self {
        Self {
            frame: tagged(&self.frame, vlans),
            ..self
        }
    }

    fn in_zone(self, zone: u16) -> Self {
        Self { zone, ..self }
    }

    fn outgoing(self) -> Self {
        Self {
            hook: Hook::Egress,
            ..self
        }
    }

    /// Sends the flow's first packet.
    fn begin(&self, plane: &mut Plane, watch: &mut Watch) {
        watch.enter(INTERFACE, "any", self.zone, 0).unwrap();
        match self.hook {
            Hook::Ingress => plane.receive(&self.frame),
            Hook::Egress => plane.send(&self.frame),
        }
    }

    /// Its key, outside all zones.
    fn key(&self) -> FlowKey {
        let wanted = Wanted {
            protocols: Protocols::TCP.with(Protocols::UDP).with(Protocols::ICMP),
            timing: false,
            vlans: true,
        };
        parse_any(self.frame.as_slice(), wanted).unwrap().key
    }
}

/// The key outside all zones.
fn outside(key: FlowKey) -> FlowKey {
    FlowKey::from_parts(key.addresses(), key.ports() & !(0x3f << 34))
}

/// The names of the rules of all live flows, by their key without the zone, and by their zone.
fn rules(plane: &mut Plane) -> BTreeMap<(FlowKey, u16), Option<String>> {
    let data_plane = plane.plane();
    let names = Names::open(&|name: &str| data_plane.open(name)).unwrap();
    let flows = data_plane.flows().unwrap();
    let rule = |flow: twheel::flows::Flow| {
        let zone = names.zone(flow.key.zone()).unwrap();
        ((outside(flow.key), zone), names.rule(flow.rule).unwrap())
    };
    flows.iter().map(rule).collect()
}

/// The rule of one flow.
fn rule_of(plane: &mut Plane, flow: &Begun) -> Option<String> {
    let all = rules(plane);
    let found = all.get(&(flow.key(), flow.zone));
    found.expect("the flow lives").clone()
}

/// Loads a policy and sweeps. What came of the flows is what was foretold.
fn load(plane: &mut Plane, policy: &str) -> String {
    let before = rules(plane);
    let foretold = plane.forecast(policy);
    assert_eq!(rules(plane), before, "a forecast changes nothing");
    plane.policy(policy);
    let flows = plane.sweep();
    assert_eq!(flows, foretold.effect.flows, "{policy}");
    let moved: u64 = foretold.moves.values().map(|it| it.flows).sum();
    assert_eq!(moved, flows.changed + flows.lost + flows.gained, "{policy}");
    flows.to_string()
}

#[test]
fn live_flows_get_the_rule_of_each_kind_of_condition() {
    let v6 = |client| Begun::new(datagram(client, false, None, true));
    let flows = [
        ("tcp", Begun::tcp(1)),
        ("vlan", Begun::tcp(2).in_vlans(&[10])),
        ("inner", Begun::tcp(3).in_vlans(&[20, 10])),
        ("zone", Begun::tcp(4).in_zone(7)),
        ("out", Begun::tcp(5).outgoing()),
        ("back", Begun::new(frame(6, true, SYN))),
        ("udp", Begun::new(datagram(1, false, None, false))),
        ("udp6", v6(2)),
        ("icmp", Begun::new(datagram(3, false, Some(8), false))),
        ("picked", Begun::new(frame(50_007, false, ACK))),
    ];
    let tcp = "tcp vlan inner zone out picked";
    let cases = [
        ("dport = 80", tcp),
        ("dport = [53, '1000-2000']", "back udp udp6"),
        ("src = '10.0.0.0'", "tcp vlan inner zone out"),
        ("src = ['192.0.2.0/24', '2001:db8::/32']", "back udp6"),
        ("dst = '192.0.2.1'", tcp),
        ("any = '10.0.0.1'", "udp picked"),
        (
            "iface = 'any'",
            "tcp vlan inner zone out back udp udp6 icmp picked",
        ),
        ("vlan = 10", "vlan inner"),
        ("vlan = 20", "inner"),
        ("vlan = 0", "tcp zone out back udp udp6 icmp picked"),
        ("zone = 7", "zone"),
        ("zone = 0", "tcp vlan inner out back udp udp6 icmp picked"),
        ("direction = 'out'", "out"),
        (
            "direction = 'in'",
            "tcp vlan inner zone back udp udp6 icmp picked",
        ),
        ("proto = ['udp', 'icmp']", "udp udp6 icmp"),
        (
            "proto = 'tcp'\nvlan = 0\ndst = '192.0.2.1'",
            "tcp zone out picked",
        ),
    ];
    let mut plane = setup().load();
    let mut watch = Watch::open(plane.plane()).unwrap();
    for (_, flow) in &flows {
        flow.begin(&mut plane, &mut watch);
    }
    for (condition, wanted) in cases {
        let wanted: Vec<_> = wanted.split(' ').collect();
        let (all, some) = (flows.len(), wanted.len());
        let rule = |name: &str| format!("[[rule]]\nname = '{name}'\n{condition}\n");
        let gained = match some {
            1 => "1 got a rule".to_owned(),
            some => format!("{some} got a rule"),
        };
        let said = load(&mut plane, &rule("one"));
        assert_eq!(said, format!("{all} live flows: {gained}"), "{condition}");
        let check = |plane: &mut Plane, name: &str| {
            for (label, flow) in &flows {
                let met = wanted.contains(label).then_some(name);
                let has = rule_of(plane, flow);
                assert_eq!(has.as_deref(), met, "{condition}: {label}");
            }
        };
        check(&mut plane, "one");
        // A rule of another name and the same conditions keeps its flows.
        let said = load(&mut plane, &rule("two"));
        let changed = match some {
            1 => "1 changed its rule".to_owned(),
            some => format!("{some} changed their rule"),
        };
        assert_eq!(said, format!("{all} live flows: {changed}"), "{condition}");
        check(&mut plane, "two");
        // So does a rule that is read again.
        let said = load(&mut plane, &rule("two"));
        assert_eq!(said, format!("{all} live flows: no change"), "{condition}");
        check(&mut plane, "two");
        let lost = match some {
            1 => "1 lost its rule".to_owned(),
            some => format!("{some} lost their rule"),
        };
        let said = load(&mut plane, "[timeouts]\nudp = '30s'\n");
        assert_eq!(said, format!("{all} live flows: {lost}"), "{condition}");
    }
}

/// Policies at random, over flows at random. The rule of each flow is the first that it meets,
/// condition by condition.
#[test]
fn live_flows_meet_the_first_rule_of_any_policy() {
    let mut random = Random(0x7161_6365);
    let mut pick = |all: &[&'static str]| all[random.below(all.len() as u64) as usize];
    let conditions = [
        "dport = 80",
        "dport = [53, '70-90']",
        "dport = '1024-65535'",
        "src = '10.0.0.0/31'",
        "src = '192.0.2.1'",
        "dst = ['10.0.0.200', '2001:db8::/120']",
        "any = '10.0.0.2/31'",
        "any = '::/0'",
        "iface = 'any'",
        "vlan = 10",
        "vlan = [0, 20]",
        "zone = [7, 9]",
        "zone = 0",
        "direction = 'in'",
        "direction = 'out'",
        "proto = 'tcp'",
        "proto = ['udp', 'icmp']",
    ];
    let settings = [
        "",
        "reap = []",
        "reap = ['socket']",
        "timeouts = { syn_sent = '5s', udp = '5s' }",
        "timeouts = { syn_sent = '500s', udp = '500s', icmp = '2s' }",
    ];
    let mut policies = Vec::new();
    while policies.len() < 60 {
        let mut text = format!("reap = {}\n", pick(&["[]", "['conntrack']"]));
        for rule in 0..6 {
            let name = format!("{}{rule}", pick(&["a", "b", "c"]));
            let [one, other] = [pick(&conditions), pick(&conditions)];
            let other = match one.split(' ').next() == other.split(' ').next() {
                true => "",
                false => other,
            };
            let setting = pick(&settings);
            text += &format!("[[rule]]\nname = '{name}'\n{one}\n{other}\n{setting}\n");
        }
        let allowed = Duration::from_millis(1)..=Duration::from_secs(1000);
        if let Ok(policy) = Policy::parse("random", text.as_bytes(), allowed) {
            policies.push((text, policy));
        }
    }

    let mut plane = setup().load();
    let mut watch = Watch::open(plane.plane()).unwrap();
    let mut flows = Vec::new();
    for client in 0..240_u32 {
        let is_back = random.below(2) == 0;
        let small = client as u8;
        let first = match random.below(4) {
            0 => Begun::new(datagram(small, is_back, None, client % 2 == 0)),
            1 => Begun::new(datagram(small, false, Some(8), false)),
            2 => Begun::new(frame(client * 400, is_back, ACK)),
            _ => Begun::new(frame(client * 400, is_back, SYN)),
        };
        let first = match random.below(4) {
            0 => first.in_vlans(&[10]),
            1 => first.in_vlans(&[20, 10]),
            2 => first.in_vlans(&[20]),
            _ => first,
        };
        let zone = [0, 0, 7, 9][random.below(4) as usize];
        let first = first.in_zone(zone);
        let first = match random.below(2) {
            0 => first.outgoing(),
            _ => first,
        };
        first.begin(&mut plane, &mut watch);
        flows.push(first);
    }
    let mut effects = [0; 5];
    for (text, policy) in &policies {
        let before = plane.forecast(text);
        load(&mut plane, text);
        let met = rules(&mut plane);
        assert_eq!(met.len(), flows.len());
        for flow in &flows {
            let wanted = judged(&mut plane, policy, flow);
            assert_eq!(met[&(flow.key(), flow.zone)], wanted, "{text}");
        }
        let flows = before.effect.flows;
        let some = [
            flows.changed,
            flows.lost,
            flows.gained,
            flows.exposed,
            flows.due,
        ];
        for (sum, some) in effects.iter_mut().zip(some) {
            *sum += some;
        }
        // None ends meanwhile, but some are due.
        plane.pass(100);
    }
    assert!(effects.iter().all(|sum| *sum > 0), "{effects:?}");
}

/// The name of the first rule of a policy that a flow meets, as `twheel policy check` finds it.
fn judged(plane: &mut Plane, policy: &Policy, flow: &Begun) -> Option<String> {
    let live = plane.plane().flows().unwrap();
    let names = {
        let data_plane = plane.plane();
        Names::open(&|name: &str| data_plane.open(name)).unwrap()
    };
    let of_zone = |key: &FlowKey| names.zone(key.zone()).unwrap();
    let key = flow.key();
    let mut all = live.iter();
    let live = all.find(|it| outside(it.key) == key && of_zone(&it.key) == flow.zone);
    let live = live.expect("the flow lives");
    let birth = Birth {
        key,
        created: 0,
        generation: 0,
    };
    let origin = Origin {
        point: Point::NONE,
        is_outgoing: false,
    };
    let shown = model::Flow::new(birth, live.word.seen(), 0, origin, false).unwrap();
    let query = Query {
        protocol: Protocol::from_iana(key.proto()),
        source: Some(mapped(shown.src.ip())),
        destination: Some(mapped(shown.dst.ip())),
        port: Some(shown.dst.port()),
        interface: Some("any".to_owned()),
        vlans: Some(shown.vlans),
        zone: Some(flow.zone),
        hook: Some(flow.hook),
    };
    let met = policy.rules.iter().find(|rule| match rule.judge(&query) {
        Verdict::Met => true,
        Verdict::Failed(_) => false,
        Verdict::Unknown(what) => panic!("{what} is known"),
    });
    met.map(|rule| rule.name.clone())
}

/// A policy that protects one port's flows by a rule of this name, and reaps all others.
fn protecting(name: &str, timeout: &str) -> String {
    format!(
        "reap = ['socket']\n[[rule]]\nname = '{name}'\ndport = 80\nreap = []\n\
         timeouts = {{ unreplied = '{timeout}' }}\n"
    )
}

#[test]
fn a_renamed_rule_protects_its_flows_all_the_time() {
    let mut plane = setup().load();
    let mut watch = Watch::open(plane.plane()).unwrap();
    plane.policy(&protecting("old", "600s"));
    plane.sweep();
    let flow = Begun::new(frame(1, false, ACK));
    flow.begin(&mut plane, &mut watch);
    let number = |plane: &mut Plane| {
        let flows = plane.plane().flows().unwrap();
        flows.iter().next().expect("the flow lives").rule
    };
    let old = number(&mut plane);
    plane.pass(500_000);
    plane.receive(&flow.frame);
    plane.pass(99_950);

    // Loaded, but not swept: the flow has its old rule, which is gone and protects it. The timer
    // visit that comes now takes the old timeout: flows of no rule live for a minute.
    plane.policy(&protecting("new", "300s"));
    assert_eq!(number(&mut plane), old);
    assert_eq!(plane.in_force(old).actions, 0);
    assert_ne!(plane.in_force(0).actions, 0);
    plane.pass(200);
    assert!(plane.step().is_empty());
    assert_eq!(plane.count(Counter::Rearmed), 1, "it was visited");
    assert_eq!(plane.sweep().to_string(), "1 live flow: 1 changed its rule");
    assert_eq!(rule_of(&mut plane, &flow).as_deref(), Some("new"));
    let new = number(&mut plane);
    assert_ne!(new, old);
    assert_eq!(plane.in_force(new).actions, 0);
    // The event of a flow that ended before has its rule.
    assert_eq!(plane.in_force(old).actions, 0);

    plane.pass(199_800);
    assert!(
        plane.step().is_empty(),
        "by the new timeout, and not before"
    );
    plane.pass(200);
    let ended = plane.step();
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].rule, new);
}

#[test]
fn flows_that_are_protected_no_more_are_told() {
    let mut plane = setup().load();
    let mut watch = Watch::open(plane.plane()).unwrap();
    load(&mut plane, &protecting("kept", "600s"));
    Begun::tcp(1).begin(&mut plane, &mut watch);
    Begun::new(frame(2, true, SYN)).begin(&mut plane, &mut watch);
    // The rule goes.
    let said = load(&mut plane, "reap = ['socket']\n");
    assert_eq!(said, "2 live flows: 1 lost its rule, 1 may now be reaped");
    // It comes back: nothing is lost.
    let said = load(&mut plane, &protecting("kept", "600s"));
    assert_eq!(said, "2 live flows: 1 got a rule");
    // It keeps its name, but not its port.
    let moved = protecting("kept", "600s").replace("80", "81");
    let said = load(&mut plane, &moved);
    assert_eq!(said, "2 live flows: 1 lost its rule, 1 may now be reaped");
    load(&mut plane, &protecting("kept", "600s"));
    // It keeps name and port, but reaps.
    let reaping = protecting("kept", "600s").replace("[]", "['reset']");
    let said = load(&mut plane, &reaping);
    assert_eq!(said, "2 live flows: 1 may now be reaped");
    // Another rule comes first.
    load(&mut plane, &protecting("kept", "600s"));
    let first = "[[rule]]\nname = 'first'\nvlan = 0\n[[rule]]\nname = 'kept'";
    let hidden = protecting("kept", "600s").replace("[[rule]]\nname = 'kept'", first);
    let said = load(&mut plane, &hidden);
    assert_eq!(
        said,
        "2 live flows: 1 changed its rule, 1 got a rule, 1 may now be reaped"
    );
    // No flow is reaped under a policy that has no actions at all; then all may be.
    let said = load(&mut plane, "reap = []\n");
    assert_eq!(said, "2 live flows: 2 lost their rule");
    let said = load(&mut plane, "reap = ['socket']\n");
    assert_eq!(said, "2 live flows: 2 may now be reaped");
}

/// Between the store that puts a policy into force and the sweep, a flow still has the number of
/// its rule. What that rule does by the new policy must not be done to it yet.
#[test]
fn a_rule_that_changes_sides_reaps_no_flow_before_it_is_swept() {
    let mut plane = setup().load();
    let mut watch = Watch::open(plane.plane()).unwrap();
    plane.policy("[[rule]]\nname = 'one'\ndport = 80\nreap = []\n");
    let flow = Begun::tcp(1);
    flow.begin(&mut plane, &mut watch);
    let flows = plane.plane().flows().unwrap();
    let one = flows.iter().next().unwrap().rule;
    assert_eq!(plane.in_force(one).actions, 0);
    // From now on `other` protects the flow, and `one` reaps flows of port 81.
    let two = "[[rule]]\nname = 'one'\ndport = 81\nreap = ['socket']\n\
               [[rule]]\nname = 'other'\ndport = 80\nreap = []\n";
    plane.policy(two);
    assert_eq!(plane.in_force(one).actions, 0);
    assert_eq!(plane.sweep().to_string(), "1 live flow: 1 changed its rule");
    assert_eq!(rule_of(&mut plane, &flow).as_deref(), Some("other"));
    assert_ne!(plane.in_force(one).actions, 0);
}

#[test]
fn a_flow_whose_place_is_not_known_keeps_its_rule() {
    let mut plane = setup().load();
    let mut watch = Watch::open(plane.plane()).unwrap();
    watch.enter(INTERFACE, "any", 0, 0).unwrap();
    let by = |name: &str, condition: &str| format!("[[rule]]\nname = '{name}'\n{condition}\n");
    let iface = "iface = 'any'";
    load(&mut plane, &by("here", iface));
    Begun::tcp(1).begin(&mut plane, &mut watch);
    let live = plane.plane().flows().unwrap();
    let first = live.iter().next().unwrap();
    let enter = |client: u32, origin: u32| Enter {
        addresses: Begun::tcp(client).key().addresses(),
        ports: Begun::tcp(client).key().ports(),
        seen: first.word.seen().0,
        rule: first.rule.into(),
        idle: 0,
        origin,
    };
    // As the reaper tracks a flow again: one that says where it was seen, and one that does not.
    let incoming = Point::new(first.point.interface(), Hook::Ingress);
    let outgoing = Point::new(first.point.interface(), Hook::Egress);
    plane.enter(enter(2, Enter::packed_origin(outgoing, true)));
    plane.enter(enter(3, Enter::packed_origin(Point::NONE, false)));
    assert_eq!(first.point, incoming);
    let rules_of = |plane: &mut Plane| {
        [1, 2, 3].map(|client| rule_of(plane, &Begun::tcp(client)).unwrap_or_default())
    };
    assert_eq!(rules_of(&mut plane), ["here", "here", "here"]);

    let out = format!("{iface}\ndirection = 'out'");
    let said = load(&mut plane, &by("out", &out));
    assert_eq!(said, "3 live flows: 1 changed its rule, 2 lost their rule");
    assert_eq!(rules_of(&mut plane), ["", "out", ""]);
    let both = format!("{}{}", by("here", iface), by("any", "dport = 80"));
    let said = load(&mut plane, &both);
    assert_eq!(said, "3 live flows: 1 changed its rule, 2 got a rule");
    assert_eq!(rules_of(&mut plane), ["here", "here", "any"]);
    // The third one keeps the name of its rule wherever that names an interface.
    let said = load(
        &mut plane,
        &format!("{}{}", by("any", &out), by("rest", iface)),
    );
    assert_eq!(said, "3 live flows: 2 changed their rule");
    assert_eq!(rules_of(&mut plane), ["rest", "any", "any"]);
    // Where no rule does, it is a flow as any other.
    let said = load(&mut plane, &by("web", "dport = 80"));
    assert_eq!(said, "3 live flows: 3 changed their rule");
    assert_eq!(rules_of(&mut plane), ["web", "web", "web"]);
}

#[test]
fn a_large_table_is_swept_and_adds_up() {
    const FLOWS: u32 = 100_000;
    let mut plane = Setup {
        max_flows: 1 << 17,
        ring_bytes: 1 << 23,
        ..Setup::default()
    }
    .load();
    let by = |name: &str, address: &str, timeout: &str| {
        format!(
            "[[rule]]\nname = '{name}'\nsrc = '{address}'\n\
             timeouts = {{ unreplied = '{timeout}' }}\n"
        )
    };
    // The first half has another address than the second.
    plane.policy(&by("first", "10.0.0.0", "600s"));
    for client in 0..FLOWS {
        plane.receive(&frame(client, false, ACK));
    }
    plane.pass(5_000);
    let policy = by("second", "10.0.0.1", "5s");
    let foretold = plane.forecast(&policy);
    let half = u64::from(FLOWS / 2);
    let between = |from: Option<&str>, to: Option<&str>| Move {
        from: from.map(str::to_owned),
        to: to.map(str::to_owned),
    };
    assert_eq!(foretold.moves.len(), 2);
    for (key, due) in [
        (between(Some("first"), None), 0),
        (between(None, Some("second")), half),
    ] {
        let moved = foretold.moves[&key];
        assert_eq!((moved.flows, moved.due), (half, due), "{key:?}");
    }
    plane.policy(&policy);
    let flows = plane.sweep();
    assert_eq!(flows, foretold.effect.flows);
    assert_eq!(
        flows.to_string(),
        "100,000 live flows: 50,000 lost their rule, 50,000 got a rule, 50,000 are due now"
    );
    plane.pass(100);
    assert_eq!(plane.step().len() as u64, half);
    assert_eq!(plane.sweep().to_string(), "50,000 live flows: no change");
}
