//! Simulates arbitrary events between effects: no request causes two signals, and every resource ends.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// An effect on its way to the outside.
#[derive(Clone, Debug)]
struct Pending {
    effect: Effect,
    /// Process that waits for the response.
    process: u32,
}

/// The simulated environment: an API server, one node and a provider.
struct World {
    board: Board,
    process: u32,
    objects: BTreeMap<ResourceKey, Value>,
    version: u64,
    node: NodeObservation,
    /// True if the provider recognises operations. Otherwise it treats each signal as a new one.
    knows: bool,
    /// Signals that had an effect, by operation.
    signals: BTreeMap<String, u32>,
    pending: Vec<Pending>,
    /// Signals that reach the provider late. Their responses are ignored.
    late: Vec<String>,
    now: i64,
    trace: Vec<String>,
}

/// An event of the simulation. The number selects one of the pending effects.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// An effect is carried out and its response arrives.
    Answer(u8),
    /// An effect is carried out, and its response is lost.
    LoseAnswer(u8),
    /// An effect is lost.
    Lose(u8),
    /// An effect is refused, for now or permanently.
    Refuse(u8, bool),
    /// A signal times out, and reaches the provider later.
    Delay(u8),
    /// Late signals reach the provider.
    Arrive,
    /// The node reboots, and becomes ready or not.
    Boot(bool),
    /// The watch delivers everything again, in an older or the current state.
    Watch,
    /// Another process takes over.
    Crash,
    /// Time passes, in seconds.
    Pass(u16),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        6 => any::<u8>().prop_map(Happening::Answer),
        2 => any::<u8>().prop_map(Happening::LoseAnswer),
        2 => any::<u8>().prop_map(Happening::Lose),
        2 => (any::<u8>(), any::<bool>()).prop_map(|(one, good)| Happening::Refuse(one, good)),
        1 => any::<u8>().prop_map(Happening::Delay),
        1 => Just(Happening::Arrive),
        1 => any::<bool>().prop_map(Happening::Boot),
        2 => Just(Happening::Watch),
        2 => Just(Happening::Crash),
        3 => (0_u16..120).prop_map(Happening::Pass),
    ]
}

impl World {
    fn new(knows: bool) -> Self {
        let mut world = Self {
            board: Board::new(config(""), None, "p0".to_owned()),
            process: 0,
            objects: BTreeMap::new(),
            version: 10,
            node: node("boot-0", true),
            knows,
            signals: BTreeMap::new(),
            pending: Vec::new(),
            late: Vec::new(),
            now: 0,
            trace: Vec::new(),
        };
        for (action, name, created) in [
            (Action::Reboot, "a", 1),
            (Action::Terminate, "b", 2),
            (Action::Reboot, "c", 3),
        ] {
            let key = ResourceKey {
                kind: action.kind(),
                name: name.to_owned(),
            };
            world
                .objects
                .insert(key, object(action, name, created, NODE));
        }
        world.crash();
        world
    }

    fn take(&mut self, input: Input) {
        let effects = self.board.handle(input, at(self.now));
        for effect in effects {
            if matches!(effect, Effect::WatchNode(_)) {
                let observation = Some(self.node.clone());
                self.take(Input::Node(NODE.to_owned(), observation.map(update)));
                continue;
            }
            if matches!(effect, Effect::StopWatching(_) | Effect::Notify(_)) {
                continue;
            }
            self.trace.push(format!("{} does {effect:?}", self.process));
            let process = self.process;
            self.pending.push(Pending { effect, process });
        }
    }

    fn crash(&mut self) {
        self.process += 1;
        // A new process: effects of the previous one may still be carried out.
        self.board = Board::new(config(""), None, format!("p{}", self.process));
        for kind in Maintenance::ALL {
            self.take(Input::ListBegun(kind));
        }
        self.watch();
        for kind in Maintenance::ALL {
            self.take(Input::Listed(kind));
        }
    }

    fn watch(&mut self) {
        for (key, object) in self.objects.clone() {
            let resource = MaintenanceResource::read(key.kind, &object).unwrap();
            self.take(Input::Updated(Box::new(resource)));
        }
        let observation = Some(self.node.clone());
        self.take(Input::Node(NODE.to_owned(), observation.map(update)));
    }

    fn signal(&mut self, operation: &str) {
        let known = self.signals.entry(operation.to_owned()).or_default();
        if *known == 0 || !self.knows {
            *known += 1;
        }
    }

    /// Carries out an effect and returns the response.
    fn carry_out(&mut self, effect: &Effect) -> Input {
        match effect.clone() {
            Effect::Write {
                key,
                version,
                status,
            } => {
                let object = self.objects.get_mut(&key).unwrap();
                if object["metadata"]["resourceVersion"] != json!(version) {
                    return Input::Written(key, WriteResult::Changed);
                }
                self.version += 1;
                object["metadata"]["resourceVersion"] = json!(self.version.to_string());
                for (field, value) in status.as_object().unwrap() {
                    object["status"][field] = value.clone();
                }
                let resource = MaintenanceResource::read(key.kind, object).unwrap();
                Input::Written(key, WriteResult::Done(Box::new(resource)))
            }
            Effect::Ask {
                key,
                operation,
                question,
                ..
            } => {
                let answer = match question {
                    Question::Send => {
                        self.signal(&operation);
                        ProviderAnswer::Sent(Ok(format!("request-of-{operation}")))
                    }
                    Question::Find => {
                        ProviderAnswer::Found(Ok(match self.signals.get(&operation) {
                            _ if !self.knows => FoundOperation::CannotTell,
                            Some(_) => FoundOperation::Sent(format!("request-of-{operation}")),
                            None => FoundOperation::NotSent,
                        }))
                    }
                    Question::Ready(_) => ProviderAnswer::Ready(Ok(self.node.ready)),
                };
                Input::Answered(key, operation, answer)
            }
            Effect::DeleteNode { key, .. } => Input::NodeTried(key),
            other => panic!("{other:?}"),
        }
    }

    /// Returns the response for an effect that was lost or refused.
    fn lost(effect: &Effect, class: Class) -> Input {
        let failure = failed(class);
        match effect.clone() {
            Effect::Write { key, .. } => Input::Written(key, WriteResult::Failed),
            Effect::Ask {
                key,
                question,
                operation,
                ..
            } => {
                let answer = match question {
                    Question::Send => ProviderAnswer::Sent(Err(failure)),
                    Question::Find => ProviderAnswer::Found(Err(failure)),
                    Question::Ready(_) => ProviderAnswer::Ready(Err(failed(Class::Transient))),
                };
                Input::Answered(key, operation, answer)
            }
            Effect::DeleteNode { key, .. } => Input::NodeTried(key),
            other => panic!("{other:?}"),
        }
    }

    fn pick(&mut self, number: u8) -> Option<Pending> {
        let count = self.pending.len();
        (count > 0).then(|| self.pending.remove(usize::from(number) % count))
    }

    /// Delivers a response to the process that waits for it, if it is still running.
    fn tell(&mut self, process: u32, answer: Input) {
        if process == self.process {
            self.take(answer);
        }
    }

    fn happens(&mut self, happening: Happening) {
        self.trace.push(format!("{:>5}: {happening:?}", self.now));
        match happening {
            Happening::Answer(number) => {
                if let Some(Pending { effect, process }) = self.pick(number) {
                    let answer = self.carry_out(&effect);
                    self.tell(process, answer);
                }
            }
            Happening::LoseAnswer(number) => {
                if let Some(Pending { effect, process }) = self.pick(number) {
                    drop(self.carry_out(&effect));
                    self.tell(process, Self::lost(&effect, Class::Ambiguous));
                }
            }
            Happening::Lose(number) => {
                if let Some(Pending { effect, process }) = self.pick(number) {
                    self.tell(process, Self::lost(&effect, Class::Ambiguous));
                }
            }
            Happening::Refuse(number, passes) => {
                if let Some(Pending { effect, process }) = self.pick(number) {
                    let class = if passes {
                        Class::Transient
                    } else {
                        Class::Permanent
                    };
                    self.tell(process, Self::lost(&effect, class));
                }
            }
            Happening::Delay(number) => {
                let Some(Pending { effect, process }) = self.pick(number) else {
                    return;
                };
                if let Effect::Ask {
                    operation,
                    question: Question::Send,
                    ..
                } = &effect
                {
                    self.late.push(operation.clone());
                }
                self.tell(process, Self::lost(&effect, Class::Ambiguous));
            }
            Happening::Arrive => {
                for operation in std::mem::take(&mut self.late) {
                    self.signal(&operation);
                }
            }
            Happening::Boot(ready) => {
                self.version += 1;
                self.node.boot_id = format!("boot-{}", self.version);
                self.node.ready = ready;
                let observation = Some(self.node.clone());
                self.take(Input::Node(NODE.to_owned(), observation.map(update)));
            }
            Happening::Watch => self.watch(),
            Happening::Crash => self.crash(),
            Happening::Pass(seconds) => {
                self.now += i64::from(seconds);
                self.take(Input::Time);
            }
        }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for (operation, count) in &self.signals {
            prop_assert!(
                *count <= 1,
                "{operation}: {count} signals\n{}",
                self.trace.join("\n")
            );
        }
        Ok(())
    }

    fn under_way(&self) -> usize {
        let open = |object: &&Value| object["status"]["completionTime"].is_null();
        self.objects.values().filter(open).count()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_request_makes_two_signals_and_every_resource_ends(
        knows: bool,
        happenings in prop::collection::vec(happening(), 0..80),
    ) {
        let mut world = World::new(knows);
        for happening in happenings {
            world.happens(happening);
            world.check()?;
        }
        // From here on every effect succeeds, while the node does not change.
        for _ in 0..100 {
            while let Some(Pending { effect, process }) = world.pick(0) {
                let answer = world.carry_out(&effect);
                world.tell(process, answer);
            }
            world.happens(Happening::Watch);
            world.happens(Happening::Pass(120));
            world.check()?;
            if world.under_way() == 0 {
                break;
            }
        }
        prop_assert_eq!(world.under_way(), 0, "{}", world.trace.join("\n"));
    }
}
