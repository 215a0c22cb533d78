//! Splits a stream of text into JSON objects: a list over many lines, as of `events -o json`, or one
//! object per line, as of `events -f -o json`.

use std::io::{self, BufRead};

/// Longest object (bytes). An accepted event is shorter, see `model/event.rs`.
const LONGEST: usize = 4 * 1024 * 1024;

/// Reader of the objects of a stream.
pub(super) struct Objects<R> {
    reader: R,
    line: u64,
    /// Line of the beginning of an open list.
    list: Option<u64>,
}

/// An object of the stream, or an error in its place.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StreamObject {
    /// Line of the beginning, from 1.
    pub(super) line: u64,
    /// Text of the object, or the error.
    pub(super) text: Result<Vec<u8>, &'static str>,
}

/// An object that is not complete yet.
#[derive(Default)]
struct Begun {
    text: Vec<u8>,
    line: u64,
    depth: usize,
    in_string: bool,
    escaped: bool,
    too_long: bool,
}

// === impl Objects ===

impl<R: BufRead> Objects<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            line: 1,
            list: None,
        }
    }

    /// Returns the number of the current line.
    pub(super) fn line(&self) -> u64 {
        self.line
    }

    /// Reads the next object; `None` at the end.
    pub(super) fn next(&mut self) -> io::Result<Option<StreamObject>> {
        let mut begun: Option<Begun> = None;
        let mut stray: Option<u64> = None;
        let mut at_line_start = false;
        loop {
            let available = self.reader.fill_buf()?;
            if available.is_empty() {
                let cut = begun.map(|begun| (begun.line, "ends in the middle of an object"));
                let stray = stray.map(|line| (line, STRAY));
                let open = self
                    .list
                    .take()
                    .map(|line| (line, "begins a list without an end"));
                let left = cut.or(stray).or(open);
                return Ok(left.map(|(line, what)| StreamObject {
                    line,
                    text: Err(what),
                }));
            }
            let mut used = 0;
            let mut done = None;
            for byte in available {
                // Lists are indented: an object at the beginning of a line inside of another one shows
                // that the earlier one was cut off. The same is true for a line end in a string.
                let cut = match &begun {
                    Some(_) if at_line_start && *byte == b'{' => true,
                    Some(begun) => begun.in_string && *byte == b'\n',
                    None => false,
                };
                if cut && let Some(begun) = begun.take() {
                    done = Some(StreamObject {
                        line: begun.line,
                        text: Err("is cut off"),
                    });
                    break;
                }
                used += 1;
                if *byte == b'\n' {
                    self.line += 1;
                }
                at_line_start = *byte == b'\n';
                match &mut begun {
                    Some(open) => {
                        if open.push(*byte)
                            && let Some(whole) = begun.take()
                        {
                            let text = if whole.too_long {
                                Err("is longer than 4 MiB")
                            } else {
                                Ok(whole.text)
                            };
                            done = Some(StreamObject {
                                line: whole.line,
                                text,
                            });
                            break;
                        }
                    }
                    None if *byte == b'{' => {
                        if let Some(line) = stray.take() {
                            // Report the stray text first; the next call reads the object.
                            used -= 1;
                            done = Some(StreamObject {
                                line,
                                text: Err(STRAY),
                            });
                            break;
                        }
                        let mut open = Begun {
                            line: self.line,
                            ..Begun::default()
                        };
                        open.push(*byte);
                        begun = Some(open);
                    }
                    None if *byte == b'[' => self.list = Some(self.line),
                    None if *byte == b']' => self.list = None,
                    None if matches!(byte, b',' | b' ' | b'\t' | b'\r' | b'\n') => {}
                    None => {
                        stray.get_or_insert(self.line);
                    }
                }
            }
            self.reader.consume(used);
            if done.is_some() {
                return Ok(done);
            }
        }
    }
}

const STRAY: &str = "is not a JSON object";

// === impl Begun ===

impl Begun {
    /// Adds a byte of the object. Returns true if it is the last one.
    fn push(&mut self, byte: u8) -> bool {
        if self.text.len() < LONGEST {
            self.text.push(byte);
        } else {
            self.too_long = true;
        }
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' => self.depth += 1,
            b'}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.depth == 0
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    /// Returns `line:text`, or `line!error`, of all objects, which must not depend on the size of reads.
    fn all(text: &str) -> Vec<String> {
        let read = |size| {
            let mut objects = Objects::new(BufReader::with_capacity(size, text.as_bytes()));
            let mut found = Vec::new();
            while let Some(object) = objects.next().unwrap() {
                found.push(match object.text {
                    Ok(text) => format!("{}:{}", object.line, String::from_utf8(text).unwrap()),
                    Err(what) => format!("{}!{what}", object.line),
                });
            }
            found
        };
        let whole = read(8_192);
        assert_eq!(whole, read(1), "{text}");
        whole
    }

    #[test]
    fn objects_are_found_in_lists_and_lines() {
        for (text, expected) in [
            ("", &[][..]),
            ("[]\n", &[]),
            (
                "{\"a\":1}\n{\"b\":{\"c\":2}}\n",
                &["1:{\"a\":1}", "2:{\"b\":{\"c\":2}}"],
            ),
            ("[{\"a\":1},{\"b\":2}]", &["1:{\"a\":1}", "1:{\"b\":2}"]),
            (
                "[\n  {\n    \"a\": 1\n  }\n]\n",
                &["2:{\n    \"a\": 1\n  }"],
            ),
            ("{\"a\":\"}{\\\"\"}", &["1:{\"a\":\"}{\\\"\"}"]),
        ] {
            assert_eq!(all(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_object_is_named_and_the_rest_is_read() {
        for (text, expected) in [
            (
                "nonsense\n{\"a\":1}\n",
                &["1!is not a JSON object", "2:{\"a\":1}"][..],
            ),
            (
                "{\"a\":1}\nrest",
                &["1:{\"a\":1}", "2!is not a JSON object"],
            ),
            (
                "{\"a\":\"cut o\n{\"b\":2}\n",
                &["1!is cut off", "2:{\"b\":2}"],
            ),
            ("{\"a\":{\n{\"b\":2}\n", &["1!is cut off", "2:{\"b\":2}"]),
            ("{\"a\":", &["1!ends in the middle of an object"]),
            ("[", &["1!begins a list without an end"]),
            (
                "[]\n[\n  {\"a\":1},\n",
                &["3:{\"a\":1}", "2!begins a list without an end"],
            ),
        ] {
            assert_eq!(all(text), expected, "{text}");
        }
    }
}
