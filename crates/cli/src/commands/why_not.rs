//! `gpuwarden why-not`: the conditions of the decision about a node, as of now.

use trial::why_not::{CheckResult, WhyNot};

use super::events::query;
use super::explain;
use crate::EXIT_OK;
use crate::args::ExplainArgs;
use crate::client::Client;
use crate::given::Given;
use crate::output::{self, Colour, say};

pub(super) async fn execute(args: &ExplainArgs, given: &Given) -> anyhow::Result<u8> {
    let client = Client::remote(&args.remote).await?;
    let node = explain::node(&client, args).await?;
    let mut why: WhyNot = client
        .get(&format!("/api/v1/nodes/{}/why-not", query(&node)))
        .await?;
    why.answer = given.complete(&why.answer);
    for fix in why.checks.iter_mut().filter_map(|check| check.fix.as_mut()) {
        *fix = given.complete(fix);
    }
    if !output::structured(args.output.output, &why)? {
        text(&why)?;
    }
    Ok(EXIT_OK)
}

fn text(why: &WhyNot) -> anyhow::Result<()> {
    say!("{}\n", output::plain(&why.answer))?;
    for check in &why.checks {
        let word = match check.result {
            CheckResult::Passes => output::colour("ok  ", Colour::Green),
            CheckResult::Stops => output::colour("stop", Colour::Red),
            CheckResult::Unknown => output::colour("?   ", Colour::Yellow),
        };
        say!("{word}  {:<8} {}", check.name, output::plain(&check.text))?;
        for detail in &check.details {
            say!("{:17}{}", "", output::plain(detail))?;
        }
        if let Some(fix) = &check.fix {
            say!("{:15}{} {}", "", "->", output::plain(fix))?;
        }
    }
    Ok(())
}
