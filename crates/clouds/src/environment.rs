//! Environment variables of the process, in which clouds look for credentials. Tests give their own.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Function that returns the value of a variable.
type LookUp = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Environment variables. Cheap to clone.
#[derive(Clone)]
pub struct Environment {
    look_up: Arc<LookUp>,
}

// === impl Environment ===

impl Environment {
    /// Returns the environment of this process.
    pub fn of_process() -> Self {
        Self {
            look_up: Arc::new(|name| std::env::var(name).ok()),
        }
    }

    /// Returns an environment with these variables only.
    pub fn of(variables: BTreeMap<String, String>) -> Self {
        Self {
            look_up: Arc::new(move |name| variables.get(name).cloned()),
        }
    }

    /// Returns the value of a variable; `None` if it is absent, empty or not UTF-8.
    pub fn get(&self, name: &str) -> Option<String> {
        (self.look_up)(name).filter(|value| !value.is_empty())
    }
}

impl fmt::Debug for Environment {
    /// Names the type only: values may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment").finish_non_exhaustive()
    }
}
