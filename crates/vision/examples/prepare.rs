//! Prepares image files for tests and benchmarks in Python. Requests come on standard input.
//!
//! A request is a line `patch merge min_pixels max_pixels rounds path`. If `min_pixels` is 0, every
//! image is resized to a square grid of `max_pixels` positions. The response is a line `error` and
//! a sentence, or `ok height width rows columns bytes nanoseconds` (over all rounds), followed by
//! the patches. With 0 rounds, only the header is read, and there are no patches.

use std::io::{self, BufRead, Write};
use std::time::Instant;

use forebay_vision::{Grid, Header, ImageError, Limits, Preparer, Processing};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut preparer = Preparer::new();
    let mut patches = Vec::new();
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.splitn(6, ' ');
        let mut number =
            || -> Result<u64, Failure> { Ok(words.next().ok_or("a number")?.parse()?) };
        let (patch, merge) = (number()? as u32, number()? as u32);
        let processing = match (number()?, number()?) {
            (0, positions) => {
                let side = positions.isqrt() as u32;
                Processing::fixed(patch, merge, Grid { height: side, width: side })?
            }
            (least, most) => Processing::new(patch, merge, least, most)?,
        };
        let rounds = number()?;
        let file = std::fs::read(words.next().ok_or("a path")?)?;
        let start = Instant::now();
        let mut result = measure(&file, &processing);
        patches.clear();
        for _ in 0..rounds {
            result = prepare(&mut preparer, &file, &processing, &mut patches);
        }
        match result {
            Ok(sizes) => {
                writeln!(out, "ok {sizes} {} {}", patches.len(), start.elapsed().as_nanos())?;
                out.write_all(&patches)?;
            }
            Err(error) => writeln!(out, "error {error}")?,
        }
        out.flush()?;
    }
    Ok(())
}

fn measure(file: &[u8], processing: &Processing) -> Result<String, ImageError> {
    let (width, height) = Header::read(file, &Limits::default())?.size();
    let grid = processing.grid(width, height);
    Ok(format!("{height} {width} {} {}", grid.height, grid.width))
}

fn prepare(
    preparer: &mut Preparer,
    file: &[u8],
    processing: &Processing,
    patches: &mut Vec<u8>,
) -> Result<String, ImageError> {
    let header = Header::read(file, &Limits::default())?;
    let (width, height) = header.size();
    patches.resize(processing.bytes(processing.grid(width, height)), 0);
    preparer.prepare(file, &header, processing, patches)?;
    measure(file, processing)
}
