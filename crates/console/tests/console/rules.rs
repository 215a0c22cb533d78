//! The rules of the analysis.

use analysis::RulesText;

use crate::server::Server;

#[tokio::test]
async fn the_rules_in_effect_are_told_as_text() {
    let server = Server::start().await;
    let rules: RulesText = server.get("/api/v1/rules").await.json();
    assert_eq!((&*rules.source, &*rules.text), ("rules.toml", "# none\n"));
}
