//! Built-in policies. The comment of each file names the source of its names.

/// Built-in policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Name, used as `preset:NAME`.
    pub name: &'static str,
    /// Text of the file.
    pub text: &'static str,
}

/// All presets.
pub const PRESETS: [Preset; 6] = [
    Preset {
        name: "node-not-ready",
        text: include_str!("../data/node-not-ready.toml"),
    },
    Preset {
        name: "operators",
        text: include_str!("../data/operators.toml"),
    },
    Preset {
        name: "node-problem-detector",
        text: include_str!("../data/node-problem-detector.toml"),
    },
    Preset {
        name: "aks",
        text: include_str!("../data/aks.toml"),
    },
    Preset {
        name: "eks",
        text: include_str!("../data/eks.toml"),
    },
    Preset {
        name: "gke",
        text: include_str!("../data/gke.toml"),
    },
];

/// Finds the built-in policies of this name. The error lists the names.
pub fn find(name: &str) -> Result<Preset, String> {
    let found = PRESETS.into_iter().find(|preset| preset.name == name);
    found.ok_or_else(|| {
        let names = PRESETS.map(|preset| preset.name).join(", ");
        format!("there is no such preset; there are {names}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_load_without_a_note() {
        for preset in PRESETS {
            let policies = crate::parse(preset.text, preset.name).unwrap();
            assert!(!policies.policies.is_empty());
            assert_eq!(policies.notes, Vec::<String>::new(), "{}", preset.name);
            assert_eq!(find(preset.name), Ok(preset));
        }
        assert!(find("mars").unwrap_err().contains("gke"));
    }
}
