//! Declarations of records and columns. Each is declared once. Its type, encoding and decoding are
//! generated from the declaration, as are the tables in `docs/protocol.md` and the Python constants
//! (`examples/columns.rs`).

use bytemuck::{Pod, cast_slice, try_cast_slice};

/// The number of elements for which a cleared column keeps its memory, even after a larger step.
pub(crate) const KEPT: usize = 1 << 18;

/// A record: consecutive words of a column that belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordSpec {
    /// The name of the record type.
    pub name: &'static str,
    /// The names of the record's words, in order.
    pub words: &'static [&'static str],
}

/// The declaration of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnSpec {
    /// The id of the column, unique within its kind of frame.
    pub id: u32,
    /// The name of the column.
    pub name: &'static str,
    /// The description of the column, in Markdown.
    pub meaning: &'static str,
    /// The record type of the column's elements; `None` if they are plain numbers.
    pub record: Option<RecordSpec>,
    /// True if the words are 32-bit floats, and false if they are integers.
    pub is_float: bool,
    /// How many elements the column may have.
    pub multiplicity: Multiplicity,
}

/// How many elements (records or numbers) a column may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Multiplicity {
    /// Exactly one.
    One,
    /// At most one.
    Optional,
    /// Any number.
    Many,
}

/// An element of a column: a record, or a 32-bit number.
pub(crate) trait Element: Pod {
    const RECORD: Option<RecordSpec> = None;
    const IS_FLOAT: bool = false;
}

impl Element for i32 {}

impl Element for u32 {}

impl Element for f32 {
    const IS_FLOAT: bool = true;
}

/// A field that is a column of a frame.
pub(crate) trait Column: Default {
    type Element: Element;
    const MULTIPLICITY: Multiplicity;

    /// Returns the column's words. If there are none, the frame omits the column.
    fn words(&self) -> &[i32];

    /// Reads a column from its words; `None` if their number does not fit the column.
    fn read(words: &[i32]) -> Option<Self>;

    /// Clears the column for the next step.
    fn empty(&mut self) {
        *self = Self::default();
    }
}

impl<T: Element + Default> Column for T {
    type Element = T;
    const MULTIPLICITY: Multiplicity = Multiplicity::One;

    fn words(&self) -> &[i32] {
        cast_slice(std::slice::from_ref(self))
    }

    fn read(words: &[i32]) -> Option<Self> {
        match try_cast_slice(words) {
            Ok(&[one]) => Some(one),
            _ => None,
        }
    }
}

impl<T: Element> Column for Option<T> {
    type Element = T;
    const MULTIPLICITY: Multiplicity = Multiplicity::Optional;

    fn words(&self) -> &[i32] {
        cast_slice(self.as_slice())
    }

    fn read(words: &[i32]) -> Option<Self> {
        match try_cast_slice(words) {
            Ok(&[]) => Some(None),
            Ok(&[one]) => Some(Some(one)),
            _ => None,
        }
    }
}

impl<T: Element> Column for Vec<T> {
    type Element = T;
    const MULTIPLICITY: Multiplicity = Multiplicity::Many;

    fn words(&self) -> &[i32] {
        cast_slice(self)
    }

    fn read(words: &[i32]) -> Option<Self> {
        try_cast_slice(words).ok().map(<[T]>::to_vec)
    }

    /// Keeps the memory, except what only one large step needed.
    fn empty(&mut self) {
        let used = self.len();
        self.clear();
        if self.capacity() > KEPT && used < self.capacity() / 4 {
            self.shrink_to(KEPT);
        }
    }
}

/// Declares a record: a struct whose fields are the words of a column, in order.
macro_rules! record {
    (
        $(#[$meta:meta])*
        $vis:vis struct $record:ident {
            $( $(#[$field_meta:meta])* $field_vis:vis $field:ident: $word:ty, )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, bytemuck_derive::Pod, bytemuck_derive::Zeroable)]
        #[repr(C)]
        $vis struct $record {
            $( $(#[$field_meta])* $field_vis $field: $word, )+
        }

        impl $record {
            /// The number of words of a record.
            $vis const WORDS: usize = size_of::<Self>() / 4;
        }

        impl $crate::columns::Element for $record {
            const RECORD: Option<$crate::columns::RecordSpec> = {
                const WORDS: &[&str] = &[$( stringify!($field) ),+];
                assert!(WORDS.len() == $record::WORDS, "each field has 32 bits");
                Some($crate::columns::RecordSpec { name: stringify!($record), words: WORDS })
            };
            const IS_FLOAT: bool = $( <$word as $crate::columns::Element>::IS_FLOAT )&&+;
        }
    };
}

/// Declares the columns of a kind of frame, by id: a struct with one field per column. The doc
/// comment of a column is its description in `docs/protocol.md`. The type must have a method
/// `check`, which checks that the columns are consistent.
macro_rules! columns {
    (
        $(#[$meta:meta])*
        pub struct $frame:ident: $kind:ident, $what:literal {
            $(#[$step_meta:meta])* $step_vis:vis step,
            $( $(#[doc = $doc:literal])+ $id:literal $vis:vis $name:ident: $column:ty, )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq)]
        pub struct $frame {
            $(#[$step_meta])* $step_vis step: u64,
            $( $(#[doc = $doc])+ $vis $name: $column, )+
        }

        impl $frame {
            /// The columns, in the order of their ids.
            pub const COLUMNS: &'static [$crate::columns::ColumnSpec] = &[$(
                $crate::columns::ColumnSpec {
                    id: $id,
                    name: stringify!($name),
                    meaning: concat!($( $doc, "\n" ),+),
                    record: <<$column as $crate::columns::Column>::Element as $crate::columns::Element>::RECORD,
                    is_float: <<$column as $crate::columns::Column>::Element as $crate::columns::Element>::IS_FLOAT,
                    multiplicity: <$column as $crate::columns::Column>::MULTIPLICITY,
                },
            )+];
            const COUNT: usize = Self::COLUMNS.len();

            /// Clears all columns for step `step`. Their memory is kept, except what only one large
            /// step needed.
            pub fn begin(&mut self, step: u64) {
                self.step = step;
                $( $crate::columns::Column::empty(&mut self.$name); )+
            }

            /// Returns the words of all columns, in the order of their ids.
            fn columns(&self) -> [&[i32]; Self::COUNT] {
                [$( $crate::columns::Column::words(&self.$name) ),+]
            }

            /// Writes a frame with these columns.
            fn encode_columns(
                step: u64,
                columns: [&[i32]; Self::COUNT],
                out: &mut Vec<u8>,
            ) -> Result<(), $crate::frame::FrameError> {
                let ids = Self::COLUMNS.iter().map(|column| column.id);
                $crate::frame::encode_columns($crate::frame::Kind::$kind, step, ids.zip(columns), out)
            }

            /// Writes the frame to `out`, replacing its content.
            ///
            /// # Errors
            /// The frame would be too large for a reader.
            pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), $crate::frame::FrameError> {
                Self::encode_columns(self.step, self.columns(), out)
            }

            /// Reads a frame.
            ///
            /// # Errors
            /// The frame is of another kind, has an unknown column, or its columns are
            /// inconsistent.
            pub fn decode(frame: &$crate::frame::Frame) -> Result<Self, $crate::frame::FrameError> {
                use $crate::frame::FrameError;
                if frame.header().kind != $crate::frame::Kind::$kind {
                    return Err(FrameError::Malformed(concat!("not a ", $what)));
                }
                // Ids ascend in both lists.
                let mut columns = frame.columns().peekable();
                $(
                    let words = columns.next_if(|&(id, _)| id == $id).map_or(&[][..], |(_, words)| words);
                    let $name = <$column as $crate::columns::Column>::read(words)
                        .ok_or(FrameError::Malformed(concat!($what, " record length")))?;
                )+
                if let Some((id, _)) = columns.next() {
                    return Err(FrameError::Column(id));
                }
                let read = Self { step: frame.header().step, $( $name, )+ };
                read.check()?;
                Ok(read)
            }
        }

        const _: () = {
            let columns = $frame::COLUMNS;
            let mut at = 1;
            while at < columns.len() {
                assert!(columns[at - 1].id < columns[at].id, "ids ascend, and each is of one column");
                at += 1;
            }
        };
    };
}

pub(crate) use {columns, record};
