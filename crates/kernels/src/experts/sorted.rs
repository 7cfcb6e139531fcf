//! The rows of a step, sorted by expert: rows of one expert lie side by side.

use crate::tile::tile_height;

/// The rows of one tile, all of one expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RowTile {
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// An expert that has rows in the step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Active {
    pub(crate) expert: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The index of the expert's first unit of work, counted over all experts in order.
    pub(crate) begin: usize,
    /// The index after the expert's last unit of work.
    pub(crate) end: usize,
}

/// The rows of a step, ordered by expert, and per expert by token. A row is one token at one of its
/// experts. Each member sorts the rows itself, which is faster than waiting for another member.
#[derive(Default)]
pub(crate) struct Sorted {
    /// The token of each row.
    pub(crate) tokens: Vec<u32>,
    /// The row of each token at each of its experts, in the order of ids.
    pub(crate) rows: Vec<u32>,
    pub(crate) active: Vec<Active>,
    pub(crate) tiles: Vec<RowTile>,
    /// The index of the next row of each expert.
    places: Vec<u32>,
}

impl Sorted {
    /// Sorts tokens by their experts `ids` `[tokens, per_token]`, all below `experts`. Tiles have
    /// at most `most` rows.
    #[inline(always)]
    pub(crate) fn sort(&mut self, ids: &[u32], per_token: usize, experts: usize, most: usize) {
        self.places.clear();
        self.places.resize(experts, 0);
        for &id in ids {
            self.places[id as usize] += 1;
        }
        self.active.clear();
        self.tiles.clear();
        let mut first = 0;
        for (expert, place) in self.places.iter_mut().enumerate() {
            let count = *place as usize;
            *place = first as u32;
            if count == 0 {
                continue;
            }
            self.active.push(Active { expert, first, count, begin: 0, end: 0 });
            let height = tile_height(count, most);
            let tile = |row| RowTile { first: first + row, count: height.min(count - row) };
            self.tiles.extend((0..count).step_by(height).map(tile));
            first += count;
        }
        self.tokens.clear();
        self.tokens.resize(ids.len(), 0);
        self.rows.clear();
        for (place, &id) in ids.iter().enumerate() {
            let next = &mut self.places[id as usize];
            self.tokens[*next as usize] = (place / per_token) as u32;
            self.rows.push(*next);
            *next += 1;
        }
    }

    /// Assigns the units of work of a product to the active experts, and returns their number.
    /// `block` returns the largest number of rows of a unit, given the number of rows of the unit's
    /// expert. Each such block of rows has one unit per panel.
    #[inline(always)]
    pub(crate) fn count_pieces(&mut self, panels: usize, block: impl Fn(usize) -> usize) -> usize {
        let mut end = 0;
        for active in &mut self.active {
            active.begin = end;
            end += panels * active.count.div_ceil(block(active.count));
            active.end = end;
        }
        end
    }

    /// Returns the index of the active expert to which a unit of work belongs.
    #[inline(always)]
    pub(crate) fn place_of(&self, piece: usize) -> usize {
        self.active.partition_point(|active| active.end <= piece)
    }
}
