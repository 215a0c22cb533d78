//! Search for the culprits when the whole gang fails, by tests of ever smaller groups: a
//! bisection over prefixes of the gang.
//!
//! Pure function of the answers so far. A group fails if it has a *culprit*, which fails with
//! every other member, or both members of a *pair* that fails only together, such as two with a
//! broken path between them. A group that contains a failing group fails, and a group within a
//! passing one passes; neither is tested again. Each culprit and each pair costs a number of
//! tests logarithmic in the size of the gang.

use std::collections::BTreeSet;

/// Ranks of the members of a group.
pub(super) type RankGroup = BTreeSet<usize>;

/// Number of members tried as a partner while none is known to be well, before the search gives
/// up.
const CENTRES: usize = 3;

/// Answers to the tests so far.
#[derive(Clone, Debug, Default)]
pub(super) struct TestAnswers {
    passed: Vec<RankGroup>,
    failed: Vec<RankGroup>,
}

/// Conclusion from the answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Conclusion {
    /// Members that fail with every other member.
    pub(super) culprits: BTreeSet<usize>,
    /// Pairs that fail only together; neither member is at fault alone.
    pub(super) pairs: BTreeSet<(usize, usize)>,
    /// True if a larger group fails although none of its pairs does, as when all share a path
    /// that is too narrow.
    pub(super) only_many: bool,
}

/// Next step of the search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SearchStep {
    /// Test this group next.
    Test(RankGroup),
    /// The search has ended.
    Done(Conclusion),
}

/// Group whose answer is needed.
struct Wanted(RankGroup);

/// Returns the next step for a gang of `members` that fails as a whole.
pub(super) fn next(members: usize, answers: &TestAnswers) -> SearchStep {
    let mut search = Search {
        answers,
        found: Conclusion::default(),
        classes: Vec::new(),
        unclear: Vec::new(),
    };
    match search.all(members) {
        Ok(()) => SearchStep::Done(search.found),
        Err(Wanted(group)) => SearchStep::Test(group),
    }
}

// === impl TestAnswers ===

impl TestAnswers {
    /// Records the answer to a test.
    pub(super) fn note(&mut self, group: RankGroup, passed: bool) {
        if passed {
            self.passed.push(group);
        } else {
            self.failed.push(group);
        }
    }

    /// Returns the known answer for a group, also if it follows from others.
    fn of(&self, group: &RankGroup) -> Option<bool> {
        if group.len() < 2 || self.passed.iter().any(|passed| passed.is_superset(group)) {
            return Some(true);
        }
        let fails = self.failed.iter().any(|failed| failed.is_subset(group));
        fails.then_some(false)
    }
}

/// Search, run anew with all known answers after each test.
struct Search<'a> {
    answers: &'a TestAnswers,
    found: Conclusion,
    /// Passing groups, which together have all members that are no culprits.
    classes: Vec<Vec<usize>>,
    /// Pairs that contain a culprit, or that fail only together.
    unclear: Vec<(usize, usize)>,
}

impl Search<'_> {
    fn all(&mut self, members: usize) -> Result<(), Wanted> {
        let mut partners = self.thin_out(members)?;
        if self.classes.first().is_none_or(|well| well.len() < 2) && !self.find_two_well()? {
            // No member can be distinguished from the others.
            self.found.pairs.extend(self.unclear.drain(..));
            return Ok(());
        }
        let unclear = std::mem::take(&mut self.unclear);
        for member in unclear.into_iter().flat_map(|(one, other)| [one, other]) {
            let well = self.classes.first().cloned().unwrap_or_default();
            if well.contains(&member) {
                continue;
            }
            if self.passes(with(&well, member))? {
                self.add(0, member);
            } else if !self.is_culprit(member, &well)? {
                partners.push(member);
            }
        }
        for member in partners {
            self.place(member)?;
        }
        Ok(())
    }

    /// Removes members one by one until the rest passes. Returns those that are no culprits.
    fn thin_out(&mut self, members: usize) -> Result<Vec<usize>, Wanted> {
        let mut left: Vec<usize> = (0..members).collect();
        let mut partners = Vec::new();
        while !self.passes(left.iter().copied().collect())? {
            // The last member of the smallest failing prefix is the cause.
            let length = self.smallest(&left, None)?;
            let member = left.remove(length - 1);
            let well: Vec<usize> = left.iter().copied().take(length - 1).collect();
            if let [first] = well[..] {
                left.retain(|other| *other != first);
                self.unclear.push((first, member));
            } else if !self.is_culprit(member, &well)? {
                partners.push(member);
            }
        }
        self.classes.push(left);
        Ok(partners)
    }

    /// Searches for two members that pass together, if at most one is left. Returns true if
    /// there are any.
    fn find_two_well(&mut self) -> Result<bool, Wanted> {
        let left = self.classes.pop().unwrap_or_default();
        let pairs = self.unclear.iter().flat_map(|(one, other)| [*one, *other]);
        let candidates: Vec<usize> = left.iter().copied().chain(pairs).collect();
        for (at, centre) in candidates.iter().enumerate().take(CENTRES) {
            for other in candidates.iter().skip(at + 1) {
                if self.passes([*centre, *other].into())? {
                    // The leftover member is judged like the others.
                    self.unclear
                        .extend(left.first().map(|first| (*first, *first)));
                    self.classes.push(vec![*centre, *other]);
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Returns true if a member fails with every other one, and records that. The member fails
    /// with this group, which passes without it, and which has at least two members.
    fn is_culprit(&mut self, member: usize, well: &[usize]) -> Result<bool, Wanted> {
        let length = self.smallest(well, Some(member))?;
        if length > 1 {
            // The member passes with those before.
            return Ok(false);
        }
        let other = well.get(1).copied().into_iter().collect::<Vec<_>>();
        let is_culprit = !self.passes(with(&other, member))?;
        if is_culprit {
            self.found.culprits.insert(member);
        }
        Ok(is_culprit)
    }

    /// Finds all partners that a member fails with, and a class for the member.
    fn place(&mut self, member: usize) -> Result<(), Wanted> {
        let mut home = None;
        for at in 0..self.classes.len() {
            let mut class = self.classes.get(at).cloned().unwrap_or_default();
            let before = class.len();
            while !self.passes(with(&class, member))? {
                let length = self.smallest(&class, Some(member))?;
                let partner = class.remove(length - 1);
                if self.passes([partner, member].into())? {
                    self.found.only_many = true;
                    return Ok(());
                }
                self.found
                    .pairs
                    .insert((member.min(partner), member.max(partner)));
            }
            if class.len() == before {
                home = home.or(Some(at));
            }
        }
        match home {
            Some(at) => self.add(at, member),
            None => self.classes.push(vec![member]),
        }
        Ok(())
    }

    fn add(&mut self, class: usize, member: usize) {
        if let Some(class) = self.classes.get_mut(class) {
            class.push(member);
        }
    }

    /// Returns the length of the smallest failing prefix of a list, together with another
    /// member if given; the whole list fails.
    fn smallest(&self, list: &[usize], other: Option<usize>) -> Result<usize, Wanted> {
        let (mut passes, mut fails) = (0, list.len());
        while fails - passes > 1 {
            let middle = passes.midpoint(fails);
            let group = list.iter().take(middle).copied().chain(other);
            if self.passes(group.collect())? {
                passes = middle;
            } else {
                fails = middle;
            }
        }
        Ok(fails)
    }

    fn passes(&self, group: RankGroup) -> Result<bool, Wanted> {
        self.answers.of(&group).ok_or(Wanted(group))
    }
}

fn with(group: &[usize], member: usize) -> RankGroup {
    group.iter().copied().chain([member]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Searches in a gang with these faults; returns the result, and the number of tests.
    fn search(members: usize, faults: &Conclusion) -> (Conclusion, usize) {
        let mut answers = TestAnswers::default();
        answers.note((0..members).collect(), false);
        for tests in 0..10_000 {
            match next(members, &answers) {
                SearchStep::Done(found) => return (found, tests),
                SearchStep::Test(group) => {
                    assert!(
                        group.len() > 1 && answers.of(&group).is_none(),
                        "{group:?} is known"
                    );
                    let culprit = faults.culprits.iter().any(|one| group.contains(one));
                    let mut pairs = faults.pairs.iter();
                    let pair = pairs.any(|(a, b)| group.contains(a) && group.contains(b));
                    answers.note(group, !culprit && !pair);
                }
            }
        }
        panic!("the search does not end");
    }

    fn found(culprits: &[usize], pairs: &[(usize, usize)]) -> Conclusion {
        Conclusion {
            culprits: culprits.iter().copied().collect(),
            pairs: pairs.iter().copied().collect(),
            only_many: false,
        }
    }

    #[test]
    fn one_culprit_is_found_wherever_it_is() {
        for members in [3, 4, 5, 8, 64, 100] {
            for culprit in 0..members {
                let faults = found(&[culprit], &[]);
                let (result, tests) = search(members, &faults);
                assert_eq!(result, faults, "of {members}");
                let most = 2 * members.ilog2() as usize + 5;
                assert!(tests <= most, "{tests} tests for {culprit} of {members}");
            }
        }
    }

    #[test]
    fn a_pair_is_named_and_nobody_of_it_blamed_alone() {
        for members in [4, 5, 8, 33] {
            for one in 0..members {
                for other in one + 1..members {
                    let faults = found(&[], &[(one, other)]);
                    assert_eq!(search(members, &faults).0, faults, "of {members}");
                }
            }
        }
    }

    /// The first partners to be tried may be culprits themselves.
    #[test]
    fn two_who_are_well_are_found_among_many_who_are_not() {
        for (members, culprits) in [(4, &[0, 2][..]), (6, &[0, 1, 3, 5])] {
            let faults = found(culprits, &[]);
            assert_eq!(search(members, &faults).0, faults, "of {members}");
        }
    }

    #[test]
    fn of_two_members_nobody_is_blamed_alone() {
        for faults in [
            found(&[0], &[]),
            found(&[1], &[]),
            found(&[0, 1], &[]),
            found(&[], &[(0, 1)]),
        ] {
            assert_eq!(search(2, &faults), (found(&[], &[(0, 1)]), 0));
        }
    }

    #[test]
    fn where_all_are_bad_nobody_is_blamed_alone() {
        for members in 2..20 {
            let all: Vec<usize> = (0..members).collect();
            let (result, tests) = search(members, &found(&all, &[]));
            assert_eq!(result.culprits, BTreeSet::new());
            assert!(
                !result.pairs.is_empty() && tests <= 8 * members,
                "{tests} of {members}"
            );
        }
    }

    #[test]
    fn where_only_many_fail_nobody_is_blamed() {
        for members in 3..40 {
            let mut answers = TestAnswers::default();
            answers.note((0..members).collect(), false);
            let found = loop {
                match next(members, &answers) {
                    SearchStep::Done(found) => break found,
                    SearchStep::Test(group) => {
                        let passes = group.len() <= members / 2 + 1 && group.len() < members;
                        answers.note(group, passes);
                    }
                }
            };
            assert!(found.only_many, "of {members}: {found:?}");
            assert_eq!(
                (found.culprits.len(), found.pairs.len()),
                (0, 0),
                "of {members}"
            );
        }
    }

    #[test]
    fn a_member_with_several_broken_ways_is_no_culprit() {
        let faults = found(&[], &[(0, 5), (3, 5), (6, 7)]);
        assert_eq!(search(9, &faults).0, faults);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Random culprits and pairs, in the minority and disjoint: all are found, and nothing
        /// else.
        #[test]
        fn whatever_is_broken_is_found_in_few_tests(
            members in 6_usize..200,
            order in proptest::collection::vec(any::<u32>(), 200),
            culprits in 0_usize..4,
            pairs in 0_usize..4,
        ) {
            let mut shuffled: Vec<usize> = (0..members).collect();
            shuffled.sort_by_key(|at| order[*at]);
            // Two members must remain that are well.
            let most = (members - 2) / 2;
            let pairs = pairs.min(most / 2);
            let culprits = culprits.min(most - pairs);
            prop_assume!(culprits + pairs > 0);
            let mut faults = Conclusion::default();
            let (bad, rest) = shuffled.split_at(culprits);
            faults.culprits.extend(bad);
            for pair in rest.chunks(2).take(pairs) {
                faults.pairs.insert((pair[0].min(pair[1]), pair[0].max(pair[1])));
            }
            let (result, tests) = search(members, &faults);
            prop_assert_eq!(&result, &faults);
            let faults = culprits + pairs;
            let bound = (faults + 1) * (2 * members.ilog2() as usize + 7);
            prop_assert!(tests <= bound, "{} tests, at most {} expected", tests, bound);
        }
    }
}
