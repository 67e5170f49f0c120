//! Cuts a sequence of places into windows, without a list of them.
//!
//! ```text
//! 11 places, row_len 4:   offset 3   [0 1 2] [3 4 5 6] [7 8 9 10]
//!                         offset 0   [0 1 2 3] [4 5 6 7] [8 9 10]
//!                         offset 2   [0 1] [2 3 4 5] [6 7 8 9] [10]      not used
//! ```

use std::{cmp::Reverse, collections::BTreeMap, ops::Range};

/// A shorter window than this has nothing to predict.
pub(super) const MIN_WINDOW: usize = 2;

/// The windows of a sequence that begin after some offset, the part before it being a window too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Windows {
    n_places: usize,
    row_len: usize,
    offset: usize,
}

impl Windows {
    pub(super) fn new(n_places: usize, row_len: usize, offset: usize) -> Self {
        assert!(row_len >= MIN_WINDOW && n_places >= MIN_WINDOW, "rows of {row_len} places from {n_places}");
        Self { n_places, row_len, offset: offset.min(n_places) }
    }

    /// How many there are; the first and the last are left out where they are too short.
    pub(super) fn len(&self) -> usize {
        let rest = self.n_places - self.offset;
        usize::from(self.has_head()) + rest / self.row_len + usize::from(rest % self.row_len >= MIN_WINDOW)
    }

    /// Window `index` in the order of the sequence.
    pub(super) fn get(&self, index: usize) -> Range<usize> {
        assert!(index < self.len(), "window {index} of {}", self.len());
        match index.checked_sub(usize::from(self.has_head())) {
            None => 0..self.offset,
            Some(index) => {
                let start = self.offset + index * self.row_len;
                start..self.n_places.min(start + self.row_len)
            }
        }
    }

    fn has_head(&self) -> bool {
        self.offset >= MIN_WINDOW
    }

    fn n_lost(&self) -> usize {
        let rest = self.n_places - self.offset;
        usize::from(self.offset == 1) + usize::from(rest % self.row_len == 1)
    }
}

/// Offsets, multiples of `align` below `row_len`, that give one number of windows, and that number.
///
/// They are drawn from those that leave no window of a single place, which could not be trained on, and among them
/// from the larger group that gives one number of windows: so every epoch has as many windows as every other and
/// sees each place once.
pub(super) fn usable_offsets(n_places: usize, row_len: usize, align: usize) -> (usize, Vec<usize>) {
    let mut groups: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for offset in (0..row_len).step_by(align) {
        let windows = Windows::new(n_places, row_len, offset);
        groups.entry((windows.n_lost(), windows.len())).or_default().push(offset);
    }
    // When every offset loses a place, as with rows of 2 and an odd number, the fewest are lost.
    let best = groups.into_iter().max_by_key(|((n_lost, _), offsets)| (Reverse(*n_lost), offsets.len()));
    let ((_, n_windows), offsets) = best.expect("offset 0 is in a group");
    (n_windows, offsets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_sees_every_place_once() {
        for align in [1, 2, 3] {
            for n_places in (4..60).filter(|n| n % align == 0) {
                for row_len in (3..20).filter(|n| n % align == 0) {
                    let (n_windows, offsets) = usable_offsets(n_places, row_len, align);
                    for offset in offsets {
                        let windows = Windows::new(n_places, row_len, offset);
                        let ranges: Vec<_> = (0..windows.len()).map(|index| windows.get(index)).collect();
                        assert_eq!(ranges.len(), n_windows, "{n_places} {row_len} {offset}");
                        assert!(ranges.iter().all(|range| (2..=row_len).contains(&range.len())));
                        assert!(ranges.iter().all(|range| range.start % align == 0));
                        let places: Vec<usize> = ranges.into_iter().flatten().collect();
                        assert!(places.into_iter().eq(0..n_places), "{n_places} {row_len} {offset}");
                    }
                }
            }
        }
    }

    #[test]
    fn sequences_beyond_four_thousand_million_places_are_cut_to_their_end() {
        let n_places = (1 << 33) + 5;
        let (n_windows, offsets) = usable_offsets(n_places, 4096, 1);
        for offset in [offsets[0], offsets[offsets.len() - 1]] {
            let windows = Windows::new(n_places, 4096, offset);
            assert_eq!(windows.get(n_windows - 1).end, n_places);
            assert_eq!(windows.get(n_windows - 2).end, windows.get(n_windows - 1).start);
        }
    }
}
