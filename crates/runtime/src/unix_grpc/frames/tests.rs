//! A client and a server written with another HPACK implementation stand on the two sides
//! of the rewriter; what the server reads must be what the client meant.

mod peers;

use httlib_hpack::{Decoder, Encoder};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use peers::{Block, Client, Read, expected, serve};

const DATA: u8 = 0x0;
const SETTINGS: u8 = 0x4;

const HUFFMAN: u8 = Encoder::HUFFMAN_NAME | Encoder::HUFFMAN_VALUE;
const INDEXED: u8 = Encoder::WITH_INDEXING | Encoder::BEST_FORMAT;

/// Rewrites in reads of `read_size` octets into outputs of `room` octets.
fn rewrite(client: &[u8], read_size: usize, room: usize) -> Result<Vec<u8>, RewriteError> {
    let mut rewriter = Rewriter::default();
    let mut output = Vec::new();
    for mut read in client.chunks(read_size) {
        loop {
            let before = output.len();
            rewriter.rewrite(&mut read, &mut (&mut output).limit(room))?;
            if output.len() - before < room {
                assert!(read.is_empty());
                break;
            }
        }
    }
    Ok(output)
}

fn rewrite_at_once(client: &[u8]) -> Result<Vec<u8>, RewriteError> {
    rewrite(client, client.len(), usize::MAX)
}

/// The fields that gRPC's C core sends, with the given authority.
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

/// An authority as C core builds it from a socket path.
const C_CORE_AUTHORITY: &str = "%2Fvar%2Frun%2Fnvsentinel.sock";

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
        let Read::Block { fields, .. } = &wanted[7] else {
            panic!("the fourth call")
        };
        assert_eq!(fields[2], (":authority".to_owned(), "localhost".to_owned()));
        assert_eq!(serve(&rewrite_at_once(&client.sent).unwrap()), wanted);
        // Byte by byte, into outputs of one byte.
        assert_eq!(serve(&rewrite(&client.sent, 1, 1).unwrap()), wanted);
    }
}

#[test]
fn authorities() {
    let cases = [
        (C_CORE_AUTHORITY, "localhost"),
        ("", "localhost"),
        ("a b", "localhost"),
        ("/run/x.sock", "localhost"),
        ("localhost", "localhost"),
        ("node-1.example:443", "node-1.example:443"),
        ("[::1]:80", "[::1]:80"),
    ];
    for (sent, read) in cases {
        let mut client = Client::new();
        client.block(&grpc_call(1, sent, INDEXED | HUFFMAN));
        let served = serve(&rewrite_at_once(&client.sent).unwrap());
        let [Read::Block { fields, .. }] = &served[..] else {
            panic!("{served:?}")
        };
        assert_eq!(fields[2].1, read, "sent as {sent:?}");
    }
}

#[test]
fn octets_that_are_no_text_make_no_authority() {
    let mut client = Client::new();
    let mut block = vec![0x01, 2]; // literal, name of index 1
    block.extend([0xff, 0xfe]);
    client.frame(HEADERS, END_HEADERS, 1, &block);
    let served = serve(&rewrite_at_once(&client.sent).unwrap());
    let [Read::Block { fields, .. }] = &served[..] else {
        panic!("{served:?}")
    };
    assert_eq!(fields[0].1, "localhost");
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
            serve(&rewrite_at_once(&client.sent).unwrap()),
            wanted,
            "by {fragment}"
        );
        assert_eq!(
            serve(&rewrite(&client.sent, 1, 5).unwrap()),
            wanted,
            "by {fragment}"
        );
    }
}

#[test]
fn blocks_without_fields_stay_frames() {
    let mut client = Client::new();
    let empty = Block {
        stream: 1,
        priority: Some([0, 0, 0, 0, 1]),
        ..Block::default()
    };
    let bare = Block {
        stream: 3,
        end_stream: true,
        ..Block::default()
    };
    client.block(&empty);
    client.block(&bare);
    let wanted = vec![expected(&empty), expected(&bare)];
    assert_eq!(serve(&rewrite_at_once(&client.sent).unwrap()), wanted);
}

#[test]
fn a_block_that_grows_is_split_into_continuations() {
    let mut client = Client::new();
    let mut call = grpc_call(1, C_CORE_AUTHORITY, INDEXED);
    call.priority = Some([0, 0, 0, 0, 16]);
    call.fields
        .push(("x-large".to_owned(), "v".repeat(3000), INDEXED));
    client.block(&call);
    // The second time the large field is one octet on the wire, ten times over.
    call.stream = 3;
    for _ in 0..9 {
        call.fields
            .push(("x-large".to_owned(), "v".repeat(3000), INDEXED));
    }
    let before = client.sent.len();
    client.block(&call);
    assert!(client.sent.len() - before < 100);
    let output = rewrite_at_once(&client.sent).unwrap();
    // `serve` checks the size of each frame.
    assert_eq!(serve(&output)[1], expected(&call));
    assert_eq!(rewrite(&client.sent, 10, 1000), Ok(output));
}

#[test]
fn never_indexed_fields_stay_so() {
    let mut client = Client::new();
    let secret = (
        "authorization".to_owned(),
        "secret".to_owned(),
        Encoder::NEVER_INDEXED,
    );
    client.block(&Block {
        stream: 1,
        fields: vec![secret],
        ..Block::default()
    });
    let output = rewrite_at_once(&client.sent).unwrap();
    let mut block = output[PREFACE.len() + HEAD_LENGTH..].to_vec();
    let mut fields = Vec::new();
    Decoder::default().decode(&mut block, &mut fields).unwrap();
    let wanted = (
        b"authorization".to_vec(),
        b"secret".to_vec(),
        Decoder::NEVER_INDEXED,
    );
    assert_eq!(fields, [wanted]);
}

#[test]
fn table_size_updates_do_not_reach_the_server() {
    let mut client = Client::new();
    let mut wanted = Vec::new();
    for (stream, table_size) in [
        (1, None),
        (3, Some(0)),
        (5, Some(64)),
        (7, Some(4096)),
        (9, None),
    ] {
        let call = Block {
            table_size,
            ..grpc_call(stream, C_CORE_AUTHORITY, INDEXED | HUFFMAN)
        };
        client.block(&call);
        wanted.push(expected(&call));
    }
    // A server without a table refuses every size above 0.
    assert_eq!(serve(&rewrite_at_once(&client.sent).unwrap()), wanted);
}

#[test]
fn other_frames_pass_unchanged() {
    let mut client = Client::new();
    for kind in [DATA, 0x2, 0x3, SETTINGS, 0x6, 0x7, 0x8, 0xb0] {
        client.frame(kind, 0xff, 0x8000_0001, b"payload");
        client.frame(kind, 0, 0, b"");
    }
    client.frame(DATA, 0, 1, &vec![7; 100_000]);
    assert_eq!(rewrite_at_once(&client.sent), Ok(client.sent.clone()));
    assert_eq!(rewrite(&client.sent, 1000, 333), Ok(client.sent));
}

#[test]
fn malformed_streams_end() {
    type Send = fn(&mut Client);
    let cases: [(&str, Send, RewriteError); 12] = [
        (
            "padding over payload",
            |c| c.frame(HEADERS, 0xc, 1, &[5, 0x82, 0, 0]),
            RewriteError::HeadersTooShort,
        ),
        (
            "no room for padding",
            |c| c.frame(HEADERS, 0xc, 1, &[]),
            RewriteError::HeadersTooShort,
        ),
        (
            "no room for priority",
            |c| c.frame(HEADERS, 0x24, 1, &[0; 4]),
            RewriteError::HeadersTooShort,
        ),
        (
            "push promise",
            |c| c.frame(PUSH_PROMISE, 4, 1, &[0, 0, 0, 2, 0x82]),
            RewriteError::PushPromise,
        ),
        (
            "data in a block",
            |c| {
                c.frame(HEADERS, 0, 1, &[0x82]);
                c.frame(DATA, 0, 1, &[]);
            },
            RewriteError::BrokenBlock { kind: DATA },
        ),
        (
            "headers in a block",
            |c| {
                c.frame(HEADERS, 0, 1, &[0x82]);
                c.frame(HEADERS, 4, 1, &[0x82]);
            },
            RewriteError::BrokenBlock { kind: HEADERS },
        ),
        (
            "continuation of another stream",
            |c| {
                c.frame(HEADERS, 0, 1, &[0x82]);
                c.frame(CONTINUATION, 4, 3, &[0x82]);
            },
            RewriteError::BrokenBlock { kind: CONTINUATION },
        ),
        (
            "truncated field",
            |c| c.frame(HEADERS, 4, 1, &[0x40, 10, b'a']),
            HpackError::Truncated.into(),
        ),
        (
            "block over the limit",
            |c| c.frame(HEADERS, 4, 1, &vec![0x82; 65_528]),
            RewriteError::BlockTooLarge,
        ),
        (
            "endless empty continuations",
            |c| {
                c.frame(HEADERS, 0, 1, &[]);
                for _ in 0..7_282 {
                    c.frame(CONTINUATION, 0, 1, &[]);
                }
            },
            RewriteError::BlockTooLarge,
        ),
        (
            "list over the limit",
            |c| {
                // One field of 3000 octets, remembered, then thirty times by its index.
                let mut block = vec![0x40, 1, b'a', 0x7f, 0xb9, 0x16];
                block.extend(vec![b'v'; 3000]);
                block.extend([0xbe; 30]);
                c.frame(HEADERS, 4, 1, &block);
            },
            RewriteError::ListTooLarge,
        ),
        (
            "table over the limit",
            |c| c.frame(HEADERS, 4, 1, &[0x3f, 0xe2, 0x1f]),
            HpackError::TableTooLarge(4097).into(),
        ),
    ];
    for (what, send, error) in cases {
        let mut client = Client::new();
        send(&mut client);
        assert_eq!(rewrite_at_once(&client.sent), Err(error), "{what}");
        assert_eq!(rewrite(&client.sent, 1, 1), Err(error), "{what}");
    }
    for client in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r",
    ] {
        assert_eq!(rewrite_at_once(client), Err(RewriteError::NoPreface));
    }
}

#[test]
fn an_unexpected_continuation_is_left_to_the_server() {
    let mut client = Client::new();
    client.frame(CONTINUATION, 4, 1, &[0x82]);
    assert_eq!(rewrite_at_once(&client.sent), Ok(client.sent));
}

#[test]
fn output_before_an_error_comes_out_and_the_error_stays() {
    let mut client = Client::new();
    client.frame(SETTINGS, 0, 0, &[]);
    let good = client.sent.clone();
    // Remembers one field and refers to a second one: decoded again, it would exist.
    client.frame(HEADERS, 4, 1, &[0x40, 1, b'a', 1, b'b', 0xbf]);
    client.frame(SETTINGS, 0, 0, &[]);
    let mut rewriter = Rewriter::default();
    let mut output = Vec::new();
    let mut input = &client.sent[..];
    for _ in 0..2 {
        let result = rewriter.rewrite(&mut input, &mut output);
        assert_eq!(result, Err(HpackError::UnknownIndex(63).into()));
    }
    assert_eq!(output, good);
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
    fn valid_connections_mean_the_same_after_rewriting(
        blocks in vec((block(), vec(any::<u8>(), 0..100)), 1..8),
        read_size in prop_oneof![Just(usize::MAX), 1..200usize],
        room in prop_oneof![Just(usize::MAX), 1..200usize],
    ) {
        let mut client = Client::new();
        let mut wanted = Vec::new();
        for (block, message) in blocks {
            client.block(&block);
            wanted.push(expected(&block));
            client.frame(DATA, 0, block.stream, &message);
            wanted.push(Read::Frame { kind: DATA, flags: 0, stream: block.stream, payload: message });
        }
        let read_size = read_size.min(client.sent.len());
        prop_assert_eq!(serve(&rewrite(&client.sent, read_size, room).unwrap()), wanted);
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in vec(any::<u8>(), 0..2000)) {
        crate::unix_grpc::fuzz_rewrite(&bytes);
    }

    /// As above, but with whole frames, so that header blocks are reached.
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
