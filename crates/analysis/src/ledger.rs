//! Ledger of GPUs: rows with places, faults and repairs.

#[expect(dead_code, reason = "the ledger uses it with the next commit")]
mod gpu;
#[expect(dead_code, reason = "the ledger uses it with the next commit")]
mod history;
#[expect(dead_code, reason = "the ledger uses it with the next commit")]
mod names;
#[expect(dead_code, reason = "the ledger uses it with the next commit")]
mod score;
