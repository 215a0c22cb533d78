//! Limits on the number and size of open faults, per node and in total.

use super::*;

#[test]
fn the_number_of_faults_is_bounded_and_fatal_ones_have_precedence() {
    let mut book = FaultBook::default();
    let mut seq = 0;
    for index in 0..MAX_OPEN_FAULTS_PER_NODE + 10 {
        seq += 1;
        book.record(&record(seq, |event| {
            event.is_fatal = false;
            event.error_code = vec![format!("code-{index}")];
        }));
    }
    assert_eq!(book.faults("n1").len(), MAX_OPEN_FAULTS_PER_NODE);
    assert_eq!(book.overflow(), 10);
    book.record(&record(seq + 1, |_| ()));
    assert_eq!(book.faults("n1").len(), MAX_OPEN_FAULTS_PER_NODE);
    assert!(book.faults("n1").iter().any(|fault| fault.event.is_fatal));
}

/// Makes the event as large as an accepted event can be.
fn large(event: &mut HealthEvent) {
    let metadata = (0..128).map(|key| (format!("key-{key}"), "\u{1}".repeat(4_096)));
    event.metadata = metadata.collect();
}

#[test]
fn the_bytes_of_a_nodes_faults_are_bounded_and_fatal_ones_have_precedence() {
    let mut book = FaultBook::default();
    let codes = |seq: u64| (0..64).map(|code| format!("{seq}-{code}")).collect();
    for seq in 1..=24 {
        book.record(&record(seq, |event| {
            event.is_fatal = false;
            event.error_code = codes(seq);
            large(event);
        }));
    }
    let size = |book: &FaultBook| -> usize {
        let faults = book.faults("n1").iter();
        faults.map(|fault| fault.event.encoded_len()).sum()
    };
    let full = size(&book);
    assert!(full <= MAX_FAULT_BYTES_PER_NODE && full > MAX_FAULT_BYTES_PER_NODE / 2);
    assert!(book.overflow() > 0);
    // The saved state is bounded too, whatever the text contains.
    let saved = serde_json::to_vec(&book.share("n1")).unwrap().len();
    assert!(saved < 12 * MAX_FAULT_BYTES_PER_NODE, "{saved}");

    // A fault that gets graver and larger evicts others, one after the other.
    let open: Vec<String> = (book.faults("n1").iter())
        .map(|fault| fault.code.clone())
        .collect();
    let graver = |seq: u64, code: &String| {
        record(seq, |event| {
            event.error_code = vec![code.clone()];
            large(event);
            event.metadata.insert("more".into(), "x".repeat(4_096));
        })
    };
    let changes = book.record(&graver(25, &open[0]));
    assert!(
        matches!(changes.as_slice(), [FaultChange::Escalated(_)]),
        "{changes:?}"
    );
    let changes = book.record(&record(26, large));
    assert!(
        matches!(changes.as_slice(), [FaultChange::Opened(_)]),
        "{changes:?}"
    );
    let codes: Vec<&str> = (book.faults("n1").iter())
        .map(|fault| fault.code.as_str())
        .collect();
    assert!(
        codes.contains(&open[0].as_str()) && codes.contains(&"79"),
        "{codes:?}"
    );
    assert!(size(&book) <= MAX_FAULT_BYTES_PER_NODE);
    // Without room no fault is opened; open faults are still refreshed.
    let count = book.faults("n1").len();
    for seq in 27..40 {
        book.record(&record(seq, |event| {
            event.error_code = vec![seq.to_string()];
            large(event);
        }));
    }
    assert!(book.faults("n1").iter().all(|fault| fault.event.is_fatal));
    assert!(book.faults("n1").len() <= count && size(&book) <= MAX_FAULT_BYTES_PER_NODE);
    let changes = book.record(&record(40, |event| {
        event.recommended_action = 15;
        large(event);
        event.metadata.insert("more".into(), "x".repeat(1 << 20));
    }));
    assert!(
        matches!(changes.as_slice(), [FaultChange::Refreshed(_)]),
        "{changes:?}"
    );
    assert!(size(&book) <= MAX_FAULT_BYTES_PER_NODE);
}

#[test]
fn invented_node_names_cannot_fill_the_memory() {
    let mut book = FaultBook::default();
    for seq in 1..=MAX_FAULTY_NODES as u64 + 5 {
        book.record(&record(seq, |event| {
            event.node_name = format!("invented-{seq}");
        }));
    }
    assert_eq!(
        (book.nodes().count(), book.overflow()),
        (MAX_FAULTY_NODES, 5)
    );
    // Known nodes are still recorded.
    let changes = book.record(&record(30_000, |event| {
        event.node_name = "invented-1".into();
        event.error_code = vec!["48".into()];
    }));
    assert!(
        matches!(changes.as_slice(), [FaultChange::Opened(_)]),
        "{changes:?}"
    );
}
