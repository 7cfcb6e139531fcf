//! Parses a call that consists of the name of a tool, a mark, and arguments as JSON.

use super::call::{Call, Context, LONGEST, Step, near};
use super::object::Arguments;
use crate::family;
use crate::parts::Parts;

/// A call in which the name precedes the arguments.
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
    /// Between the name and the arguments.
    Between,
    Arguments(Arguments),
}

/// The largest number of bytes between the name and the arguments.
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
                Stage::Kind => match near(pending, &[self.marks.skip, context.close], LONGEST) {
                    Ok((at, 0)) => {
                        call.take(pending, at + self.marks.skip.len());
                        self.stage = Stage::Name;
                    }
                    Ok(_) => return Step::Broken,
                    Err(step) => return step,
                },
                Stage::Name => {
                    let marks = [self.marks.name_end, "{", context.close];
                    let (at, mark) = match near(pending, &marks, LONGEST) {
                        Ok(found) => found,
                        Err(step) => return step,
                    };
                    let written = pending[..at].trim();
                    // An older format has a mark and the call's id between name and arguments.
                    let name = written.split('[').next().unwrap_or(written).trim().to_owned();
                    if !call.begin(&name, context, out) {
                        return Step::Broken;
                    }
                    call.take(pending, if mark == 0 { at + marks[0].len() } else { at });
                    if mark == 2 {
                        return Step::Done;
                    }
                    self.stage = Stage::Between;
                }
                Stage::Between => {
                    let (at, mark) = match near(pending, &["{", context.close], BETWEEN) {
                        Ok(found) => found,
                        Err(step) => return step,
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
