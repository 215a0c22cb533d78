//! Drains by a custom resource.

use model::attempt::Attempt;
use model::ownership::Ownership;
use model::status::eviction::EvictionStatus;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{CreateAnswer, PlannedResource};

const TABLE: &str = r#"
    [customDrain]
    enabled = true
    templateMountPath = "/t"
    templateFileName = "drain.yaml"
    namespace = "slinky"
    apiGroup = "nvsentinel.nvidia.com"
    version = "v1alpha1"
    kind = "DrainRequest"
    statusConditionType = "DrainComplete"
    statusConditionStatus = "True"
    timeout = "30m"
"#;
const TEMPLATE: &str = "{apiVersion: nvsentinel.nvidia.com/v1alpha1, kind: DrainRequest, \
    spec: {pods: [{{ range $ns, $pods := .PodsToDrain }}{{ range $pods }}{{ $ns }}/{{ . }}, {{ end }}{{ end }}]}}";

fn by(table: &str) -> Settings {
    let config = DrainConfig::parse_with(table, "d", |_| Ok(TEMPLATE.to_owned()));
    Settings {
        drain: Some(Arc::new(config.unwrap())),
        ..settings()
    }
}

fn world() -> World {
    world_with(by(TABLE), &["jobs/a", "kube-system/b"])
}

/// Looks some times. Returns the effects.
fn look(world: &mut World) -> LookEffects {
    let mut all = LookEffects::default();
    for _ in 0..6 {
        let looked = world.look(PatchFate::Made);
        assert!(looked.removals.is_empty(), "{looked:?}");
        all.creations.extend(looked.creations);
        all.withdrawn.extend(looked.withdrawn);
        all.notes.extend(looked.notes);
    }
    all
}

/// Creates a custom resource, as the API server would, unless it exists.
fn create(world: &mut World, planned: &PlannedResource) -> Value {
    let there = world.resources.entry(planned.name.clone());
    there.or_insert_with(|| planned.object.clone()).clone()
}

fn make(world: &mut World, planned: &PlannedResource) {
    let answer = CreateAnswer::There(Box::new(create(world, planned)));
    let (node, key) = ("n1".to_owned(), planned.key.clone());
    world.handle(FleetInput::ResourceCreated { node, key, answer });
}

fn finish(world: &mut World, name: &str) {
    let conditions = json!([{"type": "DrainComplete", "status": "True"}]);
    let object = world.resources.get_mut(name).unwrap();
    object["status"] = json!({"conditions": conditions});
    world.deliver_resources();
}

fn session_id(world: &World) -> String {
    Ownership::read(&world["n1"]).unwrap().session_id
}

fn eviction(world: &World) -> EvictionStatus {
    let session = world.fleet.status("n1").unwrap().session.unwrap();
    session.drain.unwrap().status
}

#[test]
fn a_node_is_drained_by_a_custom_resource_and_by_nobody_else() {
    let mut world = world();
    let before = world["n1"].clone();
    world.fault(0);
    let mut looked = look(&mut world);
    assert_eq!(
        (state(&world), looked.creations.len()),
        (Some("draining"), 1)
    );
    let planned = looked.creations.remove(0);
    let name = format!("drain-n1-{}", session_id(&world));
    assert_eq!(planned.name, name);
    // Only the pods that are to leave are named.
    assert_eq!(planned.object["spec"]["pods"], json!(["jobs/a"]));
    let owner = &planned.object["metadata"]["ownerReferences"][0];
    assert_eq!(owner["kind"], "Node");
    make(&mut world, &planned);
    assert!(look(&mut world).creations.is_empty());
    assert_eq!(awaits(&world), format!("the end of DrainRequest {name}"));
    // The node is not drained just because its pods are gone.
    gone(&mut world, "jobs/a");
    look(&mut world);
    assert_eq!(state(&world), Some("draining"));
    finish(&mut world, &name);
    look(&mut world);
    assert_eq!(
        (state(&world), world.phase()),
        (Some("drain-succeeded"), Phase::Drained)
    );
    // The resource stays for as long as the node is out, and is deleted then.
    assert!(look(&mut world).withdrawn.is_empty());
    world.recovery(0);
    let looked = look(&mut world);
    let names: Vec<&String> = looked.withdrawn.iter().map(|one| &one.name).collect();
    assert_eq!(names, [&name]);
    assert_eq!(
        (&world["n1"].labels, &world["n1"].annotations),
        (&before.labels, &before.annotations)
    );
}

/// A node is let in while its resource is created, that process ends before the answer, and the
/// same fault returns: the resource has the same name and shows the result of an earlier drain.
#[test]
fn the_resource_of_an_earlier_drain_makes_way() {
    let mut world = world();
    world.fault(0);
    let earlier = look(&mut world).creations.remove(0);
    world["n1"].unschedulable = false;
    look(&mut world);
    create(&mut world, &earlier);
    world.restart(Restart::All);
    world.now += SignedDuration::from_secs(1);
    world.fault(0);
    let planned = look(&mut world).creations.remove(0);
    assert_eq!(planned.name, earlier.name);
    assert_ne!(planned.key, earlier.key);
    make(&mut world, &planned);
    let mut looked = look(&mut world);
    let withdrawn: Vec<String> = looked.withdrawn.iter().map(Attempt::key).collect();
    assert_eq!(withdrawn, [earlier.key]);
    // The creation is requested again, and succeeds once the other resource has gone.
    world.resources.clear();
    make(&mut world, &looked.creations.remove(0));
    look(&mut world);
    assert!(awaits(&world).starts_with("the end of DrainRequest"));
}

#[test]
fn whoever_starts_anew_asks_for_the_same_drain() {
    for with in [Restart::All, Restart::Events, Restart::Nothing] {
        // Before the creation, after it without the answer, after the answer, and after its end.
        for moment in 0..4 {
            let mut world = world();
            world.fault(0);
            let planned = look(&mut world).creations.remove(0);
            match moment {
                0 => {}
                1 => drop(create(&mut world, &planned)),
                _ => make(&mut world, &planned),
            }
            if moment == 3 {
                look(&mut world);
                finish(&mut world, &planned.name);
            }
            world.restart(with);
            for again in look(&mut world).creations {
                assert_eq!((&again.name, &again.key), (&planned.name, &planned.key));
                make(&mut world, &again);
            }
            look(&mut world);
            finish(&mut world, &planned.name);
            look(&mut world);
            assert_eq!(world.phase(), Phase::Drained, "{with:?} {moment}");
        }
    }
}

/// A fault whose sender asks that pods stay keeps the node out, and the drain leaves its session.
#[test]
fn whoever_starts_anew_withdraws_it_also_where_the_drain_leaves_the_session_first() {
    let mut world = world();
    world.fault(0);
    let planned = look(&mut world).creations.remove(0);
    make(&mut world, &planned);
    look(&mut world);
    finish(&mut world, &planned.name);
    let mut other = event("Other", &[("GPU", "1")], true, false);
    other.drain_overrides = Some(BehaviourOverrides {
        force: false,
        skip: true,
    });
    world.store(other, world.now);
    look(&mut world);
    assert_eq!(world.phase(), Phase::Drained);
    world.restart(Restart::Events);
    assert!(look(&mut world).withdrawn.is_empty());
    world.recovery(0);
    let withdrawn = look(&mut world).withdrawn;
    let keys: Vec<String> = withdrawn.iter().map(Attempt::key).collect();
    assert_eq!(
        (keys, world.phase()),
        (vec![planned.key], Phase::Quarantined)
    );
}

#[test]
fn who_ends_the_session_has_it_withdrawn_also_while_it_is_made() {
    for by in ["uncordon", "release", "recovery"] {
        for made in [false, true] {
            let mut world = world();
            world.fault(0);
            let planned = look(&mut world).creations.remove(0);
            if made {
                make(&mut world, &planned);
                look(&mut world);
            }
            match by {
                "uncordon" => world["n1"].unschedulable = false,
                "release" => world.annotate(keys::RELEASE, "{}"),
                _ => world.recovery(0),
            }
            let mut withdrawn = look(&mut world).withdrawn;
            assert_eq!(withdrawn.len(), 1, "{by} {made}");
            if !made {
                make(&mut world, &planned);
                withdrawn.extend(look(&mut world).withdrawn);
                assert_eq!(withdrawn.len(), 2, "{by}");
            }
            let key = |one: &Attempt| one.key() == planned.key && one.name == planned.name;
            assert!(withdrawn.iter().all(key));
            assert_eq!(world.phase(), Phase::Idle, "{by} {made}");
        }
    }
}

#[test]
fn one_that_does_not_end_asks_a_person_and_is_not_called_drained() {
    let mut world = world();
    world.fault(0);
    let planned = look(&mut world).creations.remove(0);
    make(&mut world, &planned);
    look(&mut world);
    assert_eq!(eviction(&world), EvictionStatus::InProgress);
    world.now += SignedDuration::from_mins(30);
    let looked = look(&mut world);
    let asked = looked
        .notes
        .iter()
        .filter(|note| note.kind == EntryKind::Attention);
    let asked: Vec<&str> = asked.map(|note| note.text.as_str()).collect();
    let name = &planned.name;
    let expected = format!(
        "the drain makes no progress: DrainRequest {name} does not end; fix it by hand, \
         or release the node"
    );
    assert_eq!(asked, [expected]);
    assert_eq!(
        (state(&world), eviction(&world)),
        (Some("draining"), EvictionStatus::Failed)
    );
    // The resource is still watched.
    finish(&mut world, name);
    look(&mut world);
    assert_eq!(
        (world.phase(), eviction(&world)),
        (Phase::Drained, EvictionStatus::Succeeded)
    );
}

#[test]
fn what_cannot_be_made_is_tried_again_and_a_person_asked() {
    let mut world = world();
    world.fault(0);
    let mut planned = look(&mut world).creations.remove(0);
    let mut tries = 0;
    for _ in 0..100 {
        let (node, key) = ("n1".to_owned(), planned.key.clone());
        let why = "no kind DrainRequest".to_owned();
        let answer = CreateAnswer::Failed {
            why,
            retry_after: None,
        };
        world.handle(FleetInput::ResourceCreated { node, key, answer });
        if let Some(again) = look(&mut world).creations.pop() {
            (planned, tries) = (again, tries + 1);
        }
    }
    assert!((10..60).contains(&tries), "{tries}");
    assert_eq!(eviction(&world), EvictionStatus::Failed);
    assert!(
        awaits(&world).ends_with("to be made (no kind DrainRequest)"),
        "{}",
        awaits(&world)
    );
    // A resource of an earlier drain, or a foreign one, is not taken for ours.
    let mut other = planned.object.clone();
    other["metadata"]["annotations"] = json!({});
    other["status"] = json!({"conditions": [{"type": "DrainComplete", "status": "True"}]});
    world.resources.insert(planned.name.clone(), other);
    make(&mut world, &planned);
    look(&mut world);
    assert_eq!(state(&world), Some("draining"));
    assert!(awaits(&world).ends_with("to be made (another is there, which is not ours)"));
    world.resources.clear();
    world.now += SignedDuration::from_mins(1);
    let again = look(&mut world).creations.remove(0);
    make(&mut world, &again);
    look(&mut world);
    finish(&mut world, &again.name);
    look(&mut world);
    assert_eq!(world.phase(), Phase::Drained);
}

#[test]
fn nodes_that_the_selector_leaves_out_are_drained_by_their_namespaces() {
    let table = format!(
        "{TABLE}\nnodeSelector = \"slurm\"\n[[userNamespaces]]\nname = \"jobs\"\nmode = \"Immediate\"\n"
    );
    let mut world = world_with(by(&table), &["jobs/a"]);
    assert_eq!(removed(&begin(&mut world)), ["evict jobs/a"]);
    let mut world = world_with(by(&table), &["jobs/a"]);
    world["n1"].labels.insert("slurm".into(), String::new());
    world.fault(0);
    assert_eq!(look(&mut world).creations.len(), 1);
}

#[test]
fn a_dry_run_makes_none_and_comes_to_its_end() {
    let settings = Settings {
        mode: Mode::DryRun,
        ..by(TABLE)
    };
    let mut world = world_with(settings, &["jobs/a"]);
    world.fault(0);
    let looked = look(&mut world);
    assert!(looked.creations.is_empty());
    let mut notes = looked.notes.iter();
    assert!(notes.any(|note| note.text.starts_with("dry run: DrainRequest drain-n1-")));
    assert_eq!(world.phase(), Phase::Drained);
}

/// A step of the simulation.
#[derive(Clone, Debug)]
enum Act {
    Look(bool),
    Restart(bool),
    Fault(u8),
    Recovery(u8),
    /// Creations are: made and answered, made without an answer, failed, or refused.
    Answer(u8),
    /// The drainer is done.
    Finish,
    Delete,
    Wait(u16),
    Uncordon,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => any::<bool>().prop_map(Act::Look),
        1 => any::<bool>().prop_map(Act::Restart),
        2 => (0..2_u8).prop_map(Act::Fault),
        1 => (0..2_u8).prop_map(Act::Recovery),
        4 => (0..4_u8).prop_map(Act::Answer),
        2 => Just(Act::Finish),
        1 => Just(Act::Delete),
        2 => (1..2000_u16).prop_map(Act::Wait),
        1 => Just(Act::Uncordon),
    ]
}

#[derive(Default)]
struct Real {
    making: Vec<PlannedResource>,
}

impl Real {
    fn look(&mut self, world: &mut World, made: bool) {
        let before = state(world).map(str::to_owned);
        let fate = if made {
            PatchFate::Made
        } else {
            PatchFate::Refused
        };
        let looked = world.look(fate);
        assert!(looked.removals.is_empty(), "{looked:?}");
        for one in looked.creations {
            // Resources are requested only for a node that is out and whose mark says that it is
            // being drained.
            assert_eq!(before.as_deref(), Some("draining"), "{one:?}");
            assert!(world["n1"].unschedulable, "{one:?}");
            let twice = self.making.iter().any(|other| other.key == one.key);
            assert!(!twice, "{one:?} is under way");
            self.making.push(one);
        }
        for attempt in looked.withdrawn {
            let ours =
                |object: &Value| object["metadata"]["annotations"][keys::ATTEMPT] == attempt.key();
            if world.resources.get(&attempt.name).is_some_and(ours) {
                world.resources.remove(&attempt.name);
                world.deliver_resources();
            }
        }
        if state(world) == Some("drain-succeeded") && before.as_deref() != Some("drain-succeeded") {
            let name = format!("drain-n1-{}", session_id(world));
            let since = Ownership::read(&world["n1"])
                .unwrap()
                .mark
                .drain
                .unwrap()
                .since;
            let key = format!("drain-{}/{since}", session_id(world));
            let object = world.resources.get(&name);
            let says = object.map(|one| &one["metadata"]["annotations"][keys::ATTEMPT]);
            // The resource may be gone since it was delivered.
            assert!(says.is_none_or(|says| *says == key), "{says:?} {key}");
        }
    }

    fn act(&mut self, world: &mut World, act: &Act) {
        match act {
            Act::Look(made) => self.look(world, *made),
            Act::Restart(all) => {
                self.making.clear();
                world.restart(if *all { Restart::All } else { Restart::Nothing });
            }
            Act::Fault(gpu) => world.fault(*gpu),
            Act::Recovery(gpu) => world.recovery(*gpu),
            Act::Answer(how) => {
                let Some(planned) = self.making.pop() else {
                    return;
                };
                let (node, key, why) = ("n1".to_owned(), planned.key.clone(), "no".to_owned());
                let failed = CreateAnswer::Failed {
                    why: why.clone(),
                    retry_after: None,
                };
                let answer = match how {
                    0 => return make(world, &planned),
                    1 => {
                        create(world, &planned);
                        failed
                    }
                    2 => failed,
                    _ => CreateAnswer::Refused(why),
                };
                world.handle(FleetInput::ResourceCreated { node, key, answer });
            }
            Act::Finish => {
                let names: Vec<String> = world.resources.keys().cloned().collect();
                for name in &names {
                    finish(world, name);
                }
            }
            Act::Delete => {
                world.resources.clear();
                world.deliver_resources();
            }
            Act::Wait(seconds) => world.now += SignedDuration::from_secs(i64::from(*seconds)),
            Act::Uncordon => world["n1"].unschedulable = false,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_custom_drain_is_asked_for_by_a_node_in_drain_only_and_ends(
        acts in prop::collection::vec(act(), 1..120)
    ) {
        let mut world = world();
        let mut real = Real::default();
        for act in &acts {
            real.act(&mut world, act);
        }
        let mut ended = false;
        for _ in 0..400 {
            world.now += SignedDuration::from_secs(4);
            real.look(&mut world, true);
            real.act(&mut world, &Act::Answer(0));
            real.act(&mut world, &Act::Finish);
            let wanted = world.desired().wanted();
            ended = world.phase() == if wanted { Phase::Drained } else { Phase::Idle };
            if ended {
                break;
            }
        }
        prop_assert!(ended, "{:?}, awaits {}", world.phase(), awaits(&world));
    }
}
