//! Tools for the rules of the analysis: their text ([`show`]), conclusions about past events
//! ([`conclude`]), and likely mistakes ([`lint`]).

pub mod conclude;
pub mod lint;
pub mod show;
