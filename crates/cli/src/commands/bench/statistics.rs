//! The few figures that many measurements are told by.

/// The value in the middle; of an even number, the mean of the two. 0 where there is none.
pub(super) fn median(values: &[f64]) -> f64 {
    let sorted = sorted(values);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), middle.checked_sub(1)) {
        (Some(upper), Some(below)) if sorted.len().is_multiple_of(2) => sorted
            .get(below)
            .map_or(*upper, |lower| f64::midpoint(*lower, *upper)),
        (Some(middle), _) => *middle,
        (None, _) => 0.0,
    }
}

/// The smallest value that at least `percent` of the values do not exceed (nearest rank).
/// 0 where there is none.
pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let rank = (values.len() * percent).div_ceil(100);
    let index = rank.clamp(1, values.len().max(1)) - 1;
    sorted(values).get(index).copied().unwrap_or_default()
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let table: [(&[f64], f64); 4] = [
            (&[], 0.0),
            (&[3.0], 3.0),
            (&[9.0, 1.0, 5.0], 5.0),
            (&[4.0, 1.0, 2.0, 100.0], 3.0),
        ];
        for (values, expected) in table {
            assert!((median(values) - expected).abs() < 1e-9, "{values:?}");
        }
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let table: [(&[f64], usize, f64); 8] = [
            (&hundred, 50, 50.0),
            (&hundred, 99, 99.0),
            (&hundred, 100, 100.0),
            (&hundred, 0, 1.0),
            (&[7.0], 50, 7.0),
            (&[7.0], 99, 7.0),
            (&[1.0, 2.0, 3.0], 50, 2.0),
            (&[], 99, 0.0),
        ];
        for (values, percent, expected) in table {
            let found = percentile(values, percent);
            assert!((found - expected).abs() < 1e-9, "{percent}: {found}");
        }
    }
}
