//! Text that many groups keep without a copy each: the id of an event is part of the entries of all
//! its groups.

use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Shared text. A clone costs no memory.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text(Arc<str>);

thread_local! {
    /// Texts that were read in [`Text::shared`]; `None` outside of it.
    static READ: RefCell<Option<HashSet<Text>>> = const { RefCell::new(None) };
}

// === impl Text ===

impl Text {
    /// Calls `read`, in which equal texts that are deserialized share their memory.
    pub(crate) fn shared<T>(read: impl FnOnce() -> T) -> T {
        READ.set(Some(HashSet::new()));
        let result = read();
        READ.set(None);
        result
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl Borrow<str> for Text {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(READ.with_borrow_mut(|read| {
            let known = read.as_ref().and_then(|read| read.get(text.as_str()));
            let shared = known.cloned().unwrap_or_else(|| text.as_str().into());
            if let Some(read) = read {
                read.insert(shared.clone());
            }
            shared
        }))
    }
}
