//! Shares of a bounded resource, so that no user of this machine takes it from the others.
//!
//! The Unix socket is open to every user: checks of workloads run as the user of the workload.
//! Operators, whose monitors matter most, may use all of the resource. All other users together
//! may use half of it, and each of them at most an eighth.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Divisor of the total for all users together that are not operators.
pub const OTHERS: usize = 2;
/// Divisor of the total for one such user: several users have to act together to use up the
/// part of all.
pub const ONE: usize = 8;

/// Bounded resource, divided into shares.
#[derive(Debug)]
pub struct Shares {
    total: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    others: usize,
    /// Amount taken, by user. Users without a share are absent.
    by_user: HashMap<u32, usize>,
}

/// Share of the resource, returned when dropped.
#[derive(Debug)]
pub struct Share {
    of: Arc<Shares>,
    user: Option<u32>,
    amount: usize,
}

// === impl Shares ===

impl Shares {
    /// Creates a resource of `total` units.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            taken: Mutex::default(),
        })
    }

    /// Takes `amount` for a user, given by the uid of a local process; `None` stands for an
    /// operator, who may use all. Returns `None` if that much is not left for the user.
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

    /// Takes shares of one unit until none is left.
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
        // The rest is for operators; root of a container is not one of them.
        assert!(shares.take(Some(0), 1).is_none());
        let left = shares.take(None, 30).unwrap();
        assert!(shares.take(None, 3).is_none());
        assert_eq!(all(&shares, None).len(), 2);
        drop((one, others, left));
        let taken = shares.taken.lock().unwrap();
        assert_eq!((taken.all, taken.others, taken.by_user.len()), (0, 0, 0));
        drop(taken);
        // A single user may have an eighth.
        assert!(shares.take(None, 65).is_none());
        assert!(shares.take(None, 64).is_some());
        assert!(shares.take(Some(1000), 9).is_none());
        assert!(shares.take(Some(1000), usize::MAX).is_none());
    }
}
