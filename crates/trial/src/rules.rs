//! Tools for the rules of the analysis: their text ([`show`]), and conclusions about past events
//! ([`conclude`]).

pub mod conclude;
pub mod show;
