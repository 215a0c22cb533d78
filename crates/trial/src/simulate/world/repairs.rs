//! The custom resources of the cluster: told of, carried out by a janitor, and deleted by somebody.

use fleet::FleetInput;
use model::attempt::Attempt;
use model::ownership::Ownership;

use super::super::happening::Work;
use super::super::judge::Broken;
use super::World;

// === impl World ===

impl World {
    /// Begins to tell of the custom resource of a node, or of none any more.
    pub(super) fn watch_resource(&mut self, node: String, name: &str, watch: bool) {
        if watch {
            self.watched.insert(name.to_owned(), node);
            self.tell_of_resource(name);
        } else {
            self.watched.remove(name);
        }
    }

    pub(super) fn tell_of_resource(&mut self, name: &str) {
        let Some(node) = self.watched.get(name).cloned() else {
            return;
        };
        let (name, news) = (name.to_owned(), self.resources.news(name));
        self.take(FleetInput::Resource { node, name, news });
    }

    /// Has a janitor work on one of the custom resources.
    pub(in crate::simulate) fn work(&mut self, which: usize, work: Work) -> Result<(), Broken> {
        let Some((name, node)) = self.resources.any(which) else {
            return Ok(());
        };
        self.work_on(&name, &node, work)
    }

    fn work_on(&mut self, name: &str, node: &str, work: Work) -> Result<(), Broken> {
        let Some(node) = self.index(node).and_then(|index| self.nodes.get(index)) else {
            return Ok(());
        };
        self.resources.work(name, work, node)?;
        self.tell_of_resource(name);
        Ok(())
    }

    /// Has a janitor carry out what is there. Returns whether there was anything.
    pub(in crate::simulate) fn finish_repairs(&mut self) -> Result<bool, Broken> {
        let open = self.resources.open();
        for (name, node) in &open {
            self.work_on(name, node, Work::Begins)?;
            self.work_on(name, node, Work::Succeeds)?;
        }
        Ok(!open.is_empty())
    }

    /// Deletes one of the custom resources of which its node says that it is made. One that is deleted before
    /// is made again where its maker has crashed: nobody can know (docs/remediation.md, "Limits").
    pub(in crate::simulate) fn delete_resource(&mut self, which: usize) {
        let Some((name, node)) = self.resources.any(which) else {
            return;
        };
        let node = self.index(&node).and_then(|index| self.nodes.get(index));
        let own = node.and_then(|node| Ownership::read(&node.view));
        let mark = own.and_then(|own| own.mark.remediation).unwrap_or_default();
        let made = |one: &Attempt| one.name == name && one.made.is_some();
        if mark.attempts.iter().any(made) {
            self.resources.delete(&name);
            self.tell_of_resource(&name);
        }
    }
}
