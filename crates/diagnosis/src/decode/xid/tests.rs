use super::*;

/// Process names that programs choose, and their positions.
#[test]
fn the_name_of_a_process_ends_where_the_message_begins() {
    let report = "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000)";
    let advice = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)";
    let ch = "Ch 00000008, intr 00000000";
    let nobody = "nobody knows it, Ch 00000008, this";
    for (code, text, pid, process, message) in [
        (
            43,
            "pid=7, name=a, b, Ch 00000008, intr 00000000",
            Some(7),
            Some("a, b"),
            ch,
        ),
        (
            43,
            "pid=7, name=a, b c, d, Ch 00000008, intr 00000000",
            Some(7),
            Some("a, b c, d"),
            ch,
        ),
        (
            43,
            "pid=7, name=, , Ch 00000008, intr 00000000",
            Some(7),
            Some(", "),
            ch,
        ),
        (
            43,
            "pid=7, name='<unknown>', Ch 00000008, intr 00000000",
            Some(7),
            None,
            ch,
        ),
        (
            13,
            "pid=7, name=a, b, Graphics Exception",
            Some(7),
            Some("a, b"),
            "Graphics Exception",
        ),
        (
            149,
            &format!("pid=7, name=a, b, {report}"),
            Some(7),
            Some("a, b"),
            report,
        ),
        (
            149,
            &format!("pid=7, name=a, Fatal, {report}"),
            Some(7),
            Some("a, Fatal"),
            report,
        ),
        (
            149,
            &format!("pid=7, name=a guest, of the second rack, {report}"),
            Some(7),
            Some("a guest, of the second rack"),
            report,
        ),
        (
            154,
            &format!("pid=7, name=a, b, {advice}"),
            Some(7),
            Some("a, b"),
            advice,
        ),
        // Longer than any process name, so what follows is an unknown message.
        (
            43,
            &format!("pid=7, name=a, {nobody}"),
            Some(7),
            Some("a"),
            nobody,
        ),
        (
            149,
            "pid=7, name=a, b, nobody knows",
            Some(7),
            Some("a"),
            "b, nobody knows",
        ),
        // Process after the message.
        (
            43,
            "Ch 00000008, pid=1234, name=python",
            Some(1234),
            Some("python"),
            "Ch 00000008, pid=1234, name=python",
        ),
        (
            43,
            "Ch 8, pid='<unknown>', name=<unknown>",
            None,
            None,
            "Ch 8, pid='<unknown>', name=<unknown>",
        ),
        (43, "Ch 8, pid=12", Some(12), None, "Ch 8, pid=12"),
        (
            43,
            "Ch 8, pid=12, name=my job,v2",
            Some(12),
            Some("my job,v2"),
            "Ch 8, pid=12, name=my job,v2",
        ),
        (43, "Ch 8, name=python", None, None, "Ch 8, name=python"),
    ] {
        let text = format!("Xid (PCI:0000:b3:00): {code}, {text}");
        let xid = line(text.as_bytes()).expect(&text);
        assert_eq!(
            (xid.pid, xid.process, xid.message),
            (pid, process, message),
            "{text}"
        );
        assert_eq!(xid.nvlink5().is_some(), message == report, "{text}");
    }
}
