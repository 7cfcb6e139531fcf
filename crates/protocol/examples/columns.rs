//! Writes the files that are generated from the column declarations: the hand's constants and
//! columns in Python, and the tables of `docs/protocol.md`. Run
//! `cargo run -p forebay-protocol --example columns`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use forebay_protocol as protocol;
use forebay_protocol::{ColumnSpec, Kind, Multiplicity, RecordSpec, StepPlan, StepResult};

const MADE: &str = "Made from crates/protocol by `make columns`; a test compares the two.";
/// The width of a line of Python.
const WIDTH: usize = 120;
const FRAMES: [(&str, &str, &[ColumnSpec]); 2] =
    [("plan", "Plan", StepPlan::COLUMNS), ("result", "Result", StepResult::COLUMNS)];

fn main() -> std::io::Result<()> {
    for (path, text) in files()? {
        std::fs::write(path, text)?;
    }
    Ok(())
}

/// Returns the generated files with their content.
pub(crate) fn files() -> std::io::Result<Vec<(PathBuf, String)>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = root.join("docs/protocol.md");
    let text = page_with_tables(&std::fs::read_to_string(&page)?);
    let python = root.join("python/forebay/protocol");
    let (constants, columns) = (python.join("constants.py"), python.join("columns.py"));
    Ok(vec![(constants, python_constants()), (columns, python_columns()), (page, text)])
}

fn constants() -> Vec<(&'static str, i64)> {
    macro_rules! named {
        ($($name:ident),+ $(,)?) => { vec![$( (stringify!($name), i64::from(protocol::$name)) ),+] };
    }
    let sizes = [
        ("HEADER_BYTES", protocol::HEADER_BYTES),
        ("ENTRY_WORDS", protocol::ENTRY_WORDS),
        ("MAX_GROUP", protocol::MAX_GROUP),
    ];
    let sizes = sizes.into_iter().map(|(name, value)| (name, value as i64));
    let others = named![
        VERSION,
        MAX_WORDS,
        MAX_WAIT_US,
        NO_PAGE,
        FLAG_SAMPLE,
        FLAG_POOL,
        FLAG_MASKED,
        COPY_OK,
        COPY_FAILED,
        PLACE_OK,
        PLACE_FAILED_FILES,
        PLACE_FAILED_DIGEST,
        PLACE_FAILED_MEMORY,
        ROW_OK,
        ROW_NOT_FINITE,
    ];
    sizes.chain(others).collect()
}

/// Converts `PlanAt` to `PLAN_AT`.
fn screaming(name: &str) -> String {
    let mut found = String::new();
    for (at, letter) in name.char_indices() {
        if at > 0 && letter.is_uppercase() {
            found.push('_');
        }
        found.extend(letter.to_uppercase());
    }
    found
}

fn width_name(record: &RecordSpec) -> String {
    format!("{}_WORDS", screaming(record.name.trim_end_matches("Record")))
}

/// Returns the records in the order of columns, with the names of the columns that use them.
fn records() -> Vec<(RecordSpec, Vec<&'static str>)> {
    let mut found: Vec<(RecordSpec, Vec<&str>)> = Vec::new();
    for column in FRAMES.iter().flat_map(|(_, _, columns)| *columns) {
        let Some(record) = column.record else { continue };
        match found.iter_mut().find(|(known, _)| *known == record) {
            Some((_, columns)) => columns.push(column.name),
            None => found.push((record, vec![column.name])),
        }
    }
    found
}

fn python_constants() -> String {
    let mut out = format!("\"\"\"Numbers of the step protocol. {MADE}\"\"\"\n\n");
    out += "from enum import IntEnum\n\n";
    for (name, value) in constants() {
        let _ = writeln!(out, "{name} = {value}");
    }
    for direction in protocol::Direction::ALL {
        let name = screaming(&format!("{direction:?}"));
        let _ = writeln!(out, "COPY_{name} = {}", direction as i32);
    }
    for (record, _) in records() {
        let _ = writeln!(out, "{} = {}", width_name(&record), record.words.len());
    }
    out += "\n\nclass Kind(IntEnum):\n    \"\"\"The kind of a frame.\"\"\"\n\n";
    for kind in Kind::ALL {
        let _ = writeln!(out, "    {} = {}", screaming(&format!("{kind:?}")), kind as u16);
    }
    for (record, columns) in records() {
        let columns: Vec<String> = columns.iter().map(|name| format!("`{name}`")).collect();
        let doc = format!("Index of a word in a record of {}.", columns.join(", "));
        let _ = write!(out, "\n\nclass {}(IntEnum):\n    \"\"\"{doc}\"\"\"\n\n", record.name);
        for (at, word) in record.words.iter().enumerate() {
            let _ = writeln!(out, "    {} = {at}", word.to_uppercase());
        }
    }
    out
}

/// Returns the description of a column on one line.
fn meaning(column: &ColumnSpec) -> String {
    let lines: Vec<&str> = column.meaning.lines().map(str::trim).collect();
    let text = lines.join(" ");
    match column.record {
        None => text,
        Some(record) => {
            let words: Vec<String> = record.words.iter().map(|word| format!("`{word}`")).collect();
            format!("({}): {text}", words.join(", "))
        }
    }
}

/// Formats the docstring of a field.
fn docstring(text: &str) -> String {
    let (mut lines, mut line) = (Vec::new(), String::from("    \"\"\""));
    for (at, word) in text.split(' ').enumerate() {
        if line.len() + 1 + word.len() > WIDTH - 3 {
            lines.push(std::mem::replace(&mut line, format!("    {word}")));
        } else {
            let space = if at == 0 { "" } else { " " };
            let _ = write!(line, "{space}{word}");
        }
    }
    lines.push(line);
    lines.join("\n") + "\"\"\"\n"
}

fn python_columns() -> String {
    let mut out = format!("\"\"\"The columns of plans and results. {MADE}\"\"\"\n\n");
    out += "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\n";
    out += "from forebay.protocol.constants import (\n";
    let all = FRAMES.iter().flat_map(|(_, _, columns)| *columns);
    let shaped = all.filter(|column| column.multiplicity != Multiplicity::Optional);
    let widths: BTreeSet<String> =
        shaped.filter_map(|column| column.record.as_ref().map(width_name)).collect();
    for width in &widths {
        let _ = writeln!(out, "    {width},");
    }
    out += ")\nfrom forebay.protocol.frames import Column, Float32s, Int32s, floats, ints\n";
    for (what, class, columns) in FRAMES {
        let _ = write!(out, "\n{} = (\n", what.to_uppercase());
        for ColumnSpec { id, name, record, is_float, multiplicity, .. } in columns {
            let width = record.filter(|_| *multiplicity == Multiplicity::Many);
            let width = width.map_or(String::new(), |record| format!(", {}", width_name(&record)));
            let float = if *is_float { ", is_float=True" } else { "" };
            let _ = writeln!(out, "    Column({id}, \"{name}\"{width}{float}),");
        }
        let _ = write!(
            out,
            ")\n\"\"\"The columns of a {what}'s frame, by id.\"\"\"\n\n\n@dataclass\nclass \
             {class}Columns:\n    \"\"\"The columns of a {what}'s frame.\"\"\"\n\n    step: int = 0\n"
        );
        for column in columns {
            let width = column.record.as_ref().map(width_name);
            let shape = match (column.multiplicity, width) {
                (Multiplicity::Many, Some(width)) => format!("0, {width}"),
                (Multiplicity::One, Some(width)) => width,
                (Multiplicity::One, None) => "1".to_owned(),
                _ => "0".to_owned(),
            };
            let (kind, make) =
                if column.is_float { ("Float32s", "floats") } else { ("Int32s", "ints") };
            let _ = writeln!(out, "    {}: {kind} = {make}({shape})", column.name);
            out += &docstring(&meaning(column));
        }
        out += "\n";
    }
    let values = StepPlan::COLUMNS
        .iter()
        .filter(|column| column.record.is_some_and(|record| record.name == "SlotValue"));
    let values: Vec<String> = values.map(|column| format!("\"{}\"", column.name)).collect();
    let _ = write!(
        out,
        "\nSLOT_VALUES = ({})\n\"\"\"The columns of a plan with values of some of the new slots.\"\"\"\n",
        values.join(", ")
    );
    out
}

/// Returns the page with its tables of columns replaced.
fn page_with_tables(page: &str) -> String {
    let mut page = page.to_owned();
    for (_, heading, columns) in FRAMES {
        let section = page.find(&format!("\n## {heading}\n")).expect("the section of the frame");
        let first = section + page[section..].find("\n| 1 |").expect("a table of columns") + 1;
        let end = first + page[first..].find("\n\n").expect("an end of the table") + 1;
        let mut rows = String::new();
        for column in columns {
            let kind = if column.is_float { "f32" } else { "i32" };
            let (id, name) = (column.id, column.name);
            let _ = writeln!(rows, "| {id} | {name} | {kind} | {} |", meaning(column));
        }
        page.replace_range(first..end, &rows);
    }
    page
}
