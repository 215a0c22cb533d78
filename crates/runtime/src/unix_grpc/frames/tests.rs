//! Tests with a client and a server of another HPACK implementation on the two sides of the
//! filter; the server must read what the client meant.

mod peers;

use httlib_hpack::Encoder;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use peers::{Block, Client, Read, expected, serve};

const END_STREAM: u8 = 0x1;
const DATA: u8 = 0x0;
const SETTINGS: u8 = 0x4;

const HUFFMAN: u8 = Encoder::HUFFMAN_NAME | Encoder::HUFFMAN_VALUE;
const INDEXED: u8 = Encoder::WITH_INDEXING | Encoder::BEST_FORMAT;

/// Filters in reads of `read_size` octets.
fn repaired(client: &[u8], read_size: usize) -> Vec<u8> {
    let (mut repair, mut octets) = (Repair::default(), client.to_vec());
    for read in octets.chunks_mut(read_size) {
        repair.pass(read).unwrap();
    }
    octets
}

/// Returns the fields that gRPC's C core sends, with the given authority.
fn grpc_call(stream: u32, authority: &str, flags: u8) -> Block {
    let fields = [
        (":scheme", "http"),
        (":method", "POST"),
        (":authority", authority),
        (
            ":path",
            "/datamodels.PlatformConnector/HealthEventOccurredV1",
        ),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        (
            "user-agent",
            "grpc-python/1.82.1 grpc-c/54.0.0 (linux; chttp2)",
        ),
        ("grpc-accept-encoding", "identity, deflate, gzip"),
    ];
    let fields = fields
        .map(|(name, value)| (name.to_owned(), value.to_owned(), flags))
        .to_vec();
    Block {
        stream,
        fields,
        ..Block::default()
    }
}

/// Authority as C core builds it from a socket path.
const C_CORE_AUTHORITY: &str = "%2Fvar%2Frun%2Fnvsentinel.sock";

/// [`C_CORE_AUTHORITY`] as the server reads it.
const REPAIRED_AUTHORITY: &str = ".2Fvar.2Frun.2Fnvsentinel.sock";

#[test]
fn calls_of_c_core_over_one_connection() {
    for flags in [
        0,
        INDEXED,
        HUFFMAN,
        INDEXED | HUFFMAN,
        Encoder::NEVER_INDEXED,
    ] {
        let mut client = Client::new();
        let mut wanted = Vec::new();
        client.frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]);
        wanted.push(Read::Frame {
            kind: SETTINGS,
            flags: 0,
            stream: 0,
            payload: vec![0, 4, 0, 1, 0, 0],
        });
        for stream in [1, 3, 5, 7] {
            let call = grpc_call(stream, C_CORE_AUTHORITY, flags);
            client.block(&call);
            wanted.push(expected(&call));
            client.frame(DATA, END_STREAM, stream, b"message");
            wanted.push(Read::Frame {
                kind: DATA,
                flags: END_STREAM,
                stream,
                payload: b"message".to_vec(),
            });
        }
        assert_eq!(serve(&repaired(&client.sent, usize::MAX)), wanted);
        assert_eq!(serve(&repaired(&client.sent, 1)), wanted);
    }
}

#[test]
fn authorities() {
    // As sent, as read, and as read if sent in Huffman code.
    let cases = [
        (C_CORE_AUTHORITY, REPAIRED_AUTHORITY, REPAIRED_AUTHORITY),
        ("%2Fa:b:c[1]", ".2Fa-b-c-1-", ".2Fa:b:c[1]"),
        ("a b", "a-b", "a-b"),
        ("/run/x.sock", "3run3x.sock", "3run3x.sock"),
        ("μ", "--", "μ"),
        ("", "", ""),
        ("localhost", "localhost", "localhost"),
        ("n-1.example:443", "n-1.example:443", "n-1.example:443"),
        ("[::1]:80", "[::1]:80", "[::1]:80"),
    ];
    for (sent, plain, huffman) in cases {
        for (flags, read) in [
            (0, plain),
            (INDEXED, plain),
            (HUFFMAN, huffman),
            (INDEXED | HUFFMAN, huffman),
        ] {
            let mut client = Client::new();
            client.block(&grpc_call(1, sent, flags));
            let served = serve(&repaired(&client.sent, usize::MAX));
            let [Read::Block { fields, .. }] = &served[..] else {
                panic!("{served:?}")
            };
            assert_eq!(fields[2].1, read, "sent as {sent:?}");
        }
    }
}

#[test]
fn padding_priority_and_continuation_together() {
    for fragment in [0, 1, 2, 7, 100] {
        let mut client = Client::new();
        let call = Block {
            padding: Some(255),
            priority: Some([0x80, 0, 0, 3, 200]),
            end_stream: true,
            fragment,
            ..grpc_call(5, C_CORE_AUTHORITY, INDEXED | HUFFMAN)
        };
        client.block(&call);
        let trailers = Block {
            stream: 5,
            padding: Some(0),
            fields: vec![("grpc-status".to_owned(), "0".to_owned(), INDEXED)],
            fragment,
            ..Block::default()
        };
        client.block(&trailers);
        let wanted = vec![expected(&call), expected(&trailers)];
        assert_eq!(
            serve(&repaired(&client.sent, usize::MAX)),
            wanted,
            "by {fragment}"
        );
        assert_eq!(serve(&repaired(&client.sent, 1)), wanted, "by {fragment}");
    }
}

#[test]
fn other_frames_pass_unchanged() {
    let mut client = Client::new();
    for kind in [DATA, 0x2, 0x3, SETTINGS, 0x6, 0x7, 0x8, 0xb0] {
        client.frame(kind, 0xff, 0x8000_0001, b"payload");
        client.frame(kind, 0, 0, b"");
    }
    client.frame(DATA, 0, 1, &vec![7; 100_000]);
    assert_eq!(repaired(&client.sent, usize::MAX), client.sent);
    assert_eq!(repaired(&client.sent, 1000), client.sent);
}

#[test]
fn a_call_has_begun_when_its_fields_have_come() {
    let mut client = Client::new();
    client.frame(HEADERS, 0, 1, &[0x83]);
    let mut repair = Repair::default();
    repair.pass(&mut client.sent.clone()).unwrap();
    assert!(!repair.has_seen_a_call());
    let so_far = client.sent.len();
    client.frame(CONTINUATION, END_HEADERS, 1, &[]);
    repair.pass(&mut client.sent[so_far..]).unwrap();
    assert!(repair.has_seen_a_call());
}

#[test]
fn who_begins_otherwise_is_no_client() {
    for client in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r",
    ] {
        assert_eq!(Repair::default().pass(&mut client.to_vec()), Err(NoPreface));
    }
}

fn field() -> impl Strategy<Value = (String, String, u8)> {
    let known = prop_oneof![
        Just((":authority".to_owned(), C_CORE_AUTHORITY.to_owned())),
        Just((":authority".to_owned(), "localhost:50051".to_owned())),
        Just((
            ":path".to_owned(),
            "/datamodels.PlatformConnector/HealthEventOccurredV1".to_owned()
        )),
        Just((":method".to_owned(), "POST".to_owned())),
        Just(("te".to_owned(), "trailers".to_owned())),
        ("[a-d]", "[x-z]{0,3}"),
        ("[a-z-]{1,20}", "\\PC{0,200}"),
        ("x-large", "[a-z]{900,1500}"),
    ];
    let flags = prop_oneof![
        3 => Just(INDEXED),
        3 => Just(INDEXED | HUFFMAN),
        1 => Just(HUFFMAN),
        1 => Just(0),
        1 => Just(Encoder::NEVER_INDEXED | HUFFMAN),
    ];
    (known, flags).prop_map(|((name, value), flags)| (name, value, flags))
}

fn block() -> impl Strategy<Value = Block> {
    (
        1..1000u32,
        any::<bool>(),
        vec(field(), 0..12),
        any::<Option<u8>>(),
        any::<Option<[u8; 5]>>(),
        prop_oneof![4 => Just(None), 1 => (0..=4096u32).prop_map(Some)],
        prop_oneof![Just(0), 1..40usize],
    )
        .prop_map(
            |(stream, end_stream, fields, padding, priority, table_size, fragment)| Block {
                stream,
                end_stream,
                fields,
                padding,
                priority,
                table_size,
                fragment,
            },
        )
}

proptest! {
    #[test]
    fn valid_connections_mean_the_same_after_the_repair(
        blocks in vec((block(), vec(any::<u8>(), 0..100)), 1..8),
        read_size in prop_oneof![Just(usize::MAX), 1..200usize],
    ) {
        let mut client = Client::new();
        let mut wanted = Vec::new();
        for (block, message) in blocks {
            client.block(&block);
            wanted.push(expected(&block));
            client.frame(DATA, 0, block.stream, &message);
            wanted.push(Read::Frame { kind: DATA, flags: 0, stream: block.stream, payload: message });
        }
        prop_assert_eq!(serve(&repaired(&client.sent, read_size)), wanted);
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in vec(any::<u8>(), 0..2000)) {
        crate::unix_grpc::fuzz_rewrite(&bytes);
    }

    /// Like the test above, but with whole frames, so that header blocks are reached.
    #[test]
    fn arbitrary_frames_do_no_harm(
        frames in vec((
            prop_oneof![Just(HEADERS), Just(HEADERS), Just(CONTINUATION), Just(DATA), any::<u8>()],
            prop_oneof![Just(END_HEADERS), Just(0), any::<u8>()],
            1..3u32,
            vec(prop_oneof![any::<u8>(), 0x80..0xc8u8, Just(0x40), 0..5u8], 0..60),
        ), 0..12),
    ) {
        let mut client = Client::new();
        for (kind, flags, stream, payload) in frames {
            client.frame(kind, flags, stream, &payload);
        }
        crate::unix_grpc::fuzz_rewrite(&client.sent[PREFACE.len()..]);
    }

    /// A valid connection with some octets changed.
    #[test]
    fn damaged_connections_do_no_harm(
        blocks in vec(block(), 1..5),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let mut client = Client::new();
        for block in &blocks {
            client.block(block);
        }
        let sent = &mut client.sent[PREFACE.len()..];
        for (position, octet) in damage {
            sent[position.index(sent.len())] = octet;
        }
        crate::unix_grpc::fuzz_rewrite(sent);
    }
}
