//! The parameters of requests. Each is declared once, with its name, bound, description and target
//! field.
//!
//! A request type has a table of [`Line`]s, by which one pass reads a body: each value is checked
//! against the bound of its line and moved to its target. The documentation is generated from the
//! same lines.

#[rustfmt::skip]
pub(crate) mod generation;
mod kind;
mod object;
mod schema;
mod value;

pub(crate) use kind::{Components, Kind, component, opaque};
pub(crate) use object::read_body;
pub(crate) use schema::{add_components, object_schema};
pub(crate) use value::{OneOrMany, Value};

use crate::error::ApiError;
use crate::limits::{Bound, Param};
use generation::GenerationParameters;

/// Moves a value to its target field.
pub(crate) type Put<R> = fn(&mut R, Value<'_, '_>) -> Result<(), ApiError>;

/// A request whose parameters are in a table.
pub(crate) trait TabledRequest: Default + 'static {
    /// The name of the type, for errors and documentation.
    const NAME: &'static str;
    /// The description of the type.
    const DESCRIPTION: &'static str;
    /// The parameters, in groups.
    const LINES: &'static [&'static [Line<Self>]];
}

/// A request that generates text.
pub(crate) trait Generates: TabledRequest {
    /// Returns the generation parameters of the request.
    fn generation(&mut self) -> &mut GenerationParameters;
}

/// JSON schemas for the documentation of values that may have several JSON types.
pub(crate) const TEXT: &str = r#"{"type": ["string", "null"]}"#;
pub(crate) const SWITCH: &str = r#"{"type": ["boolean", "null"]}"#;
pub(crate) const OBJECTS: &str = r#"{"type": "array", "items": {"type": "object"}}"#;

/// A generation parameter, shared by several APIs.
#[derive(Clone, Copy)]
pub(crate) struct Parameter {
    aliases: &'static [&'static str],
    pub(crate) bound: Bound,
    description: &'static str,
    note: &'static str,
    shown: Option<&'static str>,
    put: Put<GenerationParameters>,
}

impl Parameter {
    pub(crate) const fn new(
        bound: Bound,
        description: &'static str,
        put: Put<GenerationParameters>,
    ) -> Self {
        Self { aliases: &[], bound, description, note: "", shown: None, put }
    }

    /// Sets older names of the parameter.
    pub(crate) const fn also(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    /// Sets another type for the documentation.
    pub(crate) const fn shown(self, schema: &'static str) -> Self {
        Self { shown: Some(schema), ..self }
    }

    /// Sets a remark for the API's page of the documentation.
    pub(crate) const fn note(self, note: &'static str) -> Self {
        Self { note, ..self }
    }
}

/// How the value of a parameter is handled.
pub(crate) enum Target<R> {
    /// The value is moved to a field of the request.
    Own(Put<R>),
    /// The value is moved to a field of the generation parameters.
    Generation { of: fn(&mut R) -> &mut GenerationParameters, put: Put<GenerationParameters> },
    /// A value with an effect is refused, except for these words.
    Refused(&'static [&'static str]),
    /// The value is skipped.
    Skipped,
}

impl<R> Clone for Target<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Target<R> {}

/// A parameter of an API.
pub(crate) struct Line<R> {
    pub(crate) param: Param,
    pub(crate) aliases: &'static [&'static str],
    pub(crate) description: &'static str,
    pub(crate) note: &'static str,
    pub(crate) is_required: bool,
    /// True if the types in `/openapi.json` omit this parameter.
    pub(crate) is_hidden: bool,
    /// The documented type, if it is not the target's type.
    shown: Option<&'static str>,
    pub(crate) target: Target<R>,
}

impl<R> Clone for Line<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Line<R> {}

/// Creates the line of a shared generation parameter.
pub(crate) const fn p<R: Generates>(name: &'static str, parameter: Parameter) -> Line<R> {
    Line {
        param: Param { name, bound: parameter.bound },
        aliases: parameter.aliases,
        description: parameter.description,
        note: parameter.note,
        is_required: false,
        is_hidden: false,
        shown: parameter.shown,
        target: Target::Generation { of: R::generation, put: parameter.put },
    }
}

/// Creates the line of a parameter that only one API has.
pub(crate) const fn own<R>(
    name: &'static str,
    bound: Bound,
    description: &'static str,
    put: Put<R>,
) -> Line<R> {
    Line {
        param: Param { name, bound },
        description,
        is_hidden: false,
        target: Target::Own(put),
        ..refused(name)
    }
}

/// Creates the line of a known parameter that is not supported.
pub(crate) const fn refused<R>(name: &'static str) -> Line<R> {
    Line {
        param: Param { name, bound: Bound::Ignored },
        aliases: &[],
        description: "",
        note: "",
        is_required: false,
        is_hidden: true,
        shown: None,
        target: Target::Refused(&[]),
    }
}

/// Creates the line of a parameter that never has an effect.
pub(crate) const fn skipped<R>(name: &'static str) -> Line<R> {
    Line { target: Target::Skipped, ..refused(name) }
}

impl<R> Line<R> {
    /// Marks the parameter as required.
    pub(crate) const fn required(self) -> Self {
        Self { is_required: true, ..self }
    }

    /// Omits the parameter from the types in `/openapi.json`.
    pub(crate) const fn hidden(self) -> Self {
        Self { is_hidden: true, ..self }
    }

    /// Sets other names of the parameter.
    pub(crate) const fn also(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    /// Sets another type for the documentation.
    pub(crate) const fn shown(self, schema: &'static str) -> Self {
        Self { shown: Some(schema), ..self }
    }

    /// Sets another bound, which only this API has.
    pub(crate) const fn bounded(self, bound: Bound) -> Self {
        Self { param: Param { name: self.param.name, bound }, ..self }
    }

    /// Sets another description, which only this API has.
    pub(crate) const fn described(self, description: &'static str) -> Self {
        Self { description, ..self }
    }

    /// Sets a remark for the API's page of the documentation.
    pub(crate) const fn note(self, note: &'static str) -> Self {
        Self { note, ..self }
    }

    /// Refuses all values that have an effect, except `words`.
    pub(crate) const fn unless(self, words: &'static [&'static str]) -> Self {
        Self { target: Target::Refused(words), ..self }
    }

    /// Returns the declared name that equals `name`, or `None` if this parameter has no such name.
    fn named(&self, name: &str) -> Option<&'static str> {
        let mut names = std::iter::once(&self.param.name).chain(self.aliases);
        names.find(|known| **known == name).copied()
    }
}

/// The documentation of a parameter of a request.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// The name, as clients write it.
    pub name: &'static str,
    /// True if the parameter is supported; false if values with an effect are refused.
    pub is_served: bool,
    /// True if the types in `/openapi.json` omit this parameter.
    pub is_hidden: bool,
    /// The meaning of the value.
    pub description: &'static str,
    /// A remark for the API's page of the documentation.
    pub note: &'static str,
}

/// Lists the parameters of a request type.
pub(crate) fn fields<R: TabledRequest>() -> Vec<Field> {
    let lines = R::LINES.iter().flat_map(|group| group.iter());
    let field = |line: &Line<R>| Field {
        name: line.param.name,
        is_served: !matches!(line.target, Target::Refused(_)),
        is_hidden: line.is_hidden,
        description: line.description,
        note: line.note,
    };
    lines.map(field).collect()
}

/// Counts the names in `lines`, aliases included.
pub(crate) const fn names<R>(lines: &[Line<R>]) -> usize {
    let (mut count, mut at) = (lines.len(), 0);
    while at < lines.len() {
        count += lines[at].aliases.len();
        at += 1;
    }
    count
}

/// Returns all names in `lines`, aliases included, with their bounds.
pub(crate) const fn params<R, const N: usize>(lines: &[Line<R>]) -> [Param; N] {
    let mut all = [Param { name: "", bound: Bound::Ignored }; N];
    let (mut count, mut at) = (0, 0);
    while at < lines.len() {
        all[count] = lines[at].param;
        count += 1;
        let mut alias = 0;
        while alias < lines[at].aliases.len() {
            all[count] = Param { name: lines[at].aliases[alias], bound: lines[at].param.bound };
            (count, alias) = (count + 1, alias + 1);
        }
        at += 1;
    }
    all
}

/// Implements the table of a request type: name, description, groups of lines, and access to the
/// generation parameters if the type has any.
macro_rules! tabled {
    ($kind:ident, $description:literal, [$($group:expr),+] $(, $($field:ident).+)?) => {
        impl $crate::parameter::TabledRequest for $kind {
            const NAME: &'static str = stringify!($kind);
            const DESCRIPTION: &'static str = $description;
            const LINES: &'static [&'static [$crate::parameter::Line<Self>]] = &[$($group),+];
        }

        $(impl $crate::parameter::Generates for $kind {
            fn generation(&mut self) -> &mut $crate::parameter::generation::GenerationParameters {
                &mut self.$($field).+
            }
        })?

        impl $crate::limits::Limited for $kind {
            const PARAMS: $crate::limits::Params = &[$(
                &$crate::parameter::params::<$kind, { $crate::parameter::names::<$kind>($group) }>($group)
            ),+];

            fn read(walk: &mut $crate::limits::Walk<'_>) -> Result<Self, $crate::error::ApiError> {
                $crate::parameter::read_body(walk)
            }
        }

        impl utoipa::PartialSchema for $kind {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                $crate::parameter::object_schema::<$kind>()
            }
        }

        impl utoipa::ToSchema for $kind {
            fn name() -> std::borrow::Cow<'static, str> {
                stringify!($kind).into()
            }

            fn schemas(all: &mut $crate::parameter::Components) {
                $crate::parameter::add_components::<$kind>(all);
            }
        }
    };
}
pub(crate) use tabled;
