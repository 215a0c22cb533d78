//! The brake's part of a policy file.

use super::*;

#[test]
fn a_file_that_says_nothing_of_the_brake_gets_the_default_and_else_what_it_says() {
    let brake = |text: &str| Policy::parse(text, "p").unwrap().brake;
    assert_eq!(brake("# nothing"), Brake::default());
    assert_eq!(Policy::builtin().brake, Brake::default());
    let budget = |limit, per: Option<&str>| Budget {
        limit,
        per: per.map(str::to_owned),
    };
    // NVSentinel's setting, with its chart's values as defaults.
    for text in [
        "[circuitBreaker]\npercentage = 50\nduration = \"5m\"\n",
        "[circuitBreaker]\n",
        "circuitBreaker = { duration = \"300s\" }\n",
        "circuitBreaker = { duration = \"0h5m0s\" }\n",
    ] {
        let window = Window {
            percentage: 50,
            duration: SignedDuration::from_mins(5),
        };
        assert_eq!(
            brake(text),
            Brake {
                budgets: vec![],
                window: Some(window)
            },
            "{text}"
        );
    }
    let text = "[[brake.budgets]]\nmax = \"10%\"\nper = \"rack\"\n[[brake.budgets]]\nmax = 5\n\
                [[brake.budgets]]\nkeep = 64\nper = \"rack\"\n[[brake.budgets]]\nkeep = \"90%\"\n";
    let budgets = [
        (
            budget(Limit::Max(Amount::Percent(10)), Some("rack")),
            "10% per rack",
        ),
        (budget(Limit::Max(Amount::Nodes(5)), None), "5"),
        (
            budget(Limit::Keep(Amount::Nodes(64)), Some("rack")),
            "keep 64 per rack",
        ),
        (budget(Limit::Keep(Amount::Percent(90)), None), "keep 90%"),
    ];
    let read = brake(text).budgets;
    assert_eq!(read, budgets.clone().map(|(budget, _)| budget));
    let shown: Vec<String> = read.iter().map(ToString::to_string).collect();
    assert_eq!(shown, budgets.map(|(_, shown)| shown));
    // An explicitly empty list disables the brake.
    let none = brake("[brake]\nbudgets = []\n");
    assert_eq!((none.budgets.len(), none.window), (0, None));
}

#[test]
fn what_is_wrong_with_the_brake_is_named_with_its_line() {
    let table = [
        (
            "[[brake.budgets]]\nmax = \"ten\"",
            "p:2: brake.budgets[0].max is \"ten\"; write a number of nodes, such as 5, or",
        ),
        (
            "[[brake.budgets]]\nmax = \"0%\"",
            "p:2: brake.budgets[0].max is \"0%\"; write",
        ),
        (
            "[[brake.budgets]]\nmax = \"101%\"",
            "p:2: brake.budgets[0].max is \"101%\"; write",
        ),
        (
            "[[brake.budgets]]\nmax = -1",
            "p:2: brake.budgets[0].max is -1; write",
        ),
        (
            "[[brake.budgets]]\nmax = 1\nper = \"\"",
            "p:3: brake.budgets[0].per: it names the label of a node: ",
        ),
        (
            "[[brake.budgets]]\nkeep = 0",
            "p:2: brake.budgets[0].keep is 0; write a number of nodes, such as 64, or",
        ),
        (
            "[[brake.budgets]]\nkeep = \"all\"",
            "p:2: brake.budgets[0].keep is \"all\"; write",
        ),
        (
            "[[brake.budgets]]\nmax = 1\n[[brake.budgets]]\nmax = 1\nkeep = 1",
            "p:5: brake.budgets[1].keep: a budget has either max or keep; write two budgets",
        ),
        (
            "[[brake.budgets]]\nmax = 1\n[[brake.budgets]]\nper = \"rack\"",
            "p:3: brake.budgets[1]: write max, the most nodes out of service, or keep,",
        ),
        (
            "[[brake.budgets]]\nmin = 1",
            "p:2: unknown key 'brake.budgets[0].min'",
        ),
        (
            "[brake]\nbudget = 1",
            "p:2: unknown key 'brake.budget'; did you mean 'budgets'?",
        ),
        (
            "[circuitBreaker]\npercentage = 0",
            "p:2: circuitBreaker.percentage is 0; write a whole number from 1 to 100",
        ),
        (
            "[circuitBreaker]\npercentage = 150",
            "p:2: circuitBreaker.percentage is 150; write",
        ),
        (
            "[circuitBreaker]\nduration = \"soon\"",
            "p:2: circuitBreaker.duration is \"soon\"; write a duration",
        ),
    ];
    for (text, expected) in table {
        let error = Policy::parse(text, "p").unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}
