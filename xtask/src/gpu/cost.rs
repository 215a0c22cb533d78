//! The cost of gpuwarden for a CUDA job: rounds of the same work with it and without it.

use serde::Serialize;

/// Comparison of rounds of the same work, in seconds.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Cost {
    pub(super) median_with: f64,
    pub(super) median_without: f64,
    /// Spread of the rounds without gpuwarden.
    pub(super) spread: f64,
    /// True if the difference of the medians, with and without gpuwarden, is within the spread.
    pub(super) is_noise: bool,
}

impl Cost {
    /// Compares rounds; `None` without rounds.
    pub(super) fn of(with: &[f64], without: &[f64]) -> Option<Self> {
        let sorted = |rounds: &[f64]| {
            let mut rounds = rounds.to_vec();
            rounds.sort_by(f64::total_cmp);
            rounds
        };
        let (with, without) = (sorted(with), sorted(without));
        let median = |rounds: &[f64]| rounds.get(rounds.len() / 2).copied();
        let (median_with, median_without) = (median(&with)?, median(&without)?);
        let spread = without.last()? - without.first()?;
        Some(Self {
            median_with,
            median_without,
            spread,
            is_noise: median_with - median_without <= spread,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slowdown_is_noise_up_to_the_spread_without_gpuwarden() {
        let without = [5.0, 5.25, 4.75, 5.0, 5.125];
        let cost = Cost::of(&[5.5, 5.75, 5.5, 9.0, 5.0], &without).unwrap();
        let expected = Cost {
            median_with: 5.5,
            median_without: 5.0,
            spread: 0.5,
            is_noise: true,
        };
        assert_eq!(cost, expected);
        assert!(!Cost::of(&[5.6; 5], &without).unwrap().is_noise);
        assert!(Cost::of(&[4.0; 5], &without).unwrap().is_noise, "faster");
        assert_eq!(Cost::of(&[], &without), None);
    }
}
