//! What of something bounded a user of this machine may have, so that no user takes it from
//! the others.
//!
//! The Unix socket is open to every user: checks of workloads run as the user of the
//! workload. Those who administer the machine, whose monitors matter most, may have all of
//! it. All others together leave them half, and one of those takes at most an eighth.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The part of the whole that all users may have together who do not administer the machine.
pub const OTHERS: usize = 2;
/// The part of the whole that one of them may have: several users have to come together to take
/// the room of all.
pub const ONE: usize = 8;

/// Something of which there is a certain amount.
#[derive(Debug)]
pub struct Shares {
    total: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    others: usize,
    /// Only of those who have something.
    by_user: HashMap<u32, usize>,
}

/// A part of it, until it is dropped.
#[derive(Debug)]
pub struct Share {
    of: Arc<Shares>,
    user: Option<u32>,
    amount: usize,
}

// === impl Shares ===

impl Shares {
    /// Returns shares of so much in all.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            taken: Mutex::default(),
        })
    }

    /// Takes `amount` for `user`, the uid of a local process, or for somebody who may have
    /// all; returns `None` where there is not so much left for that one.
    pub fn take(self: &Arc<Self>, user: Option<u32>, amount: usize) -> Option<Share> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if amount > self.total - taken.all {
            return None;
        }
        if let Some(user) = user {
            let own = taken.by_user.get(&user).copied().unwrap_or(0);
            if amount > (self.total / ONE).saturating_sub(own)
                || amount > (self.total / OTHERS).saturating_sub(taken.others)
            {
                return None;
            }
            taken.others += amount;
            taken.by_user.insert(user, own + amount);
        }
        taken.all += amount;
        drop(taken);
        Some(Share {
            of: Arc::clone(self),
            user,
            amount,
        })
    }
}

// === impl Share ===

impl Drop for Share {
    fn drop(&mut self) {
        let taken = &mut *self.of.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= self.amount;
        let Some(user) = self.user else { return };
        taken.others -= self.amount;
        if let Some(own) = taken.by_user.get_mut(&user) {
            *own -= self.amount;
            if *own == 0 {
                taken.by_user.remove(&user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes one by one until there is no more.
    fn all(shares: &Arc<Shares>, user: Option<u32>) -> Vec<Share> {
        std::iter::from_fn(|| shares.take(user, 1)).collect()
    }

    #[test]
    fn no_user_takes_it_from_the_others() {
        let shares = Shares::new(64);
        let one = all(&shares, Some(1000));
        assert_eq!(one.len(), 8);
        let others: Vec<_> = (1001..1100)
            .flat_map(|user| all(&shares, Some(user)))
            .collect();
        assert_eq!(others.len(), 24);
        assert!(shares.take(Some(2000), 1).is_none());
        // What is left is for the others; root of a container is none of them.
        assert!(shares.take(Some(0), 1).is_none());
        let left = shares.take(None, 30).unwrap();
        assert!(shares.take(None, 3).is_none());
        assert_eq!(all(&shares, None).len(), 2);
        drop((one, others, left));
        let taken = shares.taken.lock().unwrap();
        assert_eq!((taken.all, taken.others, taken.by_user.len()), (0, 0, 0));
        drop(taken);
        // Nobody else there: one user has an eighth.
        assert!(shares.take(None, 65).is_none());
        assert!(shares.take(None, 64).is_some());
        assert!(shares.take(Some(1000), 9).is_none());
        assert!(shares.take(Some(1000), usize::MAX).is_none());
    }
}
