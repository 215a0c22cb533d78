//! The page: static files that use the JSON API and nothing else.

/// A file of the page.
#[derive(Clone, Copy)]
pub(super) struct File {
    pub(super) path: &'static str,
    pub(super) content_type: &'static str,
    pub(super) content: &'static str,
}

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

pub(super) const FILES: [File; 6] = [
    File {
        path: "/",
        content_type: "text/html; charset=utf-8",
        content: include_str!("../page/index.html"),
    },
    File {
        path: "/style.css",
        content_type: "text/css; charset=utf-8",
        content: include_str!("../page/style.css"),
    },
    File {
        path: "/page.js",
        content_type: JAVASCRIPT,
        content: include_str!("../page/page.js"),
    },
    File {
        path: "/view.js",
        content_type: JAVASCRIPT,
        content: include_str!("../page/view.js"),
    },
    File {
        path: "/dom.js",
        content_type: JAVASCRIPT,
        content: include_str!("../page/dom.js"),
    },
    File {
        path: "/icon.svg",
        content_type: "image/svg+xml",
        content: include_str!("../page/icon.svg"),
    },
];
