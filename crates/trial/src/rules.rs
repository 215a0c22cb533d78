//! Tools for the rules of the analysis: their text ([`show`]), conclusions about past events
//! ([`conclude`]), likely mistakes ([`lint`]), tests ([`cases`]), and what each group of a rule
//! holds ([`explain`]).

pub mod cases;
pub mod conclude;
pub mod explain;
pub mod lint;
pub mod show;
