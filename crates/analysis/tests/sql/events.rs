//! Random events of some kinds of trouble.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use contract::{Entity, HealthEvent, ProcessingStrategy, json, keys};
use jiff::Timestamp;
use model::event::{EventRecord, event_id};
use model::position::Position;
use model::reporter::Reporter;

/// Random numbers that follow from the first one.
#[derive(Clone)]
pub struct Dice(pub u64);

/// Kind of trouble.
pub struct Scene {
    /// Time over which the events are spread.
    seconds: u64,
    nodes: u64,
    /// GPUs of a node.
    gpus: u64,
    codes: &'static [&'static str],
    /// Percentage of the events that are no XIDs.
    others: u64,
    /// True if all GPUs of an NVLink domain report at once, but for a few.
    storm: bool,
    /// Longest delay of an event (seconds).
    late: u64,
}

/// Events with all that follows from them.
pub struct History {
    /// Events in the order of their arrival, some twice.
    pub events: Vec<EventRecord>,
    /// Labels of the nodes of the cluster.
    pub cluster: Vec<BTreeMap<String, String>>,
    /// Time at which the conclusions are asked for.
    pub now: Timestamp,
}

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;

/// Kinds of trouble: bursts, links, racks, repairs, single XIDs, applications, and domains; racks and domains
/// also without long delays, after which their conclusions would be over.
pub const SCENES: [Scene; 10] = [
    Scene::of(30 * HOUR, 1, 2, &["13", "31", "48", "79"], 20),
    Scene::of(30 * HOUR, 1, 1, &["74"], 10),
    Scene::of(30 * MINUTE, 9, 1, &["79", "119"], 10),
    Scene::of(9 * 24 * HOUR, 1, 1, &["79"], 60),
    Scene::of(40 * HOUR, 3, 4, &["13", "31", "74", "74", "48"], 40),
    Scene::of(60 * HOUR, 2, 2, &["13", "31", "43", "45"], 20),
    Scene::of(2 * HOUR, 2, 2, &["13", "74"], 80),
    Scene {
        storm: true,
        ..Scene::of(3 * HOUR, 5, 4, &["145", "45"], 20)
    },
    Scene {
        late: MINUTE,
        ..Scene::of(30 * MINUTE, 9, 1, &["79", "119"], 10)
    },
    Scene {
        storm: true,
        late: MINUTE,
        ..Scene::of(3 * HOUR, 5, 4, &["145", "45"], 20)
    },
];

impl Dice {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 32)) % end
    }

    fn one_of<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }

    /// Returns true once in so many times.
    fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

impl Scene {
    const fn of(
        seconds: u64,
        nodes: u64,
        gpus: u64,
        codes: &'static [&'static str],
        others: u64,
    ) -> Self {
        Self {
            seconds,
            nodes,
            gpus,
            codes,
            others,
            storm: false,
            late: 3 * HOUR,
        }
    }

    /// Returns an event about a random GPU at a random time.
    fn event(&self, mut dice: Dice) -> EventRecord {
        // In steps, so that some events are at the same time, or exactly a window or gap apart.
        let step = if dice.once_in(2) { 5 } else { 60 };
        let at = dice.below(self.seconds / step) * step;
        let (node, gpu) = (dice.below(self.nodes), dice.below(self.gpus));
        let is_other = dice.below(100) < self.others;
        let event = if is_other {
            other(node, gpu, &mut dice)
        } else {
            self.xid(node, gpu, &mut dice)
        };
        self.record(at, self.named(at, event, &mut dice), &mut dice)
    }

    /// Returns an event of a time as its sender knows the GPU: by both names, or one of them. Another GPU
    /// is in the slot after a while.
    fn named(&self, at: u64, mut event: HealthEvent, dice: &mut Dice) -> HealthEvent {
        let is_replaced = at > self.seconds * 2 / 3;
        for one in &mut event.entities_impacted {
            if one.entity_type == keys::ENTITY_GPU_UUID && is_replaced && !self.storm {
                one.entity_value.push('b');
            }
        }
        let lacks = match dice.below(4) {
            0 => keys::ENTITY_PCI,
            1 => keys::ENTITY_GPU_UUID,
            _ => "",
        };
        if event.check_name != keys::CHECK_GPU_INVENTORY && !self.storm {
            event
                .entities_impacted
                .retain(|one| one.entity_type != lacks);
        }
        event
    }

    /// Returns the accepted event, whose last report is at this second.
    fn record(&self, second: u64, mut event: HealthEvent, dice: &mut Dice) -> EventRecord {
        let time = |second: u64| Timestamp::from_second(i64::try_from(second).unwrap()).unwrap();
        let (mut at, mut accepted) = (time(second), time(second + dice.below(3)));
        if dice.once_in(4) {
            accepted = time(second + dice.below(self.late));
        }
        if dice.once_in(25) {
            at = time(second + HOUR);
        }
        if dice.once_in(5) && !event.is_healthy {
            let first = time(second - dice.below(second.min(20 * MINUTE) + 1));
            note(
                &mut event,
                keys::META_COUNT,
                &(1 + dice.below(4)).to_string(),
            );
            note(&mut event, keys::META_FIRST_SEEN, &first.to_string());
            note(&mut event, keys::META_LAST_SEEN, &at.to_string());
        }
        event.generated_timestamp = Some(json::proto_timestamp(at));
        EventRecord {
            seq: Position::START,
            id: event_id(&event),
            created_at: accepted,
            event,
        }
    }

    fn xid(&self, node: u64, gpu: u64, dice: &mut Dice) -> HealthEvent {
        let code = dice.one_of(self.codes);
        let mut event = about_gpu(node, gpu, keys::SYSLOG_AGENT, keys::CHECK_XID);
        event.error_code = vec![code.to_owned()];
        event.is_fatal = dice.once_in(2);
        if code == "13" && !dice.once_in(4) {
            add(&mut event, "GPC", &dice.below(2).to_string());
            add(&mut event, "TPC", &dice.below(2).to_string());
        }
        if code == "74" {
            let register = dice.one_of(&["REG0", "REG2", "REG3", "REG4"]);
            let bits = (1_u32 << dice.below(30)) | (1_u32 << dice.below(30));
            add(&mut event, register, &format!("{bits:032b}"));
            if !dice.once_in(4) {
                add(&mut event, keys::ENTITY_NVLINK, &dice.below(2).to_string());
            }
        }
        if dice.once_in(2) {
            // A job on several GPUs, or on this one only.
            let job = match dice.below(8) {
                own @ 0..4 => format!("{node}-{gpu}-{own}"),
                _ => dice.one_of(&["a", "b", "c", "d", "e"]).to_owned(),
            };
            note(&mut event, keys::META_JOB, &job);
        }
        if dice.once_in(15) {
            note(&mut event, keys::META_EARLIER_IN_BOOT, "true");
        }
        event
    }
}

impl History {
    /// Creates the history of some events, which all follow from these numbers.
    pub fn new(scene: &Scene, events: &[u64], seed: u64) -> Self {
        let mut dice = Dice(seed);
        let mut events: Vec<EventRecord> =
            events.iter().map(|one| scene.event(Dice(*one))).collect();
        if scene.storm {
            storm(scene, &mut dice, &mut events);
        }
        let twice = usize::try_from(dice.below(events.len() as u64)).unwrap();
        events.push(events[twice].clone());
        // As they were accepted, or in any order.
        if dice.once_in(2) {
            events.sort_by_key(|one| one.created_at);
        } else {
            events.sort_by_cached_key(|_| dice.below(u64::MAX));
        }
        let last = events.iter().map(|one| one.created_at).max().unwrap();
        let pause = match dice.below(3) {
            0 => 0,
            1 => dice.below(10 * MINUTE),
            _ => dice.below(26 * HOUR),
        };
        let cluster = (0..dice.below(20)).map(labels).collect();
        Self {
            events,
            cluster,
            now: Timestamp::from_second(last.as_second() + i64::try_from(pause).unwrap()).unwrap(),
        }
    }

    /// Returns the events for people.
    pub fn text(&self) -> String {
        let mut text = format!("now {}\n", self.now.as_millisecond());
        for one in &self.events {
            let event = &one.event;
            let entities = event.entities_impacted.iter();
            let entities = entities.map(|it| format!("{} {}", it.entity_type, it.entity_value));
            let time = event.generated_timestamp.and_then(json::timestamp).unwrap();
            writeln!(
                text,
                "{} accepted {} {} {} {:?} {} healthy {} fatal {} {:?}",
                time.as_millisecond(),
                one.created_at.as_millisecond(),
                event.node_name,
                event.check_name,
                event.error_code,
                entities.collect::<Vec<_>>().join(", "),
                event.is_healthy,
                event.is_fatal,
                event.metadata,
            )
            .unwrap();
        }
        text
    }
}

/// Adds the inventory of a domain, and reports of its GPUs but for a few, one of which is noisy.
fn storm(scene: &Scene, dice: &mut Dice, events: &mut Vec<EventRecord>) {
    let begin = scene.seconds - dice.below(HOUR);
    let silent = [dice.below(20), dice.below(20)];
    let noisy = dice.below(20);
    for number in 0..20 {
        let (node, gpu) = (number / scene.gpus, number % scene.gpus);
        let named = inventory(node, gpu, dice);
        events.push(scene.record(dice.below(begin), named, dice));
        let is_silent = silent[0] == number || (silent[1] == number && dice.once_in(3));
        if is_silent && !dice.once_in(6) {
            continue;
        }
        let mut event = scene.xid(node, gpu, dice);
        event.error_code = vec!["145".to_owned()];
        event.metadata.remove(keys::META_JOB);
        events.push(scene.record(begin + dice.below(90), event.clone(), dice));
        for _ in 0..dice.below(30) {
            if noisy == number {
                events.push(scene.record(begin + dice.below(900), event.clone(), dice));
            }
        }
    }
}

/// Returns an event that is no XID.
fn other(node: u64, gpu: u64, dice: &mut Dice) -> HealthEvent {
    match dice.below(6) {
        0 => {
            let mut event = about_node(node, keys::SYSLOG_AGENT, "SysLogsNICDriverError");
            let codes = ["netdev_watchdog", "module_unplugged", "other"];
            event.error_code = vec![dice.one_of(&codes).to_owned()];
            event
        }
        1 => {
            let mut event = about_node(node, "nic-health-monitor", "InfiniBandDegradationCheck");
            add(&mut event, keys::ENTITY_NIC, "mlx5_0");
            add(&mut event, "NICPort", &dice.below(2).to_string());
            event.error_code = vec!["degraded".to_owned()];
            event.is_fatal = dice.once_in(6);
            event
        }
        2 => {
            let mut event = about_gpu(node, gpu, keys::SYSLOG_AGENT, keys::CHECK_XID);
            event.is_healthy = true;
            if dice.once_in(2) {
                event.error_code = vec![dice.one_of(&["13", "48", "74"]).to_owned()];
            }
            if dice.once_in(3) {
                event.entities_impacted.clear();
            }
            Reporter::Monitor.note_in(&mut event);
            event
        }
        3 => {
            let mut event = about_node(node, "gpuwarden", keys::CHECK_REPAIRED);
            event.is_healthy = true;
            event.processing_strategy = ProcessingStrategy::StoreAndAnalyse as i32;
            event
        }
        4 => inventory(node, gpu, dice),
        _ => release(node, gpu, dice),
    }
}

/// Returns the report that a conclusion is over, of a person.
fn release(node: u64, gpu: u64, dice: &mut Dice) -> HealthEvent {
    let of_domain = ["SilentGPU", "NoisyGPU", "RackFault", "NVLinkDomainFault"];
    let of_node = [
        "MultipleRemediations",
        "RepairNotWorking",
        "RepeatedXIDErrorOnSameGPU",
        "RepeatedXID31OnSameGPU",
        "RepeatedXID13OnSameGPCAndTPC",
        "RepeatedXID31OnDifferentGPU",
        "XIDErrorSoloNoBurst",
        "XID74Reg0SoloNVLinkError",
        "XID74Reg3UnexpectedError",
        "XID74Reg2Bit13Set",
        "RepeatedXID74Reg0HardwareIssue",
        "XID74Reg4HardwareIssue",
        "RepeatedNICDegradation",
        "RepeatedApplicationXID",
    ];
    let rules = if dice.once_in(3) {
        &of_domain[..]
    } else {
        &of_node[..]
    };
    let rule = dice.one_of(rules);
    let mut event = about_gpu(node, gpu, analysis::AGENT, rule);
    event.is_healthy = true;
    // Which member of a domain is meant, the reports alone do not tell in SQL.
    if of_domain.contains(&rule) || dice.once_in(2) {
        event.entities_impacted.clear();
    }
    if !dice.once_in(10) {
        Reporter::Monitor.note_in(&mut event);
    }
    event
}

/// Returns the event by which a monitor names a GPU of its node.
fn inventory(node: u64, gpu: u64, dice: &mut Dice) -> HealthEvent {
    let mut event = about_gpu(node, gpu, keys::GPU_AGENT, keys::CHECK_GPU_INVENTORY);
    event.is_healthy = true;
    event.processing_strategy = ProcessingStrategy::StoreOnly as i32;
    note(&mut event, keys::META_BOOT_ID, "1");
    if !dice.once_in(10) {
        Reporter::Monitor.note_in(&mut event);
    }
    event
}

fn about_gpu(node: u64, gpu: u64, agent: &str, check: &str) -> HealthEvent {
    let mut event = about_node(node, agent, check);
    add(&mut event, keys::ENTITY_PCI, &format!("0000:b{gpu}:00"));
    add(
        &mut event,
        keys::ENTITY_GPU_UUID,
        &format!("GPU-{node}{gpu}"),
    );
    event
}

fn about_node(node: u64, agent: &str, check: &str) -> HealthEvent {
    HealthEvent {
        agent: agent.to_owned(),
        check_name: check.to_owned(),
        node_name: format!("n{node}"),
        metadata: labels(node),
        ..HealthEvent::default()
    }
}

/// Returns the labels of a node: two racks, and one domain by the chassis for most nodes.
fn labels(node: u64) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    labels.insert(keys::RACK_LABELS[0].to_owned(), format!("r{}", node % 2));
    let domain = if node == 7 { "c2" } else { "c1" };
    labels.insert(keys::META_CHASSIS_SERIAL.to_owned(), domain.to_owned());
    if node == 8 {
        labels.insert(keys::NVLINK_DOMAIN_LABELS[0].to_owned(), "d".to_owned());
    }
    labels
}

fn add(event: &mut HealthEvent, kind: &str, value: &str) {
    event.entities_impacted.push(Entity {
        entity_type: kind.to_owned(),
        entity_value: value.to_owned(),
    });
}

fn note(event: &mut HealthEvent, key: &str, value: &str) {
    event.metadata.insert(key.to_owned(), value.to_owned());
}
