//! Custom resources in the simulated cluster: their watch, the janitor that executes them, and
//! their deletion by somebody.

use fleet::FleetInput;
use model::attempt::Attempt;
use model::ownership::Ownership;

use super::super::happening::Broken;
use super::super::happening::Work;
use super::super::setup::Proof;
use super::World;

// === impl World ===

impl World {
    /// Starts or stops the watch of a node's custom resource.
    pub(super) fn watch_resource(&mut self, node: String, name: &str, watch: bool) {
        if watch {
            self.watched.insert(name.to_owned(), node);
            self.send_resource(name);
        } else {
            self.watched.remove(name);
        }
    }

    pub(super) fn send_resource(&mut self, name: &str) {
        let Some(node) = self.watched.get(name).cloned() else {
            return;
        };
        let (name, news) = (name.to_owned(), self.resources.news(name));
        self.send(FleetInput::Resource {
            node,
            name,
            update: news,
        });
    }

    /// Lets a janitor, or the operator of drains, work on one of the custom resources.
    pub(in crate::simulate) fn work(&mut self, which: usize, work: Work) -> Result<(), Broken> {
        let Some((name, node)) = self.resources.any(which) else {
            return Ok(());
        };
        self.work_on(&name, &node, work)
    }

    fn work_on(&mut self, name: &str, node: &str, work: Work) -> Result<(), Broken> {
        let index = self.index(node);
        if let Some(drained) = self.resources.drain(name, work) {
            if let Some(index) = index.filter(|_| drained) {
                self.empty(index);
            }
            self.send_resource(name);
            return Ok(());
        }
        let Some(node) = index.and_then(|index| self.nodes.get(index)) else {
            return Ok(());
        };
        self.resources.work(name, work, node)?;
        self.send_resource(name);
        Ok(())
    }

    /// Lets a janitor complete all custom resources; Jobs fail where the setup says so. Returns false if there were none.
    pub(in crate::simulate) fn finish_remediations(&mut self) -> Result<bool, Broken> {
        let open = self.resources.open();
        for (name, node) in &open {
            self.work_on(name, node, Work::Begins)?;
            let fails =
                self.setup.validation == Proof::FailingJob && self.resources.validates(name);
            let end = if fails {
                Work::FailsForGood
            } else {
                Work::Succeeds
            };
            self.work_on(name, node, end)?;
        }
        Ok(!open.is_empty())
    }

    /// Deletes a custom resource whose node already records its creation. An earlier deletion,
    /// followed by a crash of the controller, leads to a second creation, since nothing records
    /// the first (docs/remediation.md, "Limits").
    pub(in crate::simulate) fn delete_resource(&mut self, which: usize) {
        let Some((name, node)) = self.resources.any(which) else {
            return;
        };
        let node = self.index(&node).and_then(|index| self.nodes.get(index));
        let own = node.and_then(|node| Ownership::read(&node.view));
        let mark = own.and_then(|own| own.mark.remediation).unwrap_or_default();
        let made = |one: &Attempt| one.name == name && one.made.is_some();
        if mark.attempts.iter().any(made) || self.resources.drain(&name, Work::IsLost).is_some() {
            self.resources.delete(&name);
            self.send_resource(&name);
        }
    }
}
