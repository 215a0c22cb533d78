//! XML responses of AWS's query APIs (EC2, STS), as a tree of elements. Attributes and namespaces
//! say nothing there.

use quick_xml::Reader;
use quick_xml::escape::resolve_xml_entity;
use quick_xml::events::{BytesRef, Event};

/// Deepest nesting of elements; responses have at most 8.
const MAX_DEPTH: usize = 32;
/// Most elements of a response: a page of instances has fewer than 40 for each.
const MAX_ELEMENTS: usize = 100_000;

/// An element.
#[derive(Debug, Default)]
pub(super) struct Element {
    name: String,
    text: String,
    children: Vec<Element>,
}

/// Reason why a response is not XML that is read here.
#[derive(Debug, thiserror::Error)]
pub(super) enum XmlError {
    /// The text is not well-formed.
    #[error("it is no XML: {0}")]
    Malformed(String),
    /// The document exceeds a limit.
    #[error("it has more than {most} {what}")]
    TooLarge {
        /// Limit.
        most: usize,
        /// Counted things.
        what: &'static str,
    },
}

// === impl Element ===

impl Element {
    /// Parses a document, and returns its root.
    pub(super) fn parse(body: &[u8]) -> Result<Self, XmlError> {
        let malformed = |what: &dyn ToString| XmlError::Malformed(what.to_string());
        let text = std::str::from_utf8(body).map_err(|error| malformed(&error))?;
        let mut reader = Reader::from_str(text);
        // The first is the document itself, whose only child is the root.
        let mut open = vec![Self::default()];
        let mut count = 0;
        loop {
            let event = reader.read_event().map_err(|error| malformed(&error))?;
            let is_empty = matches!(event, Event::Empty(_));
            match event {
                Event::Start(start) | Event::Empty(start) => {
                    count += 1;
                    let limits = [
                        (count, MAX_ELEMENTS, "elements"),
                        (open.len(), MAX_DEPTH, "levels"),
                    ];
                    if let Some((_, most, what)) =
                        limits.into_iter().find(|(is, most, _)| is > most)
                    {
                        return Err(XmlError::TooLarge { most, what });
                    }
                    open.push(Self {
                        name: start.local_name().into_inner().to_owned(),
                        ..Self::default()
                    });
                    if is_empty {
                        close(&mut open);
                    }
                }
                Event::End(_) => close(&mut open),
                Event::Text(text) => add(&mut open, &text.xml10_content()),
                Event::CData(text) => add(&mut open, &text.xml10_content()),
                Event::GeneralRef(reference) => add(&mut open, &resolved(&reference)?),
                // Entities of a document's own are not resolved, so a type has no effect.
                Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::DocType(_) => {}
                Event::Eof => break,
            }
        }
        if open.len() > 1 {
            return Err(malformed(&"it ends within an element"));
        }
        let document = open.pop().unwrap_or_default();
        let root = document.children.into_iter().next();
        root.ok_or_else(|| malformed(&"it has no element"))
    }

    /// Returns the first child of this name.
    pub(super) fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// Returns the element at the end of a path of names, each the first child of this name.
    pub(super) fn at(&self, path: &[&str]) -> Option<&Self> {
        path.iter()
            .try_fold(self, |element, name| element.child(name))
    }

    /// Returns the text of the first child of this name; empty if there is none.
    pub(super) fn text_of(&self, name: &str) -> &str {
        self.child(name).map_or("", |child| child.text.trim())
    }

    /// Returns the elements `item` of the list in the child of this name.
    pub(super) fn items(&self, list: &str) -> impl Iterator<Item = &Self> {
        let list = self.child(list).into_iter();
        list.flat_map(|list| list.children.iter().filter(|child| child.name == "item"))
    }

    /// Returns the name of the element.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// Ends the innermost element: it becomes a child of the one around it.
fn close(open: &mut Vec<Element>) {
    // The document is never closed: the reader refuses an end without a begin.
    let closed = if open.len() > 1 { open.pop() } else { None };
    if let (Some(closed), Some(parent)) = (closed, open.last_mut()) {
        parent.children.push(closed);
    }
}

fn add(open: &mut [Element], text: &str) {
    if let Some(element) = open.last_mut() {
        element.text.push_str(text);
    }
}

/// Returns the text of a reference, such as `&amp;` or `&#10;`.
fn resolved(reference: &BytesRef<'_>) -> Result<String, XmlError> {
    let malformed = |what: String| XmlError::Malformed(what);
    let character = reference.resolve_char_ref();
    if let Some(character) = character.map_err(|error| malformed(error.to_string()))? {
        return Ok(character.to_string());
    }
    let name = reference.xml10_content();
    let known = resolve_xml_entity(&name).map(str::to_owned);
    known.ok_or_else(|| malformed(format!("the entity {name} is not known")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Element, String> {
        Element::parse(text.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_list_is_read_with_its_texts() {
        let root = parse(
            "<?xml version=\"1.0\"?>\n<!-- c --><r xmlns=\"http://x/\"><s>\n<item><a>1 &amp; &#50;</a><b/>\
             </item><x/><item><a><![CDATA[<3>]]></a></item></s><a> z </a></r>\n",
        )
        .unwrap();
        let texts: Vec<&str> = root.items("s").map(|item| item.text_of("a")).collect();
        assert_eq!(texts, ["1 & 2", "<3>"]);
        assert_eq!((root.name(), root.text_of("a")), ("r", "z"));
        assert_eq!(root.at(&["s", "item", "a"]).unwrap().text, "1 & 2");
        assert_eq!((root.text_of("none"), root.items("none").count()), ("", 0));
    }

    #[test]
    fn what_is_no_xml_or_too_much_is_refused() {
        let deep = |depth: usize| "<a>".repeat(depth) + &"</a>".repeat(depth);
        let wide = |count: usize| format!("<a>{}</a>", "<b/>".repeat(count - 1));
        assert!(parse(&deep(MAX_DEPTH)).is_ok() && parse(&wide(MAX_ELEMENTS)).is_ok());
        for (text, says) in [
            (deep(MAX_DEPTH + 1), "32 levels"),
            (wide(MAX_ELEMENTS + 1), "100000 elements"),
            ("<a><b></a>".to_owned(), "no XML"),
            ("<a><b>".to_owned(), "ends within"),
            ("</a>".to_owned(), "no XML"),
            (String::new(), "no element"),
            ("Service Unavailable".to_owned(), "no element"),
            (
                "<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>".to_owned(),
                "entity b",
            ),
            ("<a>&#xffffffff;</a>".to_owned(), "no XML"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        assert!(Element::parse(b"<a>\xff</a>").is_err());
    }
}
