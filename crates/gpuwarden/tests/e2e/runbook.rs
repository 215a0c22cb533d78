//! Commands of the runbooks, which a story runs while their alert fires.

use anyhow::Context as _;
use testkit::{ControlPlane, Product};

use crate::monitoring::repository;
use crate::page::{ANYTHING, Shell, Step, steps};

/// Sources of the stories.
const STORIES: [&str; 6] = [
    include_str!("apart.rs"),
    include_str!("brake.rs"),
    include_str!("notices.rs"),
    include_str!("prometheus.rs"),
    include_str!("remediation.rs"),
    include_str!("story_failing.rs"),
];

/// Parts of commands that need a kubelet, systemd, or cert-manager.
const NEED_MORE: [&str; 4] = [" logs ", " exec ", "systemctl ", "get certificates"];

/// Runbooks whose state no story has.
const WITHOUT_STORY: [&str; 2] = ["GpuwardenStoreTooLarge", "GpuwardenPreflightFailures"];

fn page() -> String {
    std::fs::read_to_string(repository("docs/runbooks.md")).unwrap()
}

/// Returns the commands of an alert that need nothing more than the product and an API server.
fn commands(page: &str, alert: &str) -> Vec<Step> {
    let section = page
        .split("\n## ")
        .find(|it| it.lines().next() == Some(alert));
    let mut steps = steps(section.unwrap_or_else(|| panic!("no section {alert}")));
    steps.retain(|step| !NEED_MORE.iter().any(|it| step.command.contains(it)));
    steps
}

/// Replaces placeholders of the page by their values.
pub(crate) fn filled(text: &str, names: &[(&str, &str)]) -> String {
    let fill = |text: String, (name, value): &(&str, &str)| text.replace(name, value);
    names.iter().fold(text.to_owned(), fill)
}

/// A person beside a product, who follows runbooks.
pub(crate) struct Reader {
    pub(crate) shell: Shell,
}

impl Reader {
    /// Returns the reader beside a product, with access to its cluster.
    pub(crate) fn beside(product: &Product, plane: Option<&ControlPlane>) -> anyhow::Result<Self> {
        let mut shell = Shell::new(repository(""), "/home/me")?;
        let data = product.data_dir().display().to_string();
        shell.env.push(("GPUWARDEN_DATA_DIR", data));
        if let Some(plane) = plane {
            let kubeconfig = plane.kubeconfig().display().to_string();
            shell.env.push(("GPUWARDEN_KUBECONFIG", kubeconfig.clone()));
            shell.env.push(("KUBECONFIG", kubeconfig));
            shell.add_program(plane.kubectl_program());
        }
        Ok(Self { shell })
    }

    /// Runs the commands of an alert's runbook, and checks that they print what it shows. `names`
    /// are placeholders of the page with their values. Returns the commands.
    pub(crate) async fn runbook(
        &mut self,
        alert: &str,
        names: &[(&str, &str)],
    ) -> anyhow::Result<Vec<String>> {
        let commands = commands(&page(), alert).into_iter().map(|step| Step {
            command: filled(&step.command, names),
            shown: match step.shown.as_str() {
                "" => ANYTHING.to_owned(),
                shown => filled(shown, names),
            },
        });
        let commands: Vec<Step> = commands.collect();
        let followed = self.shell.follow(&commands).await;
        followed.context(alert.to_owned())?;
        Ok(commands.into_iter().map(|step| step.command).collect())
    }
}

#[test]
fn each_runbook_is_followed_in_a_story_or_the_page_says_why_not() {
    let page = page();
    let (start, _) = page.split_once("\n## ").unwrap();
    let alerts = page.lines().filter_map(|line| line.strip_prefix("## "));
    for alert in alerts {
        let story = STORIES
            .iter()
            .any(|it| it.contains(&format!("runbook(\"{alert}\"")));
        let needs_none = commands(&page, alert).is_empty() || WITHOUT_STORY.contains(&alert);
        assert_ne!(story, needs_none, "{alert}");
        let excused = start.contains(&format!("[{alert}]"));
        assert_eq!(needs_none, excused, "{alert}: in the page's sentence");
    }
}
