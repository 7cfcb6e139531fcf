//! Masks that are not ready in time.

use forebay_protocol::ROW_OK;

use super::Harness;

/// A masked row of a step in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct MaskedRow {
    pub(super) id: u64,
    pub(super) slot: u32,
    /// The row's index among the rows that sample.
    pub(super) sample: usize,
    /// The row's index among all rows; `None` if the row also returns log-probabilities of the
    /// prompt.
    pub(super) row: Option<usize>,
}

impl Harness {
    /// If exactly one step is in flight, makes some of its masked rows sit out: row `i` if bit `i`
    /// modulo 8 of `bits` is set. Returns the number of these rows.
    pub(crate) fn sit_out(&mut self, bits: u8) -> usize {
        let [flight] = self.flights.make_contiguous() else { return 0 };
        let mut late = 0;
        // Begin with the last row, so that the indices of earlier rows stay valid.
        for at in (0..flight.masked.len()).rev().filter(|at| bits >> (at % 8) & 1 == 1) {
            let MaskedRow { id, slot, sample, row } = flight.masked[at];
            let client = self.clients.get_mut(&id).expect("submitted");
            if client.end.is_some() {
                continue;
            }
            assert!(self.scheduler.sit_out(id), "{id} has a masked row");
            assert!(!self.scheduler.sit_out(id), "{id} has only one masked row");
            flight.masked.remove(at);
            client.waits = true;
            late += 1;
            flight.masked[at..].iter_mut().for_each(|row| row.sample -= 1);
            if let Some(result) = &mut flight.result {
                let first: usize = result.counts().take(sample).sum();
                let count = result.counts().nth(sample).expect("the row samples");
                self.device.take_back(slot, count);
                result.tokens.drain(first..first + count);
                if !result.token_counts.is_empty() {
                    result.token_counts.remove(sample);
                }
                row.into_iter().for_each(|row| result.row_errors[row] = ROW_OK);
            }
        }
        self.check();
        late
    }

    /// Tells the scheduler which tokens the grammars of the masked requests in `got` allow: first
    /// only the right tokens, later all tokens. For some requests the grammar is not ready.
    pub(super) fn expect_masked(&mut self, got: &[u64]) {
        for &id in got {
            let client = &self.clients[&id];
            if !client.request.masked || client.end.is_some() || id % 4 == 3 {
                continue;
            }
            let right = &client.expected.0[client.tokens.len()..];
            self.scheduler.expect_masked(id, |most, drafts| {
                let forced = right.len().min(most as usize).min(id as usize % 4 * 2);
                if drafts[..drafts.len().min(forced)] != right[..forced] {
                    drafts.splice(.., right[..forced].iter().copied());
                }
                forced as u32
            });
        }
    }

    /// Makes a masked request wait for its mask, without a row that sits out.
    pub(crate) fn wait_for_mask(&mut self, at: usize) {
        let masked = self.live().filter(|(_, client)| client.request.masked);
        let ids: Vec<u64> = masked.map(|(&id, _)| id).collect();
        if let Some(&id) = ids.get(at % ids.len().max(1)) {
            self.scheduler.wait_for_mask(id);
            self.scheduler.charge(id, at as u64 % 64);
            self.clients.get_mut(&id).expect("submitted").waits = true;
            self.check();
        }
    }

    /// Makes the mask of one waiting request ready, which `at` selects; `None`: the masks of all
    /// waiting requests.
    pub(crate) fn mask_ready(&mut self, at: Option<usize>) {
        let waiting = self.clients.iter_mut().filter(|(_, client)| client.waits);
        let waiting: Vec<_> = waiting.collect();
        let count = waiting.len().max(1);
        for (number, (&id, client)) in waiting.into_iter().enumerate() {
            if at.is_none_or(|at| at % count == number) {
                self.scheduler.mask_ready(id);
                (client.waits, client.idle) = (false, 0);
            }
        }
        self.check();
    }
}
