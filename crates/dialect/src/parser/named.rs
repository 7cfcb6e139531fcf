//! The name of a tool, a mark, and its arguments as JSON.

use super::call::{Call, Context, Step};
use super::object::Arguments;
use crate::family;
use crate::finder::{Found, find};
use crate::parts::Parts;

/// A call whose name stands before its arguments.
#[derive(Debug)]
pub(super) struct Named {
    marks: &'static family::Named,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Before the name.
    Kind,
    Name,
    /// Between name and arguments.
    Between,
    Arguments(Arguments),
}

/// Between a name and its arguments, at most: what it takes to write that JSON follows.
const BETWEEN: usize = 64;

impl Named {
    pub(super) fn new(marks: &'static family::Named) -> Self {
        let stage = if marks.skip.is_empty() { Stage::Name } else { Stage::Kind };
        Self { marks, stage }
    }

    pub(super) fn step(
        &mut self,
        pending: &mut String,
        call: &mut Call,
        out: &mut Parts,
        context: Context<'_>,
    ) -> Step {
        loop {
            match &mut self.stage {
                Stage::Kind => match find(pending, [self.marks.skip, context.close].into_iter()) {
                    Found::Mark { at, mark: 0 } => {
                        call.take(pending, at + self.marks.skip.len());
                        self.stage = Stage::Name;
                    }
                    Found::Mark { .. } => return Step::Broken,
                    Found::Nothing { .. } => return Step::More,
                },
                Stage::Name => {
                    let marks = [self.marks.name_end, "{", context.close];
                    let Found::Mark { at, mark } = find(pending, marks.into_iter()) else {
                        return Step::More;
                    };
                    let written = pending[..at].trim();
                    // An older form writes a mark and a name of the call's own between the two.
                    let name = written.split('[').next().unwrap_or(written).trim();
                    if name.is_empty() {
                        return Step::Broken;
                    }
                    call.begin(name, context.ids, out);
                    call.take(pending, if mark == 0 { at + marks[0].len() } else { at });
                    if mark == 2 {
                        return Step::Done;
                    }
                    self.stage = Stage::Between;
                }
                Stage::Between => {
                    let (at, mark) = match find(pending, ["{", context.close].into_iter()) {
                        Found::Mark { at, .. } if at > BETWEEN => return Step::Broken,
                        Found::Mark { at, mark } => (at, mark),
                        Found::Nothing { safe } if safe > BETWEEN => return Step::Broken,
                        Found::Nothing { .. } => return Step::More,
                    };
                    call.take(pending, at);
                    if mark == 1 {
                        return Step::Done;
                    }
                    self.stage = Stage::Arguments(Arguments::new(true));
                }
                Stage::Arguments(arguments) => {
                    let step = arguments.read(pending, call, out, context);
                    if step == Step::Done {
                        arguments.end(call, out);
                    }
                    return step;
                }
            }
        }
    }
}
