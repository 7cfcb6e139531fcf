//! Merges the results of ranks that execute the same plan.
//!
//! All ranks send a result for each step, so their tokens can be compared. Copies and adapter loads
//! finish between steps, at different times on each rank. Such an operation has finished when all
//! ranks have reported its end.

use std::collections::HashMap;

use forebay_protocol::{CopyEnd, CopyTiming, FrameError, PlaceEnd, StepResult};

use crate::frames::StreamError;

/// The reports on an operation that not all ranks have finished.
#[derive(Debug, Default)]
struct Reports {
    /// The ranks that have finished the operation.
    ranks: Vec<usize>,
    /// The first error that a rank reported; 0: there is no error so far.
    error: i32,
}

/// The unfinished operations, by ticket. Each rank finishes them at a different time.
#[derive(Debug, Default)]
struct Ends(HashMap<u32, Reports>);

impl Ends {
    /// Adds the report of one of `world` ranks. Once all have reported, returns the operation's
    /// error; `None`: some ranks have not reported.
    fn take(
        &mut self,
        rank: usize,
        ticket: u32,
        error: i32,
        world: usize,
    ) -> Result<Option<i32>, FrameError> {
        let reports = self.0.entry(ticket).or_default();
        if reports.ranks.contains(&rank) {
            return Err(FrameError::Malformed("a rank reported the same end twice"));
        }
        reports.ranks.push(rank);
        if reports.error == 0 {
            reports.error = error;
        }
        if reports.ranks.len() < world {
            return Ok(None);
        }
        Ok(self.0.remove(&ticket).map(|reports| reports.error))
    }
}

/// The time in microseconds that a rank has spent on copies.
#[derive(Debug, Clone, Copy, Default)]
struct CopyTimes {
    save_us: u64,
    restore_us: u64,
}

/// Merges the results of the ranks of a group, for the lifetime of the group.
#[derive(Debug)]
pub(crate) struct ResultMerger {
    copies: Ends,
    places: Ends,
    /// The total time of copies, per rank.
    busy: Vec<CopyTimes>,
    /// The largest total times of any rank at the last report.
    told: CopyTimes,
}

impl ResultMerger {
    /// Creates a merger for `world` ranks without any reports.
    pub(crate) fn new(world: usize) -> Self {
        Self {
            copies: Ends::default(),
            places: Ends::default(),
            busy: vec![CopyTimes::default(); world],
            told: CopyTimes::default(),
        }
    }

    /// Merges the results of all ranks, in the order of ranks. Different tokens mean that the ranks
    /// have diverged. The time of a step is that of the slowest rank, and its gap is the shortest
    /// of all ranks. A copy that fails on one rank has failed.
    ///
    /// # Errors
    /// The ranks disagree, or a rank has violated the protocol.
    pub(crate) fn merge(
        &mut self,
        mut results: Vec<StepResult>,
    ) -> Result<Vec<StepResult>, StreamError> {
        let world = results.len();
        if world < 2 {
            return Ok(results);
        }
        let (mut copied, mut placed) = (Vec::new(), Vec::new());
        let of_ranks = results.iter_mut().zip(&mut self.busy).enumerate();
        for (rank, (result, busy)) in of_ranks {
            for end in std::mem::take(&mut result.copied) {
                if let Some(error) = self.copies.take(rank, end.ticket, end.error, world)? {
                    copied.push(CopyEnd { ticket: end.ticket, error });
                }
            }
            for end in std::mem::take(&mut result.placed) {
                if let Some(error) = self.places.take(rank, end.ticket, end.error, world)? {
                    placed.push(PlaceEnd { ticket: end.ticket, error });
                }
            }
            let timing = result.copy_timing.take().unwrap_or_default();
            busy.save_us += u64::from(timing.save_us);
            busy.restore_us += u64::from(timing.restore_us);
        }
        let mut joined = agreed(results)?;
        // If no copy has ended, the times belong to copies that another rank has not finished. They
        // are reported later.
        joined.copy_timing = (!copied.is_empty()).then(|| self.tell_busy());
        (joined.copied, joined.placed) = (copied, placed);
        Ok(vec![joined])
    }

    /// Returns, for saves and for restores, the increase since the last report of the largest total
    /// time of any rank.
    fn tell_busy(&mut self) -> CopyTiming {
        let longest =
            |of: fn(&CopyTimes) -> u64| self.busy.iter().map(of).max().unwrap_or_default();
        let (save_us, restore_us) = (longest(|busy| busy.save_us), longest(|busy| busy.restore_us));
        let since =
            |now: u64, told: u64| u32::try_from(now.saturating_sub(told)).unwrap_or(u32::MAX);
        let timing = CopyTiming {
            save_us: since(save_us, self.told.save_us),
            restore_us: since(restore_us, self.told.restore_us),
        };
        self.told = CopyTimes { save_us, restore_us };
        timing
    }
}

/// Returns the result on which all ranks agree, with the merged times.
fn agreed(results: Vec<StepResult>) -> Result<StepResult, StreamError> {
    let mut results = results.into_iter();
    let mut first = results.next().unwrap_or_default();
    for (rank, other) in (1..).zip(results) {
        if let Some(how) = difference(&first, &other) {
            return Err(StreamError::Disagreement { rank, step: first.step, how });
        }
        let (timing, others) = (&mut first.timing, other.timing);
        timing.device_us = timing.device_us.max(others.device_us);
        timing.gap_us = timing.gap_us.min(others.gap_us);
        first.copy_wait_us = first.copy_wait_us.max(other.copy_wait_us);
    }
    Ok(first)
}

/// Checks that the results of a step group belong to the same step. The engine checks each result
/// against its rank's plan.
///
/// # Errors
/// A rank sent the result of another step.
pub(crate) fn same_step(results: &[StepResult]) -> Result<(), StreamError> {
    let Some(step) = results.first().map(|first| first.step) else { return Ok(()) };
    let other = (0..).zip(results).find(|(_, result)| result.step != step);
    other.map_or(Ok(()), |(rank, other)| {
        let how = format!("the other rank is in step {}", other.step);
        Err(StreamError::Disagreement { rank, step, how })
    })
}

/// Returns the first difference between the results of two ranks for a step.
fn difference(one: &StepResult, other: &StepResult) -> Option<String> {
    if one.step != other.step {
        return Some(format!("the other rank is in step {}", other.step));
    }
    let columns = [
        ("token", &one.tokens, &other.tokens),
        ("error of row", &one.row_errors, &other.row_errors),
    ];
    for (what, one, other) in columns {
        if one.len() != other.len() {
            return Some(format!("{} and {} {what}s", one.len(), other.len()));
        }
        if let Some(at) = one.iter().zip(other).position(|(one, other)| one != other) {
            return Some(format!("{what} {at}: {}, {}", one[at], other[at]));
        }
    }
    let counts = |result: &StepResult| result.counts().collect::<Vec<_>>();
    let differ = !one.counts().eq(other.counts());
    differ.then(|| format!("tokens a row: {:?}, {:?}", counts(one), counts(other)))
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{COPY_FAILED, COPY_OK, PLACE_FAILED_FILES, PLACE_OK};
    use proptest::prelude::*;

    use super::*;

    /// Returns the part of a rank's result that reports ended copies and adapter loads, with these
    /// tickets and errors.
    fn ended(
        copied: &[(u32, i32)],
        placed: &[(u32, i32)],
        (save_us, restore_us): (u32, u32),
    ) -> StepResult {
        let copied: Vec<_> =
            copied.iter().map(|&(ticket, error)| CopyEnd { ticket, error }).collect();
        StepResult {
            step: 1,
            copy_timing: (!copied.is_empty()).then_some(CopyTiming { save_us, restore_us }),
            copied,
            placed: placed.iter().map(|&(ticket, error)| PlaceEnd { ticket, error }).collect(),
            ..StepResult::default()
        }
    }

    fn merge(merger: &mut ResultMerger, results: Vec<StepResult>) -> StepResult {
        let mut one = merger.merge(results).expect("they agree");
        assert_eq!(one.len(), 1);
        one.remove(0)
    }

    #[test]
    fn a_copy_has_ended_when_all_ranks_have_ended_it() {
        let mut merger = ResultMerger::new(2);
        let first = merge(
            &mut merger,
            vec![ended(&[(1, 0), (2, 0)], &[], (30, 5)), ended(&[], &[], (0, 0))],
        );
        assert_eq!((&first.copied[..], first.copy_timing), (&[][..], None));
        let second = merge(
            &mut merger,
            vec![ended(&[(3, COPY_FAILED)], &[], (10, 0)), ended(&[(2, 0), (3, 0)], &[], (20, 9))],
        );
        let told =
            [CopyEnd { ticket: 2, error: COPY_OK }, CopyEnd { ticket: 3, error: COPY_FAILED }];
        assert_eq!(second.copied, told, "a copy that fails on one rank fails");
        // Rank 0 spent 40 us on saves, and rank 1 spent 9 us on restores.
        assert_eq!(second.copy_timing, Some(CopyTiming { save_us: 40, restore_us: 9 }));
        let third =
            merge(&mut merger, vec![ended(&[], &[], (0, 0)), ended(&[(1, 0)], &[], (30, 0))]);
        assert_eq!(third.copied, [CopyEnd { ticket: 1, error: COPY_OK }]);
        assert_eq!(
            third.copy_timing,
            Some(CopyTiming { save_us: 10, restore_us: 0 }),
            "the times of the longest rank"
        );
        let twice = vec![ended(&[(7, 0)], &[], (1, 1)), ended(&[], &[], (0, 0))];
        merge(&mut merger, twice.clone());
        assert!(merger.merge(twice).is_err(), "a ticket that another rank has not ended");
    }

    #[test]
    fn an_adapter_is_in_its_place_when_all_ranks_have_read_it() {
        let mut merger = ResultMerger::new(2);
        let read = |tickets: &[(u32, i32)]| ended(&[], tickets, (0, 0));
        let first = merge(
            &mut merger,
            vec![read(&[(1, PLACE_OK), (2, PLACE_OK)]), read(&[(2, PLACE_FAILED_FILES)])],
        );
        assert_eq!(first.placed, [PlaceEnd { ticket: 2, error: PLACE_FAILED_FILES }]);
        let second = merge(&mut merger, vec![read(&[]), read(&[(1, PLACE_OK)])]);
        assert_eq!(second.placed, [PlaceEnd { ticket: 1, error: PLACE_OK }]);
    }

    #[test]
    fn the_result_of_a_single_rank_stays_as_it_is() {
        let mut merger = ResultMerger::new(1);
        let result = ended(&[(1, 0), (2, COPY_FAILED)], &[(3, 0)], (4, 5));
        assert_eq!(merger.merge(vec![result.clone()]).expect("alone"), [result]);
    }

    proptest! {
        #[test]
        fn every_copy_is_reported_once_however_late_each_rank_is(
            ends in proptest::collection::vec((0_usize..6, 0_usize..6, 0_usize..6, 0_u8..8), 1..30)
        ) {
            const STEPS: usize = 6;
            let mut merger = ResultMerger::new(3);
            let mut told = HashMap::new();
            let failed = |rank: usize, bits: u8| i32::from(bits >> rank & 1);
            for step in 0..STEPS {
                let of_rank = |rank: usize| {
                    let those = (0..).zip(&ends).filter(|(_, end)| [end.0, end.1, end.2][rank] == step);
                    let copies: Vec<_> =
                        those.map(|(ticket, end)| (ticket, failed(rank, end.3))).collect();
                    ended(&copies, &[], (copies.len() as u32, 0))
                };
                for end in merge(&mut merger, (0..3).map(of_rank).collect()).copied {
                    prop_assert!(told.insert(end.ticket, (step, end.error)).is_none());
                }
            }
            let expected = (0..).zip(&ends).map(|(ticket, &(a, b, c, bits))| {
                (ticket, (a.max(b).max(c), i32::from(bits & 7 != 0)))
            });
            prop_assert_eq!(told, expected.collect::<HashMap<u32, _>>());
            prop_assert!(merger.copies.0.is_empty());
        }
    }
}
